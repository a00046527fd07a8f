"""The threads that compute."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from archerfish.kernels.machine import ARM
from archerfish.kernels.pool import ComputePool, openmp

LIMIT_S = 60


def max_active_levels() -> int:
    library = openmp()
    assert library
    return int(library.omp_get_max_active_levels())


@pytest.mark.skipif(platform.machine() not in ARM, reason="elsewhere products take as many threads as torch says")
def test_a_thread_of_the_pool_starts_no_others() -> None:
    pool = ComputePool("cpu", 2)
    assert pool.submit(max_active_levels).result(LIMIT_S) == 0
    assert max_active_levels() > 0


PROGRAM = """
import ctypes, importlib.util, os, pathlib, torch
from archerfish.kernels.pool import openmp, release_threads

packages = pathlib.Path(torch.__file__).parent.parent
for other in packages.glob("scikit_learn.libs/libgomp*"):  # as importing sklearn loads it
    ctypes.CDLL(str(other))
print(openmp()._name)

def others(): return set(os.listdir("/proc/self/task")) - {str(os.getpid())}
torch.set_num_threads(3)
before = others()
torch.ones(1 << 20).mul_(2.0)
team = others() - before
release_threads()
while team & others():
    pass
print(len(team), int(torch.ones(1 << 20).sum()))  # a new one, if it is wanted

child = os.fork()
if not child:
    release_threads()
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(openmp() is None, reason="torch brings another library of threads")
def test_threads_of_openmp_end_when_released_and_not_in_a_fork() -> None:
    """The library is torch's own, also where another package has loaded one."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=LIMIT_S)
    library, released, forked = done.stdout.splitlines()
    home = Path(torch.__file__).parent
    assert Path(library).parent in (home / "lib", home.parent / "torch.libs")
    assert (released, forked) == (f"2 {1 << 20}", "7")


@pytest.mark.parametrize(
    ("policy", "load", "expected"),
    [("", 0.5, "100000" if platform.machine() in ("x86_64", "AMD64") else "None"), ("", 9000.0, "0"), ("active", 0.5, "None")],
)
def test_openmp_threads_spin_briefly_and_not_on_busy_cores(policy: str, load: float, expected: str) -> None:
    """Red if torch could be loaded before the environment is set: OpenMP reads it once."""
    code = f"import sys, os; os.getloadavg = lambda: ({load}, 0.0, 0.0); import archerfish\n"
    code += "assert 'torch' not in sys.modules; print(os.environ.get('GOMP_SPINCOUNT'))"
    environment = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    environment |= {"OMP_WAIT_POLICY": policy} if policy else {}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == expected


def test_workers_compute_alone() -> None:
    """A worker that takes over torch's default waits for threads that it may not have: OpenBLAS did so for ever on ARM."""
    code = "import torch; from archerfish.kernels.pool import compute_pool; torch.set_num_threads(2)\n"
    code += "pool = compute_pool('cpu', 2); found = [pool.submit(torch.get_num_threads).result() for _ in range(4)]\n"
    code += "print(*found, torch.get_num_threads())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=LIMIT_S)
    assert done.stdout.split() == ["1", "1", "1", "1", "2"]
