from __future__ import annotations

import pytest
import torch

from tests.threads import one_thread

__all__ = ["one_thread"]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
