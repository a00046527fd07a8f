"""A model's config.json, read with clear errors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from archerfish.errors import UnsupportedModelError
from archerfish.kernels.ops import Activation, HeadShape
from archerfish.layers.encoder import BlockShape
from archerfish.sizes import check_number, check_size, shown

ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
}


@dataclass(frozen=True)
class Config:
    """The values of a config.json. Where null may stand for a missing value, it does."""

    values: Mapping[str, Any]

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.values.get(name)
        return check_size(name, default if value is None else value)

    def number(self, name: str, default: float) -> float:
        value = self.values.get(name)
        return check_number(name, default if value is None else value)

    def limit(self, name: str, default: float = 0.0) -> float:
        """A number that null turns off (0 then), such as a window or a cap; the default where it is missing."""
        return 0.0 if self.values.get(name, default) is None else self.number(name, default)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.values.get(name)
        return default if value is None else bool(value)

    def activation(self, name: str, default: str = "gelu") -> Activation:
        value = self.values.get(name) or default
        if not isinstance(value, str) or value not in ACTIVATIONS:
            raise UnsupportedModelError(f"Unknown activation {shown(value)} in the model's configuration ({name}).")
        return ACTIVATIONS[value]

    @property
    def model_type(self) -> str:
        return str(self.values.get("model_type", ""))

    @property
    def is_classifier(self) -> bool:
        names = self.values.get("architectures") or []
        return bool(self.score_token_ids) or any("ForSequenceClassification" in str(name) for name in names)

    @property
    def score_token_ids(self) -> list[int]:
        """Of a decoder that ranks: the tokens whose logits make its score, "yes" and maybe "no"."""
        return list(self.values.get("score_token_ids") or [])

    @property
    def num_labels(self) -> int:
        if self.score_token_ids:
            return 1
        labels = self.values.get("id2label")
        return len(labels) if isinstance(labels, dict) and labels else self.integer("num_labels", 2)

    @property
    def is_causal(self) -> bool:
        """Whether a token of a decoder sees none after it, as generating needs."""
        return self.flag("is_causal", True) and not self.flag("use_bidirectional_attention")

    def block_shape(self, width: str, heads: str, feed_forward: str, activation: str) -> BlockShape:
        """Shape of an encoder's block, from the values of these names."""
        shape = BlockShape(
            self.integer(width),
            self.integer(heads),
            self.integer(feed_forward),
            self.activation(activation),
            self.number("layer_norm_eps", 1e-12),
        )
        if shape.width % shape.num_heads:
            raise UnsupportedModelError(f"A width of {shape.width} does not divide into {shape.num_heads} heads.")
        return shape

    def heads(self, *, window: int = 0, softcap: float = 0.0, scale: float | None = None) -> HeadShape:
        """Heads of a decoder's attention; the scale is head_dim ** -0.5 unless given."""
        width, num_heads = self.integer("hidden_size"), self.integer("num_attention_heads")
        num_kv_heads = self.integer("num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise UnsupportedModelError(f"{num_heads} attention heads cannot share {num_kv_heads} key-value heads.")
        head_dim = self.integer("head_dim", width // num_heads)
        scale = head_dim**-0.5 if scale is None else scale
        return HeadShape(num_heads, num_kv_heads, head_dim, scale, window, softcap, self.is_causal)

    def layer_types(self, default_period: int = 0) -> list[str]:
        """sliding_attention or full_attention of each layer; unstated: every default_period-th is full, or all with
        0."""
        num_layers = self.integer("num_hidden_layers")
        stated = self.values.get("layer_types")
        if stated is None:
            period = self.integer("sliding_window_pattern", default_period) if default_period else 0
            is_full = [period == 0 or (i + 1) % period == 0 for i in range(num_layers)]
            return ["full_attention" if full else "sliding_attention" for full in is_full]
        kinds = ("full_attention", "sliding_attention")
        if not isinstance(stated, list) or len(stated) != num_layers or any(kind not in kinds for kind in stated):
            raise UnsupportedModelError(
                f"The model's configuration has layer_types {shown(stated)}.",
                hint=f"Expected 'full_attention' or 'sliding_attention' for each of {num_layers} layers.",
            )
        return stated
