"""Malformed HTTP, bombs in bodies, slow clients and floods. `make test-hostile`."""

from __future__ import annotations

import contextlib
import json
import random
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from .target import CHAT, HI, STREAM, Target, request

pytestmark = pytest.mark.hostile
POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
SMUGGLED = b"GET /stats HTTP/1.1\r\nHost: localhost\r\n\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
MALFORMED = {
    "nothing": b"",
    "half a request line": b"POST /v1/ch",
    "half a header": POST + b"X-Some",
    "half a body": POST + b"Content-Length: 1000\r\n\r\n{",
    "length and chunks": POST + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
    "two lengths": POST + b"Content-Length: 2\r\nContent-Length: 40\r\n\r\n{}" + SMUGGLED,
    "two codings": POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n" + SMUGGLED,
    "coding with a tab": POST + b"Transfer-Encoding:\x0bchunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n" + SMUGGLED,
    "negative length": POST + b"Content-Length: -1\r\n\r\n{}",
    "signed length": POST + b"Content-Length: +2\r\n\r\n{}",
    "huge length": POST + b"Content-Length: 99999999999999999999999\r\n\r\n{}",
    "length in words": POST + b"Content-Length: ten\r\n\r\n{}",
    "chunk of no size": CHUNKED + b"zz\r\n{}\r\n0\r\n\r\n",
    "chunk of huge size": CHUNKED + b"FFFFFFFFFFFFFFFFF\r\n{}\r\n0\r\n\r\n",
    "negative chunk": CHUNKED + b"-1\r\n{}\r\n0\r\n\r\n",
    "no last chunk": CHUNKED + b"2\r\n{}\r\n",
    "long chunk extension": CHUNKED + b"2;" + b"x" * (1 << 20) + b"\r\n{}\r\n0\r\n\r\n",
    "many chunks": CHUNKED + b"1\r\n \r\n" * 100_000 + b"0\r\n\r\n",
    "NUL in a header": GET + b"X-A: a\0b\r\n\r\n",
    "NUL in the path": b"GET /\0 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "header without a colon": GET + b"nonsense\r\n\r\n",
    "space before the colon": POST + b"Content-Length : 2\r\n\r\n{}",
    "folded header": GET + b"X-A: a\r\n b\r\n\r\n",
    "bare line feeds": b"GET /health HTTP/1.1\nHost: localhost\n\n",
    "bare carriage returns": b"GET /health HTTP/1.1\rHost: localhost\r\r",
    "HTTP/0.9": b"GET /health\r\n",
    "HTTP/9.9": b"GET /health HTTP/9.9\r\nHost: localhost\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "TLS": bytes.fromhex("1603010200010001fc0303") + bytes(500),
    "noise": random.Random(1).randbytes(1 << 16),
    "long path": b"GET /" + b"a" * (1 << 20) + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "long method": b"G" * (1 << 17) + b" / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "long header": GET + b"X-A: " + b"a" * (1 << 20) + b"\r\n\r\n",
    "many headers": GET + b"X-A: a\r\n" * 50_000 + b"\r\n",
    "upgrade": GET + b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n\r\n",
}
DOUBLES = {f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(40)}
TOOLS = [{"type": "function", "function": {"name": f"f{i}", "parameters": {}}} for i in range(20_000)]
OPTIONS = {f"a{i}": "x" * 99 for i in range(50_000)}
SCHEMAS: dict[str, Any] = {
    "combinations": {"type": "array", "uniqueItems": True, "minItems": 20, "items": {"enum": list(range(40))}},
    "all of 500": {"allOf": [{"type": "object", "properties": {f"a{i}": {"enum": [i]}}} for i in range(500)]},
    "depth": json.loads('{"items":' * 400 + "{}" + "}" * 400),
    "loop": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    "doubling": {"$ref": "#/$defs/a0", "$defs": {**DOUBLES, "a40": {}}},
    "enumeration": {"enum": [f"value {i}" for i in range(100_000)]},
    "regex": {"type": "string", "pattern": "^(((a{1,1000}){1,1000}){1,1000})+$"},
    "counts": {"type": "array", "minItems": 10**9, "maxItems": 10**18, "items": {"minLength": 10**12}},
    "properties": {"type": "object", "properties": {f"a{i}": {"type": "string"} for i in range(20_000)}},
}
BODIES: dict[str, tuple[str, Any]] = {
    "depth": (CHAT, b"[" * 200_000),
    "depth of objects": (CHAT, b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
    "digits": (CHAT, b'{"max_tokens": ' + b"9" * 1_000_000 + b"}"),
    "numbers": (CHAT, b'{"messages": [], "temperature": 1e99999, "seed": -1e400, "n": 1e308}'),
    "no UTF-8": (CHAT, b'{"messages": [{"role": "user", "content": "\xff\xfe\xc0\x80"}]}'),
    "surrogates": (CHAT, b'{"messages": [{"role": "user", "content": "\\ud800\\udfff\\ud800"}]}'),
    "NULs": (CHAT, {"messages": [{"role": "user", "content": "\0" * 1000}], "max_tokens": 4}),
    "messages": (CHAT, {"messages": HI * 300_000}),
    "unknown members": (CHAT, {"messages": HI, **{f"a{i}": i for i in range(200_000)}}),
    "biases": (CHAT, {"messages": HI, "logit_bias": {str(i): 1 for i in range(200_000)}, "max_tokens": 4}),
    "stops": (CHAT, {"messages": HI, "stop": ["a" * 1000] * 5_000, "max_tokens": 4}),
    "tools": (CHAT, {"messages": HI, "max_tokens": 4, "tools": TOOLS}),
    "choices": (CHAT, {"messages": HI, "n": 10**9, "max_tokens": 10**18}),
    "ids": ("/v1/completions", {"prompt": [2**63, -1, 10**30]}),
    "prompts": ("/v1/completions", {"prompt": ["a"] * 100_000, "max_tokens": 1}),
    "text": ("/tokenize", {"prompt": "a b " * 3_000_000}),
    "tokens": ("/detokenize", {"tokens": [1] * 2_000_000}),
    "a regex": (CHAT, {"messages": HI, "guided_regex": "((((a{1,99}){1,99}){1,99}){1,99})*b", "max_tokens": 4}),
    "template": (CHAT, {"messages": HI, "chat_template": "{{ ('a '*30000000)|title|upper|lower|length }}", "max_tokens": 4}),
    "template loop": (CHAT, {"messages": HI, "chat_template": "{% for a in range(10**9) %}x{% endfor %}", "max_tokens": 4}),
    "template options": (CHAT, {"messages": HI, "chat_template_kwargs": OPTIONS, "max_tokens": 4}),
}  # fmt: skip


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    with Target(tmp_path_factory.mktemp("target"), "--num-front-ends", "2") as made:
        yield made
        made.process.terminate()
        made.check_end(0)
        assert "Traceback" not in made.log.read_text()


@pytest.fixture(autouse=True)
def _nothing_is_left(target: Target) -> Iterator[None]:
    yield
    target.check()


def statuses(answer: bytes) -> list[int]:
    return [int(part[:3]) for part in answer.split(b"HTTP/1.1 ")[1:]]


def test_malformed_requests_get_an_error_or_nothing(target: Target) -> None:
    for name, data in MALFORMED.items():
        answer = target.send(data)
        found = statuses(answer)
        assert not answer or answer.startswith(b"HTTP/1.1 "), (name, answer[:80])
        assert all(status < 500 for status in found) and len(found) < 2, (name, found)
        assert b"archerfish_" not in answer and b'"models"' not in answer, name  # what only a smuggled request asks for
    pipeline = (GET + b"\r\n") * 1999 + GET + b"Connection: close\r\n\r\n"
    assert statuses(target.send(pipeline, ends=False)) == [200] * 2000


@pytest.mark.parametrize("name", SCHEMAS)
def test_schema_bombs_leave_others_alone(target: Target, name: str) -> None:
    schema = {"name": "bomb", "schema": SCHEMAS[name]}
    body = {"messages": HI, "max_tokens": 4, "response_format": {"type": "json_schema", "json_schema": schema}}
    beside(target, lambda: target.send(request(body, headers="Connection: close\r\n"), ends=False))


@pytest.mark.parametrize("name", BODIES)
def test_bombs_in_bodies_leave_others_alone(target: Target, name: str) -> None:
    path, body = BODIES[name]
    beside(target, lambda: target.send(request(body, path, "Connection: close\r\n"), ends=False))


def beside(target: Target, attack: Callable[[], bytes]) -> None:
    """Chats go on while four clients attack. No answer is an internal error."""
    with ThreadPoolExecutor() as pool:
        attacks = [pool.submit(attack) for _ in range(4)]
        while not all(one.done() for one in attacks):
            assert target.chat() == target.answer
    for one in attacks:
        [status] = statuses(one.result()) or [413]  # a large body may be refused before it was sent
        assert status < 500 or status in (503, 504), one.result()[:400]


def test_slow_clients_leave_others_alone(target: Target) -> None:
    with contextlib.ExitStack() as stack:
        for part in (b"GET /hea", GET, POST + b"Content-Length: 1000\r\n\r\n{", CHUNKED + b"5\r\n{"):
            for _ in range(60):
                stack.enter_context(target.connect()).sendall(part)
        for _ in range(20):
            stack.enter_context(target.connect(4096)).sendall(request(STREAM))  # nothing of it is read
        for _ in range(5):
            assert target.chat() == target.answer
        stack.enter_context(target.stream())


def test_floods_leave_nothing_behind(target: Target) -> None:
    def reset(number: int) -> None:
        connection = target.connect()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # closes with a reset
        connection.sendall(request(STREAM)[: None if number % 3 else -2])
        if number % 2 and number % 3:
            connection.recv(100)
        connection.close()

    with ThreadPoolExecutor(32) as pool:
        list(pool.map(reset, range(400)))
        body = request({"messages": HI, "max_tokens": 8}, headers="Connection: close\r\n")
        answers = list(pool.map(lambda _: target.send(body, ends=False), range(300)))
    assert {status for answer in answers for status in statuses(answer)} <= {200, 429, 503}
    assert sum(statuses(answer) == [200] for answer in answers) > 30
    held = [target.connect() for _ in range(600)]
    assert target.chat() == target.answer
    for connection in held:
        connection.close()
