"""What quantising costs: the original and the result, computed side by side over text that no calibration has seen."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from archerfish.engine.streamed_model import StreamedModel, Unread
from archerfish.kernels.batches import Ids
from archerfish.kernels.stored import Floats
from archerfish.kernels.torch.reference import Tensor
from archerfish.types import Progress

LOGIT_ROWS = 256  # at a time
ERROR_ROWS = 1024  # tokens from all over the texts that suffice to tell the error of a product

Quality = dict[str, Any]


def measure(
    model: StreamedModel, written: Mapping[str, Callable[[], Floats]], texts: Sequence[Ids], progress: Progress
) -> Quality:
    """The figures of a result. written: reads each quantised matrix as engines will find it."""
    errors: dict[str, float] = {}
    done = 0

    def stacked(parts: Sequence[Unread], like: Tensor) -> Tensor | None:
        if any(part.name not in written for part in parts):
            return None
        return torch.from_numpy(np.concatenate([written[part.name]() for part in parts])).to(like)

    def compare(parts: Sequence[Unread], x: Tensor, matrix: Tensor) -> Tensor:
        progress(len(errors), 2 * len(written), "measuring the original")
        other, first = stacked(parts, matrix), 0
        if other is not None:
            x = x[:: -(-len(x) // ERROR_ROWS)]
            for part in parts:
                rows = slice(first, first := first + part.shape[0])
                right = x @ matrix[rows].T
                errors[part.name] = float((x @ other[rows].T - right).norm() / right.norm().clamp_min(1e-12))
        return matrix

    def replaced(parts: Sequence[Unread], x: Tensor, matrix: Tensor) -> Tensor:
        nonlocal done
        done += len(parts)
        progress(len(written) + min(done, len(written)), 2 * len(written), "measuring the result")
        found = stacked(parts, matrix)
        return matrix if found is None else found

    texts = sorted(texts, key=len)
    before, after = model.hidden(texts, compare), model.hidden(texts, replaced)
    figures: Quality = {"num_texts": len(texts), "num_tokens": sum(map(len, texts))}
    figures |= (
        compare_vectors(model, before, after, texts)
        if model.is_encoder
        else compare_logits(model, before, after, texts)
    )
    return figures | {"layers": layer_errors(errors)}


def compare_logits(model: StreamedModel, before: Tensor, after: Tensor, texts: Sequence[Ids]) -> Quality:
    """Perplexities, the divergence of the result from the original in nats a token, and how often both choose one
    token."""
    targets = np.concatenate([np.append(text[1:], -1) for text in texts])
    rows = np.flatnonzero(targets >= 0)
    sums = np.zeros(4)
    for piece in np.array_split(rows, -(-len(rows) // LOGIT_ROWS)):
        tokens = torch.from_numpy(targets[piece]).to(before.device)[:, None]
        right, found = (model.logits(hidden[piece]).log_softmax(1) for hidden in (before, after))
        divergence = (right.exp() * (right - found)).sum()
        same = (right.argmax(1) == found.argmax(1)).sum()
        losses = [-each.gather(1, tokens).sum() for each in (right, found)]
        sums += [float(each) for each in (*losses, divergence, same)]
    original, result, divergence, agreement = (sums / len(rows)).tolist()
    return {
        "perplexity": math.exp(original),
        "perplexity_quantised": math.exp(result),
        "perplexity_change": math.expm1(result - original),
        "kl_divergence": divergence,
        "top1_agreement": agreement,
    }


def compare_vectors(model: StreamedModel, before: Tensor, after: Tensor, texts: Sequence[Ids]) -> Quality:
    """Cosines of the vectors of each text, and the rank correlation of the similarities of all pairs."""
    right, found = (model.vectors(hidden, texts) for hidden in (before, after))
    cosines = (right * found).sum(1)
    pairs = np.triu_indices(len(texts), 1)
    ranks = np.stack([np.argsort(np.argsort((each @ each.T).cpu().numpy()[pairs])) for each in (right, found)])
    ranks = ranks - ranks.mean(1, keepdims=True)
    correlation = float(np.prod(ranks, 0).sum() / max(1.0, np.square(ranks[0]).sum()))  # both have the same spread
    return {"cosine_mean": float(cosines.mean()), "cosine_least": float(cosines.min()), "rank_correlation": correlation}


def layer_errors(errors: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Relative errors of products with the original's inputs, by layer and matrix."""
    layers: dict[str, dict[str, float]] = defaultdict(dict)
    for name, error in errors.items():
        layer = re.match(r".*?\.\d+\.", f".{name}")
        split = layer.end() - 1 if layer else 0
        layers[name[:split].rstrip(".") or "head"][name[split:].removesuffix(".weight")] = round(error, 5)
    return dict(layers)
