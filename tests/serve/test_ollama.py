"""Ollama's routes: answers, lines of a stream, options, errors, and what is said of models."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from typing import Any

import httpx
import pytest

from archerfish.config import ServeConfig
from archerfish.serve.app import create_app
from archerfish.serve.client import RemoteError

from .client import WORDS, serving
from .fake_backend import HI, MODEL, FakeBackend, client_of, fake_app, post, prompt_of

CHAT, GENERATE = "/api/chat", "/api/generate"
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


def lines(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(one) for one in answer.text.splitlines()]


def get(backend: FakeBackend, path: str) -> Any:
    async def main() -> Any:
        async with client_of(fake_app(backend)) as client:
            return (await client.get(path)).json()

    return asyncio.run(main())


def test_chat_streams_lines_unless_told_otherwise() -> None:
    parts = lines(post(FakeBackend("Hello"), CHAT, {"model": MODEL, "messages": HI}))
    assert "".join(part["message"]["content"] for part in parts) == "Hello"
    assert [part["done"] for part in parts] == [False] * 5 + [True]
    last = parts[-1]
    assert (last["done_reason"], last["eval_count"], last["model"]) == ("stop", 6, MODEL)
    assert last["prompt_eval_count"] > 0 and last["total_duration"] > 0

    whole = post(FakeBackend("Hello"), CHAT, {"model": f"{MODEL}:latest", "messages": HI, "stream": False}).json()
    assert whole["message"] == {"role": "assistant", "content": "Hello"}
    assert whole["done"] is True and whole["model"] == f"{MODEL}:latest"


def test_options_become_parameters_of_sampling() -> None:
    backend = FakeBackend("a b c")
    options = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 3,
        "num_predict": 2,
        "seed": 7,
        "stop": ["zz"],
        "repeat_penalty": 1.2,
    }
    body = {"messages": HI, "stream": False, "options": {**options, "num_ctx": 4096, "mirostat": 1}, "keep_alive": "5m"}
    answer = post(backend, CHAT, body)
    assert answer.json()["done_reason"] == "length"
    params = backend.params()
    assert (params["temperature"], params["top_p"], params["top_k"], params["max_tokens"]) == (0.5, 0.9, 3, 2)
    assert (params["seed"], params["repetition_penalty"]) == (7, 1.2)
    assert answer.headers["x-archerfish-remark"] == "without effect here: mirostat, num_ctx"
    for unlimited in (-1, -2):
        post(backend, CHAT, {"messages": HI, "options": {"num_predict": unlimited}})
        assert backend.params()["max_tokens"] is None
    lowered = post(backend, CHAT, {"messages": HI, "options": {"num_predict": 5000}})
    assert lowered.status_code == 200 and "was lowered from 5,000" in lowered.headers["x-archerfish-remark"]


def test_think_without_effect_is_remarked() -> None:
    for route, body, said in (
        (CHAT, {"messages": HI}, f"think has no effect: the chat template of {MODEL} does not read it"),
        (GENERATE, {"prompt": "x", "raw": True}, "without effect here: think"),
    ):
        for stated in (True, "high"):
            assert post(FakeBackend(), route, {**body, "think": stated}).headers["x-archerfish-remark"] == said
        assert "x-archerfish-remark" not in post(FakeBackend(), route, {**body, "think": False}).headers


def test_any_model_may_be_named_where_the_server_is_told_so() -> None:
    app: Any = partial(create_app, config=ServeConfig(accept_any_model=True), credentials="pass")
    for route, body in (
        (CHAT, {"messages": HI}),
        (CHAT, {}),
        (GENERATE, {"prompt": "x"}),
        (GENERATE, {"prompt": "x", "raw": True}),
        (GENERATE, {}),
        ("/api/show", {}),
        ("/api/embed", {"input": "x"}),
    ):
        answer = post(FakeBackend(), route, {**body, "model": "llama3"}, app=app)
        assert answer.status_code == 200 and "'llama3' is not served here" in answer.headers["x-archerfish-remark"]


def test_stop_string_ends_the_text() -> None:
    parts = lines(post(FakeBackend("one two"), GENERATE, {"prompt": "x", "options": {"stop": " t"}}))
    assert "".join(part["response"] for part in parts) == "one"
    assert parts[-1]["done_reason"] == "stop" and parts[-1]["eval_duration"] > 0


def test_generate_uses_the_template_unless_raw() -> None:
    backend = FakeBackend("yes")
    answer = post(backend, GENERATE, {"prompt": "Hi", "system": "Be kind", "stream": False})
    assert answer.json()["response"] == "yes"
    assert prompt_of(backend) == "<|start|>system\nBe kind<|end|><|start|>user\nHi<|end|><|start|>assistant\n"
    post(backend, GENERATE, {"prompt": "Hi", "raw": True})
    assert prompt_of(backend) == "Hi"


def test_request_without_content_says_that_the_model_is_loaded() -> None:
    backend = FakeBackend()
    for route, body in ((CHAT, {"messages": []}), (GENERATE, {"prompt": ""}), (GENERATE, {})):
        answer = post(backend, route, {"model": MODEL, **body}).json()
        assert (answer["done"], answer["done_reason"]) == (True, "load")
    assert not backend.requests


@pytest.mark.parametrize("stream", [True, False])
def test_calls_of_tools_have_arguments_as_objects(stream: bool) -> None:
    backend = FakeBackend('<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>')
    call = {"function": {"name": "weather", "arguments": {"city": "Rome"}}}
    result = {"role": "tool", "content": "sunny", "tool_name": "weather"}
    earlier = [*HI, {"role": "assistant", "content": "", "tool_calls": [call]}, result]
    answer = post(
        backend, CHAT, {"messages": earlier, "tools": [WEATHER], "stream": stream, "options": {"num_predict": 100}}
    )
    parts = lines(answer) if stream else [answer.json()]
    calls = [call for part in parts for call in part["message"].get("tool_calls", [])]
    assert calls == [{"function": {"name": "weather", "arguments": {"city": "Paris"}}}]
    assert "Rome" in prompt_of(backend) and "sunny" in prompt_of(backend)


def test_format_is_json_or_a_schema() -> None:
    backend = FakeBackend("{}")
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for stated, grammar in (
        ("json", {"kind": "json", "value": None}),
        (schema, {"kind": "json_schema", "value": schema}),
    ):
        assert post(backend, CHAT, {"messages": HI, "format": stated}).status_code == 200
        assert backend.params()["grammar"] == grammar
    post(backend, CHAT, {"messages": HI, "format": ""})
    assert "grammar" not in backend.params()
    refused = post(backend, CHAT, {"messages": HI, "format": "yaml"})
    assert refused.json() == {"error": 'format must be "json" or a JSON schema, which is an object.'}


def test_logprobs_stand_beside_their_text() -> None:
    parts = lines(post(FakeBackend("ab"), CHAT, {"messages": HI, "logprobs": True, "top_logprobs": 1}))
    assert [one["token"] for part in parts for one in part.get("logprobs", [])][:2] == ["a", "b"]


def test_errors_are_strings() -> None:
    backend = FakeBackend("Hello there")
    unknown = post(backend, CHAT, {"model": "nowhere", "messages": HI})
    assert unknown.status_code == 404 and "'nowhere' is not served here" in unknown.json()["error"]
    assert "messages[0].role" in post(backend, CHAT, {"messages": [{"role": "x"}]}).json()["error"]
    assert "Content-Type" in post(backend, CHAT, b"x", headers={"Content-Type": "text/plain"}).json()["error"]
    backend.fails = {2: RemoteError("It broke.", code="internal_error", status=500)}
    assert lines(post(backend, CHAT, {"messages": HI}))[-1] == {"error": "It broke."}


def test_models_are_described() -> None:
    backend = FakeBackend()
    models = get(backend, "/api/tags")["models"]
    assert [model["name"] for model in models] == [MODEL, "lab/bare", "lab/vectors"]
    assert models[0]["details"]["family"] == "generation" and len(models[0]["digest"]) == 64
    assert [model["context_length"] for model in get(backend, "/api/ps")["models"]] == [1000, 100, 64]
    assert set(get(backend, "/api/version")) == {"version", "archerfish"}
    shown = post(backend, "/api/show", {"model": MODEL}).json()
    assert shown["capabilities"] == ["completion", "tools"] and "<|start|>" in shown["template"]
    assert shown["model_info"]["generation.context_length"] == 1000
    assert post(backend, "/api/show", {"name": "lab/vectors"}).json()["capabilities"] == ["embedding"]
    assert post(backend, "/api/show", {"model": "lab/bare"}).json()["capabilities"] == ["completion"]


@pytest.mark.anyio
async def test_vectors_of_texts() -> None:
    async with serving() as client:
        openai = (await client.post("/v1/embeddings", json={"input": ["one two", "three"]})).json()
        expected = [item["embedding"] for item in openai["data"]]
        answer = (await client.post("/api/embed", json={"model": WORDS, "input": ["one two", "three"]})).json()
        assert answer["embeddings"] == expected and answer["prompt_eval_count"] == 3
        short = (await client.post("/api/embed", json={"input": "three", "dimensions": 2})).json()
        assert [len(row) for row in short["embeddings"]] == [2]
        older = (await client.post("/api/embeddings", json={"model": f"{WORDS}:latest", "prompt": "three"})).json()
        assert older == {"embedding": expected[1]}
