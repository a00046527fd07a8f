"""Functions on embeddings, with the names, arguments and results of `sentence_transformers.util`.

A vector is a tensor, an array or a list of numbers; several vectors are a matrix of them, or a list of vectors. Results
are tensors where torch is installed, else arrays.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from archerfish.errors import InvalidInputError, InvalidOptionError, did_you_mean

Precision = Literal["float32", "int8", "uint8", "binary", "ubinary"]
PRECISIONS = ("float32", "int8", "uint8", "binary", "ubinary")
Matrix = Any  # a tensor, or an array


def is_tensor(given: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(given, torch.Tensor)


def is_vectors(given: Any) -> bool:
    """Whether something is a vector or several, and not texts or token ids."""
    if is_tensor(given):
        return True
    if isinstance(given, np.ndarray | np.generic):
        return given.dtype.kind in "fiu"
    return isinstance(given, float) or (isinstance(given, list | tuple) and bool(given) and is_vectors(given[0]))


def as_matrix(vectors: Any) -> Matrix:
    """Vectors as a matrix of floats; a single vector is a matrix of one row."""
    try:
        if importlib.util.find_spec("torch"):
            import torch

            if isinstance(vectors, list | tuple) and vectors and isinstance(vectors[0], torch.Tensor | np.ndarray):
                vectors = torch.stack([torch.as_tensor(vector) for vector in vectors])
            found: Matrix = torch.as_tensor(vectors)
            found = found if found.is_floating_point() else found.float()
        else:
            found = np.asarray(vectors)
            found = found if found.dtype.kind == "f" else found.astype(np.float32)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidInputError(
            f"Expected vectors of numbers: {error}.", hint="encode() makes vectors of texts."
        ) from None
    return found if found.ndim > 1 else found.reshape(1, -1)


def as_array(vectors: Any) -> npt.NDArray[np.float32]:
    found = as_matrix(vectors)
    return np.asarray(found.detach().float().cpu().numpy() if is_tensor(found) else found, dtype=np.float32)


def normalize_embeddings(embeddings: Any) -> Matrix:
    """Vectors of length 1."""
    found = as_matrix(embeddings)
    if is_tensor(found):
        return sys.modules["torch"].nn.functional.normalize(found, dim=1)
    return found / np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1e-12)


def cos_sim(a: Any, b: Any) -> Matrix:
    """Cosine of each vector of a with each of b, (len(a), len(b))."""
    return dot_score(normalize_embeddings(a), normalize_embeddings(b))


pytorch_cos_sim = cos_sim


def dot_score(a: Any, b: Any) -> Matrix:
    left, right = as_matrix(a), as_matrix(b)
    return left @ (right.to(left) if is_tensor(left) else right).T


def distances(a: Any, b: Any, order: int) -> Matrix:
    left, right = as_matrix(a), as_matrix(b)
    if is_tensor(left):
        return sys.modules["torch"].cdist(left, right, p=float(order))
    rows = [np.linalg.norm(right - row, ord=order, axis=1) for row in left]
    return np.array(rows, dtype=left.dtype).reshape(len(left), len(right))


def euclidean_sim(a: Any, b: Any) -> Matrix:
    """Negative distances: greater is more similar."""
    return -distances(a, b, 2)


def manhattan_sim(a: Any, b: Any) -> Matrix:
    """Negative sums of differences: greater is more similar."""
    return -distances(a, b, 1)


def pairwise_cos_sim(a: Any, b: Any) -> Matrix:
    """Cosine of each vector of a with the vector of b in the same place."""
    return pairwise_dot_score(normalize_embeddings(a), normalize_embeddings(b))


def pairwise_dot_score(a: Any, b: Any) -> Matrix:
    return (as_matrix(a) * as_matrix(b)).sum(-1)


def pairwise_euclidean_sim(a: Any, b: Any) -> Matrix:
    return -(((as_matrix(a) - as_matrix(b)) ** 2).sum(-1) ** 0.5)


def pairwise_manhattan_sim(a: Any, b: Any) -> Matrix:
    return -abs(as_matrix(a) - as_matrix(b)).sum(-1)


Score = Callable[[Any, Any], Matrix]
# By the `similarity_fn_name` of a model: of all pairs, and of vectors in the same place.
SIMILARITIES: dict[str, tuple[Score, Score]] = {
    "cosine": (cos_sim, pairwise_cos_sim),
    "dot": (dot_score, pairwise_dot_score),
    "euclidean": (euclidean_sim, pairwise_euclidean_sim),
    "manhattan": (manhattan_sim, pairwise_manhattan_sim),
}


def similarities(name: str) -> tuple[Score, Score]:
    if name not in SIMILARITIES:
        raise InvalidOptionError(f"There is no similarity {name!r}.", hint=did_you_mean(name, SIMILARITIES))
    return SIMILARITIES[name]


def semantic_search(
    query_embeddings: Any,
    corpus_embeddings: Any,
    query_chunk_size: int = 100,
    corpus_chunk_size: int = 500_000,
    top_k: int = 10,
    score_function: Score = cos_sim,
) -> list[list[dict[str, int | float]]]:
    """For each query the best vectors of a corpus, best first: their places (corpus_id) and scores."""
    queries, corpus = as_matrix(query_embeddings), as_matrix(corpus_embeddings)
    results: list[list[dict[str, int | float]]] = []
    for first in range(0, len(queries), query_chunk_size):
        rows = queries[first : first + query_chunk_size]
        rows = rows.to(corpus.device) if is_tensor(corpus) else rows
        best: list[list[tuple[float, int]]] = [[] for _ in rows]
        for start in range(0, len(corpus), corpus_chunk_size):
            scores = score_function(rows, corpus[start : start + corpus_chunk_size])
            for row, (values, places) in enumerate(highest(scores, top_k)):
                best[row] += [(value, -start - place) for value, place in zip(values, places, strict=True)]
        ordered = [sorted(row, reverse=True)[:top_k] for row in best]
        results += [[{"corpus_id": -place, "score": value} for value, place in row] for row in ordered]
    return results


def highest(scores: Matrix, count: int) -> list[tuple[list[float], list[int]]]:
    """The highest scores of each row, the highest first, and their places."""
    count = min(count, scores.shape[1])
    if is_tensor(scores):
        values, places = scores.topk(count)
    else:
        places = np.argsort(-scores, axis=1, kind="stable")[:, :count]
        values = np.take_along_axis(scores, places, axis=1)
    return list(zip(values.tolist(), places.tolist(), strict=True))


def quantize_embeddings(
    embeddings: Any, precision: Precision, ranges: Any = None, calibration_embeddings: Any = None
) -> npt.NDArray[Any]:
    """Vectors as int8 or uint8 numbers, or as bits: eight to a number, uint8 (ubinary) or int8 (binary).

    int8 and uint8 spread 256 steps over the range of each dimension: `ranges`, a matrix of lowest and highest values,
    else those of the calibration embeddings, else those of the vectors themselves.
    """
    if precision not in PRECISIONS:
        raise InvalidOptionError(f"There is no precision {precision!r}.", hint=f"Known: {', '.join(PRECISIONS)}.")
    if str(getattr(embeddings, "dtype", "")).removeprefix("torch.") in ("int8", "uint8"):
        raise InvalidInputError("These vectors are quantised already.", hint="Give the float32 vectors.")
    if np.ndim(embeddings) == 1:
        found: npt.NDArray[Any] = quantize_embeddings(as_matrix(embeddings), precision, ranges, calibration_embeddings)[
            0
        ]
        return found
    vectors = as_array(embeddings)
    if precision == "float32" or not len(vectors):
        return vectors
    if precision.endswith("binary"):
        bits = np.packbits(vectors > 0, axis=-1)
        return bits if precision == "ubinary" else (bits.astype(np.int16) - 128).astype(np.int8)
    if ranges is None:
        known = vectors if calibration_embeddings is None else as_array(calibration_embeddings)
        if len(known) < 2:
            hint = "Give more vectors, or ranges or calibration_embeddings to quantize_embeddings()."
            raise InvalidInputError(f"{precision} needs the range of each dimension: one vector has none.", hint=hint)
        ranges = np.stack([known.min(0), known.max(0)])
    lowest, highest = np.asarray(ranges, np.float32)
    steps = (highest - lowest) / np.float32(255)
    levels: npt.NDArray[Any] = np.clip(np.floor((vectors - lowest) / np.where(steps == 0, 1, steps)), 0, 255)
    return levels.astype(np.uint8) if precision == "uint8" else (levels - 128).astype(np.int8)
