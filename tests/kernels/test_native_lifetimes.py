"""The native backend when threads, processes and broken numbers meet."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import Future

import numpy as np
import pytest

from archerfish.kernels.batches import Segments
from archerfish.kernels.ops import HeadShape
from archerfish.kernels.stored import StoredTensor
from tests.kernels.native_support import LEVELS, NativeOps

from archerfish.kernels.native._native import Level, all_threads  # isort: skip (it is there if native_support is)
from archerfish.kernels.native import recorder  # isort: skip
from archerfish.kernels.native.recorder import TapeRunner  # isort: skip
from archerfish.kernels.native.weights import NativeWeight, stack_parts  # isort: skip

ONES = StoredTensor((16, 32), "float32", np.ones((16, 32), dtype=np.float32))


def product(runner: TapeRunner) -> float:
    """One number of a product with a matrix of ones that is packed for it."""
    weight = NativeWeight(runner, stack_parts([ONES], runner, "float32"))
    return float(weight.multiply(np.ones((1, 32), dtype=np.float32), "none", None)[0, 0])


def test_matrices_are_packed_whichever_threads_make_them() -> None:
    runner, wrong = TapeRunner(Level(), all_threads(2)), list[float]()

    def make() -> None:
        wrong.extend(found for found in (product(runner) for _ in range(200)) if found != 32)

    threads = [threading.Thread(target=make) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_packing_that_began_during_a_wait_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = TapeRunner(Level(), all_threads(2))
    first, second = Future[None](), Future[None]()
    runner._packing = first
    waiting = threading.Thread(target=runner.finish_packing)
    waiting.start()
    runner._packing = second
    first.set_result(None)
    waiting.join()
    assert runner._packing is second


def test_packing_needs_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(recorder, "in_background", none_left)
    runner, ended = TapeRunner(Level(), all_threads(2)), list[bool]()
    runner.start_packing(lambda: ended.append(True))
    assert product(runner) == 32
    assert ended == [True]


ENDING = """
import threading, numpy as np
from archerfish.kernels.native.ops import NativeOps
ops = NativeOps()
x, begun = np.ones((256, 512), dtype=np.float32), threading.Event()
def work():
    while True:
        ops.gated(x, "silu")
        begun.set()
threading.Thread(target=work, daemon=True).start()
begun.wait()
"""


def test_a_process_may_end_while_a_daemon_thread_computes() -> None:
    """Red without the wait at exit in about two of three processes: they abort."""
    for _ in range(4):
        assert subprocess.run([sys.executable, "-c", ENDING], capture_output=True).returncode == 0


@pytest.mark.parametrize("level", LEVELS)
def test_numbers_that_are_none_stay_so(level: str) -> None:
    ops, x = NativeOps(level=level), np.ones((3, 8), dtype=np.float32)
    x[0, 1] = np.nan
    for activation in ("relu", "relu_squared"):
        assert np.isnan(ops.gated(x, activation)[0, 1])
    assert np.isnan(ops.pool(x, Segments((3,)), "max")[0, 1])


def test_heads_that_are_too_large_are_refused() -> None:
    with pytest.raises(ValueError, match="more dimensions than attention takes"):
        NativeOps().attention(np.zeros((2, 3 * 2048), dtype=np.float32), Segments((2,)), HeadShape(1, 1, 2048, 1.0))
