"""A tensor as a checkpoint stores it: bytes of the mapped file, and what they mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
NUMPY_TYPES: dict[str, Any] = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """Plain numbers of `dtype`, or blocks of GGUF (`quant_type`), whose codes, scales and minima lie apart.

    The K types of GGUF have scales and minima among their codes.
    """

    shape: tuple[int, ...]
    dtype: str
    data: npt.NDArray[Any]  # bfloat16: as uint16; blocks: as uint8
    quant_type: str = ""
    scales: npt.NDArray[np.float16] | None = None
    mins: npt.NDArray[np.float16] | None = None

    def as_floats(self) -> Floats:
        """The numbers in float32; a view where they are float32 already."""
        if self.quant_type:
            raise TypeError(f"A tensor in {self.quant_type} is not read as floats.")
        if self.dtype == "bfloat16":
            return (self.data.astype(np.uint32) << 16).view(np.float32).reshape(self.shape)
        found: Floats = self.data.astype(np.float32, copy=False).reshape(self.shape)
        return found
