from __future__ import annotations

import pytest

from archerfish.engine import llm_loading
from archerfish.kernels.torch.reference import TorchOps
from tests.threads import one_thread as one_thread


class RecordingOps(TorchOps):
    """A backend of the CPU that only claims to record."""

    is_async = can_record = True


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of the test record their steps."""
    monkeypatch.setattr(llm_loading, "choose_ops", lambda device, dtype: RecordingOps(device, dtype))
