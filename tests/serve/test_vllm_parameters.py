"""Parameters of vLLM's server that have a meaning here too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from .fake_backend import START, FakeBackend, error_of, events, post, prompt_of, save_model
from .test_openai_parameters import CHAT, HI, TEXT

TALK = [*HI, {"role": "assistant", "content": "The sky"}]


@pytest.mark.parametrize(("route", "body"), [(CHAT, {"messages": HI, "n": 2}), (TEXT, {"prompt": "Hi"})])
def test_continuous_usage_stats(route: str, body: dict[str, Any]) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    found = events(post(FakeBackend("abc"), route, {**body, "stream": True, "stream_options": options}))
    counts = [event["usage"]["completion_tokens"] for event in found]
    assert counts == sorted(counts) and counts[-1] == 4 * body.get("n", 1) + 2 * (body.get("n", 1) - 1)
    assert len(set(counts)) > 3
    only = {**body, "stream": True, "stream_options": {"continuous_usage_stats": True}}
    assert "usage" not in events(post(FakeBackend("abc"), route, only))[-1]


def test_generation_prompt_and_continued_message() -> None:
    backend = FakeBackend(" is blue")
    post(backend, CHAT, {"messages": HI, "add_generation_prompt": False})
    assert prompt_of(backend) == "<|start|>user\nHi<|end|>"
    answer = post(backend, CHAT, {"messages": TALK, "add_generation_prompt": False, "continue_final_message": True})
    assert prompt_of(backend) == "<|start|>user\nHi<|end|><|start|>assistant\nThe sky"
    assert answer.json()["choices"][0]["message"]["content"] == " is blue"
    tokens = post(backend, "/tokenize", {"messages": TALK, "continue_final_message": True}).json()["tokens"]
    assert tokens == backend.requests[-1].token_ids
    for body, expected in (
        ({"messages": TALK, "add_generation_prompt": True}, "exclude each other"), ({"messages": HI}, "text of the assistant"),
        ({"messages": TALK[1:]}, "text of the assistant"),
    ):  # fmt: skip
        error = error_of(post(backend, CHAT, {**body, "continue_final_message": True}))
        assert expected in error["message"] and error["param"] == "continue_final_message"


def test_echo_of_a_continued_message() -> None:
    body = {"messages": TALK, "continue_final_message": True, "echo": True}
    answer = post(FakeBackend(" is blue"), CHAT, body)
    assert answer.json()["choices"][0]["message"]["content"] == "The sky is blue"
    deltas = [event["choices"][0]["delta"] for event in events(post(FakeBackend(" is blue"), CHAT, {**body, "stream": True}))]
    assert "".join(delta.get("content", "") for delta in deltas) == "The sky is blue"
    assert post(FakeBackend("Yes"), CHAT, {"messages": HI, "echo": True}).json()["choices"][0]["message"]["content"] == "Yes"


def test_special_tokens_before_a_conversation(tmp_path: Path) -> None:
    backend, file = FakeBackend(), save_model(tmp_path) / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.post_processor = TemplateProcessing(single="<|start|> $A", special_tokens=[("<|start|>", START)])
    tokenizer.save(str(file))
    backend.directory = tmp_path
    for route in (CHAT, "/tokenize"):
        found: list[list[int]] = []
        for stated in ({}, {"add_special_tokens": False}, {"add_special_tokens": True}):
            answer = post(backend, route, {"messages": HI, **stated})
            found.append(answer.json()["tokens"] if route == "/tokenize" else backend.requests[-1].token_ids or [])
        assert found[0] == found[1] and found[2] == [START, *found[0]]
    text = [post(backend, "/tokenize", {"prompt": "a", **s}).json()["tokens"] for s in ({}, {"add_special_tokens": False})]
    assert text == [[START, 97], [97]]


@pytest.mark.parametrize(("route", "body"), [(CHAT, {"messages": [{"role": "user", "content": "a" * 2000}]}),
                                             (TEXT, {"prompt": "a" * 2000}), (TEXT, {"prompt": [97] * 2000})])  # fmt: skip
def test_truncated_prompts_keep_their_end(route: str, body: dict[str, Any]) -> None:
    backend = FakeBackend(max_length=1000)
    assert post(backend, route, body).status_code == 400
    for stated, max_tokens, expected in ((30, 5, 30), (-1, 100, 900), (-1, None, 984 if route == TEXT else 999)):
        given = {"truncate_prompt_tokens": stated} | ({"max_tokens": max_tokens} if max_tokens else {})
        assert post(backend, route, {**body, **given}).status_code == 200
        assert len(backend.requests[-1].token_ids or []) == expected
    assert prompt_of(backend).endswith("assistant\n" if route == CHAT else "aaa")
    error = error_of(post(backend, route, {**body, "truncate_prompt_tokens": 0}))
    assert error["param"] == "truncate_prompt_tokens"


@pytest.mark.parametrize(("stated", "grammar"), [
    ({"json": {"type": "object"}}, {"kind": "json_schema", "value": {"type": "object"}}),
    ({"regex": "a+", "disable_fallback": True}, {"kind": "regex", "value": "a+"}),
    ({"choice": ["a", "b"]}, {"kind": "choice", "value": ["a", "b"]}), ({"json_object": True}, {"kind": "json", "value": None}),
    ({"grammar": 'start: "a"', "json": None}, {"kind": "lark", "value": 'start: "a"'}),
])  # fmt: skip
def test_structured_outputs(stated: dict[str, Any], grammar: dict[str, Any]) -> None:
    for route, body in ((CHAT, {"messages": HI}), (TEXT, {"prompt": "Hi"})):
        backend, guided = FakeBackend(), FakeBackend()
        assert post(backend, route, {**body, "structured_outputs": stated}).status_code == 200
        names = {"json_schema": "guided_json", "regex": "guided_regex", "choice": "guided_choice", "lark": "guided_grammar"}
        assert backend.params()["grammar"].items() >= {k: v for k, v in grammar.items() if v is not None}.items()
        if grammar["kind"] in names:
            post(guided, route, {**body, names[grammar["kind"]]: grammar["value"]})
            assert guided.params() == backend.params()


@pytest.mark.parametrize(("stated", "expected"), [
    ({}, "exactly one"), ({"json": {}, "regex": "a"}, "exactly one"), ({"jsn": {"a": 1}}, "Did you mean"),
])  # fmt: skip
def test_wrong_structured_outputs(stated: dict[str, Any], expected: str) -> None:
    error = error_of(post(FakeBackend(), CHAT, {"messages": HI, "structured_outputs": stated}))
    assert expected in error["message"] and error["param"] == "structured_outputs"
    both = {"structured_outputs": {"regex": "a"}, "guided_regex": "a"}
    assert "exclude each other" in error_of(post(FakeBackend(), CHAT, {"messages": HI, **both}))["message"]
