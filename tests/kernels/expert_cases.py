"""Mixtures of experts as a loop over rows and experts, and what the backends are given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from archerfish.kernels.experts import Routing
from archerfish.kernels.formats import PLAIN, WeightFormat
from archerfish.kernels.ops import LinearWeight
from archerfish.kernels.stored import StoredTensor
from archerfish.kernels.torch.activations import ACTIVATIONS

Tensor = torch.Tensor
ROUTINGS: dict[str, Routing[Any]] = {
    "softmax": Routing(8, 3),
    "normed": Routing(5, 2, is_normed=True, scale=1.5),
    "one": Routing(4, 1),
    "every": Routing(3, 3),
    "sigmoid": Routing(8, 2, is_sigmoid=True, is_normed=True, scale=2.0, bias=torch.linspace(0.0, 0.9, 8).flip(0)),
}
LOGITS: dict[str, Callable[[Tensor], Tensor]] = {  # how they become others
    "random": lambda logits: logits,
    "on one expert": lambda logits: logits + 100 * torch.eye(logits.shape[1])[2],
    "some experts empty": lambda logits: logits - 100 * (torch.arange(logits.shape[1]) % 2),
}


def expected(
    x: Tensor,
    logits: Tensor,
    routing: Routing[Any],
    gate_up: Tensor,
    down: Tensor,
    shared: Tensor | None = None,
    *,
    biases: Sequence[Tensor] = (),
) -> Tensor:
    """Row by row, expert by expert. biases: of gate_up and down, for the gates of gpt-oss."""
    rows = []
    for i, row in enumerate(x):
        given = logits[i, : routing.num_experts]
        scores = torch.sigmoid(given) if routing.is_sigmoid else torch.exp(given - given.max())
        if not routing.is_sigmoid:
            scores = scores / scores.sum()
        compared = scores if routing.bias is None else scores + routing.bias
        chosen = sorted(range(routing.num_experts), key=lambda e: -float(compared[e]))[: routing.num_chosen]
        factor = routing.scale / (sum(float(scores[e]) for e in chosen) if routing.is_normed else 1.0)
        total = torch.zeros(x.shape[1])
        for e in chosen:
            gate, up = (gate_up[e] @ row + (biases[0][e] if biases else 0.0)).chunk(2)
            hidden = ACTIVATIONS["silu"](gate) * up
            if biases:
                gate, up = gate.clamp(max=7), up.clamp(-7, 7)
                hidden = (up + 1) * gate * torch.sigmoid(1.702 * gate)
            total += factor * scores[e] * (down[e] @ hidden + (biases[1][e] if biases else 0.0))
        if shared is not None:
            total += shared[i] * (torch.sigmoid(logits[i, -1]) if logits.shape[1] > routing.num_experts else 1.0)
        rows.append(total)
    return torch.stack(rows) if rows else torch.zeros_like(x)


def make(
    routing: Routing[Any], num_rows: int, *, has_gate: bool = False, width: int = 96, hidden: int = 48
) -> tuple[Tensor, ...]:
    """Rows, logits, weights of both products, shared rows."""
    num = routing.num_experts
    return (
        torch.randn(num_rows, width),
        torch.randn(num_rows, num + has_gate),
        torch.randn(num, 2 * hidden, width) / 6,
        torch.randn(num, width, hidden) / 4,
        torch.randn(num_rows, width),
    )


def packed(ops: Any, matrices: Tensor, weight_format: WeightFormat = PLAIN) -> LinearWeight[Any]:
    """As one stack, or as a tensor for each expert."""
    parts = [matrices.flatten(0, 1)] if len(matrices) % 2 else list(matrices)
    return ops.linear_weight(parts, [None] * len(parts), weight_format)  # type: ignore[no-any-return]


def run(
    ops: Any, routing: Routing[Any], x: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor, **options: Any
) -> Tensor:
    weight_format = options.pop("weight_format", PLAIN)
    first, second = packed(ops, gate_up, weight_format), packed(ops, down, weight_format)
    return ops.experts(x, logits, routing, first, second, "silu", **options)  # type: ignore[no-any-return]


def as_matrices(ops: Any, stored: list[StoredTensor], weight_format: WeightFormat = PLAIN) -> LinearWeight[Any]:
    return ops.linear_weight(stored, [None] * len(stored), weight_format)  # type: ignore[no-any-return]


def rounded(weight_format: WeightFormat, matrices: Tensor) -> Tensor:
    """The numbers of a format that are meant."""
    made = weight_format.load(matrices.flatten(0, 1))
    return weight_format.dequantise(made, torch.float32).view(matrices.shape)


def check_biases(ops: Any, num_rows: int) -> None:
    """Biases of each expert, and gates and others that are clamped. Matrices are one stack, and a tensor for each
    expert."""
    routing = ROUTINGS["normed"]
    x, logits, gate_up, down, _ = make(routing, num_rows)
    biases = 5 * torch.randn(gate_up.shape[:2]), torch.randn(down.shape[:2])
    first = ops.linear_weight([gate_up.flatten(0, 1)], [biases[0].flatten()])
    second = ops.linear_weight(list(down), list(biases[1]))
    given = [ops.tensor(each.numpy()) for each in (x, logits)]
    found = ops.experts(*given, routing, first, second, "swiglu_oai").cpu()
    torch.testing.assert_close(found, expected(x, logits, routing, gate_up, down, biases=biases), atol=1e-3, rtol=1e-3)
