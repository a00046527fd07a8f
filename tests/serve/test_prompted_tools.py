"""Tools with a chat template that does not support them: all chat routes describe them in the prompt and find calls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from archerfish.text.tool_calls import tool_prompt
from tests.text.test_tool_prompts import SMOLLM2, WEATHER, WRITTEN

from .fake_backend import FakeBackend, events, ids, post, save_model

FUNCTION = WEATHER["function"]
CALL_ID = "call_1"
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "tool_calls": [
                {"id": CALL_ID, "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}},
            ]},
            {"role": "tool", "content": "22 degrees", "tool_call_id": CALL_ID},
        ],
        "tools": [WEATHER],
    },
    "/v1/responses": {
        "input": [
            {"role": "user", "content": "Hi"},
            {"type": "function_call", "call_id": CALL_ID, "name": "weather", "arguments": '{"city": "Rome"}'},
            {"type": "function_call_output", "call_id": CALL_ID, "output": "22 degrees"},
        ],
        "tools": [{"type": "function", **FUNCTION}],
    },
    "/v1/messages": {
        "max_tokens": 200,
        "messages": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": [
                {"type": "tool_use", "id": CALL_ID, "name": "weather", "input": {"city": "Rome"}},
            ]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": CALL_ID, "content": "22 degrees"}]},
        ],
        "tools": [{
            "name": "weather", "description": FUNCTION["description"], "input_schema": FUNCTION["parameters"],
        }],
    },
}  # fmt: skip
HISTORY = (
    f"<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n{WRITTEN}<|im_end|>\n"
    "<|im_start|>user\n<tool_response>\n22 degrees\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
)


@pytest.fixture
def backend(tmp_path: Path) -> FakeBackend:
    made = FakeBackend(f"I ask.\n{WRITTEN}", max_length=4000)
    made.directory = save_model(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(SMOLLM2)
    return made


def prompt_of(backend: FakeBackend) -> str:
    return bytes(backend.requests[-1].token_ids or []).decode()


@pytest.mark.parametrize("route", BODIES)
def test_tools_are_described_and_calls_found(backend: FakeBackend, route: str) -> None:
    answer = post(backend, route, BODIES[route])
    assert answer.status_code == 200, answer.text
    assert '"weather"' in answer.text
    assert "<tool_call>" not in answer.text
    assert prompt_of(backend) == f"<|im_start|>system\n{tool_prompt([WEATHER])}<|im_end|>\n{HISTORY}"


@pytest.mark.parametrize("route", BODIES)
def test_tool_choice_none_leaves_out_the_description(backend: FakeBackend, route: str) -> None:
    choice: Any = {"type": "none"} if route == "/v1/messages" else "none"
    answer = post(backend, route, {**BODIES[route], "tool_choice": choice})
    assert "<tool_call>" in answer.text
    assert "# Tools" not in prompt_of(backend)
    assert prompt_of(backend).endswith(HISTORY)


def test_calls_in_a_stream(backend: FakeBackend) -> None:
    route = "/v1/chat/completions"
    deltas = [chunk["choices"][0]["delta"] for chunk in events(post(backend, route, {**BODIES[route], "stream": True}))]
    calls = [call["function"] for delta in deltas for call in delta.get("tool_calls", ())]
    assert "".join(call.get("name", "") for call in calls) == "weather"
    assert json.loads("".join(call["arguments"] for call in calls)) == {"city": "Rome"}
    assert "".join(delta.get("content") or "" for delta in deltas).strip() == "I ask."


def test_count_tokens_includes_the_description(backend: FakeBackend) -> None:
    body = {key: value for key, value in BODIES["/v1/messages"].items() if key != "max_tokens"}
    count = post(backend, "/v1/messages/count_tokens", body).json()["input_tokens"]
    post(backend, "/v1/messages", BODIES["/v1/messages"])
    assert count == len(backend.requests[-1].token_ids or []) > len(ids(tool_prompt([WEATHER])))


def test_unknown_template_name_is_refused(backend: FakeBackend) -> None:
    for name in ("other", ["default"], {"a": 1}):
        body = {**BODIES["/v1/chat/completions"], "chat_template_kwargs": {"template_name": name}}
        assert post(backend, "/v1/chat/completions", body).status_code == 400
