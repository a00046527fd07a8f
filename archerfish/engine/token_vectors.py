"""Vectors that are not one row of numbers for each text: sparse ones, and several for a text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from archerfish.engine.text_batches import pack, plan_batches
from archerfish.kernels.batches import Ids
from archerfish.text.tokenizer import TokenizedText

if TYPE_CHECKING:
    from archerfish.engine.arrow_engine import ArrowEngine
    from archerfish.engine.inference_core import Output, Vectors

MOST_SCORES = 1 << 26  # float32 numbers over the vocabulary that a pass of SPLADE makes: 256 MiB


class SparseVector(NamedTuple):
    """Weights of tokens of the vocabulary; all others have none. Token ids ascend."""

    token_ids: Ids
    weights: Vectors

    def as_dict(self) -> dict[int, float]:
        return dict(zip(self.token_ids.tolist(), self.weights.tolist(), strict=True))

    def dot(self, other: SparseVector) -> float:
        _, own, others = np.intersect1d(self.token_ids, other.token_ids, assume_unique=True, return_indices=True)
        return float(self.weights[own] @ other.weights[others])


TokenVectors = list["SparseVector | Vectors"]


def compute_token_vectors(
    engine: ArrowEngine, texts: Sequence[TokenizedText], max_tokens: int, output: Output, *, normalize: bool, is_query: bool
) -> TokenVectors:
    """For each text its sparse vector, or the vectors of its tokens, in their order."""
    core = engine.core
    found = core.outputs[output]
    if found.masked is not None:
        max_tokens = min(max_tokens, max(1, MOST_SCORES // found.dimension))
    batches = plan_batches([len(text.token_ids) for text in texts], max_tokens, engine.pool.num_workers)
    running = [
        engine.pool.submit(core.start, pack([texts[i] for i in batch]), normalize=normalize, output=output) for batch in batches
    ]
    skipped = [] if output == "sparse" else skipped_tokens(engine, is_query=is_query)
    vectors: dict[int, Any] = {}
    for batch, starting in zip(batches, running, strict=True):
        rows = starting.result()()
        if found.masked is not None:
            vectors |= {i: nonzero(row) for i, row in zip(batch, rows, strict=True)}
            continue
        ends = np.cumsum([len(texts[i].token_ids) for i in batch])
        for i, part in zip(batch, np.split(rows, ends[:-1]), strict=True):
            ids = texts[i].token_ids
            if output == "sparse":
                vectors[i] = token_weights(ids, part[:, 0], engine.tokenizer.special_ids)
            else:  # BGE-M3 has no use for the vector of the first token
                vectors[i] = part[~np.isin(ids, skipped)] if core.output == output else part[1:]
    return [vectors[i] for i in range(len(texts))]


def as_rows(vectors: SparseVector | Vectors) -> Vectors:
    """Rows of numbers: of a sparse vector, token ids and weights."""
    if not isinstance(vectors, SparseVector):
        return vectors
    return np.stack([vectors.token_ids.astype(np.float32), vectors.weights], axis=1)


def from_rows(rows: Vectors, output: str) -> SparseVector | Vectors:
    """What `as_rows` was given."""
    return SparseVector(rows[:, 0].astype(np.int64), rows[:, 1]) if output == "sparse" else rows


def nonzero(row: Vectors) -> SparseVector:
    places = np.flatnonzero(row)
    return SparseVector(places.astype(np.int64), row[places])


def token_weights(token_ids: Ids, weights: Vectors, special_ids: Sequence[int]) -> SparseVector:
    """The largest weight of each token of a text, special tokens left out."""
    distinct, places = np.unique(token_ids, return_inverse=True)
    largest = np.zeros(len(distinct), np.float32)
    np.maximum.at(largest, places, weights)
    is_kept = (largest > 0) & ~np.isin(distinct, special_ids)
    return SparseVector(distinct[is_kept], largest[is_kept])


def skipped_tokens(engine: ArrowEngine, *, is_query: bool) -> list[int]:
    """Tokens whose vectors a late-interaction model leaves out, usually punctuation in documents."""
    task = "query" if is_query else "document"
    if task not in (engine.embedding.get("skiplist_tasks") or ["document"]):
        return []
    return engine.tokenizer.ids_of(engine.embedding.get("skiplist_words") or [])


def score_of(a: Any, b: Any) -> float:
    return a.dot(b) if isinstance(a, SparseVector) else float((a @ b.T).max(1).sum())


def scores_of(left: Sequence[SparseVector | Vectors], right: Sequence[SparseVector | Vectors]) -> Vectors:
    """Of each text of a list with each of another: dot products, or for several vectors a text MaxSim, which is the sum over
    the first's tokens of the best dot product."""
    scores = [[score_of(a, b) for b in right] for a in left]
    return np.array(scores, np.float32).reshape(len(left), len(right))
