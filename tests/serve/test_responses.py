import re
from typing import Any

import pytest

from archerfish.serve.client import RemoteError

from .fake_backend import MODEL, FakeBackend, events, post, prompt_of

RESPONSES = "/v1/responses"
TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def test_whole_response() -> None:
    backend = FakeBackend("Good day")
    body = post(backend, RESPONSES, {"input": "Hi", "instructions": "Be kind", "metadata": {"a": "b"}, "model": MODEL}).json()
    assert (body["object"], body["status"], body["store"], body["metadata"]) == ("response", "completed", False, {"a": "b"})
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
        {"type": "message", "id": "m", "status": "completed", "role": "assistant",
         "content": [{"type": "output_text", "text": "I ask", "annotations": []}]},
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
    assert names == [event["type"] for event in found] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        "response.output_text.delta", "response.output_text.delta", "response.output_text.done", "response.content_part.done",
        "response.output_item.done", "response.completed",
    ]
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    assert found[6]["text"] == "".join(event["delta"] for event in found[4:6]) == "Hé"
    assert found[-1]["response"]["output"] == [found[8]["item"]]
    assert found[-1]["response"]["id"] == found[0]["response"]["id"]
    assert len({event["item_id"] for event in found[3:8]}) == 1


def test_events_of_a_call() -> None:
    found = events(post(FakeBackend("Wait." + CALL), RESPONSES, {"input": "Hi", "stream": True, "tools": [TOOL]}))
    kinds = [event["type"] for event in found]
    deltas = [event for event in found if event["type"] == "response.function_call_arguments.delta"]
    assert "".join(event["delta"] for event in deltas) == '{"city": "Rome"}'
    assert {event["output_index"] for event in deltas} == {1}
    assert kinds[-3:] == ["response.function_call_arguments.done", "response.output_item.done", "response.completed"]
    message, call = found[-1]["response"]["output"]
    assert message["content"][0]["text"] == "Wait."
    assert (call["type"], call["name"], call["arguments"]) == ("function_call", "weather", '{"city": "Rome"}')


def test_calls_in_a_whole_response() -> None:
    [call] = post(FakeBackend(CALL), RESPONSES, {"input": "Hi", "tools": [TOOL], "tool_choice": "required"}).json()["output"]
    assert (call["name"], call["arguments"], call["status"]) == ("weather", '{"city": "Rome"}', "completed")


@pytest.mark.parametrize("stream", [False, True])
def test_incomplete_response(stream: bool) -> None:
    answer = post(FakeBackend("abcdef"), RESPONSES, {"input": "Hi", "max_output_tokens": 3, "stream": stream})
    body = events(answer)[-1]["response"] if stream else answer.json()
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert body["output"][0]["status"] == "incomplete"
    assert body["output"][0]["content"][0]["text"] == "abc"


@pytest.mark.parametrize("stream", [False, True])
def test_only_the_last_item_is_incomplete(stream: bool) -> None:
    text = "Wait." + CALL
    body = {"input": "Hi", "tools": [TOOL], "max_output_tokens": text.index("Rome"), "stream": stream}
    answer = post(FakeBackend(text), RESPONSES, body)
    shown = events(answer)[-1]["response"] if stream else answer.json()
    assert shown["status"] == "incomplete"
    assert [(item["type"], item["status"]) for item in shown["output"]] == [
        ("message", "completed"), ("function_call", "incomplete"),
    ]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
def test_empty_response_has_an_empty_message(stream: bool) -> None:
    answer = post(FakeBackend(""), RESPONSES, {"input": "Hi", "stream": stream})
    body = events(answer)[-1]["response"] if stream else answer.json()
    assert body["output"][0]["content"][0]["text"] == ""


def test_formats_and_logprobs() -> None:
    backend = FakeBackend("y")
    wanted = {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}}
    body = {"input": "Hi", "text": wanted, "include": ["message.output_text.logprobs"], "top_logprobs": 1}
    answer = post(backend, RESPONSES, body).json()
    assert backend.params()["grammar"] == {"kind": "json_schema", "value": {"type": "object"}}
    assert backend.params()["logprobs"] == 1
    [entry] = answer["output"][0]["content"][0]["logprobs"]
    likely = {"token": "y", "logprob": -0.5, "bytes": [121]}
    assert entry == {**likely, "top_logprobs": [likely]}


def test_error_during_a_stream() -> None:
    backend = FakeBackend("abc")
    backend.fails[2] = RemoteError("It died.", code="unavailable", status=503)
    found = events(post(backend, RESPONSES, {"input": "Hi", "stream": True}))
    assert [event["type"] for event in found[-2:]] == ["error", "response.failed"]
    assert found[-1]["response"]["error"] == {"code": "unavailable", "message": "It died."}
