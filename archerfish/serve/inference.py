"""Between the routes and the engines: everything is computed in shared batches, off the event loop."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt

from archerfish.config import ServeConfig
from archerfish.engine.batch_server import BatchInferenceServer
from archerfish.errors import InvalidOptionError, UnsupportedModelError
from archerfish.observe.metrics import SIZE_BUCKETS, MetricRegistry

Text = str | list[int]
Pair = tuple[str, str]
Array = npt.NDArray[np.float32]
MAX_RETRY_AFTER_S = 60


class Engine(Protocol):
    """What the service asks of an engine; ArrowEngine and the fakes have it."""

    model_name: str

    @property
    def is_cross_encoder(self) -> bool: ...
    def encode_batch(self, texts: Sequence[Text], normalize: bool | None = ..., /) -> npt.NDArray[Any]: ...
    def score_pairs(self, pairs: Sequence[Pair], /) -> npt.NDArray[Any]: ...
    def count_tokens(self, texts: Sequence[Any], /) -> list[int]: ...
    def check_texts(self, texts: Sequence[Any], /) -> None: ...
    def get_embedding_dimension(self) -> int: ...
    def get_max_seq_length(self) -> int: ...


@dataclass(frozen=True)
class Computed:
    """Rows for the inputs of one request, and the tokens that they took."""

    rows: Array
    num_tokens: int


class Inference:
    """The engines of a service behind one batch server each; an async context manager, in which alone it computes.

    `engine` gives embeddings unless it is a cross-encoder; pairs are scored by `reranker`, by a cross-encoder `engine`, or by
    the cosine of embeddings.
    """

    def __init__(self, engine: Engine, reranker: Engine | None, config: ServeConfig, registry: MetricRegistry) -> None:
        if reranker is not None and not reranker.is_cross_encoder:
            raise InvalidOptionError(
                f"[serve] rerank_model {reranker.model_name} is no cross-encoder.",
                hint="Leave it empty to rank by the cosine of the embedding model.",
            )
        self.embedder = None if engine.is_cross_encoder else engine
        self.reranker = reranker or (engine if engine.is_cross_encoder else None)
        self._registry = registry
        limits = _limits(config, registry)
        self._texts = BatchInferenceServer[Text, tuple[Array, int]](self._embed_batch, name="texts", **limits)
        self._pairs = BatchInferenceServer[Pair, tuple[float, int]](self._score_batch, name="pairs", **limits)
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self._texts)
        await self._stack.enter_async_context(self._pairs)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.__aexit__(kind, error, trace)

    def ranking_engine(self) -> Engine:
        """The engine whose name answers for /v1/rerank."""
        engine = self.reranker or self.embedder
        assert engine is not None
        return engine

    async def embed(self, texts: Sequence[Text]) -> Computed:
        """(n, dim) unit vectors."""
        if self.embedder is None:
            raise UnsupportedModelError(f"{self.ranking_engine().model_name} is a cross-encoder: it has no embeddings.")
        self.embedder.check_texts(texts)
        results = await self._texts.predict_many(texts)
        return Computed(np.stack([vector for vector, _ in results]), sum(count for _, count in results))

    async def score(self, query: str, documents: Sequence[str]) -> Computed:
        """(n,) relevance of each document to the query."""
        if self.reranker is None:
            embedded = await self.embed([query, *documents])
            return Computed(embedded.rows[1:] @ embedded.rows[0], embedded.num_tokens)
        self.reranker.check_texts([query, *documents])
        results = await self._pairs.predict_many([(query, document) for document in documents])
        scores = np.asarray([score for score, _ in results], np.float32)
        return Computed(scores, sum(count for _, count in results))

    async def similarity(self, sources: Sequence[str], sentences: Sequence[str]) -> Computed:
        """(sources, sentences) cosines."""
        embedded = await self.embed([*sources, *sentences])
        rows = embedded.rows
        return Computed(rows[: len(sources)] @ rows[len(sources) :].T, embedded.num_tokens)

    async def probe(self) -> None:
        """Compute something small on every engine, through the same queues as requests."""
        if self.embedder is not None:
            await self.embed(["health"])
        if self.reranker is not None:
            await self.score("health", ["health"])

    def retry_after_s(self) -> int:
        """How long the queues will take, judged by the time that inputs have taken so far."""
        waiting_s = 0.0
        compute = self._registry.histogram("archerfish_compute_seconds", label_names=("queue",))
        size = self._registry.histogram("archerfish_batch_size", label_names=("queue",), buckets=SIZE_BUCKETS)
        for server in (self._texts, self._pairs):
            computed = size.sum(queue=server.name)
            if computed:
                waiting_s += server.queue_depth() * compute.sum(queue=server.name) / computed
        return max(1, min(MAX_RETRY_AFTER_S, math.ceil(waiting_s)))

    def _embed_batch(self, texts: Sequence[Text]) -> list[tuple[Array, int]]:
        assert self.embedder is not None
        rows = np.asarray(self.embedder.encode_batch(texts, True), np.float32)
        return list(zip(rows, self.embedder.count_tokens(texts), strict=True))

    def _score_batch(self, pairs: Sequence[Pair]) -> list[tuple[float, int]]:
        assert self.reranker is not None
        scores = np.asarray(self.reranker.score_pairs(pairs))
        if scores.ndim != 1:
            raise UnsupportedModelError(f"{self.reranker.model_name} gives several labels per pair; ranking needs one.")
        return list(zip(scores.tolist(), self.reranker.count_tokens(pairs), strict=True))


def _limits(config: ServeConfig, registry: MetricRegistry) -> dict[str, Any]:
    return {
        "max_batch_size": config.max_batch_texts,
        "max_wait_time": config.max_wait_ms / 1000,
        "max_queue_size": config.max_queue_texts,
        "registry": registry,
    }
