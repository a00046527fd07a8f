"""Asynchronous tests, which are marked with `anyio`, run in asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def no_task_is_left(anyio_backend: str) -> AsyncIterator[None]:
    num_before = len(asyncio.all_tasks())
    yield
    assert len(asyncio.all_tasks()) == num_before
