"""Work that ends with who waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from starlette.requests import Request
from starlette.types import Message

from archerfish.serve.errors import ClientGoneError
from archerfish.serve.sse import unless_gone

LIMIT_S = 20


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


def run(test: Callable[[Client], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(LIMIT_S):
            await test(Client())
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


def test_result_for_a_connected_client() -> None:
    async def test(client: Client) -> None:
        work = Work()
        work.may_end.set()
        assert await unless_gone(client.request, work.run()) == "done"
        client.has_left.set()
        await asyncio.sleep(0)  # nobody is cancelled by who leaves later

    run(test)


def test_disconnect_cancels_the_work() -> None:
    async def test(client: Client) -> None:
        work = Work()
        task = asyncio.create_task(unless_gone(client.request, work.run()))
        await work.has_begun.wait()
        client.has_left.set()
        with pytest.raises(ClientGoneError):
            await task
        assert work.is_cancelled

    run(test)


def test_errors_of_the_work_are_raised() -> None:
    """Also one that looks as if time had run out."""

    async def test(client: Client) -> None:
        work = Work(TimeoutError("of the work"))
        work.may_end.set()
        with pytest.raises(TimeoutError, match="of the work"):
            await unless_gone(client.request, work.run())

    run(test)


def test_cancellation_is_not_a_disconnect() -> None:
    async def test(client: Client) -> None:
        work = Work()
        task = asyncio.create_task(unless_gone(client.request, work.run()))
        await work.has_begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert work.is_cancelled

    run(test)
