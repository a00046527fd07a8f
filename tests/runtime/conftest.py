from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from archerfish.engine import llm_loading
from archerfish.kernels.torch.reference import TorchOps


class RecordingOps(TorchOps):
    """A backend of the CPU that only claims to record."""

    is_async = can_record = True


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of the test record their steps."""
    monkeypatch.setattr(llm_loading, "choose_ops", lambda device, dtype: RecordingOps(device, dtype))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other make small arrays slow on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
