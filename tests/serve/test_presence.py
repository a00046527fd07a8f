"""Work is cancelled when the client that waits for it disconnects."""

from __future__ import annotations

import asyncio

import pytest
from starlette.requests import Request
from starlette.types import Message

from archerfish.serve.errors import ClientGoneError
from archerfish.serve.sse import unless_gone

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("no_task_is_left")]


class Client:
    """Of one request, whose body has been read."""

    def __init__(self) -> None:
        self.has_left = asyncio.Event()
        self.request = Request({"type": "http"}, self._receive)

    async def _receive(self) -> Message:
        await self.has_left.wait()
        return {"type": "http.disconnect"}


class Work:
    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.has_begun, self.may_end = asyncio.Event(), asyncio.Event()
        self.is_cancelled = False

    async def run(self) -> str:
        self.has_begun.set()
        try:
            await self.may_end.wait()
        except asyncio.CancelledError:
            self.is_cancelled = True
            raise
        if self.error is not None:
            raise self.error
        return "done"


async def test_result_for_a_connected_client() -> None:
    client, work = Client(), Work()
    work.may_end.set()
    assert await unless_gone(client.request, work.run()) == "done"
    client.has_left.set()
    await asyncio.sleep(0)  # nobody is cancelled by who leaves later


async def test_disconnect_cancels_the_work() -> None:
    client, work = Client(), Work()
    task = asyncio.create_task(unless_gone(client.request, work.run()))
    await work.has_begun.wait()
    client.has_left.set()
    with pytest.raises(ClientGoneError):
        await task
    assert work.is_cancelled


async def test_errors_of_the_work_are_raised() -> None:
    """Also one that looks as if time had run out."""
    client, work = Client(), Work(TimeoutError("of the work"))
    work.may_end.set()
    with pytest.raises(TimeoutError, match="of the work"):
        await unless_gone(client.request, work.run())


async def test_cancellation_is_not_a_disconnect() -> None:
    client, work = Client(), Work()
    task = asyncio.create_task(unless_gone(client.request, work.run()))
    await work.has_begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert work.is_cancelled
