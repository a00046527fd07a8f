"""Gemma 2: norms before and after attention and feed-forward, every other layer windowed, scores and logits capped."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from archerfish.errors import UnsupportedModelError
from archerfish.kernels.ops import HeadShape, T
from archerfish.layers.decoder import BlockNorms, GatedMLP
from archerfish.layers.weights import Weights
from archerfish.models.config import Config
from archerfish.models.llama import LlamaModel


class Gemma2Model(LlamaModel[T]):
    ties_embeddings = True
    norm_plus = 1.0
    score_cap: ClassVar[float] = 50.0  # these three where the configuration does not say
    logit_cap: ClassVar[float] = 30.0
    full_period: ClassVar[int] = 2  # every so many layers one sees everything

    def __init__(self, weights: Weights[T], config: Config, max_len: int) -> None:
        if config.flag("use_bidirectional_attention"):
            raise UnsupportedModelError("A Gemma that sees both directions (use_bidirectional_attention) cannot generate.")
        super().__init__(weights, config, max_len)

    def embed(self, token_ids: T) -> T:
        return self.ops.lookup(self.embedding, token_ids, scale=self.width**0.5)

    def logits(self, hidden: T) -> T:
        return self.ops.logits(hidden, self.head, softcap=self.config.limit("final_logit_softcapping", self.logit_cap))

    def mlp(self, weights: Weights[T]) -> Callable[[T], T]:
        activation = self.config.activation("hidden_activation", "gelu_pytorch_tanh")
        return GatedMLP(weights, self.width, self.config.integer("intermediate_size"), activation)

    def norms(self, weights: Weights[T]) -> BlockNorms[T]:
        return BlockNorms(
            before_attention=self.rms_norm(weights, "input_layernorm"),
            before_mlp=self.rms_norm(weights, "pre_feedforward_layernorm"),
            after_attention=self.rms_norm(weights, "post_attention_layernorm"),
            after_mlp=self.rms_norm(weights, "post_feedforward_layernorm"),
        )

    def heads(self, layer: int) -> HeadShape:
        return self.config.heads(
            window=self.window(layer), softcap=self.config.limit("attn_logit_softcapping", self.score_cap),
            scale=self.config.number("query_pre_attn_scalar", 256) ** -0.5,
        )

    def window(self, layer: int) -> int:
        is_sliding = self.layer_type(self.config, layer) == "sliding_attention"
        return int(self.config.limit("sliding_window", 4096)) if is_sliding else 0

    @classmethod
    def layer_type(cls, config: Config, layer: int) -> str:
        return config.layer_types(cls.full_period)[layer]
