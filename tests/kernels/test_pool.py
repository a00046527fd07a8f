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


def in_a_process(code: str) -> str:
    """The output of a program that imports torch and then runs the code."""
    script = f"import os, sys, threading, time, torch\nfrom archerfish.kernels.pool import *\n{code}"
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=LIMIT_S).stdout


@pytest.mark.skipif(openmp() is None, reason="torch brings another library of threads")
def test_released_threads_end() -> None:
    out = in_a_process(
        """
def others(): return set(os.listdir("/proc/self/task")) - {str(os.getpid())}
torch.set_num_threads(3)
before = others()
torch.ones(1 << 20).mul_(2.0)
team = others() - before
release_threads()
while team & others():
    pass
print(len(team), int(torch.ones(1 << 20).sum()))  # a new one, if it is wanted
"""
    )
    assert out == f"2 {1 << 20}\n"


@pytest.mark.skipif(openmp() is None, reason="torch brings another library of threads")
def test_forked_process_does_not_wait_for_the_threads_of_its_parent() -> None:
    out = in_a_process(
        """
torch.set_num_threads(2)
torch.ones(1 << 20).mul_(2.0)
child = os.fork()
if not child:
    release_threads()
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    )
    assert out == "7\n"


@pytest.mark.skipif(openmp() is None, reason="torch brings another library of threads")
def test_openmp_is_the_library_of_torch() -> None:
    pytest.importorskip("sklearn", reason="as it does")
    out = in_a_process("import sklearn.utils._openmp_helpers\nprint(openmp()._name)")
    assert Path(out.strip()).parent in (Path(torch.__file__).parent / "lib", Path(torch.__file__).parent.parent / "torch.libs")


@pytest.mark.parametrize(("policy", "expected"), [("", "100000"), ("active", "None")])
def test_openmp_threads_spin_briefly_unless_the_user_says_otherwise(policy: str, expected: str) -> None:
    """Red if torch could be loaded before the environment is set: OpenMP reads it once."""
    code = "import sys, os, archerfish; assert 'torch' not in sys.modules; print(os.environ.get('GOMP_SPINCOUNT'))"
    environment = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    environment |= {"OMP_WAIT_POLICY": policy} if policy else {}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == (expected if platform.machine() in ("x86_64", "AMD64") else "None")
