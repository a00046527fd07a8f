"""API keys: every route checks them, the engine process gets the tenant, and no answer or log shows a key."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.applications import Starlette

from archerfish.config import EngineConfig
from archerfish.serve.app import create_app
from archerfish.serve.tenants import Tenants
from archerfish.serve.wire import ClassifyRequest, EmbedRequest, ExplainRequest

from .client import PASS, client_of, error_of
from .fake_backend import MODEL, FakeBackend

pytestmark = pytest.mark.anyio

ALICE, BOB, OPERATOR, STRANGER = (f"{name}-{'0123456789' * 3}" for name in ("alice", "bob", "operator", "stranger"))
KEYS = Tenants.from_text(f"alice={ALICE}, bob={BOB}, operator={OPERATOR}")
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
MESSAGE = {**CHAT, "max_tokens": 20}
POSTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT),
    ("/v1/completions", {"model": MODEL, "prompt": "Hi"}),
    ("/v1/responses", {"model": MODEL, "input": "Hi"}),
    ("/v1/messages", MESSAGE),
    ("/v1/embeddings", {"input": "Hi"}),
    ("/v1/rerank", {"query": "Hi", "documents": ["a"]}),
    ("/similarity", {"source": "Hi", "sentences": ["a"]}),
    ("/v1/cache/explain", {"model": MODEL, "prompt": "Hi"}),
    ("/tokenize", {"model": MODEL, "prompt": "Hi"}),
]


def callers(backend: FakeBackend) -> set[tuple[str, str]]:
    """Tenant and credentials of the requests since the last call."""
    owned = [one for one in backend.asked if isinstance(one, EmbedRequest | ClassifyRequest | ExplainRequest)]
    found = {(one.tenant, one.credentials) for one in [*backend.requests, *owned]}
    backend.requests.clear()
    backend.asked.clear()
    return found


def app_with_keys(backend: FakeBackend | None = None, tenants: Tenants = KEYS) -> Starlette:
    return create_app(backend or FakeBackend(), credentials=PASS, tenants=tenants)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


# Who is let in


def shown(value: object) -> str:
    return value if isinstance(value, str) else ""


@pytest.mark.parametrize(("route", "body"), [*POSTS, ("/nowhere", {})], ids=shown)
async def test_every_route_needs_a_key(route: str, body: dict[str, Any]) -> None:
    backend = FakeBackend()

    async with client_of(app_with_keys(backend)) as client:
        for headers in (
            {},
            bearer(STRANGER),
            {"x-api-key": STRANGER},
            {"Authorization": ALICE},
            {"Authorization": f"Basic {ALICE}"},
            bearer(""),
            bearer(ALICE.upper()),
            bearer(ALICE[:-1]),
            bearer("x" * 100_000),
            {"api-key": ALICE},
        ):
            answer = await client.post(route, json=body, headers=headers)
            assert answer.status_code == 401, headers
            assert answer.headers["www-authenticate"] == "Bearer"
            if route == "/v1/messages":
                assert answer.json()["error"]["type"] == "authentication_error"
            else:
                error = error_of(answer)
                assert (error["code"], error["type"]) == ("invalid_api_key", "invalid_request_error")
            assert "Authorization: Bearer <key>" in answer.text
            assert STRANGER not in answer.text
            assert ALICE not in answer.text
        assert not callers(backend)
        for headers in (bearer(ALICE), {"Authorization": f"bearer  {ALICE} "}, {"x-api-key": ALICE}):
            answer = await client.post(route, json=body, headers=headers)
            assert answer.status_code == (404 if route == "/nowhere" else 200), answer.text


@pytest.mark.parametrize("route", ["/", "/health", "/ready", "/openapi.json", "/docs", "/version", "/favicon.ico"])
async def test_open_paths_need_no_key(route: str) -> None:
    async with client_of(app_with_keys()) as client:
        for headers in ({}, bearer(STRANGER)):
            assert (await client.get(route, headers=headers)).status_code == 200


@pytest.mark.parametrize(
    "route",
    ["/stats", "/metrics", "/%6detrics", "/metrics/", "/stats?about=models", "/admin/optimization", "/admin/anything"],
)
async def test_figures_and_options_need_an_operator_key(route: str) -> None:
    backend = FakeBackend()

    async with client_of(app_with_keys(backend)) as client:
        assert (await client.get(route)).status_code == 401
        answer = await client.get(route, headers=bearer(ALICE))
        assert (answer.status_code, error_of(answer)["code"]) == (403, "not_an_operator")
        assert "'alice'" in error_of(answer)["message"]
        assert "www-authenticate" not in answer.headers
        assert backend.asked == []
        allowed = await client.get(route, headers=bearer(OPERATOR))
        assert allowed.status_code not in (401, 403)


async def test_server_without_keys_has_one_anonymous_tenant() -> None:
    backend = FakeBackend()

    async with client_of(app_with_keys(backend, Tenants())) as client:
        for headers in ({}, bearer(ALICE), {"x-api-key": STRANGER}):
            for route, body in POSTS:
                assert (await client.post(route, json=body, headers=headers)).status_code == 200, route
            assert (await client.get("/stats", headers=headers)).status_code == 200
        assert callers(backend) == {("", PASS)}


async def test_key_is_checked_before_the_body_is_read() -> None:
    was_read = False

    async def body() -> AsyncIterator[bytes]:
        nonlocal was_read
        was_read = True
        yield b"{}"

    async with client_of(app_with_keys()) as client:
        json_type = {"Content-Type": "application/json"}
        answer = await client.post("/v1/embeddings", content=body(), headers={**bearer(STRANGER), **json_type})
        assert answer.status_code == 401
        assert not was_read
        assert (
            await client.post("/v1/embeddings", content=body(), headers={**bearer(BOB), **json_type})
        ).status_code == 400
        assert was_read


# As whom


@pytest.mark.parametrize(("route", "body"), POSTS[:-1], ids=shown)
async def test_engine_process_gets_the_tenant_of_a_request(route: str, body: dict[str, Any]) -> None:
    backend = FakeBackend()

    async with client_of(app_with_keys(backend)) as client:
        for name, key in (("alice", ALICE), ("bob", BOB)):
            claims = {"x-tenant": "operator", "tenant": "operator"}
            assert (await client.post(route, json=body, headers={**bearer(key), **claims})).status_code == 200
            assert callers(backend) == {(name, PASS)}


# What is never told


async def test_no_answer_or_log_contains_a_key(caplog: pytest.LogCaptureFixture) -> None:
    backend = FakeBackend()
    told: list[str] = []
    secrets = (ALICE, OPERATOR, STRANGER, PASS)

    def broken(request: object) -> str:
        raise RuntimeError(f"a fault that shows its request: {request}")

    caplog.set_level(logging.DEBUG)
    async with client_of(app_with_keys(backend)) as client:
        for key in (ALICE, OPERATOR, STRANGER):
            for headers in (bearer(key), {"x-api-key": key}):
                for route, body in [*POSTS, ("/nowhere", {}), ("/v1/embeddings", {"inptu": 1}), ("/metrics", {})]:
                    answer = await client.post(route, json=body, headers=headers)
                    told.extend((answer.text, str(answer.headers)))
                for route in ("/", "/metrics", "/stats", "/health", "/v1/models", "/openapi.json"):
                    answer = await client.get(route, headers=headers)
                    told.extend((answer.text, str(answer.headers)))
        backend.reply = broken
        failed = await client.post("/v1/chat/completions", json=CHAT, headers=bearer(ALICE))
        assert failed.status_code == 500
        told.extend((failed.text, str(failed.headers)))
    for secret in secrets:
        assert not [text for text in told if secret in text]
    for key in (ALICE, OPERATOR, STRANGER):
        assert key not in caplog.text
    messages = json.dumps([repr(message) for message in [*backend.requests, *backend.asked]])
    assert PASS in messages
    assert ALICE not in messages


# Options of a running service, changed by an operator


ADMIN = "/admin/optimization"


async def test_operator_reads_and_changes_options() -> None:
    backend = FakeBackend()
    async with client_of(create_app(backend)) as client:
        assert (await client.get(ADMIN)).json()["logits_cache_mib"] == 64
        answer = await client.patch(ADMIN, json={"cache_size_mb": 16, "result_cache_mib": 4, "max_queue_size": 4096})
    assert answer.status_code == 200
    assert backend.config.logits_cache_mib == 16
    assert answer.json()["changed"] == {
        "logits_cache_mib": {"before": 64, "now": 16},
        "result_cache_mib": {"before": 0, "now": 4},
    }


@pytest.mark.parametrize("content", [b'{"logits_cache_mib": -1}', b'{"no_such": 1}', b"[1]", b"{"])
async def test_wrong_option_changes_nothing(content: bytes) -> None:
    backend = FakeBackend()
    async with client_of(create_app(backend)) as client:
        answer = await client.patch(ADMIN, content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]
    assert backend.config == EngineConfig()
