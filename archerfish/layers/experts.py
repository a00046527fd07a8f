"""A mixture of experts as the feed-forward of a decoder block."""

from __future__ import annotations

import math
from typing import Generic, NamedTuple

from archerfish.errors import UnsupportedModelError
from archerfish.kernels.batches import T
from archerfish.kernels.experts import Routing
from archerfish.kernels.ops import Activation, Ops
from archerfish.layers.decoder import GatedMLP
from archerfish.layers.weights import Weights


class ExpertNames(NamedTuple):
    """Of the matrices of each expert in a checkpoint."""

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


UNIT = 16  # hidden units that backends keep together
USUAL_NAMES = ExpertNames()


class MixtureOfExperts(Generic[T]):
    """The experts that a router chooses for each row, and maybe a feed-forward that all rows have.

    A checkpoint has experts.3.gate_proj.weight and so on for each expert, or a stack of all experts' matrices: see
    `Weights.experts`. Ranks divide the hidden units of every expert.
    """

    def __init__(
        self,
        weights: Weights[T],
        width: int,
        hidden: int,
        activation: Activation,
        routing: Routing[T],
        *,
        names: ExpertNames = USUAL_NAMES,
        router: str = "gate",
        shared: GatedMLP[T] | None = None,
        shared_gate: str = "",
        has_biases: bool = False,
    ) -> None:
        """shared_gate: the map to the logit that says how much of `shared` a row has; empty: all of it. has_biases: of
        the router and of the experts."""
        self.ops: Ops[T] = weights.ops
        self.activation: Activation = activation
        self.routing, self.shared = routing, shared
        if width % UNIT or hidden % UNIT:
            raise UnsupportedModelError(
                f"Experts take {width} numbers and have {hidden} hidden units, which are not multiples of {UNIT}.",
                hint="No published mixture of experts has such sizes; docs/add-a-model.md shows how to write your own layer.",
            )
        if not 0 < routing.num_chosen <= routing.num_experts:
            raise UnsupportedModelError(f"A row cannot choose {routing.num_chosen} of {routing.num_experts} experts.")
        experts, logits = weights.scope("experts"), routing.num_experts
        self.router = (
            weights.linear((router, shared_gate), (logits, 1), width, is_plain=True)
            if shared_gate
            else weights.linear(router, logits, width, bias=has_biases or None, is_plain=True)
        )
        unit = math.lcm(UNIT, *(experts.cut_inputs(name, hidden) for name in (names.down, f"0.{names.down}")))
        part = self.ops.ranks.part(hidden, unit, "hidden units of an expert")
        self.gate_up = experts.experts(
            (names.gate, names.up), "gate_up_proj", logits, part, width, has_biases=has_biases
        )
        self.down = experts.experts((names.down,), "down_proj", logits, width, part, has_biases=has_biases)

    def __call__(self, x: T) -> T:
        ops, shared = self.ops, None
        if self.shared is not None:
            shared = ops.linear(ops.gated_linear(x, self.shared.gate_up, self.shared.activation), self.shared.down)
        logits = ops.linear(x, self.router)
        if self.down.is_partial and ops.ranks.index:  # the shared rows are the same on all ranks: the first adds them
            shared = None
        found = ops.experts(x, logits, self.routing, self.gate_up, self.down, self.activation, shared=shared)
        return ops.ranks.add_up(found) if self.down.is_partial else found
