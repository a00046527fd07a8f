from __future__ import annotations

import pytest

from tests.threads import one_thread

__all__ = ["one_thread"]


def pytest_configure(config: pytest.Config) -> None:
    """A mark of pytest-cov's, which a machine with a GPU need not have."""
    config.addinivalue_line("markers", "no_cover: not traced for coverage")
