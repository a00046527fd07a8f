"""Wrong bodies, wrong routes and limits: each answer says what was wrong."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from archerfish.serve.app import create_app
from archerfish.serve.client import Answer, Question, RemoteError
from archerfish.serve.tenants import Tenants, add_key

from .client import WORDS, app_of, error_of, host_with, with_client, words_host
from .fake_backend import FakeBackend
from .hosting import WordEncoder, add_llm

JSON = {"Content-Type": "application/json"}
EMBEDDINGS, RERANK, SIMILARITY = "/v1/embeddings", "/v1/rerank", "/similarity"
CHAT = {"messages": [{"role": "user", "content": "hello"}]}


@pytest.mark.parametrize(
    ("route", "body", "param", "message"),
    [
        (EMBEDDINGS, {}, "input", "The parameter 'input' is missing."),
        (EMBEDDINGS, {"inputs": "x"}, "inputs", "Unknown parameter 'inputs'. Did you mean 'input'?"),
        (EMBEDDINGS, {"input": "x", "{message}": 1}, "{message}", "Unknown parameter '{message}'."),
        (EMBEDDINGS, {"input": "x", "\ud800": 1}, "\\ud800", "Unknown parameter '\\ud800'."),
        (EMBEDDINGS, {"input": []}, "input", "not an empty list."),
        (EMBEDDINGS, {"input": None}, "input", "not null."),
        (EMBEDDINGS, {"input": {"a": 1}}, "input", "not an object."),
        (EMBEDDINGS, {"input": ["a", 3]}, "input", "input[1] must be a string, not a number."),
        (EMBEDDINGS, {"input": ["a", True]}, "input", "input[1] must be a string, not a boolean."),
        (EMBEDDINGS, {"input": [1, "a"]}, "input", "input[1] must be a token id."),
        (EMBEDDINGS, {"input": [1, -1]}, "input", "input[1] must be a token id."),
        (EMBEDDINGS, {"input": [[1], []]}, "input", "input[1] must be a list of token ids"),
        (EMBEDDINGS, {"input": "\ud800"}, "input", "not valid Unicode"),
        (EMBEDDINGS, {"input": "x", "dimensions": 0}, "dimensions", "dimensions must be at least 1, not 0."),
        (EMBEDDINGS, {"input": "x", "dimensions": "3"}, "dimensions", "dimensions must be a whole number, not '3'."),
        (EMBEDDINGS, {"input": "x", "encoding_format": "int8"}, "encoding_format", "must be 'float' or 'base64', not 'int8'."),
        (EMBEDDINGS, {"input": "x", "model": 3}, "model", "model must be a string, not 3."),
        (RERANK, {"query": "x", "texts": ["y"]}, "texts", "Unknown parameter 'texts'."),
        (RERANK, {"query": "x", "documents": []}, "documents", "not empty"),
        (RERANK, {"query": "x", "documents": [{"txt": "y"}]}, "documents", "documents[0] must be a string, not an object."),
        (RERANK, {"query": "x", "documents": ["y"], "max_tokens_per_doc": 9}, "max_tokens_per_doc", "is not supported here."),
        (RERANK, {"query": "x", "documents": ["y"], "rank_fields": ["body"]}, "rank_fields", "is not supported here."),
        (EMBEDDINGS, {"input": "x", "truncate_prompt_tokens": 8}, "truncate_prompt_tokens", "is not supported here."),
        (RERANK, {"query": "x", "documents": [{"text": 1}]}, "documents", "documents[0].text must be a string"),
        (RERANK, {"query": ["x"], "documents": ["y"]}, "query", "query must be a string, not an array."),
        (RERANK, {"query": "x", "documents": ["y"], "top_n": 0}, "top_n", "top_n must be at least 1, not 0."),
        (RERANK, {"query": "x", "documents": ["y"], "return_documents": "yes"}, "return_documents", "true or false, not"),
        (RERANK, {"query": "x", "documents": ["y"], "top_n": "a" * 99}, "top_n", "not 'aaaaaaaaaaaaaaaaaaaaaaa..."),
        (RERANK, {"query": "x", "documents": ["y"], "top_n": [1]}, "top_n", "must be a whole number, not an array."),
        ("/v1/completions", {"prompt": "a", "guided_json": 3}, "guided_json", "must be a JSON schema, which is an object,"),
        (SIMILARITY, {"source": "x", "sentences": "y"}, "sentences", "list of strings"),
        (SIMILARITY, {"source": [], "sentences": ["y"]}, "source", "not empty"),
        (SIMILARITY, {"source": 1, "sentences": ["y"]}, "source", "source must be a string, not a number."),
    ],
)
def test_wrong_value_names_its_parameter(route: str, body: dict[str, Any], param: str, message: str) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        answer = await client.post(route, content=json.dumps(body), headers=JSON)
        assert answer.status_code == 400, answer.text
        error = error_of(answer)
        assert message in error["message"]
        assert error["param"] == param
        assert error["type"] == "invalid_request_error"

    with_client(test)


@pytest.mark.parametrize(
    ("content", "headers", "code", "said"),
    [
        (b"{", JSON, "invalid_json", "in line 1, column 2, where it ends."),
        (b'{"input": "x", }', JSON, "invalid_json", "in line 1, column"),
        (b'{\n  "input": "x"\n  "user": "y"\n}', JSON, "invalid_json",
         """Expecting ',' delimiter, in line 3, column 3, at '"user": "y"'."""),
        (b"{'input': 'x'}", JSON, "invalid_json", "in double quotes, in line 1, column 2, at \"'input': 'x'}\"."),
        (b"[]", JSON, "bad_request", "must be a JSON object"),
        (b"3", JSON, "bad_request", "must be a JSON object"),
        (b"", JSON, "bad_request", "must be a JSON object"),
        (b'{"input": "\xff"}', JSON, "invalid_json", "it is not UTF-8: byte 12 (0xff): invalid start byte."),
        (b'{"input": [' + b"1" * 5000 + b"]}", JSON, "invalid_json", "a whole number has more than 4,300 digits."),
        (b"[" * 100_000, JSON, "invalid_json", "it is nested too deeply."),
        (b'{"input": "x"}', {"Content-Type": "text/plain"}, "bad_request", "Content-Type: application/json"),
        (b'{"input": ["NaN \\"",\nNaN]}', JSON, "invalid_json", "NaN is not a JSON number, in line 2, column 1, at 'NaN]}'."),
        (b'{"input": [-Infinity]}', JSON, "invalid_json", "-Infinity is not a JSON number, in line 1, column 12"),
        (b'{"input": [1e999]}', JSON, "invalid_json", "1e999 is not a JSON number, in line 1, column 12"),
    ],
)  # fmt: skip
def test_body_that_is_not_a_json_object(content: bytes, headers: dict[str, str], code: str, said: str) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        for sent in (headers, {"Content-Type": headers["Content-Type"] + "; charset=utf-8"}):  # which another way reads
            answer = await client.post(EMBEDDINGS, content=content, headers=sent)
            assert answer.status_code == 400
            assert error_of(answer)["code"] == code
            assert said in error_of(answer)["message"]

    with_client(test)


def test_unknown_routes_and_methods() -> None:
    async def test(client: httpx.AsyncClient) -> None:
        answer = await client.post("/v1/audio/speech", json={})
        assert (answer.status_code, error_of(answer)["code"]) == (404, "not_found")
        assert error_of(answer)["message"] == "There is no route POST /v1/audio/speech. GET /openapi.json lists all."
        near = {"/chat/completions": "/v1/chat/completions", "/v1/v1/embeddings": EMBEDDINGS, "/v1/message": "/v1/messages"}
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

    with_client(test)


def test_route_without_its_kind_of_model_gives_400() -> None:
    async def test(client: httpx.AsyncClient) -> None:
        for body in (CHAT, {**CHAT, "model": WORDS}):
            answer = await client.post("/v1/chat/completions", json=body)
            assert (answer.status_code, error_of(answer)["param"]) == (400, "model")
            assert "GET /v1/models" in error_of(answer)["message"]

    with_client(test)


def test_model_without_chat_template_gives_400_without_paths(tmp_path: Path) -> None:
    host = host_with(tmp_path)
    add_llm(host, tmp_path, has_text=True)

    async def test(client: httpx.AsyncClient) -> None:
        answer = await client.post("/v1/chat/completions", json=CHAT)
        assert (answer.status_code, error_of(answer)["param"]) == (400, "model")
        assert "/v1/completions" in error_of(answer)["message"]
        assert str(tmp_path) not in answer.text

    with_client(test, host)


def test_errors_repeat_only_the_start_of_long_values() -> None:
    async def test(client: httpx.AsyncClient) -> None:
        for body in ({"input": "x", "y" * 5000: 1}, {"input": "x", "model": "y" * 5000}):
            answer = await client.post(EMBEDDINGS, json=body)
            assert len(answer.text) < 2500

    with_client(test)


def test_trailing_slash_is_not_redirected() -> None:
    async def test(client: httpx.AsyncClient) -> None:
        for host in ("evil.example", "["):
            answer = await client.post(EMBEDDINGS + "/", json={"input": "x"}, headers={"Host": host})
            assert (answer.status_code, error_of(answer)["code"]) == (404, "not_found")

    with_client(test)


def claude_error(answer: httpx.Response) -> dict[str, Any]:
    """The error of an answer, which must have Anthropic's shape."""
    body = answer.json()
    assert set(body) == {"type", "error"}
    assert body["type"] == "error"
    assert set(body["error"]) == {"type", "message"}
    error: dict[str, Any] = body["error"]
    return error


def test_errors_before_a_route_have_the_shape_of_its_api(tmp_path: Path) -> None:
    claude = "/v1/messages"
    large = b'{"messages": "' + b"x" * 2000 + b'"}'
    keys = tmp_path / "keys.toml"
    add_key(keys, "ann")

    async def test(client: httpx.AsyncClient) -> None:
        for content in (large, in_pieces(large)):
            answer = await client.post(claude, content=content, headers=JSON)
            assert (answer.status_code, claude_error(answer)["type"]) == (413, "request_too_large")
        answer = await client.get(claude)
        assert (answer.status_code, claude_error(answer)["type"]) == (405, "invalid_request_error")
        answer = await client.post(claude + "/batches", json={})
        assert (answer.status_code, claude_error(answer)["type"]) == (404, "not_found_error")
        assert error_of(await client.post("/v1/messagesx", json={}))["code"] == "not_found"

    async def locked(client: httpx.AsyncClient) -> None:
        answer = await client.post(claude, json={})
        assert (answer.status_code, claude_error(answer)["type"]) == (401, "authentication_error")
        assert answer.headers["www-authenticate"] == "Bearer"
        assert error_of(await client.post(EMBEDDINGS, json={}))["code"] == "invalid_api_key"

    with_client(test, max_body_bytes=1024)
    with_client(locked, tenants=Tenants.from_file(keys))


async def in_pieces(data: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(data), 500):
        yield data[start : start + 500]


def test_too_large_body_is_refused_with_and_without_content_length(tmp_path: Path) -> None:
    encoder = WordEncoder(WORDS)

    async def test(client: httpx.AsyncClient) -> None:
        large = b'{"input": "' + b"x" * 2000 + b'"}'
        for content in (large, in_pieces(large)):
            answer = await client.post(EMBEDDINGS, content=content, headers=JSON)
            assert answer.status_code == 413
            assert error_of(answer)["code"] == "input_too_large"
        exact = b'{"input": "' + b"x" * (1024 - 13) + b'"}'
        for content in (exact, in_pieces(exact)):
            assert (await client.post(EMBEDDINGS, content=content, headers=JSON)).status_code == 200
        assert len(encoder.jobs) == 2

    with_client(test, host_with(tmp_path, encoder), max_body_bytes=1024)


def test_too_many_texts_give_413() -> None:
    async def test(client: httpx.AsyncClient) -> None:
        for route, body in (
            (EMBEDDINGS, {"input": ["x"] * 4}),
            (RERANK, {"query": "x", "documents": ["x"] * 4}),
            (SIMILARITY, {"source": ["x"] * 2, "sentences": ["x"] * 2}),
        ):
            answer = await client.post(route, json=body)
            assert answer.status_code == 413
            assert "at most 3" in error_of(answer)["message"]

    with_client(test, max_texts_per_request=3)


def test_text_refused_by_the_engine_gives_400() -> None:
    async def test(client: httpx.AsyncClient) -> None:
        answer = await client.post(EMBEDDINGS, json={"input": ["ok", "an unreadable one"]})
        assert answer.status_code == 400
        error = error_of(answer)
        assert (error["code"], error["message"]) == ("invalid_input", "A text is unreadable.")
        assert error["param"] == "input"

    with_client(test)


def test_stopped_service_gives_503() -> None:
    async def main() -> None:
        with words_host() as host, host:
            app = app_of(host)
            async with app.router.lifespan_context(app):
                pass
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
                answer = await client.post(EMBEDDINGS, json={"input": "x"})
        assert (answer.status_code, error_of(answer)["code"]) == (503, "stopped")
        assert "retry-after" in answer.headers

    asyncio.run(main())


class Broken(FakeBackend):
    async def ask(self, message: Question) -> Answer:
        raise RemoteError("Broken.", status=500)


def test_paths_cannot_forge_log_lines(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        transport = httpx.ASGITransport(create_app(Broken()))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            assert (await client.get("/v1/models/x%0D%1B[2KERROR%20all%20is%20lost")).status_code == 500

    asyncio.run(main())
    [told] = [record.getMessage() for record in caplog.records if "all is lost" in record.getMessage()]
    assert told.isprintable()
