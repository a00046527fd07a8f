"""What a model knows of a tensor: next to nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]


class Handle(Protocol):
    """All that a model may ask of a tensor."""

    @property
    def shape(self) -> Sequence[int]: ...


T = TypeVar("T", bound=Handle)
T_co = TypeVar("T_co", bound=Handle, covariant=True)
