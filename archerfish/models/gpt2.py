"""GPT-2 and StarCoder2: layer norms, and a feed-forward without a gate."""

from __future__ import annotations

from archerfish.errors import UnsupportedModelError
from archerfish.kernels.batches import T
from archerfish.kernels.ops import PagedBatch, Rotary
from archerfish.layers.decoder import LayerNorm, Norm, PlainMLP
from archerfish.layers.weights import Weights
from archerfish.models.config import Config
from archerfish.models.llama import NO_FULL_LAYER, Biases, LlamaModel


class Starcoder2Model(LlamaModel[T]):
    ties_embeddings = True
    full_period = NO_FULL_LAYER
    default_window = 0.0

    def mlp(self, weights: Weights[T]) -> PlainMLP[T]:
        activation = self.config.activation("hidden_act", "gelu_pytorch_tanh")
        return PlainMLP(
            weights, self.width, self.config.integer("intermediate_size"), activation, bias=self.biases().mlp
        )

    def biases(self) -> Biases:
        return Biases(*[self.config.flag("use_bias", default=True) or None] * 3)

    def make_norm(self, weights: Weights[T], name: str, times: float = 1.0) -> Norm[T]:
        eps = self.config.number("norm_epsilon", 1e-5)
        return LayerNorm(self.ops, weights.layer_norm(name, self.width, eps, times=times))


class Gpt2Model(Starcoder2Model[T]):
    """GPT-2 under the names that `store/text_parts.py` gives to its tensors and settings: learned positions."""

    has_fused_qkv = True
    full_period = 0

    def __init__(self, weights: Weights[T], config: Config, max_len: int) -> None:
        if config.flag("scale_attn_by_inverse_layer_idx") or not config.flag("scale_attn_weights", default=True):
            raise UnsupportedModelError("A GPT-2 with scores of another scale (scale_attn_...) is not supported.")
        super().__init__(weights, config, max_len)
        num_positions = config.integer("max_position_embeddings")
        self.positions = weights.scope("model").table("embed_positions.weight", num_positions, self.width)

    def embed(self, table: T, batch: PagedBatch[T]) -> T:
        positions = self.ops.lookup(self.positions, self.ops.tensor(batch.positions))
        return self.ops.add(self.ops.lookup(table, batch.token_ids), positions)

    def rotary(self, layer: int) -> Rotary[T] | None:
        return None

    @classmethod
    def max_positions(cls, config: Config) -> int:
        return config.integer("max_position_embeddings")
