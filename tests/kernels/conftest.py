from __future__ import annotations

import pytest
import torch

from archerfish.kernels.machine import FreeCores, usable_cores
from tests.threads import one_thread

__all__ = ["one_thread"]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes have all their threads here, also beside other tests."""
    monkeypatch.setattr(FreeCores, "count", lambda self: len(usable_cores()))
