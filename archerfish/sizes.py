"""The sizes in a model's configuration, and the range that each may have.

A configuration comes with a model's files, so it is not trusted. Every size is checked here before it is used.
"""

from __future__ import annotations

from typing import Any

from archerfish.errors import UnsupportedModelError

MOST = (1 << 31) - 1  # the highest value of a size that is not in RANGES
# Lowest and highest value by key of a config.json. Published models are far below the highest values.
RANGES: dict[str, tuple[int, int]] = {
    **dict.fromkeys(("num_hidden_layers", "n_layers", "n_layer"), (1, 1 << 10)),
    **dict.fromkeys(("hidden_size", "dim", "n_embd"), (1, 1 << 17)),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_heads", "n_head"), (1, 1 << 12)),
    "head_dim": (1, 1 << 13),
    **dict.fromkeys(("intermediate_size", "hidden_dim", "n_inner", "moe_intermediate_size"), (1, 1 << 20)),
    **dict.fromkeys(("decay_low_rank_dim", "a_low_rank_dim", "v_low_rank_dim", "gate_low_rank_dim"), (1, 1 << 13)),
    "vocab_size": (1, 1 << 23),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), (1, 1 << 24)),
    "type_vocab_size": (0, 1 << 16),
    **dict.fromkeys(("num_experts", "num_local_experts"), (0, 1 << 12)),
    "num_experts_per_tok": (0, 1 << 8),
    "num_labels": (1, 1 << 20),
    "relative_attention_num_buckets": (1, 1 << 16),
    **dict.fromkeys(("sliding_window_pattern", "global_attn_every_n_layers"), (1, MOST)),
    **dict.fromkeys(("no_rope_layer_interval", "decoder_sparse_step"), (1, MOST)),
}
MAX_EXPERTS = 1 << 16  # in all layers together
MAX_NUMBER = 1e30  # the largest number that is no size, such as the base of a rotary embedding


def check_size(name: str, value: Any, where: str = "The model's configuration") -> int:
    """The value of a key, which must be a whole number within its range."""
    low, high = RANGES.get(name, (0, MOST))
    if type(value) is not int or not low <= value <= high:
        expected = f"a whole number from {low:,} to {high:,}"
        raise UnsupportedModelError(f"{where} has {name} = {shown(value)}, which must be {expected}.")
    return value


def check_number(name: str, value: Any, where: str = "The model's configuration") -> float:
    """The value of a key, which must be a finite number."""
    if type(value) not in (int, float) or not -MAX_NUMBER <= value <= MAX_NUMBER:
        raise UnsupportedModelError(f"{where} has {name} = {shown(value)}, which must be a number.")
    return float(value)


def shown(value: Any) -> str:
    """A value of a file in an error message, cut to a line."""
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
