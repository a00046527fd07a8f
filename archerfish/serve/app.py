"""The HTTP service: the routes of every kind of model, and those about the service itself, over a backend that
computes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from archerfish.compat.optimization import OptimizationConfig
from archerfish.config import EngineConfig, ServeConfig, split_names
from archerfish.errors import ArcherfishError, InvalidInputError, StoppedError
from archerfish.kernels.build import build_info
from archerfish.observe.metrics import GivenMetric, Metric, MetricRegistry, Sample
from archerfish.serve.adapter_routes import AdapterRoutes
from archerfish.serve.answers import Failing, Health, Models, Restarting, Version
from archerfish.serve.catalog import Catalog, ModelCard
from archerfish.serve.client import AsyncClient, Backend
from archerfish.serve.encoder_routes import TEIRoutes, VLLMRoutes
from archerfish.serve.errors import HANDLERS, RETRY_AFTER_S, json_response
from archerfish.serve.generation import TextService
from archerfish.serve.http import REMARK_HEADER, REQUEST_ID_HEADER, RequestMiddleware, read_body
from archerfish.serve.messages_routes import MessagesRoutes
from archerfish.serve.metrics import CONTENT_TYPE, exposition, metric_values, process_metrics, read_metrics
from archerfish.serve.ollama_routes import OllamaRoutes
from archerfish.serve.openai_routes import OpenAIRoutes
from archerfish.serve.openapi import openapi_document
from archerfish.serve.overload import retry_after
from archerfish.serve.page import Asset, asset_response, assets, docs_page, page_data
from archerfish.serve.responses_routes import ResponsesRoutes
from archerfish.serve.result_cache import ResultCache
from archerfish.serve.routing import RoutedBackend
from archerfish.serve.tenants import ANONYMOUS, Tenants
from archerfish.serve.token_routes import TextRoutes, TTSRoutes
from archerfish.serve.tracing import make_tracer
from archerfish.serve.vector_routes import CohereRoutes, VectorRoutes
from archerfish.serve.view_routes import ViewRoutes
from archerfish.serve.wire import Configure, FrontEndState, Ping, Pong, Query

HEALTH_TIMEOUT_S = 10.0
STOPPED = "The service was stopped before the answer was complete."
SHARE_S = 1.0  # between two messages of a front end, if there are several
ANSWER_S = 5.0  # limit for the engine process's answer to a request of `/metrics`
CACHE_COUNTERS = {
    "hits": "Answers from the result cache.",
    "misses": "Lookups in the result cache without an answer.",
    "evictions": "Cached answers removed for room.",
    "expirations": "Cached answers removed for age.",
    "refusals": "Answers not kept in the result cache.",
}
CACHE_GAUGES = {"entries": "Answers in the result cache.", "bytes": "Size of the answers in the result cache."}


class FrontEndSync:
    """Exchanges metrics and changed options with the other front ends, by way of the engine process.

    So `/metrics` is the same whichever front end answers, and a change of the result cache reaches all of them within
    SHARE_S. Of two changes at the same time, the one that reaches the engine process first is in force everywhere.
    """

    def __init__(self, catalog: Catalog, registry: MetricRegistry, results: ResultCache) -> None:
        self.source = f"{os.getpid()}-{secrets.token_hex(4)}"
        self._catalog = catalog
        self._registry = registry
        self._results = results
        self._version = 0  # of the options; 0: those of the configuration

    def own_metrics(self) -> list[Metric]:
        totals = self._results.totals()
        cache = [
            GivenMetric(kind, f"archerfish_result_cache_{name}", text, (), [Sample((), float(totals[name]))])
            for kind, texts in (("counter", CACHE_COUNTERS), ("gauge", CACHE_GAUGES))
            for name, text in texts.items()
        ]
        return [*self._registry, *cache]

    async def query(self, about: str) -> dict[str, Any]:
        """Ask the engine process for a report, and send it the state of this front end."""
        metrics = {metric.name: metric_values(metric) for metric in self.own_metrics()}
        state = FrontEndState(metrics=metrics, version=self._version, options=self._options())
        return await self._catalog.report(Query(request_id="", about=about, source=self.source, values=state))

    def _options(self) -> dict[str, Any]:
        return {"max_bytes": self._results.max_bytes, "ttl_seconds": self._results.ttl_seconds}

    async def sync(self) -> None:
        """Send the state of this front end and take over the options of the others, unless the own ones are newer."""
        found = await self.query("options")
        if found.get("version", 0) >= max(1, self._version):
            self._version = found["version"]
            if found["options"] != self._options():
                self._results.resize(**found["options"])

    async def publish_options(self) -> None:
        """Send changed options to the other front ends."""
        self._version += 1
        with contextlib.suppress(ArcherfishError):  # the next message repeats them
            await self.sync()

    async def all_metrics(self) -> list[Metric]:
        """The metrics of the engine process and of all front ends; while the process is away, those of this front
        end."""
        found: dict[str, Metric] = {metric.name: metric for metric in self.own_metrics()}
        is_up = True
        try:
            async with asyncio.timeout(ANSWER_S):
                found |= {metric.name: metric for metric in read_metrics(await self.query("metrics"))}
        except (ArcherfishError, TimeoutError) as error:
            if getattr(error, "status", 503) != 503:
                raise
            is_up = False
        return [*process_metrics({"engine_up": is_up}), *found.values()]

    async def run(self) -> None:
        while True:
            with contextlib.suppress(ArcherfishError):
                await self.sync()
            self._catalog.expire_adapters()
            await asyncio.sleep(SHARE_S)


class StateRoutes:
    """Models, health, figures, the web page, and options for operators."""

    def __init__(
        self, catalog: Catalog, results: ResultCache, share: FrontEndSync, num_replicas: int, *, has_keys: bool
    ) -> None:
        """num_replicas: those that the parent of this process keeps. has_keys: whether the service asks for API
        keys."""
        self.catalog = catalog
        self.results = results
        self.share = share
        self.num_replicas = num_replicas
        self.has_keys = has_keys
        self.routes = [
            Route("/v1/models", self.models),
            Route("/v1/models/{model_id:path}", self.model),
            Route("/health", self.health),
            Route("/ready", self.ready),
            Route("/stats", self.stats),
            Route("/metrics", self.metrics),
            Route("/", self.index),
            Route("/openapi.json", self.openapi),
            Route("/docs", self.docs),
            Route("/version", self.version),
            Route("/favicon.ico", self.icon),
            Route("/web/{name}", self.file),
            Route("/admin/optimization", self.optimization, methods=["GET", "PATCH"]),
            Route("/admin/restart", self.restart, methods=["POST"]),
        ]

    async def models(self, request: Request) -> Response:
        """The models that are served."""
        return json_response(Models(data=await self.catalog.listed(request.state.tenant)))

    async def model(self, request: Request) -> Response:
        """One model."""
        card = await self.catalog.find(request.path_params["model_id"], request=request)
        return json_response(self.catalog.describe(card))

    async def health(self, request: Request) -> Response:
        """Whether a computation succeeds now."""
        return await self._ping("")

    async def ready(self, request: Request) -> Response:
        """Whether new requests should be sent here: the engine process takes them, and the service is not being
        stopped."""
        if request.app.state.is_stopping:
            stopping = Failing(reason="the service is being stopped")
            return json_response(stopping, 503, {"Retry-After": retry_after(RETRY_AFTER_S)})
        return await self._ping(None)

    async def _ping(self, probe: str | None) -> Response:
        began = time.perf_counter()
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT_S):
                answer = await self.catalog.backend.ask(Ping(request_id="", probe=probe))
        except (ArcherfishError, TimeoutError) as error:
            reason = error.message if isinstance(error, ArcherfishError) else f"no result within {HEALTH_TIMEOUT_S:g} s"
            wait = retry_after(getattr(error, "retry_after_s", None) or RETRY_AFTER_S)
            return json_response(Failing(reason=reason), 503, {"Retry-After": wait})
        assert isinstance(answer, Pong)
        seconds = answer.seconds if probe is not None else time.perf_counter() - began
        return json_response(Health(seconds=round(seconds, 6), failing=answer.failing or msgspec.UNSET))

    async def stats(self, request: Request) -> Response:
        """Figures of the engines and their caches."""
        return json_response(await self.share.query("stats"))

    async def metrics(self, request: Request) -> Response:
        """Figures for Prometheus of the engine process and all front ends, or of this front end if the engine is
        away."""
        return Response(exposition(await self.share.all_metrics()), media_type=CONTENT_TYPE)

    async def index(self, request: Request) -> Response:
        """The web page."""
        return asset_response(request, assets()["index.html"])

    async def file(self, request: Request) -> Response:
        """A file of the web page."""
        name = request.path_params["name"]
        found = page_data(has_keys=self.has_keys) if name == "data.json" else assets().get(name)
        if found is None:
            raise HTTPException(404)
        return asset_response(request, found)

    async def openapi(self, request: Request) -> Response:
        """The OpenAPI document."""
        return json_response(openapi_document(request.app.routes))

    async def docs(self, request: Request) -> Response:
        """The routes and their parameters as a web page."""
        page = docs_page(openapi_document(request.app.routes))
        return asset_response(request, Asset.of("docs.html", page.encode()))

    async def version(self, request: Request) -> Response:
        """Version and build of archerfish."""
        return json_response(Version(**await asyncio.to_thread(build_info)))

    async def icon(self, request: Request) -> Response:
        """The picture of the pages."""
        return asset_response(request, assets()["favicon.svg"])

    async def restart(self, request: Request) -> Response:
        """Restart the replicas of this machine one after another, without losing a request."""
        if "origin" in request.headers:  # browsers send a POST without a body for a page of any site
            raise InvalidInputError("Web pages may not restart the replicas.", hint="Use a program, such as curl.")
        if self.num_replicas < 2:
            hint = "Serve with --replicas 2 or more, or stop the server and start it again."
            raise InvalidInputError("One replica is not restarted: requests would be refused meanwhile.", hint=hint)
        os.kill(os.getppid(), signal.SIGHUP)  # the main process
        return json_response(Restarting(replicas=self.num_replicas), 202)

    async def optimization(self, request: Request) -> Response:
        """The options in force; PATCH changes some, by either of their names, and the answer has both values of those
        too."""
        card = await self.catalog.find(request.query_params.get("model"), "generation")
        body = await read_body(request) if request.method == "PATCH" else {}
        await self.share.sync()  # another front end may have changed them
        engine = await self._configure(card, {})
        if request.method != "PATCH":
            return json_response(OptimizationConfig.of(engine, self.results).as_dict())
        changed = OptimizationConfig.of(engine, self.results).updated(body).apply(engine, self.results)
        await (
            self.share.publish_options()
        )  # before anything else is awaited: a message in between would bring older options
        engine = await self._configure(card, engine.changes)
        shown = OptimizationConfig.of(engine, self.results).as_dict()
        return json_response({**shown, "changed": {name: {"before": a, "now": b} for name, (a, b) in changed.items()}})

    async def _configure(self, card: ModelCard, changes: dict[str, Any]) -> RemoteEngine:
        return RemoteEngine(await self.catalog.report(Configure(request_id="", model=card.id, options=changes)))


class RemoteEngine:
    """The options of an engine in another process, and the changes to send to it."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.config = EngineConfig(**{name: value for name, value in values.items() if name in EngineConfig.names()})
        self.changes: dict[str, Any] = {}

    def configure(self, **changes: Any) -> dict[str, Any]:
        self.changes |= changes
        self.config = self.config.replace(**changes)
        return changes


def cross_origin(origins: str) -> Middleware:
    """Allows pages of other sites to use the service."""
    exposed = ("Retry-After", REQUEST_ID_HEADER.decode(), REMARK_HEADER.decode())
    return Middleware(
        CORSMiddleware,
        allow_origins=[origin.rstrip("/") for origin in split_names(origins)],
        allow_methods=["*"],
        allow_headers=["*"],
        allow_private_network=True,
        expose_headers=exposed,
    )


def create_app(
    backend: Backend,
    config: ServeConfig | None = None,
    registry: MetricRegistry | None = None,
    *,
    credentials: str = "",
    tenants: Tenants | None = None,
) -> Starlette:
    """The service as an ASGI app. A backend that is a client of an engine process is closed when the app ends.

    credentials: the password that allows this front end to name the tenants of requests to the engine process.
    """
    config = config or ServeConfig()
    registry = registry or MetricRegistry()
    tenants = tenants or Tenants()
    catalog = Catalog(backend, credentials, accepts_any=config.accept_any_model)
    shares: dict[str, Any] = {"max_tenants": max(1, len(tenants.all())), "num_front_ends": config.num_front_ends}
    results = ResultCache(config.result_cache_mib << 20, config.result_cache_ttl_s, **shares)
    texts = TextService(catalog, results, config)
    share, tracer = FrontEndSync(catalog, registry, results), make_tracer(config.otlp_endpoint)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        sync = asyncio.create_task(share.run()) if config.num_front_ends > 1 else None
        if isinstance(backend, RoutedBackend):
            backend.start()
        try:
            yield
        finally:
            if sync is not None:
                sync.cancel()
                await asyncio.wait([sync])
            if isinstance(backend, AsyncClient | RoutedBackend):
                await backend.close(StoppedError(STOPPED, hint="Send the request again."))
            if tracer is not None:
                await asyncio.to_thread(tracer.close)

    vectors = VectorRoutes(catalog, config, registry)
    groups = (
        OpenAIRoutes(texts),
        vectors,
        ResponsesRoutes(texts),
        MessagesRoutes(texts),
        TextRoutes(texts),
        TTSRoutes(texts),
        OllamaRoutes(texts, vectors),
        CohereRoutes(vectors),
        TEIRoutes(vectors),
        VLLMRoutes(vectors),
        AdapterRoutes(catalog, config),
        ViewRoutes(catalog),
        StateRoutes(catalog, results, share, config.replicas, has_keys=ANONYMOUS not in tenants.all()),
    )
    routes = [route for group in groups for route in group.routes]
    middleware = [Middleware(RequestMiddleware, registry, tenants, config, tracer)]
    if config.cors_origins:  # outermost: preflights need no key, and refusals have CORS headers too
        middleware.insert(0, cross_origin(config.cors_origins))
    app = Starlette(routes=routes, middleware=middleware, exception_handlers=HANDLERS, lifespan=lifespan)
    app.router.redirect_slashes = False
    app.state.catalog, app.state.max_texts = catalog, config.max_texts_per_request
    app.state.is_stopping = False
    return app
