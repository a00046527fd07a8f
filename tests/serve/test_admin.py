"""Options of a running service, changed over HTTP by an operator."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx

from archerfish.config import EngineConfig
from archerfish.serve.app import create_app
from archerfish.serve.tenants import Tenants, add_key

from .fake_backend import FakeBackend


def call(
    backend: FakeBackend, method: str, tenants: Tenants | None = None, *, json: Any = None, content: bytes | None = None,
    headers: dict[str, str] | None = None,
) -> httpx.Response:
    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app=create_app(backend, tenants=tenants))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, "/admin/optimization", json=json, content=content, headers=headers)

    return asyncio.run(run())


def test_operator_reads_and_changes_options() -> None:
    backend = FakeBackend()
    assert call(backend, "GET").json()["logits_cache_mib"] == 64
    answer = call(backend, "PATCH", json={"cache_size_mb": 16, "result_cache_mib": 4, "max_queue_size": 4096})
    assert answer.status_code == 200
    assert backend.config.logits_cache_mib == 16
    assert answer.json()["changed"] == {
        "logits_cache_mib": {"before": 64, "now": 16}, "result_cache_mib": {"before": 0, "now": 4}
    }


def test_wrong_option_changes_nothing() -> None:
    backend = FakeBackend()
    for given in ({"json": {"logits_cache_mib": -1}}, {"json": {"no_such": 1}}, {"json": [1]}, {"content": b"{"}):
        answer = call(backend, "PATCH", **given)
        assert answer.status_code == 400, given
        assert answer.json()["error"]["message"]
    assert backend.config == EngineConfig()


def test_options_need_an_operator_key(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    alice, root = add_key(file, "alice"), add_key(file, "root", is_operator=True)
    tenants = Tenants.from_file(file)
    assert call(FakeBackend(), "GET", tenants).status_code == 401
    assert call(FakeBackend(), "GET", tenants, headers={"x-api-key": alice}).status_code == 403
    assert call(FakeBackend(), "GET", tenants, headers={"x-api-key": root}).status_code == 200
