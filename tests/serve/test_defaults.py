"""What the service does without being asked: sampling parameters of the model, limits that fit, and remarks about
them."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from archerfish.config import ServeConfig
from archerfish.observe.metrics import MetricRegistry
from archerfish.serve.app import create_app
from archerfish.serve.client import RemoteError
from archerfish.serve.http import RequestMiddleware
from archerfish.serve.tenants import Tenants

from .client import host_with, serving
from .fake_backend import CHAT, HI, KEY, MODEL, RESPONSES, TEXT, FakeBackend, client_of, fake_app, keyed_app, post
from .hosting import WordEncoder

MESSAGES = "/v1/messages"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HI},
    TEXT: {"prompt": "Hi"},
    RESPONSES: {"input": "Hi"},
    MESSAGES: {"messages": HI, "max_tokens": 20},
}
STATED = {"temperature": 0.0, "top_k": 5, "repetition_penalty": 1.5}


@pytest.mark.parametrize("route", BODIES)
def test_the_parameters_of_the_model_hold_unless_the_body_states_them(route: str) -> None:
    backend = FakeBackend()
    backend.default_sampling = STATED
    assert post(backend, route, BODIES[route]).status_code == 200
    assert backend.params().items() >= STATED.items()
    assert post(backend, route, {**BODIES[route], "temperature": 0.5, "top_k": -1}).status_code == 200
    assert backend.params()["temperature"] == 0.5 and backend.params()["repetition_penalty"] == 1.5
    assert "top_k" not in backend.params()


def test_several_choices_are_allowed_where_the_model_states_temperature_0() -> None:
    backend = FakeBackend()
    backend.default_sampling = STATED
    assert post(backend, CHAT, {**BODIES[CHAT], "n": 2}).status_code == 200
    assert "temperature" not in backend.params() and backend.params()["top_k"] == 5
    assert post(backend, CHAT, {**BODIES[CHAT], "n": 2, "temperature": 0}).status_code == 400


def test_models_show_their_parameters() -> None:
    backend = FakeBackend()
    backend.default_sampling = STATED

    async def main() -> Any:
        async with client_of(fake_app(backend)) as client:
            return (await client.get("/v1/models")).json()["data"]

    shown = {model["id"]: model.get("default_sampling") for model in asyncio.run(main())}
    assert shown == {MODEL: STATED, "lab/bare": {}, "lab/vectors": None}


# Limits and remarks


def test_max_tokens_is_lowered_to_what_the_memory_holds() -> None:
    backend = FakeBackend(max_length=1000)
    backend.max_sequence = 100
    answer = post(backend, TEXT, {"prompt": "x" * 90, "max_tokens": 50})
    assert backend.params()["max_tokens"] == 10
    assert answer.headers["x-archerfish-remark"].startswith("max_tokens was lowered from 50 to 10, as many as fit")
    assert post(backend, TEXT, {"prompt": "x" * 90, "max_tokens": None}).status_code == 200
    assert backend.params()["max_tokens"] is None
    assert post(backend, TEXT, {"prompt": "x" * 1000}).status_code == 400


def test_the_limit_of_the_server_lowers_max_tokens_of_all_sequences_together() -> None:
    backend = FakeBackend()

    def app(backend: FakeBackend) -> Any:
        return create_app(backend, ServeConfig(max_output_tokens=12), credentials="pass")

    for body, told, is_remarked in (
        ({"max_tokens": 50}, 12, True),
        ({"max_tokens": 50, "n": 3}, 4, True),
        ({"max_tokens": 12}, 12, False),
        ({"max_tokens": None}, 12, False),
    ):
        answer = post(backend, TEXT, {"prompt": "Hi", **body}, app=app)
        assert answer.status_code == 200 and backend.params()["max_tokens"] == told
        assert ("the limit of this server" in answer.headers.get("x-archerfish-remark", "")) == is_remarked


def test_remarks_become_one_header_of_plain_characters() -> None:
    async def answer(scope: Any, receive: Any, send: Any) -> None:
        Request(scope).state.remarks.extend(["one", "two\r\nX-Other: 1", "one", "\u00fcber"])
        await PlainTextResponse("done")(scope, receive, send)

    app = Starlette(middleware=[Middleware(RequestMiddleware, MetricRegistry(), Tenants(), ServeConfig())])
    app.mount("/", answer)
    app.state.is_stopping = False

    async def main() -> Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            return await client.get("/")  # type: ignore[return-value]

    assert asyncio.run(main()).headers["x-archerfish-remark"] == "one; two??X-Other: 1; \\xfcber"


# Texts that are longer than an encoder takes


@pytest.mark.parametrize(("route", "stream"), [(CHAT, {"stream": True}), ("/api/chat", {})])
def test_remarks_do_not_reach_later_streams(route: str, stream: dict[str, Any]) -> None:
    body = {"messages": HI, **stream}
    assert "5,000" in post(FakeBackend(), route, {**body, "max_tokens": 5000}).headers["x-archerfish-remark"]
    assert "x-archerfish-remark" not in post(FakeBackend(), route, body).headers


LONG, SHORT = "word " * 600, "word " * 512
VECTOR_BODIES: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": [SHORT, LONG]},
    "/v1/rerank": {"query": "word", "documents": [SHORT, LONG]},
    "/similarity": {"source": "word", "sentences": [SHORT, LONG]},
}


@pytest.mark.anyio
@pytest.mark.parametrize("route", VECTOR_BODIES)
@pytest.mark.parametrize("is_cross_encoder", [False, True])
async def test_long_texts_are_cut_or_refused(tmp_path: Path, route: str, is_cross_encoder: bool) -> None:
    if is_cross_encoder and route != "/v1/rerank":
        pytest.skip("a cross-encoder serves reranking alone")
    body = VECTOR_BODIES[route]
    host = host_with(tmp_path, WordEncoder("lab/words", is_cross_encoder=is_cross_encoder))
    async with serving(host) as client:
        answer = await client.post(route, json=body)
        num_cut = 2 if is_cross_encoder else 1  # with the query, the other document is too long as well
        assert answer.status_code == 200 and answer.json()["usage"]["truncated"] is True
        assert answer.headers["x-archerfish-remark"] == f"texts cut to 512 tokens: {num_cut}"
        if route == "/v1/embeddings":
            assert [item.get("truncated") for item in answer.json()["data"]] == [None, True]
        for value in (False, "NONE"):
            refused = await client.post(route, json={**body, "truncate": value})
            assert refused.status_code == 400
            assert "has more than 512 tokens, special ones included, the limit of lab/words" in refused.text
        for cutting in (True, "END", None):
            assert (await client.post(route, json={**body, "truncate": cutting})).status_code == 200
        wrong = await client.post(route, json={**body, "truncate": 1})
        assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "truncate"
        if not is_cross_encoder:
            fitting = await client.post(route, json={**body, next(reversed(body)): [SHORT], "truncate": False})
            assert fitting.status_code == 200 and "truncated" not in fitting.json()["usage"]
            assert "x-archerfish-remark" not in fitting.headers


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/embed", {"inputs": [SHORT, LONG]}),
        ("/rerank", {"query": "word", "texts": [LONG]}),
        ("/predict", {"inputs": LONG}),
        ("/api/embed", {"input": LONG}),
        ("/v2/embed", {"texts": [LONG]}),
    ],
)
async def test_routes_of_other_servers_cut_or_refuse_long_texts(
    tmp_path: Path, route: str, body: dict[str, Any]
) -> None:
    host = host_with(tmp_path, WordEncoder("lab/words", is_cross_encoder=route in ("/rerank", "/predict")))
    async with serving(host) as client:
        for cutting in (True, "END", None):
            answer = await client.post(route, json={**body, "truncate": cutting})
            assert answer.status_code == 200 and answer.headers["x-archerfish-remark"] == "texts cut to 512 tokens: 1"
        for value, said in (
            (False, "more than 512 tokens"),
            ("NONE", "more than 512 tokens"),
            ("START", "not 'START'"),
        ):
            refused = await client.post(route, json={**body, "truncate": value})
            assert refused.status_code == 400 and said in refused.text


# The access log


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records if record.name == "archerfish.access"]
    caplog.clear()
    return found


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_has_a_line_with_its_tokens(caplog: pytest.LogCaptureFixture, stream: bool) -> None:
    caplog.set_level(logging.INFO, "archerfish.access")
    body = {"prompt": ["Hi", "Hello"], "max_tokens": 3, "stream": stream}
    assert post(FakeBackend(), TEXT, body, app=keyed_app).status_code == 200
    [line] = lines(caplog)
    counts = "prompt_tokens=7 output_tokens=6 cached_tokens=6 finish_reason=length"
    assert line.startswith(f"POST {TEXT} 200 tenant=acme model={MODEL} {counts} ms=")
    assert post(FakeBackend(), "/v1/rerank", {"query": "a", "documents": ["b", "c"]}).status_code == 200
    [line] = lines(caplog)
    assert line.startswith("POST /v1/rerank 200 tenant=anonymous model=lab/vectors prompt_tokens=3 output_tokens=0 ms=")


def test_refused_requests_have_a_line_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "archerfish.access")
    failing = FakeBackend()
    failing.fails = {1: RemoteError("It broke.", code="engine_failed", status=500)}
    for backend, route, body, headers, expected in (
        (FakeBackend(), CHAT, b"{", {}, [f"POST {CHAT} 400 tenant=acme ms=", "code=invalid_json reason="]),
        (
            FakeBackend(),
            CHAT,
            {"messages": HI, "model": "a b", "top_p": "x"},
            {},
            ["model=a%20b ", 'reason="top_p must'],
        ),
        (FakeBackend(), CHAT, {"messages": HI, "top_p": 7}, {}, [" 400 ", 'reason="top_p must be a number']),
        (
            FakeBackend(),
            CHAT,
            {"messages": HI},
            {"Authorization": "Bearer no"},
            [f"POST {CHAT} 401 tenant=- ", "reason="],
        ),
        (FakeBackend(), "/x%0Ay", {}, {}, ["POST /x%0Ay 404 ", "code=not_found"]),
        (
            failing,
            CHAT,
            {"messages": HI, "stream": True},
            {},
            [" 200 ", f"model={MODEL}", 'code=engine_failed reason="It'],
        ),
    ):
        post(backend, route, body, app=keyed_app, headers=headers)
        [line] = lines(caplog)
        assert all(part in line for part in expected), line
        assert KEY not in line


def test_the_access_log_can_be_turned_off(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "archerfish.access")
    answer = post(FakeBackend(), TEXT, {"prompt": "Hi"}, app=lambda one: create_app(one, ServeConfig(access_log=False)))
    assert answer.is_success
    assert not lines(caplog)
