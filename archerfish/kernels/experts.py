"""Mixtures of experts: how a row chooses some of many feed-forwards, which `Ops.experts` computes."""

from __future__ import annotations

from typing import Generic, NamedTuple

from archerfish.kernels.batches import T


class Routing(NamedTuple, Generic[T]):
    """How the experts of a row, and their weights, follow from its logits, which begin with one for each expert."""

    num_experts: int
    num_chosen: int
    is_sigmoid: bool = False  # scores are sigmoids of the logits; else their softmax over all experts
    is_normed: bool = False  # the weights of a row's experts are divided by their sum
    scale: float = 1.0  # of the weights
    bias: T | None = None  # added to scores in the choice, not in the weights
