"""The routes /v1/chat/completions and /v1/completions, and those about tokens."""

from __future__ import annotations

import re
from typing import Any

import pytest

from archerfish.serve.client import RemoteError
from archerfish.serve.wire import GenerationRequest
from archerfish.store.names import STORY_MODEL, resolve_model

from .fake_backend import CHAT, END, HI, MODEL, FakeBackend, error_of, events, ids, keyed_app, post, prompt_of

WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {}}}},
}
CLOCK = {"type": "function", "function": {"name": "clock"}}


def test_whole_answer() -> None:
    backend = FakeBackend("Hello thére")
    answer = post(backend, CHAT, {"messages": HI, "model": MODEL})
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert re.fullmatch(r"chatcmpl-[0-9a-f]{24}", body["id"])
    assert (body["object"], body["model"]) == ("chat.completion", MODEL)
    message = {"role": "assistant", "content": "Hello thére", "refusal": None}
    assert body["choices"] == [
        {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop", "stop_reason": END}
    ]
    num_prompt = len(ids("user\nHiassistant\n")) + 3
    assert body["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": 13,
        "total_tokens": num_prompt + 13,
        "prompt_tokens_details": {"cached_tokens": 3},
    }
    assert prompt_of(backend) == "<|start|>user\nHi<|end|><|start|>assistant\n"
    sent = backend.requests[-1]
    assert (sent.model, sent.credentials, sent.stream, sent.params) == (MODEL, "pass", False, {"max_tokens": None})


def test_bytes_of_a_stream() -> None:
    backend = FakeBackend('Hé"\n')
    body = {"messages": HI, "stream": True, "stream_options": {"include_usage": True}}
    answer = post(backend, CHAT, body)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    assert "content-length" not in answer.headers
    text = re.sub(r"chatcmpl-[0-9a-f]{24}", "ID", answer.text)
    text = re.sub(r'"created":\d+', '"created":0', text)
    head = 'data: {"id":"ID","object":"chat.completion.chunk","created":0,"model":"lab/writer","choices":['

    def chunk(delta: str, ended: str = "null") -> str:
        return f'{head}{{"index":0,"delta":{{{delta}}},"logprobs":null,"finish_reason":{ended}}}],"usage":null}}\n\n'

    usage = '{"prompt_tokens":20,"completion_tokens":6,"total_tokens":26,"prompt_tokens_details":{"cached_tokens":3}}'
    assert text == (
        chunk('"role":"assistant","content":""')
        + chunk('"content":"H"')
        + chunk('"content":"é"')
        + chunk('"content":"\\""')
        + chunk('"content":"\\n"')
        + chunk("", '"stop","stop_reason":256')
        + f'{head}],"usage":{usage}}}\n\n'
        + "data: [DONE]\n\n"
    )


def test_every_parameter_reaches_the_engine() -> None:
    backend = FakeBackend()
    stated = {
        "n": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.1,
        "seed": 5,
        "stop_token_ids": [9],
        "ignore_eos": True,
        "min_tokens": 2,
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
        "prompt_logprobs": 1,
        "bad_words": ["cat"],
        "allowed_token_ids": [5, 6],
    }
    others = {
        "max_completion_tokens": 9,
        "logit_bias": {"5": 1, "6": -2.5},
        "logprobs": True,
        "top_logprobs": 2,
        "stop": "zz",
        "priority": -3,
        "deadline_s": 2.5,
        "user": "me",
        "metadata": {"a": "b"},
        "store": False,
        "model": "writer",
    }
    answer = post(backend, CHAT, {"messages": HI, **stated, **others}, app=keyed_app)
    assert answer.status_code == 200, answer.text
    sent = backend.requests[-1]
    expected = {**stated, "max_tokens": 9, "logit_bias": {5: 1, 6: -2.5}, "logprobs": 2}
    assert {name: list(value) if isinstance(value, tuple) else value for name, value in sent.params.items()} == expected
    assert (sent.priority, sent.deadline_s, sent.tenant) == (-3, 2.5, "acme")
    assert sent.stream  # stop strings are found here


def test_logprobs() -> None:
    backend = FakeBackend("hé")
    body = {"messages": HI, "logprobs": True, "top_logprobs": 2}
    content = post(backend, CHAT, body).json()["choices"][0]["logprobs"]["content"]
    likely = [{"token": "h", "logprob": -0.5, "bytes": [104]}, {"token": "?", "logprob": -1.5, "bytes": [63]}]
    assert content[0] == {"token": "h", "logprob": -0.5, "bytes": [104], "top_logprobs": likely}
    assert [entry["bytes"] for entry in content] == [[104], [0xC3], [0xA9]]  # the end token is not shown
    streamed = events(post(backend, CHAT, {**body, "stream": True}))
    pieces = [c["choices"][0]["logprobs"] for c in streamed]
    assert [entry for piece in pieces if piece for entry in piece["content"]] == content


def test_prompt_logprobs() -> None:
    found = post(FakeBackend(), CHAT, {"messages": HI, "prompt_logprobs": 1}).json()["prompt_logprobs"]
    assert found[:2] == [None, {str(ord("u")): {"logprob": -0.5, "rank": 1, "decoded_token": "u"}}]
    refused = post(FakeBackend(), CHAT, {"messages": HI, "prompt_logprobs": 1, "stream": True})
    assert error_of(refused)["code"] == "unsupported_parameter"


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_ends_the_request_in_the_engine(stream: bool) -> None:
    backend = FakeBackend("one two three four")
    body: dict[str, Any] = {"messages": HI, "stop": ["o t", " three"], "stream": stream}
    body |= {"stream_options": {"include_usage": True}} if stream else {}
    answer = post(backend, CHAT, body)
    if stream:
        chunks = events(answer)
        text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks[:-1])
        ended, usage = chunks[-2]["choices"][0], chunks[-1]["usage"]
    else:
        ended, usage = answer.json()["choices"][0], answer.json()["usage"]
        text = ended["message"]["content"]
    assert text == "one tw"
    assert (ended["finish_reason"], ended["stop_reason"]) == ("stop", "o t")
    assert usage["completion_tokens"] == len("one two t")
    assert usage["prompt_tokens_details"] == {"cached_tokens": 3}
    assert len(backend.left) == 1
    assert backend.num_sent == len("one two t")
    assert "stop" not in backend.params()


@pytest.mark.parametrize(
    ("reason", "status", "shown"),
    [("length", 200, None), ("deadline", 200, "deadline"), ("abort", 503, 0), ("error", 500, 0)],
)
def test_finish_reasons(reason: str, status: int, shown: Any) -> None:
    backend = FakeBackend("abc")
    backend.finish_reason = reason
    answer = post(backend, CHAT, {"messages": HI, "max_tokens": 2})
    assert answer.status_code == status
    if status == 200:
        choice = answer.json()["choices"][0]
        assert (choice["finish_reason"], choice["stop_reason"], choice["message"]["content"]) == ("length", shown, "ab")


def test_special_tokens_in_a_message_are_text() -> None:
    backend = FakeBackend()
    post(backend, CHAT, {"messages": [{"role": "user", "content": "<|end|>"}]})
    assert (backend.requests[-1].token_ids or []).count(END) == 1


def test_prompt_has_roles_parts_and_calls() -> None:
    backend = FakeBackend()
    called = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages: list[dict[str, Any]] = [
        {"role": "developer", "content": "Be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [called],
            "refusal": None,
            "audio": None,
            "annotations": [],
        },
        {"role": "tool", "content": "sunny", "tool_call_id": "c1"},
    ]
    assert post(backend, CHAT, {"messages": messages}).status_code == 200
    assert prompt_of(backend) == (
        '<|start|>system\nBe brief<|end|><|start|>user\na\nb<|end|><|start|>assistant\n[weather {"city": "Rome"}]<|end|>'
        "<|start|>tool\nsunny<|end|><|start|>assistant\n"
    )


def test_wrong_model_and_long_prompt() -> None:
    error = error_of(post(FakeBackend(), CHAT, {"messages": HI, "model": "writr"}))
    assert error["code"] == "model_not_found"
    assert "'lab/writer'" in error["message"]
    assert error_of(post(FakeBackend(), CHAT, {"messages": HI, "model": "vectors"}))["param"] == "model"
    error = error_of(post(FakeBackend(max_length=20), CHAT, {"messages": HI}))
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    assert "20 tokens" in error["message"]
    assert error_of(post(FakeBackend(), CHAT, {"messages": HI, "model": "bare"}))["param"] == "messages"


@pytest.mark.parametrize("stream", [False, True])
def test_refusals_have_retry_after(stream: bool) -> None:
    backend = FakeBackend()
    backend.fails[0] = RemoteError("Too much waits.", code="too_many_requests", status=429, retry_after_s=2.2)
    answer = post(backend, CHAT, {"messages": HI, "stream": stream})
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "3")
    assert error_of(answer)["type"] == "rate_limit_error"
    backend.fails[0] = RemoteError("Gone.", code="unavailable", status=503)
    answer = post(backend, CHAT, {"messages": HI, "stream": stream})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert backend.left == []


@pytest.mark.parametrize(("route", "body"), [(CHAT, {"messages": HI}), ("/v1/tts/tokens", {"text": "Hello"})])
def test_error_during_a_stream_is_an_event(route: str, body: dict[str, Any]) -> None:
    backend = FakeBackend("abc")
    backend.fails[2] = RemoteError("The engine process died.", code="unavailable", status=503)
    answer = post(backend, route, {**body, "stream": True})
    assert answer.status_code == 200
    error = events(answer)[-1]["error"]
    assert error == {
        "message": "The engine process died.",
        "type": "server_error",
        "param": None,
        "code": "unavailable",
    }
    assert "[DONE]" not in answer.text


@pytest.mark.parametrize(
    ("stated", "grammar"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, {"kind": "json", "value": None}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}},
            {"kind": "json_schema", "value": {"type": "object", "x-guidance": {"lenient": True}}},
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"strict": True, "schema": {"type": "object"}}}},
            {"kind": "json_schema", "value": {"type": "object"}},
        ),
        ({"response_format": {"type": "regex", "regex": "a+"}}, {"kind": "regex", "value": "a+"}),
        ({"response_format": {"type": "grammar", "grammar": 'start: "a"'}}, {"kind": "lark", "value": 'start: "a"'}),
        ({"guided_json": {"type": "array"}}, {"kind": "json_schema", "value": {"type": "array"}}),
        ({"guided_regex": "a+"}, {"kind": "regex", "value": "a+"}),
        ({"guided_grammar": 'start: "a"'}, {"kind": "lark", "value": 'start: "a"'}),
        ({"guided_choice": ["a", "b"]}, {"kind": "choice", "value": ["a", "b"]}),
    ],
)
def test_response_formats_become_grammars(stated: dict[str, Any], grammar: dict[str, Any] | None) -> None:
    backend = FakeBackend()
    assert post(backend, CHAT, {"messages": HI, **stated}).status_code == 200
    assert backend.params().get("grammar") == grammar


CALLS = (
    'I ask.<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
)


def test_tool_calls() -> None:
    backend = FakeBackend(CALLS)
    choice = post(backend, CHAT, {"messages": HI, "tools": [WEATHER, CLOCK]}).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "I ask."
    calls = choice["message"]["tool_calls"]
    assert [call["function"] for call in calls] == [
        {"name": "weather", "arguments": '{"city": "Rome"}'},
        {"name": "clock", "arguments": "{}"},
    ]
    assert len({call["id"] for call in calls}) == 2
    assert '"name": "clock"' in prompt_of(backend)
    assert prompt_of(backend).startswith("<|start|>tools\n")
    choice = post(backend, CHAT, {"messages": HI, "tools": [WEATHER], "tool_choice": "none"}).json()["choices"][0]
    assert choice["message"]["content"] == CALLS and "tools" not in prompt_of(backend)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_forced_tool_call_has_a_grammar(choice: Any) -> None:
    backend = FakeBackend(CALLS.removeprefix("I ask."))
    body = {"messages": HI, "tools": [WEATHER, CLOCK], "tool_choice": choice}
    answer = post(backend, CHAT, body).json()["choices"][0]
    assert answer["finish_reason"] == "tool_calls"
    assert answer["message"]["content"] is None
    grammar = backend.params()["grammar"]
    assert grammar["kind"] == "lark"
    assert ("clock" in grammar["value"]) == (choice == "required")
    assert ")*" not in grammar["value"]
    post(backend, CHAT, {**body, "parallel_tool_calls": True})
    assert (")*" in backend.params()["grammar"]["value"]) == (choice == "required")


@pytest.mark.parametrize("stream", [False, True])
def test_parallel_tool_calls_false_gives_one_call(stream: bool) -> None:
    body = {"messages": HI, "tools": [WEATHER, CLOCK], "parallel_tool_calls": False, "stream": stream}
    answer = post(FakeBackend(CALLS), CHAT, body)
    assert "weather" in answer.text
    assert "clock" not in answer.text


# Completions


COMPLETIONS = "/v1/completions"


def echo_back(request: GenerationRequest) -> str:
    return "<" + bytes(i for i in request.token_ids or [] if i < 256).decode(errors="replace") + ">"


@pytest.mark.parametrize(
    ("prompt", "sent"),
    [
        ("ab", [ids("ab")]),
        (["ab", "c"], [ids("ab"), ids("c")]),
        ([97, 98], [[97, 98]]),
        ([[97], [98, 99]], [[97], [98, 99]]),
    ],
)
def test_prompts_of_every_form(prompt: Any, sent: list[list[int]]) -> None:
    backend = FakeBackend(echo_back)
    body = post(backend, COMPLETIONS, {"prompt": prompt, "n": 2}).json()
    assert [request.token_ids for request in backend.requests] == sent
    texts = [f"<{bytes(token_ids).decode()}>{suffix}" for token_ids in sent for suffix in ("", " 1")]
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == list(enumerate(texts))
    assert body["usage"]["prompt_tokens"] == sum(map(len, sent))
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 3 * len(sent)}
    assert (body["object"], body["model"]) == ("text_completion", MODEL)


def test_bytes_of_a_completion_stream() -> None:
    backend = FakeBackend("é")
    body = {"prompt": ["a", "b"], "stream": True, "stream_options": {"include_usage": True}}
    text = post(backend, COMPLETIONS, body).text
    text = re.sub(r'"created":\d+', '"created":0', re.sub(r"cmpl-[0-9a-f]{24}", "ID", text))
    head = 'data: {"id":"ID","object":"text_completion","created":0,"model":"lab/writer","choices":['
    expected: list[str] = []
    for index in (0, 1):
        expected.append(f'{head}{{"index":{index},"text":"é","logprobs":null,"finish_reason":null}}],"usage":null}}')
        ended = '"logprobs":null,"finish_reason":"stop","stop_reason":256'
        expected.append(f'{head}{{"index":{index},"text":"",{ended}}}],"usage":null}}')
    usage = '{"prompt_tokens":2,"completion_tokens":6,"total_tokens":8,"prompt_tokens_details":{"cached_tokens":6}}'
    assert sorted(text.strip().split("\n\n")) == sorted([*expected, f'{head}],"usage":{usage}}}', "data: [DONE]"])


def test_default_max_tokens_is_16() -> None:
    backend = FakeBackend("x" * 50)
    choice = post(backend, COMPLETIONS, {"prompt": "a"}).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("x" * 16, "length")
    choice = post(backend, COMPLETIONS, {"prompt": "a", "max_tokens": None}).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("x" * 50, "stop")


def test_logprobs_and_echo() -> None:
    backend = FakeBackend("yz")
    body = {"prompt": "ab", "logprobs": 2, "echo": True}
    choice = post(backend, COMPLETIONS, body).json()["choices"][0]
    assert choice["text"] == "abyz"
    assert choice["logprobs"] == {
        "tokens": ["a", "b", "y", "z"],
        "token_logprobs": [None, -0.5, -0.5, -0.5],
        "text_offset": [0, 1, 2, 3],
        "top_logprobs": [None, *({token: -0.5, "?": -1.5} for token in "byz")],
    }
    answer = post(backend, COMPLETIONS, {**body, "max_tokens": 0}).json()
    assert answer["usage"]["completion_tokens"] == 0
    [choice] = answer["choices"]
    assert (choice["text"], choice["logprobs"]["tokens"]) == ("ab", ["a", "b"])
    assert backend.params()["max_tokens"] == 1
    choice = post(backend, COMPLETIONS, {"prompt": [97, 98], "echo": True}).json()["choices"][0]
    assert (choice["text"], choice["logprobs"]) == ("abyz", None)
    chunks = events(post(backend, COMPLETIONS, {"prompt": "ab", "echo": True, "stream": True}))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "abyz"


def test_text_offsets_point_into_the_shown_text() -> None:
    """The tokenizer puts a special token before the prompt, which the echoed text does not have."""
    backend = FakeBackend("yz")
    backend.directory = resolve_model(STORY_MODEL)
    for prompt in ("Once upon a time", [0, 388, 390]):
        body = {"prompt": prompt, "logprobs": 0, "echo": True, "max_tokens": 2}
        choice = post(backend, COMPLETIONS, body).json()["choices"][0]
        tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
        assert tokens[:3] == ["<|end|>", "Once", " upon"] and offsets[0] == 0
        for token, offset in list(zip(tokens, offsets, strict=True))[1:]:
            assert choice["text"][offset : offset + len(token)] == token


def test_logprobs_in_a_stream() -> None:
    chunks = events(post(FakeBackend("yz"), COMPLETIONS, {"prompt": "ab", "logprobs": 1, "stream": True}))
    found = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [entry["tokens"] for entry in found if entry] == [["y"], ["z"]]
    assert [entry["text_offset"] for entry in found if entry] == [[0], [1]]


def test_prompt_logprobs_and_token_ids() -> None:
    body = {"prompt": "ab", "prompt_logprobs": 0, "return_token_ids": True}
    choice = post(FakeBackend("y"), COMPLETIONS, body).json()["choices"][0]
    assert choice["prompt_logprobs"] == [None, {"98": {"logprob": -0.5, "rank": 1, "decoded_token": "b"}}]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([97, 98], [121, END])
    chunks = events(post(FakeBackend("y"), COMPLETIONS, {"prompt": "ab", "return_token_ids": True, "stream": True}))
    assert [chunk["choices"][0]["token_ids"] for chunk in chunks] == [[121], [END]]


def test_model_without_tokenizer_takes_ids() -> None:
    body: dict[str, Any] = {"prompt": [1, 2], "return_token_ids": True, "model": "bare", "max_tokens": 3}
    backend = FakeBackend("xyz")
    choice = post(backend, COMPLETIONS, body).json()["choices"][0]
    assert (choice["text"], choice["token_ids"]) == ("", ids("xyz"))
    refused = post(backend, COMPLETIONS, {**body, "prompt": "a"})
    assert "token ids" in error_of(refused)["message"]
    refused = post(backend, COMPLETIONS, {**body, "stop": "a"})
    assert error_of(refused)["param"] == "stop"


def test_failing_prompt_cancels_the_others() -> None:
    backend = FakeBackend("abc")
    backend.fails[1] = RemoteError("Out of luck.", code="unlucky", status=500)
    answer = post(backend, COMPLETIONS, {"prompt": ["a", "b"], "stop": "zz"})
    assert (answer.status_code, error_of(answer)["code"]) == (500, "unlucky")


@pytest.mark.parametrize("stream", [False, True])
def test_echo_alone_hides_the_generated_token(stream: bool) -> None:
    body = {"prompt": "ab", "max_tokens": 0, "echo": True, "return_token_ids": True, "stream": stream}
    answer = post(FakeBackend(), COMPLETIONS, body)
    choices = [chunk["choices"][0] for chunk in (events(answer) if stream else [answer.json()])]
    assert "".join(choice["text"] for choice in choices) == "ab"
    assert [token_id for choice in choices for token_id in choice.get("token_ids", [])] == []


def test_too_many_choices_give_413() -> None:
    backend = FakeBackend()
    answer = post(backend, COMPLETIONS, {"prompt": ["a"] * 17, "n": 128, "stream": True})
    assert (answer.status_code, error_of(answer)["code"]) == (413, "input_too_large")
    assert "2,176 choices; a request takes at most 2,048" in error_of(answer)["message"] and not backend.requests


def test_tokenize_and_detokenize() -> None:
    body = post(FakeBackend(), "/tokenize", {"prompt": "hé", "return_token_strs": True}).json()
    assert body == {"count": 3, "max_model_len": 1000, "tokens": ids("hé"), "token_strs": ["h", "�", "�"]}
    messages = [{"role": "user", "content": "a"}]
    body = post(FakeBackend(), "/tokenize", {"messages": messages, "model": "vectors"}).json()
    assert (body["count"], body["max_model_len"], body["token_strs"]) == (len("user\naassistant\n") + 3, 64, None)
    assert post(FakeBackend(), "/detokenize", {"tokens": ids("hé")}).json() == {"prompt": "hé"}
    assert post(FakeBackend(), "/detokenize", {"tokens": []}).json() == {"prompt": ""}
    for wrong in ({}, {"prompt": "a", "messages": messages}):
        assert error_of(post(FakeBackend(), "/tokenize", wrong))["param"] == "prompt"
    assert error_of(post(FakeBackend(), "/detokenize", {"tokens": ["a"]}))["param"] == "tokens"
    outside = error_of(post(FakeBackend(), "/detokenize", {"tokens": [5, 10**9]}))
    assert outside["param"] == "tokens" and "Token id 1000000000 is outside" in outside["message"]
    assert "no tokenizer" in error_of(post(FakeBackend(), "/detokenize", {"tokens": [1], "model": "bare"}))["message"]


def test_cache_explain_uses_the_callers_tenant() -> None:
    for body in ({"prompt": "abc"}, {"prompt": [1, 2, 3]}):
        answer = post(FakeBackend(), "/v1/cache/explain", body, app=keyed_app)
        assert answer.json() == {"model": MODEL, "num_tokens": 3, "tenant": "acme"}
    assert (
        error_of(post(FakeBackend(), "/v1/cache/explain", {"prompt": "a", "tenant": "other"}))["code"]
        == "unknown_parameter"
    )
    assert error_of(post(FakeBackend(), "/v1/cache/explain", {"prompt": [10**9]}))["param"] == "prompt"
