"""How tests of asynchronous code run: in a loop of their own that must be left clean."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, ParamSpec

LIMIT_S = 20
P = ParamSpec("P")


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a test in a loop of its own; afterwards no task and no worker thread may be left."""

    async def guarded() -> None:
        async with asyncio.timeout(LIMIT_S):
            await main()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    before = threading.enumerate()
    asyncio.run(guarded())
    for thread in threading.enumerate():
        if thread not in before and thread.name.startswith(("archerfish-batch", "archerfish-engine")):
            thread.join(LIMIT_S)
            assert not thread.is_alive()


def in_loop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Make an asynchronous test one that pytest can run."""

    @wraps(test)
    def run_test(*args: P.args, **kwargs: P.kwargs) -> None:
        run(lambda: test(*args, **kwargs))

    return run_test


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0)
