import re
from typing import Any

import pytest

from archerfish.serve.client import RemoteError
from archerfish.serve.wire import GenerationRequest
from archerfish.store.names import STORY_MODEL, resolve_model

from .fake_backend import END, MODEL, FakeBackend, error_of, events, ids, keyed_app, post

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


def test_bytes_of_a_stream() -> None:
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
        "tokens": ["a", "b", "y", "z"], "token_logprobs": [None, -0.5, -0.5, -0.5], "text_offset": [0, 1, 2, 3],
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


def test_stop_string_across_tokens_and_chunks() -> None:
    for size in (1, 2, 5, 100):
        backend = FakeBackend("one two three")
        backend.tokens_per_chunk = size
        body = {"prompt": "a", "stop": "wo t", "logprobs": 0, "return_token_ids": True}
        choice = post(backend, COMPLETIONS, body).json()["choices"][0]
        assert (choice["text"], choice["stop_reason"]) == ("one t", "wo t")
        assert choice["token_ids"] == ids("one two t")
        assert len(choice["logprobs"]["tokens"]) == len("one two t")
        assert len(backend.left) == (size < 100)


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
    assert error_of(post(FakeBackend(), "/v1/cache/explain", {"prompt": "a", "tenant": "other"}))["code"] == "unknown_parameter"
    assert error_of(post(FakeBackend(), "/v1/cache/explain", {"prompt": [10**9]}))["param"] == "prompt"
