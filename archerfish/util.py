"""Functions on embeddings, with the names, arguments and results of `sentence_transformers.util`.

A vector is a tensor, an array or a list of numbers; several vectors are a matrix of them, or a list of vectors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from archerfish.errors import InvalidInputError, InvalidOptionError, did_you_mean

Precision = Literal["float32", "int8", "uint8", "binary", "ubinary"]
PRECISIONS = ("float32", "int8", "uint8", "binary", "ubinary")


def is_vectors(given: Any) -> bool:
    """Whether something is a vector or several, and not texts or token ids."""
    if isinstance(given, torch.Tensor):
        return True
    if isinstance(given, np.ndarray | np.generic):
        return given.dtype.kind in "fiu"
    return isinstance(given, float) or (isinstance(given, list | tuple) and bool(given) and is_vectors(given[0]))


def as_matrix(vectors: Any) -> torch.Tensor:
    """Vectors as a matrix of floats; a single vector is a matrix of one row."""
    if isinstance(vectors, list | tuple) and vectors and isinstance(vectors[0], torch.Tensor | np.ndarray):
        vectors = torch.stack([torch.as_tensor(vector) for vector in vectors])
    try:
        found = torch.as_tensor(vectors)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidInputError(f"Expected vectors of numbers: {error}.", hint="encode() makes vectors of texts.") from None
    found = found if found.is_floating_point() else found.float()
    return found if found.ndim > 1 else found.reshape(1, -1)


def normalize_embeddings(embeddings: Any) -> torch.Tensor:
    """Vectors of length 1."""
    return torch.nn.functional.normalize(as_matrix(embeddings), dim=1)


def cos_sim(a: Any, b: Any) -> torch.Tensor:
    """Cosine of each vector of a with each of b, (len(a), len(b))."""
    return dot_score(normalize_embeddings(a), normalize_embeddings(b))


pytorch_cos_sim = cos_sim


def dot_score(a: Any, b: Any) -> torch.Tensor:
    left, right = as_matrix(a), as_matrix(b)
    return left @ right.to(left).T


def euclidean_sim(a: Any, b: Any) -> torch.Tensor:
    """Negative distances: greater is more similar."""
    return -torch.cdist(as_matrix(a), as_matrix(b), p=2.0)


def manhattan_sim(a: Any, b: Any) -> torch.Tensor:
    """Negative sums of differences: greater is more similar."""
    return -torch.cdist(as_matrix(a), as_matrix(b), p=1.0)


def pairwise_cos_sim(a: Any, b: Any) -> torch.Tensor:
    """Cosine of each vector of a with the vector of b in the same place."""
    return pairwise_dot_score(normalize_embeddings(a), normalize_embeddings(b))


def pairwise_dot_score(a: Any, b: Any) -> torch.Tensor:
    return (as_matrix(a) * as_matrix(b)).sum(-1)


def pairwise_euclidean_sim(a: Any, b: Any) -> torch.Tensor:
    return -(as_matrix(a) - as_matrix(b)).square().sum(-1).sqrt()


def pairwise_manhattan_sim(a: Any, b: Any) -> torch.Tensor:
    return -(as_matrix(a) - as_matrix(b)).abs().sum(-1)


Score = Callable[[Any, Any], torch.Tensor]
# By the `similarity_fn_name` of a model: of all pairs, and of vectors in the same place.
SIMILARITIES: dict[str, tuple[Score, Score]] = {
    "cosine": (cos_sim, pairwise_cos_sim), "dot": (dot_score, pairwise_dot_score),
    "euclidean": (euclidean_sim, pairwise_euclidean_sim), "manhattan": (manhattan_sim, pairwise_manhattan_sim),
}  # fmt: skip


def similarities(name: str) -> tuple[Score, Score]:
    if name not in SIMILARITIES:
        raise InvalidOptionError(f"There is no similarity {name!r}.", hint=did_you_mean(name, SIMILARITIES))
    return SIMILARITIES[name]


def semantic_search(
    query_embeddings: Any, corpus_embeddings: Any, query_chunk_size: int = 100, corpus_chunk_size: int = 500_000,
    top_k: int = 10, score_function: Score = cos_sim,
) -> list[list[dict[str, int | float]]]:
    """For each query the best vectors of a corpus, best first: their places (corpus_id) and scores."""
    queries, corpus = as_matrix(query_embeddings), as_matrix(corpus_embeddings)
    results: list[list[dict[str, int | float]]] = []
    for first in range(0, len(queries), query_chunk_size):
        rows = queries[first : first + query_chunk_size].to(corpus.device)
        scores, ids = corpus.new_empty(len(rows), 0), torch.empty(len(rows), 0, dtype=torch.int64, device=corpus.device)
        for start in range(0, len(corpus), corpus_chunk_size):
            new = score_function(rows, corpus[start : start + corpus_chunk_size])
            places = torch.arange(start, start + new.shape[1], device=corpus.device).expand(len(rows), -1)
            scores, ids = torch.cat([scores, new], 1), torch.cat([ids, places], 1)
            scores, best = scores.topk(min(top_k, scores.shape[1]))
            ids = ids.gather(1, best)
        found = zip(ids.tolist(), scores.tolist(), strict=True)
        results += [[{"corpus_id": i, "score": s} for i, s in zip(*row, strict=True)] for row in found]
    return results


def quantize_embeddings(
    embeddings: Any, precision: Precision, ranges: Any = None, calibration_embeddings: Any = None
) -> npt.NDArray[Any]:
    """Vectors as int8 or uint8 numbers, or as bits: eight to a number, uint8 (ubinary) or int8 (binary).

    int8 and uint8 spread 256 steps over the range of each dimension: `ranges`, a matrix of lowest and highest values, else
    those of the calibration embeddings, else those of the vectors themselves.
    """
    if precision not in PRECISIONS:
        raise InvalidOptionError(f"There is no precision {precision!r}.", hint=f"Known: {', '.join(PRECISIONS)}.")
    if getattr(embeddings, "dtype", None) in (torch.int8, torch.uint8, np.int8, np.uint8):
        raise InvalidInputError("These vectors are quantised already.", hint="Give the float32 vectors.")
    if np.ndim(embeddings) == 1:
        found: npt.NDArray[Any] = quantize_embeddings(as_matrix(embeddings), precision, ranges, calibration_embeddings)[0]
        return found
    vectors = as_matrix(embeddings).float().cpu().numpy()
    if precision == "float32" or not len(vectors):
        return vectors
    if precision.endswith("binary"):
        bits = np.packbits(vectors > 0, axis=-1)
        return bits if precision == "ubinary" else (bits.astype(np.int16) - 128).astype(np.int8)
    if ranges is None:
        known = vectors if calibration_embeddings is None else as_matrix(calibration_embeddings).float().cpu().numpy()
        if len(known) < 2:
            hint = "Give more vectors, or ranges or calibration_embeddings to quantize_embeddings()."
            raise InvalidInputError(f"{precision} needs the range of each dimension: one vector has none.", hint=hint)
        ranges = np.stack([known.min(0), known.max(0)])
    lowest, highest = np.asarray(ranges, np.float32)
    steps = (highest - lowest) / np.float32(255)
    levels: npt.NDArray[Any] = np.clip(np.floor((vectors - lowest) / np.where(steps == 0, 1, steps)), 0, 255)
    return levels.astype(np.uint8) if precision == "uint8" else (levels - 128).astype(np.int8)
