"""Vectors that are not one row of numbers for each text: sparse ones, and several for a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from archerfish.engine.text_batches import pack, plan_batches
from archerfish.errors import InvalidInputError
from archerfish.kernels.batches import Ids
from archerfish.text.tokenizer import TokenizedText
from archerfish.util import Precision, as_array, as_matrix, similarities

if TYPE_CHECKING:
    from archerfish.engine.arrow_engine import ArrowEngine
    from archerfish.engine.inference_core import Output, Vectors

DOCUMENT_PROMPTS = ("document", "passage", "corpus")  # names, of which models have one
TASKS = {"query": "query", **dict.fromkeys(DOCUMENT_PROMPTS, "document")}  # by themselves and by names of prompts
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
    engine: ArrowEngine,
    texts: Sequence[TokenizedText],
    max_tokens: int,
    output: Output,
    *,
    normalize: bool,
    is_query: bool,
) -> TokenVectors:
    """For each text its sparse vector, or the vectors of its tokens, in their order."""
    core = engine.core
    found = core.outputs[output]
    if found.masked is not None:
        max_tokens = min(max_tokens, max(1, MOST_SCORES // found.dimension))
    groups: dict[int | None, list[int]] = {}
    for i, text in enumerate(texts):
        groups.setdefault(text.num_attended, []).append(i)
    batches = [
        [group[i] for i in batch]
        for group in groups.values()
        for batch in plan_batches([len(texts[i].token_ids) for i in group], max_tokens, engine.pool.num_workers)
    ]
    running = [
        engine.pool.submit(core.start, pack([texts[i] for i in batch]), normalize=normalize, output=output)
        for batch in batches
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


def shown_as(
    vectors: TokenVectors, *, as_tensors: bool, truncate_dim: int | None = None, precision: Precision = "float32"
) -> list[Any]:
    """Vectors of tokens as the caller of `encode` wants them."""
    if truncate_dim is not None or precision not in ("float32", None):
        raise InvalidInputError("truncate_dim and precision are for models that give one vector a text.")
    if not as_tensors:
        return vectors
    import torch

    return [each if isinstance(each, SparseVector) else torch.from_numpy(each) for each in vectors]


def document_prompt(prompts: Mapping[str, str]) -> str:
    """The name of a model's prompt for documents."""
    return next((name for name in DOCUMENT_PROMPTS if prompts.get(name)), DOCUMENT_PROMPTS[0])


def most_tokens(engine: ArrowEngine, task: str | None) -> int | None:
    """Where the model's files say that queries and documents are cut; None where they do not."""
    stated, kind = engine.embedding, TASKS.get(task or "")
    expansion = stated.get("query_expansion") if kind == "query" else None
    most: int | None = stated.get(f"{kind}_length")
    if expansion is not None:
        is_fixed, length = expansion["strategy"] == "fixed", int(expansion["length"])
        most = length if is_fixed else most and max(most, length)
    return most


def check_expansion(engine: ArrowEngine) -> None:
    """Refuse a model without the token of its query expansion when it is loaded, not at the first query."""
    if engine.embedding.get("query_expansion") is not None:
        expand_queries(engine, [], "query")


def expand_queries(engine: ArrowEngine, texts: list[TokenizedText], task: str | None) -> list[TokenizedText]:
    """Queries with expansion tokens appended up to a length, where the model's files ask for them."""
    expansion = engine.embedding.get("query_expansion") if TASKS.get(task or "") == "query" else None
    if expansion is None:
        return texts
    token_id = engine.tokenizer.expansion_token_id(expansion.get("token"))

    def expand(text: TokenizedText) -> TokenizedText:
        num = len(text.token_ids)
        if num >= expansion["length"]:
            return text
        ids = np.pad(text.token_ids, (0, expansion["length"] - num), constant_values=token_id)
        return text._replace(token_ids=ids, num_attended=None if expansion.get("attend") else num)

    return [expand(text) for text in texts]


def skipped_tokens(engine: ArrowEngine, *, is_query: bool) -> list[int]:
    """Tokens whose vectors a late-interaction model leaves out, usually punctuation in documents."""
    task = "query" if is_query else "document"
    if task not in (engine.embedding.get("skiplist_tasks") or ["document"]):
        return []
    return engine.tokenizer.ids_of(engine.embedding.get("skiplist_words") or [])


def texts_of(vectors: Any, output: Output) -> list[Any] | None:
    """An item for each text, of sparse vectors or vectors of tokens; None if they are dense ones."""
    num_dims = getattr(vectors, "ndim", 0)
    if isinstance(vectors, SparseVector) or (output == "multi_vector" and num_dims == 2):
        return [vectors]
    if num_dims == 3:
        return [rows[rows.any(1)] for rows in as_array(vectors)]  # without padding
    if not isinstance(vectors, list | tuple) or not vectors or isinstance(vectors[0], str):
        return None
    return list(vectors) if isinstance(vectors[0], SparseVector) or np.ndim(vectors[0]) == 2 else None


def compare(engine: ArrowEngine, a: Any, b: Any, *, is_pairwise: bool = False) -> Any:
    """Similarity of vectors that `encode` gave, of any kind: of each of a with each of b, or with that in the same
    place."""
    left, right = (texts_of(each, engine.core.output) for each in (a, b))
    how = engine.similarity_fn_name
    if left is None or right is None:
        return similarities(how)[is_pairwise](a, b)
    if not is_pairwise:
        return as_matrix(scores_of(left, right, how))
    if len(left) != len(right):
        raise InvalidInputError(
            f"similarity_pairwise() compares vectors in the same place: {len(left)} and {len(right)}."
        )
    return as_matrix([[scores_of([x], [y], how)[0, 0] for x, y in zip(left, right, strict=True)]])[0]


def score_of(a: Any, b: Any, *, is_mean: bool) -> float:
    if isinstance(a, SparseVector):
        return a.dot(b)
    if not len(a) or not len(b):
        return 0.0
    best = (a @ b.T).max(1)
    return float(best.mean() if is_mean else best.sum())


def scores_of(left: Sequence[Any], right: Sequence[Any], similarity_fn_name: str | None = None) -> Vectors:
    """Of each text of a list with each of another: dot products of sparse vectors, or for several vectors a text
    MaxSim, which is the sum (`meanmaxsim`: the mean) over the first's tokens of the best dot product."""
    first, second = (
        [each if isinstance(each, SparseVector | np.ndarray) else as_array(each) for each in given]
        for given in (left, right)
    )
    scores = [[score_of(a, b, is_mean=similarity_fn_name == "meanmaxsim") for b in second] for a in first]
    return np.array(scores, np.float32).reshape(len(left), len(right))
