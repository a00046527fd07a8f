"""Options of a running service, changed over HTTP by an operator."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx

from archerfish.config import EngineConfig
from archerfish.engine.request_options import RUNNING_OPTIONS
from archerfish.serve.app import create_app
from archerfish.serve.client import Answer, Question
from archerfish.serve.tenants import Tenants, add_key
from archerfish.serve.wire import Configure, Report

from .fake_backend import FakeBackend


class ConfiguredBackend(FakeBackend):
    """An engine process with options."""

    def __init__(self) -> None:
        super().__init__()
        self.config = EngineConfig()
        self.told: list[dict[str, Any]] = []

    async def ask(self, message: Question) -> Answer:
        if not isinstance(message, Configure):
            return await super().ask(message)
        if message.options:
            self.told.append(message.options)
        self.config = self.config.replace(**message.options)
        values = {name: getattr(self.config, name) for name in RUNNING_OPTIONS}
        return Report(request_id=message.request_id, values=values)


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
    backend = ConfiguredBackend()
    assert call(backend, "GET").json()["logits_cache_mib"] == 64
    answer = call(backend, "PATCH", json={"cache_size_mb": 16, "result_cache_mib": 4, "max_queue_size": 4096})
    assert answer.status_code == 200
    assert backend.told == [{"logits_cache_mib": 16}]
    assert answer.json()["changed"] == {
        "logits_cache_mib": {"before": 64, "now": 16}, "result_cache_mib": {"before": 0, "now": 4}
    }


def test_wrong_option_changes_nothing() -> None:
    backend = ConfiguredBackend()
    for given in ({"json": {"logits_cache_mib": -1}}, {"json": {"no_such": 1}}, {"json": [1]}, {"content": b"{"}):
        answer = call(backend, "PATCH", **given)
        assert answer.status_code == 400, given
        assert answer.json()["error"]["message"]
    assert not backend.told


def test_options_need_an_operator_key(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    alice, root = add_key(file, "alice"), add_key(file, "root", is_operator=True)
    tenants = Tenants.from_file(file)
    assert call(ConfiguredBackend(), "GET", tenants).status_code == 401
    assert call(ConfiguredBackend(), "GET", tenants, headers={"x-api-key": alice}).status_code == 403
    assert call(ConfiguredBackend(), "GET", tenants, headers={"x-api-key": root}).status_code == 200
