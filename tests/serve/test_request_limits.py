"""Limits of requests: bytes of headers and bodies, items, wrong values; and the hosts and pages that may ask."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import httpx
import pytest
from pydantic import ValidationError
from starlette.applications import Starlette

from archerfish.config import HubConfig, ServeConfig
from archerfish.errors import InputTooLargeError, InvalidOptionError, nearest
from archerfish.serve import http as serve_http
from archerfish.serve.app import create_app
from archerfish.serve.bodies import Body
from archerfish.serve.client import RemoteError
from archerfish.serve.http import MAX_HEAD, MIB
from archerfish.serve.openai_routes import ChatBody
from archerfish.serve.run import host_config
from archerfish.serve.tenants import Tenants
from archerfish.serve.token_routes import DetokenizeBody
from archerfish.serve.vector_routes import CohereEmbedBody

from .client import running
from .fake_backend import CHAT, KEY, RESPONSES, TEXT, FakeBackend, client_of, error_of, keyed_app, post
from .test_sockets import answer_on, connect, rest_of

EMBEDDINGS = "/v1/embeddings"
HI = b'"messages":[{"role":"user","content":"a"}]'
TOOL = b'{"type":"function","function":{"name":"f"}}'
PAGE = "https://chat.example"

# Headers

GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
LONG = b"a" * (MAX_HEAD + 1)
ENDLESS = b"a" * MIB  # without the end of the header
MANY = b"a: b\r\n" * 15_000


@pytest.mark.parametrize(
    "sent",
    [
        GET + b"x: " + LONG + b"\r\n\r\n",
        GET + b"x: " + ENDLESS,
        GET + ENDLESS,
        b"GET /" + ENDLESS,
        GET + MANY + b"\r\n",
        CHUNKED + b"1\r\n{\r\n0\r\n" + MANY,
        CHUNKED + b"1\r\n{\r\n0\r\nx: " + ENDLESS,
        CHUNKED + b"1;" + ENDLESS,
    ],
    ids=["value", "no end", "name", "path", "many", "trailers", "trailer", "chunk extension"],
)
def test_long_headers_are_refused_as_they_come(sent: bytes) -> None:
    with running(create_app(FakeBackend())) as served:
        for is_first in (True, False):
            with connect(served) as sender:
                if not is_first:
                    sender.sendall(GET + b"\r\n")
                    assert answer_on(sender).read()
                with suppress(OSError):  # the server may have closed the connection
                    sender.sendall(sent)
                answer = answer_on(sender)
                assert (answer.status, answer.reason) == (431, "Request Header Fields Too Large")
                assert b"65,536 bytes" in answer.read()


def test_headers_of_one_request_are_not_counted_for_the_next() -> None:
    ask = GET + b"x: " + b"a" * (MAX_HEAD - 100) + b"\r\n"
    body = b"a" * (3 * MAX_HEAD)
    posted = b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    with running(create_app(FakeBackend())) as served, connect(served) as sender:
        sender.sendall((ask + b"\r\n" + posted) * 3 + ask + b"Connection: close\r\n\r\n")
        found = rest_of(sender)
    assert (found.count(b"HTTP/1.1 200"), found.count(b"HTTP/1.1 404"), found.count(b"HTTP/1.1")) == (4, 3, 7)


# Bodies


def status_and_message(backend: FakeBackend, route: str, body: bytes) -> tuple[int, str]:
    answer = post(backend, route, body)
    return answer.status_code, "" if answer.status_code == 200 else error_of(answer)["message"]


@pytest.mark.parametrize(
    ("route", "start", "limit"),
    [
        (TEXT, b'{"prompt":"', 16_000 + MIB),
        ("/tokenize", b'{"prompt":"', 16_000 + MIB),
        (RESPONSES, b'{"input":"', 16_000 + MIB),
        (EMBEDDINGS, b'{"input":"', 8 * MIB),
    ],
)
def test_body_is_limited_by_what_its_route_reads(route: str, start: bytes, limit: int) -> None:
    body = start + b"a" * (limit - len(start) - 2) + b'"}'
    backend = FakeBackend(max_length=1000)
    assert status_and_message(backend, route, body)[0] != 413
    status, message = status_and_message(backend, route, body + b" ")
    assert (status, f"more than {limit:,} bytes" in message) == (413, True)
    assert ("16 a token for 2,048 texts of 64" if limit == 8 * MIB else "served here, 1,000 tokens") in message
    status, _ = status_and_message(FakeBackend(max_length=1001), route, body + b" ")
    assert (status == 413) == (limit == 8 * MIB)


@pytest.mark.parametrize("text", ["a" * 4000, [1000] * 64], ids=["texts", "token ids"])
def test_bulk_embeddings_are_taken(text: Any) -> None:
    answer = post(FakeBackend(), EMBEDDINGS, {"input": [text] * 2048})
    assert (answer.status_code, len(answer.json()["data"])) == (200, 2048)


BOMBS = {
    "messages": (CHAT, b'{"messages":[' + b'{"role":"user"},' * 1_000_000 + b"{}]}"),
    "token ids": ("/detokenize", b'{"tokens":[' + b"1," * 10_000_000 + b"1]}"),
    "unknown keys": (CHAT, b"{" + HI + b',"k":1' * 2_000_000 + b"}"),
    "logit_bias": (CHAT, b"{" + HI + b',"logit_bias":{"1":1' + b',"1":1' * 1_000_000 + b"}}"),
    "tools": (CHAT, b"{" + HI + b',"tools":[' + (TOOL + b",") * 100_000 + TOOL + b"]}"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_bodies_of_many_items_are_refused_before_they_are_built(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_http, "from_json", None)
    status, message = status_and_message(FakeBackend(max_length=1_300_000), *BOMBS[name])
    assert (status, "too many parts" in message) == (413, True)


def test_items_are_counted_exactly_and_not_in_strings(monkeypatch: pytest.MonkeyPatch) -> None:
    source = random.Random(1)
    counts = {"items": 0, "parts": 0}

    def value(depth: int) -> Any:
        if depth == 0 or source.random() < 0.3:
            return "".join(source.choices('"\\,[{:a', k=source.randrange(9)))
        members = [value(depth - 1) for _ in range(source.randrange(5))]
        is_object = source.random() < 0.5
        counts["items"] += max(0, len(members) - 1)
        counts["parts"] += 1 + is_object * len(members)
        return {f"{source.random()}\\": one for one in members} if is_object else members

    for piece in (5, 8, 64 << 10):
        monkeypatch.setattr(serve_http, "PIECE", piece)
        for _ in range(50):
            counts |= {"items": 0, "parts": 0}
            body = bytearray(json.dumps(value(4)).encode())
            monkeypatch.setattr(serve_http, "MAX_PARTS", counts["parts"])
            asyncio.run(serve_http.check_size(body, counts["items"]))
            with pytest.raises(InputTooLargeError):
                asyncio.run(serve_http.check_size(body, counts["items"] - 1))
            monkeypatch.setattr(serve_http, "MAX_PARTS", counts["parts"] - 1)
            with pytest.raises(InputTooLargeError):
                asyncio.run(serve_http.check_size(body, counts["items"]))
    asyncio.run(serve_http.check_size(bytearray(b"\\"), 0))


def test_other_requests_run_while_a_body_is_counted() -> None:
    async def main() -> None:
        counting = asyncio.create_task(serve_http.check_size(bytearray(8 * MIB), 0))
        for _ in range(128):
            await asyncio.sleep(0)
            assert not counting.done()
        await counting

    asyncio.run(main())


def test_detokenize_takes_as_many_ids_as_the_longest_context() -> None:
    assert post(FakeBackend(), "/detokenize", {"tokens": [97] * 1000}).json() == {"prompt": "a" * 1000}
    error = error_of(post(FakeBackend(), "/detokenize", {"tokens": [97] * 1001}))
    assert (error["param"], "1,001" in error["message"], "1,000" in error["message"]) == ("tokens", True, True)


@pytest.mark.parametrize(
    ("body_type", "values"),
    [
        (DetokenizeBody, {"tokens": [""] * 999}),
        (ChatBody, {"messages": [{"role": "user", "content": "a"}], "stop_token_ids": [""] * 999}),
        (CohereEmbedBody, {"texts": [1] * 999}),
    ],
)
def test_the_first_wrong_item_ends_the_check(body_type: type[Body], values: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as raised:
        body_type.model_validate(values)
    assert raised.value.error_count() == 1


def test_errors_of_many_wrong_members_and_of_long_names_are_short() -> None:
    bias = b",".join(b'"%d":""' % token_id for token_id in range(999))
    status, message = status_and_message(FakeBackend(), CHAT, b"{" + HI + b',"logit_bias":{' + bias + b"}}")
    assert (status, message) == (400, "The body has 999 wrong values.")
    assert nearest("a" * 201, ["a" * 200]) == []


# Hosts and pages of other sites


def host_status(app: Callable[[FakeBackend], Starlette], *hosts: str) -> int:
    async def main() -> int:
        async with client_of(app(FakeBackend())) as client:
            headers = [("Host", host) for host in hosts] + [("Authorization", f"Bearer {KEY}")]
            return (await client.get("/v1/models", headers=headers)).status_code

    return asyncio.run(main())


LOCAL = "localhost LocalHost:8000 localhost. a.localhost:1 127.0.0.1:8000 127.9.9.9 [::1]:80 [::1]"
OTHER = "evil.example localhost.evil.example 127.0.0.1.evil.example:8000 xlocalhost 10.0.0.1 [fe80::1]:1"


def test_server_without_keys_on_loopback_answers_for_local_hosts_alone() -> None:
    for host in (*LOCAL.split(), ""):
        assert host_status(create_app, host) == 200, host
    for host in OTHER.split():
        assert host_status(create_app, host) == 403, host
    assert host_status(create_app, "localhost", "evil.example") == 403
    assert host_status(keyed_app, "evil.example") == 200
    for host, allowed in (("0.0.0.0", ""), ("", ""), ("::1", "*"), ("::1", "a, Evil.example")):
        config = ServeConfig(host=host, allowed_hosts=allowed)
        assert host_status(partial(create_app, config=config), "evil.example:80") == 200
    error = error_of(post(FakeBackend(), CHAT, b"{}", headers={"Host": "evil.example"}))
    assert error["code"] == "forbidden_host" and "--allowed-hosts" in error["message"]


def test_request_without_a_host_is_answered() -> None:
    with running(create_app(FakeBackend())) as served, connect(served) as old:
        old.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        assert rest_of(old).startswith(b"HTTP/1.1 200 OK\r\n")


def ask_as_page(app: Starlette, method: str, path: str, page: str = PAGE, **options: Any) -> httpx.Response:
    async def main() -> httpx.Response:
        async with client_of(app) as client:
            headers = {"Origin": page, **options.pop("headers", {})}
            return await client.request(method, path, headers=headers, **options)

    return asyncio.run(main())


PREFLIGHT = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}


def test_pages_of_other_sites_are_not_answered_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "kill", lambda *_: pytest.fail("the replicas were restarted"))
    backend = FakeBackend()
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=a", ""):
        answer = ask_as_page(
            create_app(backend), "POST", CHAT, content=b"{" + HI + b"}", headers={"Content-Type": kind}
        )
        assert (answer.status_code, backend.requests) == (400, [])
        assert "access-control-allow-origin" not in answer.headers
    assert ask_as_page(create_app(backend), "OPTIONS", CHAT, headers=PREFLIGHT).status_code == 405
    answer = ask_as_page(create_app(backend, ServeConfig(replicas=2)), "POST", "/admin/restart")
    assert (answer.status_code, "Web pages" in answer.text) == (400, True)


@pytest.mark.parametrize("origins", [f"http://a, {PAGE}/", "*"])
def test_cors_origins_may_ask(origins: str) -> None:
    backend = FakeBackend()
    config, tenants = ServeConfig(cors_origins=origins, max_body_bytes=1024), Tenants.from_text(f"acme={KEY}")

    def ask(method: str, page: str = PAGE, **options: Any) -> httpx.Response:
        return ask_as_page(create_app(backend, config, tenants=tenants), method, CHAT, page, **options)

    key = {"Authorization": f"Bearer {KEY}"}
    allowed = "*" if origins == "*" else PAGE
    answer = ask("OPTIONS", headers={**PREFLIGHT, "Access-Control-Request-Private-Network": "true"})
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, allowed)
    assert "authorization" in answer.headers["access-control-allow-headers"]
    answers = [ask("POST"), ask("POST", headers=key, content=bytes(2000)), ask("POST", headers=key, content=b"{}")]
    backend.ask_error = RemoteError("Too many.", status=429, retry_after_s=2.0)
    answers.append(ask("POST", headers=key, json={"messages": [{"role": "user", "content": "a"}]}))
    assert [answer.status_code for answer in answers] == [401, 413, 400, 429]
    for answer in answers:
        assert answer.headers["access-control-allow-origin"] == allowed
        exposed = answer.headers["access-control-expose-headers"].lower()
        assert {"retry-after", "x-request-id", "x-archerfish-remark"} <= set(exposed.split(", "))
    answer = ask("OPTIONS", "https://other.example", headers=PREFLIGHT)
    assert (answer.status_code == 200) == (origins == "*")
    with pytest.raises(InvalidOptionError, match="is no origin"):
        host_config(ServeConfig(cors_origins=f"{origins},chat.example"), (), HubConfig(), "/a")
