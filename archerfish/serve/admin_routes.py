"""Switches of a running service, for operators."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from archerfish.config import EngineConfig
from archerfish.serve.catalog import Catalog, ModelCard
from archerfish.serve.errors import json_response
from archerfish.serve.optimization import OptimizationConfig
from archerfish.serve.result_cache import ResultCache
from archerfish.serve.schemas import BodyRoute
from archerfish.serve.sharing import FrontEndSync
from archerfish.serve.wire import Configure, Report

OPTIONS = {"type": "object", "description": "Options by either of their names, with their new values."}
CHANGES = {"requestBody": {"required": True, "content": {"application/json": {"schema": OPTIONS}}}}


class FarEngine:
    """The options of an engine in another process, and the changes that it is to be told."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.config = EngineConfig(**{name: value for name, value in values.items() if name in EngineConfig.names()})
        self.wanted: dict[str, Any] = {}

    def configure(self, **changes: Any) -> dict[str, Any]:
        self.wanted |= changes
        self.config = self.config.replace(**changes)
        return changes


class AdminRoutes:
    """`OptimizationConfig` read and changed while everything runs on. All front ends follow with their result caches.

    `Identify` lets only operators reach these routes.
    """

    def __init__(self, catalog: Catalog, results: ResultCache, share: FrontEndSync) -> None:
        self.catalog, self.results, self.share = catalog, results, share
        self.router = APIRouter(route_class=BodyRoute)
        self.router.get("/admin/optimization", response_model=None)(self.show)
        self.router.patch("/admin/optimization", response_model=None, openapi_extra=CHANGES)(self.change)

    async def show(self, model: str | None = None) -> Response:
        """The options in force."""
        await self.share.sync()  # another front end may have been told of a change
        engine = await self._configure(await self.catalog.find(model, "generation"), {})
        return json_response(OptimizationConfig.of(engine, self.results).as_dict())

    async def change(self, request: Request, model: str | None = None) -> Response:
        """Change some, by either of their names; the answer has all of them, and what they were before."""
        body = await request.json()  # of a StrictRequest
        card = await self.catalog.find(model, "generation")
        await self.share.sync()
        engine = await self._configure(card, {})
        changed = OptimizationConfig.of(engine, self.results).updated(body).apply(engine, self.results)
        await self.share.publish_options()  # at once: what is heard meanwhile is older
        engine = await self._configure(card, engine.wanted)
        shown = OptimizationConfig.of(engine, self.results).as_dict()
        return json_response({**shown, "changed": {name: {"before": a, "now": b} for name, (a, b) in changed.items()}})

    async def _configure(self, card: ModelCard, changes: dict[str, Any]) -> FarEngine:
        message = Configure(
            request_id=self.catalog.new_id(), model=card.id, options=changes, credentials=self.catalog.credentials
        )
        answer = await self.catalog.backend.ask(message)
        assert isinstance(answer, Report)
        return FarEngine(answer.values)
