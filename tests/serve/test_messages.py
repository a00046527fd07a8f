"""The routes /v1/messages and /v1/responses."""

from __future__ import annotations

import re
from typing import Any

import pytest

from archerfish.serve.client import RemoteError

from .fake_backend import END, HI, MODEL, FakeBackend, events, post, prompt_of

MESSAGES = "/v1/messages"
TOOL = {"name": "weather", "description": "Now", "input_schema": {"type": "object"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def asked(**changes: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 100, "messages": HI, **changes}


def test_whole_message() -> None:
    backend = FakeBackend("Good day")
    body = post(backend, MESSAGES, asked(system="Be kind", temperature=0.5, top_k=3, metadata={"user_id": "x"})).json()
    assert re.fullmatch("msg_[0-9a-f]{24}", body.pop("id"))
    num_prompt = len(backend.requests[-1].token_ids or [])
    assert body == {
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": [{"type": "text", "text": "Good day"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": num_prompt - 3,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 3,
            "output_tokens": 9,
        },
    }
    assert backend.params() == {"max_tokens": 100, "temperature": 0.5, "top_k": 3}
    assert prompt_of(backend) == "<|start|>system\nBe kind<|end|><|start|>user\nHi<|end|><|start|>assistant\n"


def test_prompt_has_blocks_of_every_kind() -> None:
    backend = FakeBackend()
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "Weather?", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "I ask"},
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Rome"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "sunny"}]},
                {"type": "text", "text": "So?"},
            ],
        },
    ]
    system = [{"type": "text", "text": "One"}, {"type": "text", "text": "Two"}]
    assert post(backend, MESSAGES, asked(messages=messages, system=system)).status_code == 200
    assert prompt_of(backend) == (
        "<|start|>system\nOne\nTwo<|end|><|start|>user\nWeather?<|end|>"
        '<|start|>assistant\nI ask[weather {"city": "Rome"}]<|end|>'
        "<|start|>tool\nsunny<|end|><|start|>user\nSo?<|end|><|start|>assistant\n"
    )


def test_answer_continues_the_last_assistant_message() -> None:
    backend = FakeBackend(" 42")
    messages = [*HI, {"role": "assistant", "content": "The answer is<|end|>"}]
    assert post(backend, MESSAGES, asked(messages=messages)).json()["content"][0]["text"] == " 42"
    assert prompt_of(backend).endswith("<|start|>assistant\nThe answer is<|end|>")
    assert (backend.requests[-1].token_ids or []).count(END) == 1  # the other is the caller's text
    counted = post(backend, f"{MESSAGES}/count_tokens", {"messages": messages, "model": MODEL}).json()
    assert counted["input_tokens"] == len(backend.requests[-1].token_ids or [])


def test_bytes_of_a_stream() -> None:
    text = post(FakeBackend('H"'), MESSAGES, asked(stream=True)).text
    usage = '"usage":{"input_tokens":17,"cache_creation_input_tokens":0,"cache_read_input_tokens":3,"output_tokens":%d}'
    blank = (
        '"type":"message","role":"assistant","model":"lab/writer","content":[],"stop_reason":null,"stop_sequence":null'
    )
    head = 'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,"delta":'
    delta = head + '{"type":"text_delta","text":%s}}\n\n'
    assert re.sub("msg_[0-9a-f]{24}", "ID", text) == (
        f'event: message_start\ndata: {{"type":"message_start","message":{{"id":"ID",{blank},{usage % 0}}}}}\n\n'
        "event: content_block_start\n"
        'data: {"type":"content_block_start","index":0,"content_block":{"type":"text","text":""}}\n\n'
        + delta % '"H"'
        + delta % '"\\""'
        + 'event: content_block_stop\ndata: {"type":"content_block_stop","index":0}\n\n'
        'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":"end_turn","stop_sequence":null},'
        f"{usage % 3}}}\n\n"
        'event: message_stop\ndata: {"type":"message_stop"}\n\n'
    )


def test_stop_reasons() -> None:
    for stream in (False, True):
        for changes, reason, sequence in (
            ({"max_tokens": 2}, "max_tokens", None),
            ({"stop_sequences": ["o t"]}, "stop_sequence", "o t"),
            ({}, "end_turn", None),
        ):
            answer = post(FakeBackend("one two three"), MESSAGES, asked(stream=stream, **changes))
            ended = events(answer)[-2]["delta"] if stream else answer.json()
            assert (ended["stop_reason"], ended["stop_sequence"]) == (reason, sequence)


@pytest.mark.parametrize("choice", [None, {"type": "any"}, {"type": "tool", "name": "weather"}])
def test_tool_calls(choice: Any) -> None:
    backend = FakeBackend(CALL)
    body = asked(tools=[TOOL], **({"tool_choice": choice} if choice else {}))
    answer = post(backend, MESSAGES, body).json()
    [block] = answer["content"]
    assert (answer["stop_reason"], block["type"], block["name"], block["input"]) == (
        "tool_use",
        "tool_use",
        "weather",
        {"city": "Rome"},
    )
    assert ("grammar" in backend.params()) == (choice is not None)
    found = events(post(backend, MESSAGES, {**body, "stream": True}))
    starts = [event["content_block"] for event in found if event["type"] == "content_block_start"]
    assert [(start["type"], start["name"], start["input"]) for start in starts] == [("tool_use", "weather", {})]
    pieces = [event["delta"]["partial_json"] for event in found if event["type"] == "content_block_delta"]
    assert "".join(pieces) == '{"city": "Rome"}'
    assert len(pieces) > 5
    assert found[-2]["delta"]["stop_reason"] == "tool_use"


def test_disabled_parallel_tool_use_gives_one_call() -> None:
    body = asked(tools=[TOOL], tool_choice={"type": "auto", "disable_parallel_tool_use": True}, max_tokens=900)
    assert len(post(FakeBackend(CALL + "\n" + CALL), MESSAGES, body).json()["content"]) == 1


def test_output_config_becomes_a_grammar() -> None:
    backend = FakeBackend("{}")
    post(backend, MESSAGES, asked(output_config={"format": {"type": "json_schema", "schema": {"type": "object"}}}))
    assert backend.params()["grammar"] == {"kind": "json_schema", "value": {"type": "object"}}


@pytest.mark.parametrize(
    ("changes", "status", "kind", "message"),
    [
        ({"max_tokens": 0}, 400, "invalid_request_error", "max_tokens must be a whole number"),
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens"),
        ({"messages": []}, 400, "invalid_request_error", "not empty"),
        ({"messages": [{"role": "system", "content": "x"}]}, 400, "invalid_request_error", "goes into system"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            400,
            "invalid_request_error",
            "'image', which",
        ),
        ({"messages": [{"role": "user", "content": 3}]}, 400, "invalid_request_error", "a string or a list of parts"),
        (
            {"tools": [{"type": "bash_20250124", "name": "bash"}]},
            400,
            "invalid_request_error",
            "only tools of the caller",
        ),
        ({"tool_choice": {"type": "any"}}, 400, "invalid_request_error", "there are no tools"),
        ({"stop_sequences": "x"}, 400, "invalid_request_error", "stop_sequences must be an array"),
        ({"model": "writr"}, 404, "not_found_error", "not served here"),
        (
            {"messages": [{"role": "user", "content": "a" * 1000}]},
            400,
            "invalid_request_error",
            "maximum context length",
        ),
    ],
)
def test_errors_have_anthropic_shape(changes: dict[str, Any], status: int, kind: str, message: str) -> None:
    answer = post(FakeBackend(), MESSAGES, asked(**changes))
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert set(body) == {"type", "error"}
    assert (body["type"], body["error"]["type"]) == ("error", kind)
    assert message in body["error"]["message"]


@pytest.mark.parametrize(("status", "kind"), [(429, "rate_limit_error"), (503, "overloaded_error"), (500, "api_error")])
def test_refusals_and_failures(status: int, kind: str) -> None:
    backend = FakeBackend("abc")
    backend.fails[0] = RemoteError("No.", code="x", status=status, retry_after_s=4)
    answer = post(backend, MESSAGES, asked(stream=True))
    assert (answer.status_code, answer.json()["error"]["type"], answer.headers["retry-after"]) == (status, kind, "4")
    backend.fails = {2: backend.fails[0]}
    last = events(post(backend, MESSAGES, asked(stream=True)))[-1]
    assert last == {"type": "error", "error": {"type": kind, "message": "No."}}


def test_cut_off_call_has_empty_input() -> None:
    body = post(FakeBackend(CALL[:-24]), MESSAGES, asked(tools=[TOOL])).json()
    assert [(block["type"], block.get("input")) for block in body["content"]] == [("tool_use", {})]


# Responses


RESPONSES = "/v1/responses"
FUNCTION_TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object"}}


def test_whole_response() -> None:
    backend = FakeBackend("Good day")
    body = post(
        backend, RESPONSES, {"input": "Hi", "instructions": "Be kind", "metadata": {"a": "b"}, "model": MODEL}
    ).json()
    assert (body["object"], body["status"], body["store"], body["metadata"]) == (
        "response",
        "completed",
        False,
        {"a": "b"},
    )
    [item] = body["output"]
    part = {"type": "output_text", "text": "Good day", "annotations": [], "logprobs": []}
    assert item == {"type": "message", "id": item["id"], "status": "completed", "role": "assistant", "content": [part]}
    assert body["usage"]["input_tokens_details"]["cached_tokens"] == 3
    assert body["usage"]["output_tokens"] == len("Good day") + 1
    assert prompt_of(backend) == "<|start|>system\nBe kind<|end|><|start|>user\nHi<|end|><|start|>assistant\n"


def test_prompt_has_items_of_every_kind() -> None:
    backend = FakeBackend()
    items: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {
            "type": "message",
            "id": "m",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "I ask", "annotations": []}],
        },
        {"type": "function_call", "id": "f", "call_id": "c", "name": "weather", "arguments": '{"city": "Rome"}'},
        {"type": "function_call_output", "call_id": "c", "output": "sunny"},
    ]
    assert post(backend, RESPONSES, {"input": items}).status_code == 200
    assert prompt_of(backend) == (
        '<|start|>user\nWeather?<|end|><|start|>assistant\nI ask[weather {"city": "Rome"}]<|end|>'
        "<|start|>tool\nsunny<|end|><|start|>assistant\n"
    )


def test_events_of_a_text() -> None:
    answer = post(FakeBackend("Hé"), RESPONSES, {"input": "Hi", "stream": True})
    names = re.findall(r"^event: (.*)$", answer.text, re.MULTILINE)
    found = events(answer)
    assert (
        names
        == [event["type"] for event in found]
        == [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.delta",
            "response.output_text.delta",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.completed",
        ]
    )
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    assert found[6]["text"] == "".join(event["delta"] for event in found[4:6]) == "Hé"
    assert found[-1]["response"]["output"] == [found[8]["item"]]
    assert found[-1]["response"]["id"] == found[0]["response"]["id"]
    assert len({event["item_id"] for event in found[3:8]}) == 1


def test_events_of_a_call() -> None:
    found = events(
        post(FakeBackend("Wait." + CALL), RESPONSES, {"input": "Hi", "stream": True, "tools": [FUNCTION_TOOL]})
    )
    kinds = [event["type"] for event in found]
    deltas = [event for event in found if event["type"] == "response.function_call_arguments.delta"]
    assert "".join(event["delta"] for event in deltas) == '{"city": "Rome"}'
    assert {event["output_index"] for event in deltas} == {1}
    assert kinds[-3:] == ["response.function_call_arguments.done", "response.output_item.done", "response.completed"]
    message, call = found[-1]["response"]["output"]
    assert message["content"][0]["text"] == "Wait."
    assert (call["type"], call["name"], call["arguments"]) == ("function_call", "weather", '{"city": "Rome"}')


def test_calls_in_a_whole_response() -> None:
    body = {"input": "Hi", "tools": [FUNCTION_TOOL], "tool_choice": "required"}
    [call] = post(FakeBackend(CALL), RESPONSES, body).json()["output"]
    assert (call["name"], call["arguments"], call["status"]) == ("weather", '{"city": "Rome"}', "completed")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("reply", "max_tokens", "items"),
    [
        ("abcdef", 3, [("message", "incomplete")]),
        ("", 3, [("message", "completed")]),
        (f"Wait.{CALL}", CALL.index("Rome") + 5, [("message", "completed"), ("function_call", "incomplete")]),
    ],
)
def test_only_the_last_item_is_incomplete(reply: str, max_tokens: int, items: Any, stream: bool) -> None:
    body = {"input": "Hi", "tools": [FUNCTION_TOOL], "max_output_tokens": max_tokens, "stream": stream}
    answer = post(FakeBackend(reply), RESPONSES, body)
    shown = events(answer)[-1]["response"] if stream else answer.json()
    assert [(item["type"], item["status"]) for item in shown["output"]] == items
    assert shown["output"][0]["content"][0]["text"] == reply[: min(max_tokens, 5)]
    assert shown["status"] == items[-1][1]
    if shown["status"] == "incomplete":
        assert shown["incomplete_details"] == {"reason": "max_output_tokens"}


def test_formats_and_logprobs() -> None:
    backend = FakeBackend("y")
    wanted = {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": True}}
    body = {"input": "Hi", "text": wanted, "include": ["message.output_text.logprobs"], "top_logprobs": 1}
    answer = post(backend, RESPONSES, body).json()
    assert backend.params()["grammar"] == {"kind": "json_schema", "value": {"type": "object"}}
    assert backend.params()["logprobs"] == 1
    [entry] = answer["output"][0]["content"][0]["logprobs"]
    likely = {"token": "y", "logprob": -0.5, "bytes": [121]}
    assert entry == {**likely, "top_logprobs": [likely]}


def test_error_during_a_response() -> None:
    backend = FakeBackend("abc")
    backend.fails[2] = RemoteError("It died.", code="unavailable", status=503)
    found = events(post(backend, RESPONSES, {"input": "Hi", "stream": True}))
    assert [event["type"] for event in found[-2:]] == ["error", "response.failed"]
    assert found[-1]["response"]["error"] == {"code": "unavailable", "message": "It died."}
