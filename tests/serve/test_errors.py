"""Wrong bodies, wrong routes and limits: each answer says what was wrong."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from archerfish.errors import TooManyRequestsError
from archerfish.serve.client import RemoteError
from archerfish.serve.overload import BusyError

from .client import WORDS, app_of, client_of, error_of, host_with, serving, words_host
from .fake_backend import CHAT, HI, RESPONSES, TEXT, FakeBackend, fake_app, keyed_app, post

pytestmark = pytest.mark.anyio

JSON = {"Content-Type": "application/json"}
EMBEDDINGS = "/v1/embeddings"
RERANK = "/v1/rerank"
SIMILARITY = "/similarity"
CLOCK = {"type": "function", "function": {"name": "clock"}}


@pytest.mark.parametrize(
    ("route", "body", "param", "message"),
    [
        (EMBEDDINGS, {}, "input", "The parameter 'input' is missing."),
        (EMBEDDINGS, {"inputs": "x"}, "inputs", "Unknown parameter 'inputs'. Did you mean 'input'?"),
        (EMBEDDINGS, {"input": "x", "{message}": 1}, "{message}", "Unknown parameter '{message}'."),
        (EMBEDDINGS, {"input": []}, "input", "not an empty list."),
        (EMBEDDINGS, {"input": None}, "input", "not null."),
        (EMBEDDINGS, {"input": ["a", 3]}, "input", "input[1] must be a string, not a number."),
        (EMBEDDINGS, {"input": [1, "a"]}, "input", "input[1] must be a token id."),
        (EMBEDDINGS, {"input": [1, -1]}, "input", "input[1] must be a token id."),
        (EMBEDDINGS, {"input": [[1], []]}, "input", "input[1] must be a list of token ids"),
        (EMBEDDINGS, {"input": "x", "dimensions": 0}, "dimensions", "dimensions must be at least 1, not 0."),
        (EMBEDDINGS, {"input": "x", "dimensions": 5}, "dimensions", "lab/vectors has 4 dimensions, not 5."),
        (EMBEDDINGS, {"input": "x", "deadline_s": 0}, "deadline_s", "deadline_s must be"),
        (EMBEDDINGS, {"input": "x", "dimensions": "3"}, "dimensions", "dimensions must be a whole number, not '3'."),
        (
            EMBEDDINGS,
            {"input": "x", "encoding_format": "int8"},
            "encoding_format",
            "must be 'float' or 'base64', not 'int8'.",
        ),
        (EMBEDDINGS, {"input": "x", "model": 3}, "model", "model must be a string, not 3."),
        (RERANK, {"query": "x", "documents": []}, "documents", "not empty"),
        (
            RERANK,
            {"query": "x", "documents": [{"txt": "y"}]},
            "documents",
            "documents[0] must be a string, not an object.",
        ),
        (
            RERANK,
            {"query": "x", "documents": ["y"], "max_tokens_per_doc": 9},
            "max_tokens_per_doc",
            "is not supported here.",
        ),
        (RERANK, {"query": "x", "documents": ["y"], "rank_fields": ["body"]}, "rank_fields", "is not supported here."),
        (EMBEDDINGS, {"input": "x", "truncate_prompt_tokens": 8}, "truncate_prompt_tokens", "is not supported here."),
        (RERANK, {"query": "x", "documents": [{"text": 1}]}, "documents", "documents[0].text must be a string"),
        (RERANK, {"query": ["x"], "documents": ["y"]}, "query", "query must be a string, not an array."),
        (
            RERANK,
            {"query": "x", "documents": ["y"], "return_documents": "yes"},
            "return_documents",
            "true or false, not",
        ),
        (RERANK, {"query": "x", "documents": ["y"], "top_n": "a" * 99}, "top_n", f"not '{'a' * 39}..."),
        (
            TEXT,
            {"prompt": "a", "guided_json": 3},
            "guided_json",
            "The JSON schema of a grammar must be an object, not int.",
        ),
        (SIMILARITY, {"source": "x", "sentences": "y"}, "sentences", "sentences must be an array, not 'y'."),
        (SIMILARITY, {"source": "x", "sentences": []}, "sentences", "at least 1 item"),
        (SIMILARITY, {"source": "x", "sentences": ["y", 3]}, "sentences", "sentences[1] must be a string, not 3."),
        (SIMILARITY, {"source": [], "sentences": ["y"]}, "source", "not empty"),
        (TEXT, {"prompt": ""}, "prompt", "The prompt is empty"),
        (TEXT, {"prompt": "a", "max_tokens": 0}, "max_tokens", "only allowed with echo"),
        (TEXT, {"prompt": "a", "echo": True, "logprobs": 1, "stream": True}, "stream", "not streamed"),
        (TEXT, {"prompt": "a", "logprobs": 65}, "logprobs", "from 0 to 64"),
        (
            TEXT,
            {"prompt": "a" * 1000},
            "prompt",
            "context length is 1,000 tokens, answer included; the prompt has 1,000.",
        ),
        (TEXT, {"prompt": "a" * 9000}, "prompt", "answer included; the prompt has at least 1,000."),
        (TEXT, {"prompt": [[5], [5, 10**9]]}, "prompt", "Token id 1000000000 is outside of the vocabulary"),
        (TEXT, {"prompt": "a", "n": 2, "temperature": 7000}, "temperature", "temperature must be"),
        (RESPONSES, {"input": "Hi", "previous_response_id": "a"}, "previous_response_id", "keeps no responses"),
        (RESPONSES, {"input": []}, "input", "not empty"),
        (
            RESPONSES,
            {"input": [{"type": "item_reference", "id": "x"}]},
            "input",
            "'item_reference', which is not supported",
        ),
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", "text parts are"),
        (RESPONSES, {"input": "Hi", "tools": [{"type": "web_search"}]}, "tools", "'web_search' is not supported"),
        (RESPONSES, {"input": "Hi", "max_tokens": 5}, "max_tokens", "Did you mean 'min_tokens'"),
        (CHAT, {}, "messages", "The parameter 'messages' is missing."),
        (CHAT, {"messages": []}, "messages", "not empty"),
        (CHAT, {"messages": "Hi"}, "messages", "must be a list"),
        (CHAT, {"messages": ["Hi"]}, "messages", "messages[0] must be an object, not a string."),
        (CHAT, {"messages": [{"role": "king", "content": "x"}]}, "messages", "not 'king'"),
        (
            CHAT,
            {"messages": [{"content": "x"}]},
            "messages",
            "messages[0].role must be system, developer, user, assistant or tool",
        ),
        (CHAT, {"messages": [{"role": "user"}]}, "messages", "messages[0] has no content."),
        (
            CHAT,
            {"messages": [{"role": "user", "contents": "x"}]},
            "messages",
            "messages[0] has no member 'contents'. Did you mean 'content'?",
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages",
            "of type 'image_url', which is not",
        ),
        (
            CHAT,
            {"messages": [{"role": "tool", "content": "x"}]},
            "messages",
            "messages[0].tool_call_id must be a string",
        ),
        (CHAT, {"messages": [{"role": "assistant", "content": None}]}, "messages", "neither content nor tool_calls"),
        (CHAT, {"messages": HI, "max_token": 5}, "max_token", "Did you mean 'max_tokens'?"),
        (
            CHAT,
            {"messages": HI, "temperature": -1},
            "temperature",
            "temperature must be a number from 0 to 100, not -1.0.",
        ),
        (CHAT, {"messages": HI, "max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens", "differ"),
        (CHAT, {"messages": HI, "top_logprobs": 2}, "top_logprobs", "needs logprobs"),
        (CHAT, {"messages": HI, "logit_bias": {"x": 1}}, "logit_bias", "'x' is no token id"),
        (CHAT, {"messages": HI, "logit_bias": {"1": "x"}}, "logit_bias", "logit_bias.1 must be a number, not 'x'."),
        (CHAT, {"messages": HI, "logit_bias": {"1": 1000}}, "logit_bias", "from -100 to 100"),
        (CHAT, {"messages": HI, "stop": [""]}, "stop", "not empty"),
        (CHAT, {"messages": HI, "stop": 3}, "stop", "a string or a list of strings, not int."),
        (CHAT, {"messages": HI, "top_k": 10**30}, "top_k", "top_k cannot be sent to the engine"),
        (CHAT, {"messages": HI, "stop_token_ids": [10**30]}, "stop_token_ids", "outside of the vocabulary"),
        (
            TEXT,
            {"prompt": [5], "model": "bare", "stop_token_ids": [10**30]},
            "stop_token_ids",
            "cannot be sent to the engine",
        ),
        (CHAT, {"messages": HI, "logit_bias": {"999999999": 1}}, "logit_bias", "outside of the vocabulary"),
        (CHAT, {"messages": HI, "allowed_token_ids": [999999999]}, "allowed_token_ids", "outside of the vocabulary"),
        (CHAT, {"messages": HI, "bad_words": [""]}, "bad_words", "words that are not empty"),
        (CHAT, {"messages": HI, "priority": 10**30}, "priority", "priority must be below 2,147,483,648"),
        (CHAT, {"messages": HI, "deadline_s": -1}, "deadline_s", "deadline_s must be at least 0"),
        (CHAT, {"messages": HI, "guided_regex": "a", "guided_choice": ["b"]}, "guided_regex", "exclude each other"),
        (CHAT, {"messages": HI, "stream_options": {"include_usage": True}}, "stream_options", "set stream to true"),
        (
            CHAT,
            {"messages": HI, "stream_options": {"include_usages": True}},
            "include_usages",
            "Did you mean 'include_usage'?",
        ),
        (CHAT, {"messages": HI, "tools": [{"type": "custom"}]}, "tools", "'custom' is not supported"),
        (
            CHAT,
            {"messages": HI, "tools": [{"type": "function", "function": {}}]},
            "tools",
            "tools[0].function.name must be a string",
        ),
        (
            CHAT,
            {"messages": HI, "chat_template_kwargs": {"messages": []}},
            "chat_template_kwargs",
            "cannot hold 'messages'",
        ),
        (CHAT, {"messages": HI, "tool_choice": "required"}, "tool_choice", "there are no tools"),
        (CHAT, {"messages": HI, "tools": [CLOCK], "tool_choice": "maybe"}, "tool_choice", 'must be "auto", "none"'),
        (CHAT, {"messages": HI, "tools": [CLOCK, CLOCK]}, "tools", "Two tools are called 'clock'"),
        (CHAT, {"messages": HI, "tools": [CLOCK], "guided_regex": "a"}, "tools", "json_schema or json_object only"),
        (
            CHAT,
            {"messages": HI, "tools": [CLOCK], "tool_choice": {"type": "function", "function": {"name": "clok"}}},
            "tool_choice",
            "Did you mean 'clock'?",
        ),
    ],
)
def test_wrong_value_names_its_parameter(route: str, body: dict[str, Any], param: str, message: str) -> None:
    backend = FakeBackend()
    answer = post(backend, route, body)
    assert answer.status_code == 400, answer.text
    error = error_of(answer)
    assert message in error["message"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert backend.requests == []


def test_full_queue_and_limit_of_an_engine_have_codes_of_their_own() -> None:
    assert (TooManyRequestsError.status, TooManyRequestsError.code) == (429, "too_many_requests")
    assert (BusyError.status, BusyError.code) == (503, "overloaded")


@pytest.mark.parametrize(
    ("content", "headers", "code", "said"),
    [
        (b"{", JSON, "invalid_json", "EOF while parsing an object at line 1 column 1."),
        (b'{"input": "x", }', JSON, "invalid_json", "trailing comma at line 1 column 16."),
        (b'{\n  "input": "x"\n  "user": "y"\n}', JSON, "invalid_json", "expected `,` or `}` at line 3 column 3."),
        (b"{'input': 'x'}", JSON, "invalid_json", "key must be a string at line 1 column 2."),
        (b"[]", JSON, "bad_request", "must be a JSON object"),
        (b"", JSON, "bad_request", "must be a JSON object"),
        (b'{"input": "\xff"}', JSON, "invalid_json", "invalid unicode code point at line 1 column 12."),
        (b'{"input": [' + b"1" * 5000 + b"]}", JSON, "invalid_json", "number out of range at line 1 column 4313."),
        (b"[" * 100_000, JSON, "invalid_json", "recursion limit exceeded at line 1 column 202."),
        (b'{"input": "x"}', {"Content-Type": "text/plain"}, "bad_request", "Content-Type: application/json"),
        (b'{"input": "\\ud800"}', JSON, "invalid_json", "hex escape at line 1 column 18."),
        (b'{"input": ["NaN \\"",\nNaN]}', JSON, "invalid_json", "expected value at line 2 column 1."),
        (b'{"input": [-Infinity]}', JSON, "invalid_json", "invalid number at line 1 column 13."),
        (b'{"input": "x", "deadline_s": 1e999}', JSON, "invalid_input", "deadline_s: Input should be a finite number."),
    ],
)
def test_body_that_is_not_a_json_object(content: bytes, headers: dict[str, str], code: str, said: str) -> None:
    for sent in (headers, {"Content-Type": headers["Content-Type"] + "; charset=utf-8"}):
        answer = post(FakeBackend(), EMBEDDINGS, content, headers=sent)
        assert (answer.status_code, error_of(answer)["code"]) == (400, code)
        assert said in error_of(answer)["message"]


async def test_type_of_a_body_may_be_left_out_except_by_pages() -> None:
    async with client_of(fake_app(FakeBackend())) as client:
        for stated in (
            {},
            {"Content-Type": "application/x-www-form-urlencoded"},
        ):  # the second is what `curl -d` states
            answer = await client.post(EMBEDDINGS, content=b'{"input": "x"}', headers=stated)
            assert answer.status_code == 200
            answer = await client.post(
                EMBEDDINGS, content=b'{"input": "x"}', headers={**stated, "Origin": "http://other"}
            )
            assert answer.status_code == 400


async def test_unknown_routes_and_methods() -> None:
    async with serving() as client:
        answer = await client.post("/v1/audio/speech", json={})
        assert (answer.status_code, error_of(answer)["code"]) == (404, "not_found")
        assert error_of(answer)["message"] == "There is no route POST /v1/audio/speech. GET /docs lists all."
        near = {
            "/chat/completions": "/v1/chat/completions",
            "/v1/v1/embeddings": EMBEDDINGS,
            "/v1/message": "/v1/messages",
        }
        for path, meant in near.items():
            assert f"Did you mean '{meant}'" in error_of(await client.post(path, json={}))["message"]
        answer = await client.post(f"/{'long' * 5000}")
        assert answer.status_code == 404 and "Did you mean" not in answer.text
        answer = await client.get(EMBEDDINGS)
        assert (answer.status_code, error_of(answer)["code"]) == (405, "method_not_allowed")
        assert error_of(answer)["message"] == "/v1/embeddings does not take GET; it takes POST."
        answer = await client.delete("/v1/models/a/b")
        assert error_of(answer)["message"] == "/v1/models/a/b does not take DELETE; it takes GET, HEAD."
        assert answer.headers["Allow"] == "GET, HEAD"


async def test_route_without_its_kind_of_model_gives_400() -> None:
    async with serving() as client:
        for named in ({}, {"model": WORDS}):
            answer = await client.post(CHAT, json={"messages": HI, **named})
            assert (answer.status_code, error_of(answer)["param"]) == (400, "model")
            assert "GET /v1/models" in error_of(answer)["message"]


async def test_model_without_chat_template_gives_400(tmp_path: Path) -> None:
    host = host_with(tmp_path, llm={"has_text": True})

    async with serving(host) as client:
        answer = await client.post(CHAT, json={"messages": HI})
        assert (answer.status_code, error_of(answer)["param"]) == (400, "model")
        assert "/v1/completions" in error_of(answer)["message"]
        assert str(tmp_path) not in answer.text


@pytest.mark.parametrize(
    "body", [{"input": "x", "y" * 5000: 1}, {"input": "x", "model": "y" * 5000}], ids=["name", "value"]
)
def test_errors_repeat_only_the_start_of_long_values(body: dict[str, Any]) -> None:
    assert len(post(FakeBackend(), EMBEDDINGS, body).text) < 2500


def test_trailing_slash_is_not_redirected() -> None:
    for host in ("evil.example", "["):
        answer = post(FakeBackend(), EMBEDDINGS + "/", {"input": "x"}, app=keyed_app, headers={"Host": host})
        assert (answer.status_code, error_of(answer)["code"]) == (404, "not_found")


def claude_error(answer: httpx.Response) -> Any:
    """The type of an error, which must have Anthropic's shape."""
    body = answer.json()
    assert (set(body), body["type"], set(body["error"])) == ({"type", "error"}, "error", {"type", "message"})
    return body["error"]["type"]


async def test_errors_before_a_route_have_its_shape() -> None:
    claude = "/v1/messages"
    large = b'{"messages": "' + b"x" * 2000 + b'"}'
    async with serving(max_body_bytes=1024) as client:
        for content in (large, in_pieces(large)):
            answer = await client.post(claude, content=content, headers=JSON)
            assert (answer.status_code, claude_error(answer)) == (413, "request_too_large")
        answer = await client.get(claude)
        assert (answer.status_code, claude_error(answer)) == (405, "invalid_request_error")
        answer = await client.post(claude + "/batches", json={})
        assert (answer.status_code, claude_error(answer)) == (404, "not_found_error")
        assert error_of(await client.post("/v1/messagesx", json={}))["code"] == "not_found"


async def in_pieces(data: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(data), 500):
        yield data[start : start + 500]


async def test_too_large_body_gives_413() -> None:
    async with serving(max_body_bytes=1024) as client:
        for num_bytes, status in ((2000, 413), (1025, 413), (1024, 200)):
            body = b'{"input": "' + b"x" * (num_bytes - 13) + b'"}'
            for content in (body, in_pieces(body)):
                answer = await client.post(EMBEDDINGS, content=content, headers=JSON)
                assert answer.status_code == status
                assert status == 200 or error_of(answer)["code"] == "input_too_large"


async def test_too_many_texts_give_413() -> None:
    async with serving(max_texts_per_request=3) as client:
        for route, body in (
            (EMBEDDINGS, {"input": ["x"] * 4}),
            (RERANK, {"query": "x", "documents": ["x"] * 4}),
            (SIMILARITY, {"source": ["x"] * 2, "sentences": ["x"] * 2}),
        ):
            answer = await client.post(route, json=body)
            assert answer.status_code == 413
            assert "at most 3" in error_of(answer)["message"]


async def test_text_refused_by_the_engine_gives_400() -> None:
    async with serving() as client:
        answer = await client.post(EMBEDDINGS, json={"input": ["ok", "an unreadable one"]})
        error = error_of(answer)
        assert (answer.status_code, error["code"], error["param"]) == (400, "invalid_input", "input")
        assert error["message"] == "A text is unreadable."


async def test_stopped_service_gives_503() -> None:
    with words_host() as host, host:
        app = app_of(host)
        async with app.router.lifespan_context(app):
            pass
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            answer = await client.post(EMBEDDINGS, json={"input": "x"})
    assert (answer.status_code, error_of(answer)["code"]) == (503, "stopped")
    assert "retry-after" in answer.headers


async def test_paths_cannot_forge_log_lines(caplog: pytest.LogCaptureFixture) -> None:
    backend = FakeBackend()
    backend.ask_error = RemoteError("Broken.", status=500)
    async with client_of(fake_app(backend)) as client:
        assert (await client.get("/v1/models/x%0D%1B[2KERROR%20all%20is%20lost")).status_code == 500
    [told] = [record.getMessage() for record in caplog.records if "all is lost" in record.getMessage()]
    assert told.isprintable()
