"""Cores: how many others leave free, and threads that are bound to one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from archerfish.kernels import machine
from archerfish.kernels.machine import FreeCores, num_free_cores, usable_cores

PINNED = """
import os
from archerfish.kernels.machine import usable_cores
from archerfish.kernels.native._native import all_threads

before = set(os.listdir("/proc/self/task"))
threads = all_threads(4)
threads.pin(usable_cores())
print(sorted(next(iter(os.sched_getaffinity(int(task)))) for task in set(os.listdir("/proc/self/task")) - before
             if len(os.sched_getaffinity(int(task))) == 1), len(os.sched_getaffinity(0)))
"""


@pytest.mark.parametrize(
    ("num_cores", "busy_s", "own_s", "found"),
    [(2, 2.0, 2.0, 2), (2, 2.0, 1.6, 2), (2, 2.0, 1.4, 1), (2, 2.0, 0.0, 1), (2, 1.0, 1.2, 2), (16, 16.0, 13.0, 13)],
)
def test_free_cores(num_cores: int, busy_s: float, own_s: float, found: int) -> None:
    assert num_free_cores(num_cores, busy_s, own_s, 1.0) == found
    assert num_free_cores(num_cores, 3 * busy_s, 3 * own_s, 3.0) == found


def test_cores_are_looked_up_once_in_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red if each pass read the file, if cores did not come back, if an idle engine began with what was before, or if
    long passes counted as idle."""
    stat = tmp_path / "stat"
    cores = usable_cores()
    now_s = 0.0
    own_s = 0.0
    monkeypatch.setattr(machine, "time", SimpleNamespace(monotonic=lambda: now_s, process_time=lambda: own_s))
    free, found = FreeCores(stat), []  # there is no file yet: all is idle
    for passed_s, busy in (
        (0.1, 9000),
        (0.2, 9000),
        (0.2, 9999),
        (0.3, 9999),
        (0.3, 9999),
        (5.0, 90000),
        (5.1, 180000),
    ):
        now_s, own_s = now_s + passed_s, 4.0 * (passed_s == 5.1)
        stat.write_text("cpu  0 0\n" + "".join(f"cpu{core} {busy} 0 0 7 7 0 0 0 0 0\n" for core in cores) + "intr 5\n")
        found.append(free.count())
    everything = len(cores)
    assert found == [everything, 1, 1, 1, everything, everything, 1]


def test_a_machine_without_such_a_file(tmp_path: Path) -> None:
    assert FreeCores(tmp_path / "stat").count() == len(usable_cores())


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs Linux")
def test_pinned_threads() -> None:
    pytest.importorskip("archerfish.kernels.native._native")
    cores = usable_cores()
    expected = sorted(cores[place % len(cores)] for place in (1, 2, 3))
    found = subprocess.run(
        [sys.executable, "-c", PINNED], capture_output=True, text=True, env=os.environ, check=True
    ).stdout
    assert found.split("]")[0] == str(expected)[:-1] and (len(cores) == 1 or int(found.split("]")[1]) == len(cores))
