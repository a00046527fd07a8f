"""Is a stored tensor what its source says, to the precision of the stored type?

Rounding to the nearest value of a type with p bits of significand is off by at most 2^-p of the value, or by half the smallest
subnormal number near zero. A type that holds every value of the source's type must hold it exactly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from archerfish.errors import ValidationError
from archerfish.store.format import FLOAT_DTYPES

if TYPE_CHECKING:
    import torch

CHUNK_PARAMS = 1 << 24
# Relative error of rounding to a type, and half of its smallest subnormal number.
ROUNDING = {"float32": (2.0**-24, 2.0**-150), "float16": (2.0**-11, 2.0**-25), "bfloat16": (2.0**-8, 2.0**-134)}
EXACT = {
    ("float64", "float64"), ("float32", "float32"), ("float16", "float16"), ("bfloat16", "bfloat16"),
    ("float16", "float32"), ("bfloat16", "float32"),
}  # fmt: skip


def stored_dtype_of(source_dtype: str, shape: tuple[int, ...], target_dtype: str) -> str:
    """The type in which a source tensor is stored: matrices in the chosen type, integers as they are.

    Vectors (norms, biases) stay float32: they take next to no room, and rounding them costs a third of the accuracy.
    """
    if source_dtype not in FLOAT_DTYPES:
        return source_dtype
    return target_dtype if len(shape) > 1 else "float32"


def cast(name: str, source: torch.Tensor, dtype: str) -> torch.Tensor:
    """The tensor in its stored type; NaN in the source and overflow are errors that name the tensor."""
    import torch

    result = source.to(getattr(torch, dtype)).contiguous()
    if not result.is_floating_point() or is_finite(result):
        return result
    for start in range(0, result.numel(), CHUNK_PARAMS):
        after = result.view(-1)[start : start + CHUNK_PARAMS]
        if bool(torch.isfinite(after).all()):
            continue
        before = source.reshape(-1)[start : start + CHUNK_PARAMS]
        if bool(torch.isnan(before).any()):
            position = start + int(torch.isnan(before).nonzero()[0])
            raise ValidationError(f"The tensor {name!r} of the source holds NaN (first at position {position}).")
        overflown = torch.isinf(after) & torch.isfinite(before)
        if bool(overflown.any()):
            value = float(before[int(overflown.nonzero()[0])])
            raise ValidationError(f"The tensor {name!r} holds {value:g}, which {dtype} cannot hold.")
    return result


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether all values are finite, in one pass without temporaries."""
    import torch

    if tensor.numel() == 0:
        return True
    low, high = torch.aminmax(tensor)
    return bool(torch.isfinite(low)) and bool(torch.isfinite(high))


def compare(name: str, source: torch.Tensor, stored: torch.Tensor) -> None:
    """Raise a ValidationError when a stored tensor differs from its source by more than the rounding of its type."""
    import torch

    if source.shape != stored.shape:
        raise ValidationError(f"The tensor {name!r} was written with shape {tuple(stored.shape)}, not {tuple(source.shape)}.")
    types = (str(source.dtype).removeprefix("torch."), str(stored.dtype).removeprefix("torch."))
    exact = types in EXACT or not source.is_floating_point()
    relative, absolute = (0.0, 0.0) if exact else ROUNDING[types[1]]
    wide = torch.float64 if "float64" in types or (not exact and types[1] == "float32") else torch.float32
    for start in range(0, source.numel(), CHUNK_PARAMS):
        before = source.reshape(-1)[start : start + CHUNK_PARAMS]
        after = stored.reshape(-1)[start : start + CHUNK_PARAMS]
        if exact and torch.equal(before, after.to(before.dtype)):
            continue
        check_chunk(name, before.to(wide), after.to(wide), start, relative, absolute)


def check_chunk(
    name: str, before: torch.Tensor, after: torch.Tensor, start: int, relative: float, absolute: float
) -> None:
    same = before == after
    close = (after - before).abs() <= before.abs().mul(relative).clamp(min=absolute)
    wrong = ~(same | close)
    if bool(wrong.any()):
        position = int(wrong.nonzero()[0])
        raise ValidationError(
            f"The tensor {name!r} was written as {float(after[position]):g} at position {start + position}, "
            f"where the source has {float(before[position]):g}."
        )
