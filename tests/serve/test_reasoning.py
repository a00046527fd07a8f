"""Reasoning of models that write it between marks, in the shape of each API."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from anthropic.types import ThinkingBlock
from starlette.applications import Starlette
from tokenizers import Tokenizer

from archerfish.config import ServeConfig
from archerfish.serve.app import create_app

from .client import running
from .fake_backend import CHAT, HI, MODEL, RESPONSES, TEMPLATE, FakeBackend, events, post, prompt_of, save_model
from .test_openai_parameters import COUNT, MESSAGES, REMARK

ANSWER = "<think>\nTwo and\ntwo.\n</think>\n\nFour."
# As Qwen 3 has it: earlier reasoning is read, and none is written if enable_thinking is false.
QWEN = TEMPLATE.replace(
    "{{ message.content }}",
    "{% if message.reasoning_content %}({{ message.reasoning_content }}){% endif %}{{ message.content }}",
) + (
    "{% if add_generation_prompt and enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)
OPENED = TEMPLATE.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")  # as DeepSeek R1 has it


def thinker(directory: Path, template: str, reply: str) -> FakeBackend:
    backend = FakeBackend(reply)
    backend.directory = save_model(directory)
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>", "chat_template": template}))
    return backend


@pytest.fixture(params=["qwen", "opened"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> FakeBackend:
    is_qwen = request.param == "qwen"
    return thinker(tmp_path, QWEN if is_qwen else OPENED, ANSWER if is_qwen else ANSWER.removeprefix("<think>"))


def message_of(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 200, answer.text
    message: dict[str, Any] = answer.json()["choices"][0]["message"]
    return message


def test_chat(backend: FakeBackend) -> None:
    message = message_of(post(backend, CHAT, {"messages": HI, "max_tokens": 99}))
    assert (message["reasoning_content"], message["content"]) == ("Two and\ntwo.", "Four.")
    body = {"messages": HI, "max_tokens": 99, "stream": True}
    deltas = [event["choices"][0]["delta"] for event in events(post(backend, CHAT, body))]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Two and\ntwo."
    assert "".join(delta.get("content", "") for delta in deltas) == "Four."
    assert sum("reasoning_content" in delta for delta in deltas) > 5
    hidden = post(backend, CHAT, {**body, "include_reasoning": False})
    assert "Two" not in hidden.text and '"content":"F"' in hidden.text
    whole = post(backend, CHAT, {"messages": HI, "max_tokens": 99, "include_reasoning": False})
    assert "reasoning_content" not in message_of(whole)


def test_cut_off_reasoning(backend: FakeBackend) -> None:
    message = message_of(post(backend, CHAT, {"messages": HI, "max_tokens": 12}))
    assert "Two and\ntwo.".startswith(message["reasoning_content"]) and message["content"] == ""


def test_reasoning_before_a_call(backend: FakeBackend) -> None:
    backend.reply = str(backend.reply).replace(
        "Four.", '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'
    )
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    message = message_of(post(backend, CHAT, {"messages": HI, "max_tokens": 200, "tools": tools}))
    assert message["reasoning_content"] == "Two and\ntwo." and message["content"] is None
    assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 2}'}


def test_responses(backend: FakeBackend) -> None:
    body = {"input": "Hi", "max_output_tokens": 99}
    response = post(backend, RESPONSES, body).json()
    whole = response["output"]
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": len("Two and\ntwo.")}
    found = events(post(backend, RESPONSES, {**body, "stream": True}))
    for output in (whole, found[-1]["response"]["output"]):
        assert [item["type"] for item in output] == ["reasoning", "message"]
        assert (
            output[0]["content"] == [{"type": "reasoning_text", "text": "Two and\ntwo."}] and output[0]["summary"] == []
        )
        assert output[1]["content"][0]["text"] == "Four."
    deltas = [event["delta"] for event in found if event["type"] == "response.reasoning_text.delta"]
    assert "".join(deltas) == "Two and\ntwo."
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    answer = post(backend, RESPONSES, {**body, "input": [*HI, *whole, *HI]})
    assert answer.status_code == 200, answer.text


def test_messages(backend: FakeBackend) -> None:
    body = {"messages": HI, "max_tokens": 99}
    content = post(backend, MESSAGES, body).json()["content"]
    assert content == [
        {"type": "thinking", "thinking": "Two and\ntwo.", "signature": ""},
        {"type": "text", "text": "Four."},
    ]
    found = events(post(backend, MESSAGES, {**body, "stream": True}))
    starts = [event["content_block"]["type"] for event in found if event["type"] == "content_block_start"]
    assert starts == ["thinking", "text"]
    deltas = [event["delta"] for event in found if event["type"] == "content_block_delta"]
    assert "".join(delta.get("thinking", "") for delta in deltas) == "Two and\ntwo."
    assert "".join(delta.get("text", "") for delta in deltas) == "Four."
    talk = [*HI, {"role": "assistant", "content": content}, *HI]
    assert post(backend, COUNT, {"messages": talk}).status_code == 200


@pytest.mark.parametrize(("route", "body"), [("/api/chat", {"messages": HI}), ("/api/generate", {"prompt": "Hi"})])
def test_ollama(backend: FakeBackend, route: str, body: dict[str, Any]) -> None:
    whole = post(backend, route, {**body, "stream": False})
    parts = [whole.json(), *(json.loads(one) for one in post(backend, route, body).text.splitlines())]
    found = [(part.get("message") or part, "content" if "message" in part else "response") for part in parts]
    thoughts, texts = [one.get("thinking", "") for one, _ in found], [one[name] for one, name in found]
    assert thoughts[0] == "".join(thoughts[1:]) == "Two and\ntwo." and texts[0] == "".join(texts[1:]) == "Four."
    assert "thinking" in post(backend, "/api/show", {"model": MODEL}).json()["capabilities"]


def test_think_of_ollama_is_an_effort(tmp_path: Path) -> None:
    backend = thinker(tmp_path, TEMPLATE + "{{ reasoning_effort }}", "Four.")
    for think, effort in ((True, "medium"), ("high", "high"), (False, "none"), (None, "\n")):
        assert REMARK not in post(backend, "/api/chat", {"messages": HI, "think": think}).headers
        assert prompt_of(backend).endswith(effort)


def test_reasoning_none_leaves_the_text_alone(backend: FakeBackend) -> None:
    app: partial[Starlette] = partial(create_app, config=ServeConfig(reasoning="none"), credentials="pass")
    message = message_of(post(backend, CHAT, {"messages": HI, "max_tokens": 99}, app=app))
    assert message["content"] == backend.reply and "reasoning_content" not in message


def test_given_form_has_no_reasoning(backend: FakeBackend) -> None:
    """A grammar holds from the first token: what the template has opened is closed, and the answer is all text."""
    is_opened, backend.reply = not str(backend.reply).startswith("<think>"), "[1]"
    answer = post(backend, CHAT, {"messages": HI, "guided_regex": r"\[1\]"})
    assert message_of(answer)["content"] == "[1]" and "reasoning_content" not in message_of(answer)
    assert prompt_of(backend).endswith("assistant\n<think>\n\n</think>\n\n" if is_opened else "assistant\n")
    assert (REMARK in answer.headers) == is_opened


def test_channels_of_gpt_oss(tmp_path: Path) -> None:
    """A given form is an answer in its own channel, and earlier reasoning before a call has the template's name."""
    template = TEMPLATE.replace(
        "{{ message.content }}", "{% if message.thinking %}({{ message.thinking }}){% endif %}{{ message.content }}"
    )
    backend = thinker(tmp_path, template, "analysisTwo.assistantfinalFour.")
    tokenizer = Tokenizer.from_file(str(backend.directory / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|channel|>", "<|message|>"])
    tokenizer.save(str(backend.directory / "tokenizer.json"))
    message = message_of(post(backend, CHAT, {"messages": HI, "max_tokens": 99}))
    assert (message["reasoning_content"], message["content"]) == ("Two.", "Four.")
    backend.reply = "[1]"
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    called = {"role": "assistant", "content": None, "reasoning_content": "2+2", "tool_calls": [call]}
    earlier = [*HI, called, {"role": "tool", "tool_call_id": "1", "content": "4"}]
    answer = post(backend, CHAT, {"messages": earlier, "guided_regex": r"\[1\]"})
    assert message_of(answer)["content"] == "[1]" and REMARK in answer.headers and "(2+2)" in prompt_of(backend)
    channel, message_mark = (tokenizer.token_to_id(name) for name in ("<|channel|>", "<|message|>"))
    assert (backend.requests[-1].token_ids or [])[-7:] == [channel, *map(ord, "final"), message_mark]


def test_models_without_reasoning_keep_marks() -> None:
    assert message_of(post(FakeBackend(ANSWER), CHAT, {"messages": HI, "max_tokens": 99}))["content"] == ANSWER


@pytest.mark.parametrize(
    ("route", "stated"),
    [
        (CHAT, {"reasoning_effort": "none"}),
        (CHAT, {"chat_template_kwargs": {"enable_thinking": False}}),
        (CHAT, {"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}}),
        (RESPONSES, {"reasoning": {"effort": "none"}}),
        (MESSAGES, {"thinking": {"type": "disabled"}, "max_tokens": 99}),
        ("/api/chat", {"think": False, "stream": False}),
    ],
)
def test_reasoning_is_turned_off(tmp_path: Path, route: str, stated: dict[str, Any]) -> None:
    backend = thinker(tmp_path, QWEN, "Four.")
    answer = post(backend, route, {("input" if route == RESPONSES else "messages"): HI, **stated})
    assert answer.status_code == 200 and REMARK not in answer.headers, answer.text
    assert prompt_of(backend).endswith("assistant\n<think>\n\n</think>\n\n") and "Four." in answer.text


def test_earlier_reasoning_reaches_the_template(tmp_path: Path) -> None:
    backend = thinker(tmp_path, QWEN, ANSWER)
    echoed = {
        "content": "4",
        "reasoning_content": "2+2",
        "annotations": [{"a": 1}],
        "provider_specific_fields": {"a": 1},
    }
    blocks = [{"type": "thinking", "thinking": "2+2", "signature": "x"}, {"type": "text", "text": "4"}]
    for route, message in (
        (CHAT, {"content": "4", "reasoning_content": "2+2"}),
        (CHAT, {"content": "4", "reasoning": "2+2"}),
        (CHAT, echoed),
        (MESSAGES, {"content": blocks}),
        ("/api/chat", {"content": "4", "thinking": "2+2"}),
    ):
        body = {"messages": [*HI, {"role": "assistant", **message}, *HI], "max_tokens": 20}
        assert post(backend, route, body).status_code == 200
        assert "<|start|>assistant\n(2+2)4<|end|>" in prompt_of(backend)
    items = [
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "2+2"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "4"}]},
    ]
    assert post(backend, RESPONSES, {"input": [*HI, *items, *HI]}).status_code == 200
    assert "<|start|>assistant\n(2+2)4<|end|>" in prompt_of(backend)


def test_packages_read_reasoning(backend: FakeBackend) -> None:
    """The streams of both packages put an answer together again; what they give can be sent back."""
    with running(create_app(backend, credentials="pass")) as served:
        claude = anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0)
        with claude.messages.stream(
            model=MODEL, max_tokens=99, messages=[{"role": "user", "content": "2+2?"}]
        ) as stream:
            content = stream.get_final_message().content
        assert [block.type for block in content] == ["thinking", "text"]
        assert isinstance(content[0], ThinkingBlock) and content[0].thinking == "Two and\ntwo."
        talk: Any = [*HI, {"role": "assistant", "content": content}, *HI]
        assert claude.messages.create(model=MODEL, max_tokens=99, messages=talk).content[0] == content[0]
        client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
        with client.responses.stream(model=MODEL, input="2+2?", max_output_tokens=99) as answers:
            response = answers.get_final_response()
        assert [item.type for item in response.output] == ["reasoning", "message"] and response.output_text == "Four."
        items: Any = [*HI, *response.output, *HI]
        assert client.responses.create(model=MODEL, input=items, max_output_tokens=99).output_text == "Four."
        chat = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "2+2?"}], max_tokens=99
        )
        message = chat.choices[0].message
        assert (message.content, getattr(message, "reasoning_content", "")) == ("Four.", "Two and\ntwo.")
        again: Any = [*HI, message, *HI]
        assert (
            client.chat.completions.create(model=MODEL, messages=again, max_tokens=99).choices[0].message.content
            == "Four."
        )
