"""Fuzzed requests: wrong bytes and headers, and requests that schemathesis makes from our OpenAPI document."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, settings
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.types import Message

from archerfish.config import ServeConfig
from archerfish.errors import InvalidInputError
from archerfish.serve.app import create_app
from archerfish.serve.bodies import Body
from archerfish.serve.http import BodyRoute
from archerfish.serve.openapi import ANSWERS, openapi_document

from .client import WORDS, app_of, host_with
from .fake_backend import HI, MODEL, TEMPLATE, FakeBackend
from .hosting import WordEncoder, add_llm

LIMIT_S = 60  # for one request
ALLOWED = {200, 400, 404, 405, 413}
NUM_AT_ONCE = 8
ANSWER_TYPES = {route.path: route.answer for route in create_app(FakeBackend()).routes if isinstance(route, BodyRoute)}
STREAM = {"stream": True, "n": 2, "stop": ["e", "zz"], "logprobs": True}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
COMPLETION = {"prompt": "Hi", "max_tokens": 6, "temperature": 0, "ignore_eos": True}
VALID: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"model": MODEL, "messages": HI, "max_tokens": 4, **STREAM}),
    ("/v1/chat/completions", {"messages": HI, "max_tokens": 9, "tools": [TOOL], "tool_choice": "auto"}),
    ("/v1/completions", {"prompt": ["a", [5, 6]][0], "max_tokens": 3, "echo": True, "logprobs": 2}),
    ("/v1/responses", {"input": "Hi", "max_output_tokens": 4, "instructions": "Be kind", "stream": True}),
    ("/v1/messages", {"model": MODEL, "max_tokens": 4, "messages": HI, "system": "Be kind", "stream": True}),
    ("/v1/messages/count_tokens", {"model": MODEL, "messages": HI}),
    ("/v1/embeddings", {"input": ["a", "b c"], "encoding_format": "base64"}),
    ("/v1/rerank", {"query": "a", "documents": ["b", {"text": "c"}], "return_documents": True}),
    ("/similarity", {"source": ["a", "b"], "sentences": ["c"]}),
    ("/tokenize", {"prompt": "Hi", "return_token_strs": True}),
    ("/v1/tts/tokens", {"text": "Hi", "max_tokens": 3, "seed": 5}),
    ("/api/chat", {"model": MODEL, "messages": HI, "options": {"num_predict": 4, "stop": "zz"}}),
    ("/v1/embed", {"texts": ["a", "b c"], "embedding_types": ["int8", "base64"], "input_type": "search_query"}),
    ("/rerank", {"query": "a", "texts": ["b", "c"], "return_text": True}),
    ("/score", {"text_1": "a", "text_2": ["b", "c"]}),
    ("/api/generate", {"prompt": "Hi", "stream": False, "options": {"num_predict": 4}}),
]
NUMBERS = [b"NaN", b"1e999", b"-0", b"1" * 5000, b"1.0", b"9" * 30, b"01", b"true"]
HEADERS = [
    (b"content-type", b"text/plain"),
    (b"content-type", b"application/json; charset=\xff"),
    (b"content-length", b"-1"),
    (b"content-length", b"x"),
    (b"content-encoding", b"gzip"),
    (b"authorization", b"Bearer \xff"),
    (b"x-api-key", b"\x00"),
    (b"cache-control", b"max-age=-9e9,,=;no-cache="),
    (b"host", b"["),
    (b"cookie", b"\xff=;;" * 99),
    (b"accept", b"\xff"),
]


@dataclass
class FuzzedRequest:
    """One request as its bytes."""

    path: str
    content: bytes = b""
    method: str = "POST"
    headers: list[tuple[bytes, bytes]] = field(default_factory=lambda: [(b"content-type", b"application/json")])
    num_parts: int = 1
    is_broken_off: bool = False  # the client goes before the end of the body


def fuzzed(draw: random.Random) -> FuzzedRequest:
    path, body = draw.choice(VALID)
    made = FuzzedRequest(path, json.dumps(body).encode(), num_parts=draw.choice((1, 2, 7)))
    if draw.random() < 0.6:
        made.content = garbled(draw, made.content)
    if draw.random() < 0.3:
        made.headers += draw.sample(HEADERS, 2)
        draw.shuffle(made.headers)
    if draw.random() < 0.05:
        made.method = draw.choice(("GET", "PUT", "HEAD", "PATCH", "x"))
    if draw.random() < 0.05:
        made.path += draw.choice(("/", "/x", "/\x00", "%ff", "/../stats", "é"))
    made.is_broken_off = draw.random() < 0.02
    return made


def garbled(draw: random.Random, content: bytes) -> bytes:
    place = draw.randrange(len(content))
    digits = [i for i, byte in enumerate(content) if 48 <= byte < 58] or [place]
    digit = draw.choice(digits)
    ways: list[Callable[[], bytes]] = [
        lambda: content[:place],
        lambda: content[:place] + bytes([draw.randrange(256)]) + content[place + 1 :],
        lambda: content[:place] + draw.randbytes(3) + content[place:],
        lambda: content + content,
        lambda: content[:digit] + draw.choice(NUMBERS) + content[digit + 1 :],
        lambda: gzip.compress(content),
        lambda: content.decode().encode("utf-16"),
        lambda: b"\xef\xbb\xbf" + content,
        lambda: b"[" * 50_000,
        lambda: content.replace(b'"Hi"', b'"\\ud800"'),
        lambda: content.replace(b'"Hi"', b"null"),
        lambda: b"",
    ]
    return draw.choice(ways)()


@dataclass
class Answered:
    status: int = 0
    headers: dict[bytes, bytes] = field(default_factory=dict)
    body: bytes = b""


async def ask(app: Starlette, made: FuzzedRequest) -> Answered:
    """Call an app as a server does, with headers that no HTTP client would send."""
    size = max(1, -(-len(made.content) // made.num_parts))
    parts = [made.content[start : start + size] for start in range(0, len(made.content), size)] or [b""]
    messages: list[Message] = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    if made.is_broken_off:
        messages[-1] = {"type": "http.disconnect"}
    else:
        messages[-1]["more_body"] = False
    answered = Answered()

    async def receive() -> Message:
        if messages:
            return messages.pop(0)
        return {"type": "http.disconnect"} if made.is_broken_off else await asyncio.Future()

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            answered.status, answered.headers = message["status"], dict(message["headers"])
        else:
            answered.body += message.get("body", b"")

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": made.method,
        "scheme": "http",
        "path": made.path,
        "raw_path": made.path.encode("utf-8", "surrogatepass"),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"host", b"test"), *made.headers],
        "client": ("127.0.0.1", 1),
        "server": ("test", 80),
        "state": {},
    }
    async with asyncio.timeout(LIMIT_S):
        await app(scope, receive, send)
    return answered


def check(made: FuzzedRequest, answered: Answered) -> None:
    if made.is_broken_off and answered.status in (0, 499):
        return
    assert answered.status in ALLOWED
    kind = answered.headers[b"content-type"].decode()
    if answered.status != 200:
        assert kind == "application/json"
        if made.method != "HEAD":
            error = json.loads(answered.body)["error"]
            message = error if isinstance(error, str) else error["message"]
            assert 0 < len(message) < 1010 and "Traceback" not in message
    elif kind == "application/json":
        msgspec.json.decode(answered.body, type=ANSWER_TYPES[made.path])
    else:
        assert kind.startswith(("text/event-stream", "application/x-ndjson")) and b'"error":{' not in answered.body
        assert not any(line.startswith(b'{"error":') for line in answered.body.splitlines())


async def fuzz(app: Starlette, seed: int, number: int, num_at_once: int = 1) -> Counter[int]:
    """Send so many requests; the statuses of their answers."""
    draw = random.Random(seed)
    statuses: Counter[int] = Counter()

    async def one(made: FuzzedRequest) -> None:
        try:
            answered = await ask(app, made)
            check(made, answered)
        except Exception as error:
            error.add_note(f"seed {seed}, after {statuses.total()} requests: {made}"[:2000])
            raise
        statuses[answered.status] += 1

    async with app.router.lifespan_context(app):
        plain = FuzzedRequest("/v1/completions", json.dumps(COMPLETION).encode())
        before = json.loads((await ask(app, plain)).body)["choices"]
        for _ in range(0, number, num_at_once):
            await asyncio.gather(*(one(fuzzed(draw)) for _ in range(num_at_once)))
        assert json.loads((await ask(app, plain)).body)["choices"] == before
        await until_blocks_are_free(app)
    assert min(statuses[200], statuses[400]) > statuses.total() / 8, "good and bad requests are both needed"
    return statuses


async def until_blocks_are_free(app: Starlette) -> None:
    """Waits until no sequence of any model holds a block."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            stats = json.loads((await ask(app, FuzzedRequest("/stats", method="GET"))).body)
            if not any(model.get("num_blocks_in_use") for model in stats.get("models", {}).values()):
                return
            await asyncio.sleep(0)


def fuzz_host(directory: Path, seed: int, number: int) -> Counter[int]:
    """Fuzz an engine host with a tiny Llama and encoders."""
    host = host_with(directory, WordEncoder(WORDS), WordEncoder("fake/pairs", is_cross_encoder=True))
    add_llm(host, directory, has_text=True, max_len=64)
    host.models.entries[-1].aliases = (MODEL,)
    (directory / "tiny" / "chat_template.jinja").write_text(TEMPLATE)
    with host:
        return asyncio.run(fuzz(app_of(host, max_body_bytes=1 << 20, allowed_hosts="*"), seed, number, NUM_AT_ONCE))


@pytest.mark.no_cover
def test_fuzzed_requests_are_answered() -> None:
    app = create_app(FakeBackend(), ServeConfig(max_body_bytes=1 << 20, allowed_hosts="*"))
    assert asyncio.run(fuzz(app, 0, 600)).total() >= 600


@pytest.mark.no_cover
def test_fuzzed_requests_leave_no_blocks_in_use(tmp_path: Path) -> None:
    assert fuzz_host(tmp_path, 1, 240).total() >= 240


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 14))
def test_many_fuzzed_requests(tmp_path: Path, seed: int) -> None:
    assert fuzz_host(tmp_path, seed, 8_000).total() >= 8_000


# The OpenAPI document


GENERATED = [phase for phase in Phase if phase != Phase.explicit]  # the explicit ones are those of the short test
APP = create_app(FakeBackend(), ServeConfig(allowed_hosts="*"))
DOCUMENT = openapi_document(APP.routes)
OPERATIONS = [f"{method.upper()} {path}" for path, operations in DOCUMENT["paths"].items() for method in operations]


@cache
def operations() -> dict[str, Any]:
    import schemathesis

    schema: Any = schemathesis.openapi.from_asgi("/openapi.json", APP)
    return {found.ok().label: (found.ok(), schema.config) for found in schema.get_all_operations()}


def check_operation(label: str, **options: Any) -> None:
    """As `schema.parametrize` does it, but cases are made when the test runs, not when any worker collects tests."""
    from schemathesis.checks import not_a_server_error
    from schemathesis.generation.feedback import NO_FEEDBACK
    from schemathesis.pytest._test_builder import build_operation_test
    from schemathesis.specs.openapi import checks

    # Not among them: that valid data is accepted. Models, templates and grammars have rules that no schema can state.
    chosen = [
        not_a_server_error,
        checks.status_code_conformance,
        checks.content_type_conformance,
        checks.response_schema_conformance,
        checks.response_headers_conformance,
        checks.negative_data_rejection,
        checks.unsupported_method,
    ]

    @settings(deadline=None, suppress_health_check=list(HealthCheck), **options)
    def validate(case: Any) -> None:
        case.call_and_validate(checks=chosen)

    operation, config = operations()[label]
    build_operation_test(
        config=config, operation=operation, test_func=validate, given_kwargs={}, feedback=NO_FEEDBACK
    )()


@pytest.mark.no_cover
@pytest.mark.parametrize("operation", OPERATIONS)
def test_answers_match_the_document(operation: str) -> None:
    check_operation(operation, max_examples=3)


@pytest.mark.slow
@pytest.mark.parametrize("operation", OPERATIONS)
def test_many_answers_match_the_document(operation: str) -> None:
    check_operation(operation, max_examples=200, phases=GENERATED)


def test_document_has_the_answers_of_every_route() -> None:
    stated = {(method, path) for path, operations in DOCUMENT["paths"].items() for method in operations}
    assert stated == ANSWERS.keys() | {("post", path) for path in LEAST}
    for operations in DOCUMENT["paths"].values():
        for operation in operations.values():
            assert "422" not in operation["responses"]


LEAST: dict[str, dict[str, Any]] = {
    "/v1/load_lora_adapter": {"lora_name": "a", "lora_path": "a"},
    "/v1/unload_lora_adapter": {"lora_name": "a"},
    "/v1/chat/completions": {"messages": HI},
    "/v1/completions": {"prompt": "a"},
    "/v1/responses": {"input": "a"},
    "/v1/messages": {"messages": HI, "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": HI},
    "/v1/embeddings": {"input": "a"},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/similarity": {"source": "a", "sentences": ["b"]},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [1]},
    "/v1/cache/explain": {"prompt": "a"},
    "/v1/tts/tokens": {"text": "a"},
    "/api/chat": {"messages": HI},
    "/api/generate": {"prompt": "a"},
    "/api/embed": {"input": "a"},
    "/api/embeddings": {"prompt": "a"},
    "/api/show": {},
    "/v1/embed": {"texts": ["a"]},
    "/v2/embed": {"texts": ["a"]},
    "/v2/rerank": {"query": "a", "documents": ["b"]},
    "/rerank": {"query": "a", "texts": ["b"]},
    "/embed": {"inputs": "a"},
    "/": {"inputs": "a"},
    "/predict": {"inputs": "a"},
    "/score": {"text_1": "a", "text_2": "b"},
    "/v1/score": {"text_1": "a", "text_2": "b"},
    "/pooling": {"input": "a"},
    "/classify": {"input": "a"},
    "/v1/classify": {"input": "a"},
    "/embed_sparse": {"inputs": "a"},
    "/embed_all": {"inputs": "a"},
}


def bodies(kind: type[Body]) -> dict[str, type[Body]]:
    return {kind.__name__: kind} | {
        name: each for child in kind.__subclasses__() for name, each in bodies(child).items()
    }


@pytest.mark.parametrize("path", LEAST)
def test_document_marks_nullable_parameters(path: str) -> None:
    reference = DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    name = reference.rpartition("/")[2]
    model = bodies(Body)[name]
    members = DOCUMENT["components"]["schemas"][name]["properties"]
    may_be, say_so = (
        set[str](),
        {key for key, member in members.items() if not member.get("type") and admits_null(member)},
    )
    for key in members:
        with suppress(ValidationError, InvalidInputError):
            model.model_validate({**LEAST[path], key: None})
            may_be.add(key)
    assert may_be == say_so


def admits_null(member: dict[str, Any]) -> bool:
    return {"type": "null"} in member.get("anyOf", [{"type": "null"}])
