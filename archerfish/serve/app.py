"""The HTTP service: embeddings, reranking and similarity over one engine, or two."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import numpy as np
from fastapi import FastAPI, Request
from starlette.responses import HTMLResponse, Response

from archerfish.config import ServeConfig
from archerfish.errors import ArcherfishError, InputTooLargeError, did_you_mean
from archerfish.observe.metrics import MetricRegistry
from archerfish.serve.errors import ClientGoneError, InvalidParameterError, UnservedModelError, install_handlers, json_response
from archerfish.serve.inference import Array, Engine, Inference
from archerfish.serve.metrics import CONTENT_TYPE, exposition
from archerfish.serve.middleware import BodyLimit, RequestMetrics
from archerfish.serve.page import page
from archerfish.serve.schemas import EmbeddingsBody, RerankBody, SimilarityBody

T = TypeVar("T")
HEALTH_TIMEOUT_S = 10.0
YIELD_ROWS = 16  # rows turned into JSON before other requests get a turn: a few milliseconds


class Service:
    """The routes of one app."""

    def __init__(
        self, engine: Engine, config: ServeConfig, reranker: Engine | None, registry: MetricRegistry, aliases: Sequence[str]
    ) -> None:
        self.config = config
        self.registry = registry
        self.inference = Inference(engine, reranker, config, registry)
        self.started_at = int(time.time())
        self.names: dict[str, Engine] = dict.fromkeys(names_of(reranker), reranker) if reranker else {}
        self.names |= dict.fromkeys(names_of(engine, aliases), engine)
        self.texts = registry.counter("archerfish_texts_total", "Texts or pairs computed.", ("route",))
        self.tokens = registry.counter("archerfish_tokens_total", "Tokens computed.", ("route",))

    async def embeddings(self, request: Request, body: EmbeddingsBody) -> Response:
        """Vectors of texts."""
        engine = self.engine_for(body.model, self.inference.embedder)
        self.check_number(len(body.input), "input")
        dimension = engine.get_embedding_dimension()
        if body.dimensions is not None and body.dimensions > dimension:
            raise InvalidParameterError(f"{engine.model_name} has {dimension} dimensions, not {body.dimensions}.", "dimensions")
        computed = await unless_gone(request, self.inference.embed(body.input))
        rows = shorten(computed.rows, body.dimensions)
        items = (
            f'{{"object":"embedding","index":{index},"embedding":{embedding_json(row, body.encoding_format)}}}'
            for index, row in enumerate(rows)
        )
        tail = {"model": engine.model_name, "usage": self.usage("/v1/embeddings", len(rows), computed.num_tokens)}
        return await list_response('{"object":"list","data":[', items, tail)

    async def rerank(self, request: Request, body: RerankBody) -> Response:
        """Documents by their relevance to a query, best first."""
        engine = self.engine_for(body.model, self.inference.ranking_engine())
        self.check_number(len(body.documents), "documents")
        computed = await unless_gone(request, self.inference.score(body.query, body.documents))
        order = np.argsort(-computed.rows, kind="stable")[: body.top_n].tolist()
        results: list[dict[str, Any]] = [{"index": i, "relevance_score": float(computed.rows[i])} for i in order]
        if body.return_documents:
            for result in results:
                result["document"] = {"text": body.documents[result["index"]]}
        usage = self.usage("/v1/rerank", len(body.documents), computed.num_tokens)
        return json_response({"model": engine.model_name, "results": results, "usage": usage})

    async def similarity(self, request: Request, body: SimilarityBody) -> Response:
        """Cosines: a list for one source, a list per source for several."""
        engine = self.engine_for(body.model, self.inference.embedder)
        sources = [body.source] if isinstance(body.source, str) else body.source
        self.check_number(len(sources) + len(body.sentences), "sentences")
        computed = await unless_gone(request, self.inference.similarity(sources, body.sentences))
        rows = computed.rows[0] if isinstance(body.source, str) else computed.rows
        num_texts = len(sources) + len(body.sentences)
        tail = {"model": engine.model_name, "usage": self.usage("/similarity", num_texts, computed.num_tokens)}
        return await list_response('{"similarities":[', (json.dumps(row.tolist()) for row in rows), tail)

    async def models(self) -> Response:
        """The models that are served."""
        engines = {id(engine): engine for engine in self.names.values()}
        return json_response({"object": "list", "data": [self.describe(engine) for engine in engines.values()]})

    async def model(self, model_id: str) -> Response:
        """One of them."""
        if model_id not in self.names:
            raise self.unknown_model(model_id)
        return json_response(self.describe(self.names[model_id]))

    async def health(self) -> Response:
        """Whether a computation succeeds now."""
        began = time.perf_counter()
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT_S):
                await self.inference.probe()
        except TimeoutError:
            return json_response({"status": "failing", "reason": f"no result within {HEALTH_TIMEOUT_S:g} s"}, 503)
        except Exception as error:
            reason = error.message if isinstance(error, ArcherfishError) else type(error).__name__
            return json_response({"status": "failing", "reason": reason}, 503)
        return json_response({"status": "ok", "seconds": round(time.perf_counter() - began, 6)})

    async def metrics(self) -> Response:
        """Figures for Prometheus."""
        return Response(exposition(self.registry), media_type=CONTENT_TYPE)

    async def index(self, request: Request) -> Response:
        """A page for people."""
        models = [self.describe(engine) for engine in {id(e): e for e in self.names.values()}.values()]
        return HTMLResponse(page(str(request.base_url).rstrip("/"), models))

    def engine_for(self, name: str | None, engine: Engine | None) -> Engine:
        """The engine of a route, if the request names it or no model at all."""
        if name is not None and name not in self.names:
            raise self.unknown_model(name)
        if engine is None or (name is not None and self.names[name] is not engine):
            name = name or self.inference.ranking_engine().model_name
            raise InvalidParameterError(f"The model {name!r} does not serve this route; see GET /v1/models.", "model")
        return engine

    def unknown_model(self, name: str) -> UnservedModelError:
        return UnservedModelError(f"The model {name!r} is not served here.", hint=did_you_mean(name, self.names))

    def check_number(self, number: int, param: str) -> None:
        if number > self.config.max_texts_per_request:
            raise InputTooLargeError(
                f"{param} makes {number} texts; a request takes at most {self.config.max_texts_per_request}.",
                hint="Send several requests: they share batches.",
            )

    def usage(self, route: str, num_texts: int, num_tokens: int) -> dict[str, int]:
        self.texts.add(num_texts, route=route)
        self.tokens.add(num_tokens, route=route)
        return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}

    def describe(self, engine: Engine) -> dict[str, Any]:
        shown = {"id": engine.model_name, "object": "model", "created": self.started_at, "owned_by": "archerfish"}
        kind = "cross-encoder" if engine.is_cross_encoder else "embedding"
        shown |= {"kind": kind, "max_length": engine.get_max_seq_length()}
        return shown if engine.is_cross_encoder else {**shown, "dimension": engine.get_embedding_dimension()}


def create_app(
    engine: Engine,
    config: ServeConfig | None = None,
    reranker: Engine | None = None,
    registry: MetricRegistry | None = None,
    *,
    aliases: Sequence[str] = (),
) -> FastAPI:
    """The service as an ASGI app.

    `reranker` is a cross-encoder for /v1/rerank; without one, documents are ranked by cosine. `aliases` are further names
    under which requests may call `engine`.
    """
    config = config or ServeConfig()
    registry = registry or MetricRegistry()
    service = Service(engine, config, reranker, registry, aliases)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with service.inference:
            yield

    app = FastAPI(title="archerfish", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.service = service
    app.post("/v1/embeddings", response_model=None)(service.embeddings)
    app.post("/v1/rerank", response_model=None)(service.rerank)
    app.post("/similarity", response_model=None)(service.similarity)
    app.get("/v1/models", response_model=None)(service.models)
    app.get("/v1/models/{model_id:path}", response_model=None)(service.model)
    app.get("/health", response_model=None)(service.health)
    app.get("/metrics", response_model=None)(service.metrics)
    app.get("/", include_in_schema=False, response_model=None)(service.index)
    app.add_middleware(BodyLimit, max_bytes=config.max_body_bytes)
    app.add_middleware(RequestMetrics, registry=registry)
    install_handlers(app, service.inference.retry_after_s)
    return app


def names_of(engine: Engine, aliases: Iterable[str] = ()) -> list[str]:
    """Under which names a request may call for an engine: its own, its last part, and aliases."""
    found = [engine.model_name, *aliases]
    return [*found, *(name.rstrip("/").rsplit("/", 1)[-1] for name in found)]


def shorten(rows: Array, dimensions: int | None) -> Array:
    """The first dimensions of each row, scaled to length 1 again."""
    if dimensions is None or dimensions == rows.shape[1]:
        return rows
    short = rows[:, :dimensions]
    norms = np.linalg.norm(short, axis=1, keepdims=True)
    return np.asarray(short / np.maximum(norms, np.finfo(np.float32).tiny), np.float32)


def embedding_json(row: Array, encoding_format: str) -> str:
    if encoding_format == "base64":
        return f'"{base64.b64encode(row.astype("<f4").tobytes()).decode()}"'
    return json.dumps(row.tolist(), separators=(",", ":"))


async def list_response(opening: str, items: Iterable[str], tail: dict[str, Any]) -> Response:
    """A JSON object whose first member is a long list, written without holding up the event loop."""
    parts: list[str] = []
    for index, item in enumerate(items, 1):
        parts.append(item)
        if index % YIELD_ROWS == 0:
            await asyncio.sleep(0)
    body = f"{opening}{','.join(parts)}],{json.dumps(tail, separators=(',', ':'))[1:]}"
    return Response(body, media_type="application/json")


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled if the client closes its connection first."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(disconnected(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def disconnected(request: Request) -> None:
    """Returns when the client is gone; the body has been read before."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
