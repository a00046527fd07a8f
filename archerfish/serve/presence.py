"""Work that goes on only while somebody waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import Request

from archerfish.serve.errors import ClientGoneError

T = TypeVar("T")


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled if the client closes its connection first."""
    gone = asyncio.create_task(disconnected(request))
    limit = asyncio.timeout(None)

    def end(_: object) -> None:
        limit.reschedule(0)

    try:
        async with limit:
            gone.add_done_callback(end)
            try:
                return await work
            finally:
                gone.remove_done_callback(end)
                gone.cancel()
                await asyncio.gather(gone, return_exceptions=True)
    except TimeoutError:
        if limit.expired():
            raise ClientGoneError from None
        raise


async def disconnected(request: Request) -> None:
    """Returns when the client is gone; the body has been read before."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
