"""Rotary embeddings as tables, from what a config.json says of them.

Frequencies and angles are computed in float32, as models are trained with.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from archerfish.errors import UnsupportedModelError
from archerfish.sizes import check_number, check_size

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class RotaryConfig:
    """Rotary embedding of a layer: its type, and the parameters of that type as the configuration names them."""

    rope_type: str
    theta: float
    partial_factor: float  # share of a head's dimensions that is rotated
    max_positions: int  # the configuration's max_position_embeddings
    original_max_positions: int  # length of training, before any scaling
    parameters: Mapping[str, Any]

    def number(self, name: str, default: float | None = None) -> float:
        value = self.parameters.get(name)
        return check_number(name, default if value is None else value, f"Rotary type {self.rope_type!r}")

    @property
    def longest(self) -> int:
        """Longest sequence that the scaling is made for."""
        if self.rope_type == "yarn":
            scaled = int(self.number("factor") * self.original_max_positions)
            return check_size("max_position_embeddings", max(self.max_positions, scaled), "The rotary scaling")
        return self.max_positions

    @property
    def usual(self) -> int:
        """Longest sequence unless a longer one is asked for."""
        return min(self.longest, self.original_max_positions) if self.rope_type == "longrope" else self.longest


def read_rotary(values: Mapping[str, Any], layer_type: str = "", *, theta: float = 10000.0) -> RotaryConfig:
    """What a config.json says in `rope_parameters` (transformers 5; maybe by layer type), or `rope_theta` and
    `rope_scaling`.

    theta is the architecture's base where none is stated.
    """
    stated = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if not isinstance(stated, Mapping):
        raise UnsupportedModelError(f"The model's configuration gives its rotary embedding as {stated!r}.")
    if any(isinstance(value, Mapping) for value in stated.values()):
        stated = stated.get(layer_type) or {}
    found = {name: values.get(name) for name in ("rope_theta", "partial_rotary_factor")}
    found |= {name: value for name, value in stated.items() if value is not None}
    rope_type = str(found.get("rope_type") or found.get("type") or "default")
    rope_type = "longrope" if rope_type == "su" else rope_type  # its first name
    if rope_type not in FREQUENCIES:
        raise UnsupportedModelError(
            f"Rotary type {rope_type!r} is not supported.", hint=f"Known: {', '.join(FREQUENCIES)}."
        )
    most = values.get("max_position_embeddings")
    most = 0 if most is None else check_size("max_position_embeddings", most)
    original = values.get("original_max_position_embeddings") or found.get("original_max_position_embeddings") or most
    config = RotaryConfig(rope_type, 0.0, 0.0, most, check_size("original_max_position_embeddings", original), found)
    return replace(
        config, theta=config.number("rope_theta", theta), partial_factor=config.number("partial_rotary_factor", 1.0)
    )


def rotary_table(config: RotaryConfig, head_dim: int, max_len: int) -> tuple[Floats, int]:
    """(max_len, rotary_dim) cosines and sines as `ops.Rotary` keeps them, and rotary_dim.

    A table holds for all sequences of a run. "dynamic" has a base that grows with the sequence: here it is that of
    max_len, so that up to max_position_embeddings nothing is scaled. "longrope" has factors for short and for long
    sequences, of which max_len chooses: as in vLLM, all sequences of a run have the same.
    """
    rotary_dim = int(head_dim * config.partial_factor)
    if not 2 <= rotary_dim <= head_dim or rotary_dim % 2:
        raise UnsupportedModelError(f"{rotary_dim} of {head_dim} dimensions of a head cannot be rotated in pairs.")
    frequencies, scale = FREQUENCIES[config.rope_type](config, rotary_dim, max_len)
    angles = np.arange(max_len, dtype=np.float32)[:, None] * frequencies.astype(np.float32)
    return np.concatenate((np.cos(angles), np.sin(angles)), axis=1) * np.float32(scale), rotary_dim


def powers(theta: float, dim: int) -> Floats:
    """theta to the power of 0, 2/dim, 4/dim ..."""
    result: Floats = np.float32(theta) ** (np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim))
    return result


def default(config: RotaryConfig, dim: int, max_len: int) -> tuple[Floats, float]:
    return 1.0 / powers(config.theta, dim), 1.0


def linear(config: RotaryConfig, dim: int, max_len: int) -> tuple[Floats, float]:
    return 1.0 / powers(config.theta, dim) / np.float32(config.number("factor")), 1.0


def ntk(config: RotaryConfig, dim: int, max_len: int) -> tuple[Floats, float]:
    """As in GTE's own code: one base for all lengths."""
    if config.parameters.get("mixed_b") is not None:
        raise UnsupportedModelError("Rotary type 'ntk' with 'mixed_b' is not supported.")
    factor = config.number("factor")
    return 1.0 / powers(config.theta * factor, dim) / np.float32(factor ** (2 / dim)), 1.0


def dynamic(config: RotaryConfig, dim: int, max_len: int) -> tuple[Floats, float]:
    factor, most = config.number("factor"), config.max_positions
    growth = factor * max(max_len, most) / most - (factor - 1.0)
    return 1.0 / powers(config.theta * growth ** (dim / (dim - 2)), dim), 1.0


def llama3(config: RotaryConfig, dim: int, max_len: int) -> tuple[Floats, float]:
    """Low frequencies are divided by the factor, high ones stay, those between are blended."""
    factor, low, high = (config.number(name) for name in ("factor", "low_freq_factor", "high_freq_factor"))
    frequencies = 1.0 / powers(config.theta, dim)
    turns = config.original_max_positions * frequencies / (2 * math.pi)  # within the length of training
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    result: Floats = frequencies * (kept + (1.0 - kept) / factor)
    return result, 1.0


def yarn(config: RotaryConfig, dim: int, max_len: int) -> tuple[Floats, float]:
    """Dimensions that turn seldom within the length of training are divided by the factor; a ramp joins the two
    kinds."""
    original = config.original_max_positions
    factor = config.number("factor", config.max_positions / original)

    def dimension_of(num_turns: float) -> float:
        return dim * math.log(original / (num_turns * 2 * math.pi)) / (2 * math.log(config.theta))

    first, last = dimension_of(config.number("beta_fast", 32.0)), dimension_of(config.number("beta_slow", 1.0))
    if config.parameters.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - first) / max(last - first, 0.001), 0.0, 1.0)
    frequencies = 1.0 / powers(config.theta, dim)
    return frequencies / factor * ramp + frequencies * (1.0 - ramp), yarn_scale(config, factor)


def yarn_scale(config: RotaryConfig, factor: float) -> float:
    """What cosines and sines are multiplied with, and so the scores twice."""

    def scale_of(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0

    mscale, over_all = config.number("mscale", 0.0), config.number("mscale_all_dim", 0.0)
    inferred = scale_of(mscale) / scale_of(over_all) if mscale and over_all else scale_of(1.0)
    return config.number("attention_factor", inferred)


def longrope(config: RotaryConfig, dim: int, max_len: int) -> tuple[Floats, float]:
    original = config.original_max_positions
    name = "long_factor" if max_len > original else "short_factor"
    factors = np.asarray(config.parameters.get(name), dtype=np.float32)
    if factors.shape != (dim // 2,):
        raise UnsupportedModelError(f"Rotary type 'longrope' needs {dim // 2} numbers in {name!r}.")
    factor = config.number("factor", config.max_positions / original)
    inferred = math.sqrt(1.0 + math.log(factor) / math.log(original)) if factor > 1.0 else 1.0
    return 1.0 / (factors * powers(config.theta, dim)), config.number("attention_factor", inferred)


FREQUENCIES = {
    "default": default,
    "linear": linear,
    "ntk": ntk,
    "dynamic": dynamic,
    "llama3": llama3,
    "yarn": yarn,
    "longrope": longrope,
}
