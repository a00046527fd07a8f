"""What the machine can do, measured with the backend's own products: for `archerfish doctor` and `archerfish bench
cpu`."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from archerfish.kernels.machine import READ_PEAK, cpu, fast_cpu_dtype
from archerfish.kernels.native._native import Level, all_threads
from archerfish.kernels.native.recorder import TapeRunner
from archerfish.kernels.native.weights import NativeWeight, stack_parts

READ_BYTES = 1 << 27  # more than the caches of most machines hold
NUM_INPUTS, NUM_ROWS = 1024, 256
NUM_ROUNDS = 5


def measure_peaks() -> dict[str, float]:
    """Reads of memory in GB/s, and products in float32 and in the type of this CPU in GFLOP/s; in some tenths of a
    second."""
    runner = TapeRunner(Level(), all_threads(cpu().num_cores))

    def rate(kind: str, num_outputs: int, num_rows: int) -> tuple[float, int]:
        """Products a second, and the bytes of their matrix."""
        [matrix] = stack_parts([np.ones((num_outputs, NUM_INPUTS), dtype=np.float32)], runner, kind)
        x = np.ones((num_rows, NUM_INPUTS), dtype=np.float32)
        weight = NativeWeight(runner, [matrix])
        return 1 / best_s(lambda: weight.multiply(x, "none", None)), matrix.num_bytes

    reads, num_bytes = rate("float32", READ_BYTES // NUM_INPUTS // 4, 1)
    found = {READ_PEAK: reads * num_bytes / 1e9}
    for kind in ("float32", fast_cpu_dtype()):
        found[f"GFLOP/s in {kind}"] = rate(kind, NUM_INPUTS, NUM_ROWS)[0] * 2 * NUM_ROWS * NUM_INPUTS**2 / 1e9
    return found


def best_s(work: Callable[[], object]) -> float:
    found = []
    for _ in range(NUM_ROUNDS):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return min(found)
