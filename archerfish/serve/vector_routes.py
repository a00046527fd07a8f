"""Embeddings, reranking and similarity over a backend."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from fastapi import APIRouter, Request
from starlette.responses import Response

from archerfish.config import ServeConfig
from archerfish.errors import InputTooLargeError, InvalidInputError
from archerfish.observe.metrics import MetricRegistry
from archerfish.serve.catalog import Catalog, ModelCard
from archerfish.serve.client import RemoteError
from archerfish.serve.errors import InvalidParameterError, json_response
from archerfish.serve.presence import unless_gone
from archerfish.serve.refusals import note_refusal
from archerfish.serve.schemas import BodyRoute, EmbeddingsBody, RerankBody, SimilarityBody
from archerfish.serve.wire import EmbedRequest, ScoreRequest, Vectors

Array = npt.NDArray[np.float32]
YIELD_ROWS = 16  # rows turned into JSON before other requests get a turn: a few milliseconds


class VectorRoutes:
    """Routes that answer with numbers."""

    def __init__(self, catalog: Catalog, config: ServeConfig, registry: MetricRegistry) -> None:
        self.catalog, self.config = catalog, config
        self.texts = registry.counter("archerfish_texts_total", "Texts or pairs computed.", ("route",))
        self.tokens = registry.counter("archerfish_tokens_total", "Tokens computed.", ("route",))
        self.router = APIRouter(route_class=BodyRoute)
        self.router.post("/v1/embeddings", response_model=None)(self.embeddings)
        self.router.post("/v1/rerank", response_model=None)(self.rerank)
        self.router.post("/similarity", response_model=None)(self.similarity)

    async def embeddings(self, request: Request, body: EmbeddingsBody) -> Response:
        """Vectors of texts."""
        card = await self.catalog.find(body.model, "embedding")
        self.check_number(len(body.input), "input")
        if body.dimensions is not None and body.dimensions > card.dimension:
            raise InvalidParameterError(f"{card.id} has {card.dimension} dimensions, not {body.dimensions}.", "dimensions")
        try:
            rows, num_tokens = await self.embed(request, card, body.input, body.deadline_s)
        except RemoteError as error:
            if error.code in (InvalidInputError.code, InputTooLargeError.code):
                error.param = error.param or "input"
            raise
        rows = shorten(rows, body.dimensions)
        items = (
            f'{{"object":"embedding","index":{index},"embedding":{embedding_json(row, body.encoding_format)}}}'
            for index, row in enumerate(rows)
        )
        tail = {"model": card.id, "usage": self.usage("/v1/embeddings", len(rows), num_tokens)}
        return await list_response('{"object":"list","data":[', items, tail)

    async def rerank(self, request: Request, body: RerankBody) -> Response:
        """Documents by their relevance to a query, best first: by a cross-encoder where one is served, else by cosine."""
        card = await self.catalog.find(body.model, "cross-encoder", "embedding")
        self.check_number(len(body.documents), "documents")
        if card.kind == "cross-encoder":
            message = ScoreRequest(
                query=body.query, documents=body.documents, deadline_s=body.deadline_s, **self.catalog.address(request, card)
            )
            rows, num_tokens = await self.ask(request, message)
            scores = rows[:, 0]
        else:
            rows, num_tokens = await self.embed(request, card, [body.query, *body.documents], body.deadline_s)
            scores = rows[1:] @ rows[0]
        order = np.argsort(-scores, kind="stable")[: body.top_n].tolist()
        results: list[dict[str, Any]] = [{"index": i, "relevance_score": float(scores[i])} for i in order]
        if body.return_documents:
            for result in results:
                result["document"] = {"text": body.documents[result["index"]]}
        usage = self.usage("/v1/rerank", len(body.documents), num_tokens)
        return json_response({"model": card.id, "results": results, "usage": usage})

    async def similarity(self, request: Request, body: SimilarityBody) -> Response:
        """Cosines: a list for one source, a list per source for several."""
        card = await self.catalog.find(body.model, "embedding")
        sources = [body.source] if isinstance(body.source, str) else body.source
        num_texts = len(sources) + len(body.sentences)
        self.check_number(num_texts, "sentences")
        rows, num_tokens = await self.embed(request, card, [*sources, *body.sentences], body.deadline_s)
        cosines = rows[: len(sources)] @ rows[len(sources) :].T
        shown = cosines[0] if isinstance(body.source, str) else cosines
        tail = {"model": card.id, "usage": self.usage("/similarity", num_texts, num_tokens)}
        return await list_response('{"similarities":[', (row_json(row) for row in shown), tail)

    async def embed(
        self, request: Request, card: ModelCard, texts: Sequence[str | list[int]], deadline_s: float | None
    ) -> tuple[Array, int]:
        """Vectors of length 1, and the tokens that they took."""
        message = EmbedRequest(texts=list(texts), normalize=True, deadline_s=deadline_s, **self.catalog.address(request, card))
        return await self.ask(request, message)

    async def ask(self, request: Request, message: EmbedRequest | ScoreRequest) -> tuple[Array, int]:
        """What the backend computes, and the tokens that it took."""
        try:
            answer = await unless_gone(request, self.catalog.backend.ask(message))
        except RemoteError as error:
            note_refusal(request, error)
            raise
        assert isinstance(answer, Vectors)
        rows = np.frombuffer(answer.data, dtype="<f4").reshape(answer.num_rows, answer.num_columns)
        return rows.astype(np.float32, copy=False), answer.num_tokens

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
    return row_json(row)


def row_json(row: Array) -> str:
    """As json.dumps, which takes ten times as long for a vector."""
    return msgspec.json.encode(row.tolist()).decode()


async def list_response(opening: str, items: Iterable[str], tail: dict[str, Any]) -> Response:
    """A JSON object whose first member is a long list, written without holding up the event loop."""
    parts: list[str] = []
    for index, item in enumerate(items, 1):
        parts.append(item)
        if index % YIELD_ROWS == 0:
            await asyncio.sleep(0)
    body = f"{opening}{','.join(parts)}],{json.dumps(tail, separators=(',', ':'))[1:]}"
    return Response(body, media_type="application/json")
