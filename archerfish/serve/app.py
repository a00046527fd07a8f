"""The HTTP service: the routes of every kind of model, over a backend that computes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from starlette.responses import HTMLResponse, Response

from archerfish.config import ServeConfig
from archerfish.errors import ArcherfishError, StoppedError
from archerfish.observe.metrics import MetricRegistry
from archerfish.serve.admin_routes import AdminRoutes
from archerfish.serve.answers import state_answers
from archerfish.serve.catalog import Catalog
from archerfish.serve.client import AsyncClient, Backend
from archerfish.serve.errors import RETRY_AFTER_S, install_handlers, json_response
from archerfish.serve.generation import TextService
from archerfish.serve.identity import Identify, caller_of, note_blocked
from archerfish.serve.limits import Blocked, retry_after
from archerfish.serve.messages_routes import MessagesRoutes
from archerfish.serve.metrics import CONTENT_TYPE, exposition
from archerfish.serve.middleware import BodyLimit, RequestMetrics
from archerfish.serve.openai_routes import OpenAIRoutes
from archerfish.serve.page import page
from archerfish.serve.refusals import Refusals
from archerfish.serve.responses_routes import ResponsesRoutes
from archerfish.serve.result_cache import ResultCache
from archerfish.serve.sharing import FrontEndSync
from archerfish.serve.tenants import Tenants
from archerfish.serve.text_routes import TextRoutes
from archerfish.serve.tts_routes import TTSRoutes
from archerfish.serve.vector_routes import VectorRoutes
from archerfish.serve.wire import Ping, Pong

HEALTH_TIMEOUT_S = 10.0
STOPPED = "The service was stopped before the answer was complete."


class StateRoutes:
    """What the service says of itself."""

    def __init__(self, catalog: Catalog, share: FrontEndSync) -> None:
        self.catalog, self.share = catalog, share
        self.router = APIRouter()
        handlers: dict[str, Callable[..., Coroutine[Any, Any, Response]]] = {
            "/v1/models": self.models, "/v1/models/{model_id:path}": self.model, "/health": self.health, "/ready": self.ready,
            "/stats": self.stats, "/metrics": self.metrics, "/": self.index,
        }
        for path, handler in handlers.items():
            self.router.get(path, include_in_schema=path != "/", response_model=None)(handler)
            self.router.head(path, include_in_schema=False, response_model=None)(handler)  # the server leaves out the body

    async def models(self) -> Response:
        """The models that are served."""
        cards = await self.catalog.cards()
        return json_response({"object": "list", "data": [self.catalog.describe(card) for card in cards]})

    async def model(self, model_id: str) -> Response:
        """One of them."""
        return json_response(self.catalog.describe(await self.catalog.named(model_id)))

    async def health(self) -> Response:
        """Whether a computation succeeds now."""
        return await self._ping("")

    async def ready(self) -> Response:
        """Whether the engine process takes requests."""
        return await self._ping(None)

    async def _ping(self, probe: str | None) -> Response:
        began = time.perf_counter()
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT_S):
                answer = await self.catalog.backend.ask(Ping(request_id=self.catalog.new_id(), probe=probe))
        except (ArcherfishError, TimeoutError) as error:
            reason = error.message if isinstance(error, ArcherfishError) else f"no result within {HEALTH_TIMEOUT_S:g} s"
            wait = retry_after(getattr(error, "retry_after_s", None) or RETRY_AFTER_S)
            return json_response({"status": "failing", "reason": reason}, 503, {"Retry-After": wait})
        assert isinstance(answer, Pong)
        seconds = answer.seconds if probe is not None else time.perf_counter() - began
        return json_response({"status": "ok", "seconds": round(seconds, 6)})

    async def stats(self) -> Response:
        """Figures of the engines and their caches."""
        return json_response(await self.share.query("stats"))

    async def metrics(self) -> Response:
        """Figures for Prometheus: of the engine process and all front ends; while it is away, of this front end."""
        return Response(exposition(await self.share.all_metrics()), media_type=CONTENT_TYPE)

    async def index(self, request: Request) -> Response:
        """A page for people."""
        models = [self.catalog.describe(card) for card in await self.catalog.cards()]
        return HTMLResponse(page(str(request.base_url).rstrip("/"), models))


async def cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def create_app(
    backend: Backend, config: ServeConfig | None = None, registry: MetricRegistry | None = None, *, credentials: str = "",
    tenants: Tenants | None = None,
) -> FastAPI:
    """The service as an ASGI app. A backend that is a client of an engine process is closed when the app ends.

    credentials: the pass with which this front end may tell the engine process whose a request is.
    """
    config, registry = config or ServeConfig(), registry or MetricRegistry()
    catalog = Catalog(backend, credentials, caller_of=caller_of)
    tenants = tenants or Tenants()
    results = ResultCache(
        config.result_cache_mib << 20, config.result_cache_ttl_s, max_tenants=max(1, len(tenants.all())),
        num_front_ends=config.num_front_ends,
    )
    texts = TextService(catalog, results, keep_alive_s=config.keep_alive_s)
    share = FrontEndSync(catalog, registry, results)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            if isinstance(backend, AsyncClient):
                stack.push_async_callback(backend.close, StoppedError(STOPPED, hint="Send the request again."))
            if config.num_front_ends > 1:
                stack.push_async_callback(cancelled, asyncio.create_task(share.run()))
            yield

    app = FastAPI(title="archerfish", lifespan=lifespan, docs_url=None, redoc_url=None, redirect_slashes=False)
    for routes in (
        OpenAIRoutes(texts, config), VectorRoutes(catalog, config, registry), ResponsesRoutes(texts), MessagesRoutes(texts),
        TextRoutes(texts), TTSRoutes(texts), StateRoutes(catalog, share), AdminRoutes(catalog, results, share),
    ):  # fmt: skip
        app.router.routes.extend(routes.router.routes)  # one list: a router in a router is looked through twice
    app.add_middleware(Refusals, registry=registry)
    app.add_middleware(BodyLimit, max_bytes=config.max_body_bytes)
    blocked = Blocked()
    app.add_middleware(Identify, tenants=tenants, blocked=blocked)
    app.add_middleware(RequestMetrics, registry=registry)
    install_handlers(app)
    note_blocked(app, blocked)
    state_answers(app)
    return app
