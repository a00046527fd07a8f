"""Ctrl+C and SIGTERM from the first import of a command to its end. `make test-hostile`."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ENDS = {signal.SIGINT: {130, -signal.SIGINT}, signal.SIGTERM: {143, -signal.SIGTERM}}  # a shell shows 130 and 143
LIMIT_S = 120


def in_session(session: int) -> list[str]:
    """The processes of a session, zombies excluded."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = stat.read_text().rpartition(")")
        except OSError:  # the process has just ended
            continue
        if rest.split()[0] != "Z" and int(rest.split()[3]) == session:
            found.append(name)
    return found


def is_over_after(num_imports: int, words: str, number: signal.Signals, scratch: Path) -> bool:
    """Signal a command after its processes have made `num_imports` imports. True if it was serving, or over, by
    then."""
    scratch.mkdir()
    environment = {**os.environ, "TMPDIR": str(scratch), "PYTHONPROFILEIMPORTTIME": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "archerfish", *words.split()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,
    )
    assert process.stdout is not None
    num_seen, is_serving, others = -1, False, []
    for line in process.stdout:
        if line.startswith("import time:"):
            num_seen += num_seen >= 0 or line.endswith(" archerfish.cli\n")  # before, Python itself handles signals
        else:
            others.append(line)
        is_serving = line.startswith("archerfish serves ")
        if num_seen >= num_imports or is_serving:
            process.send_signal(number)
            break
    is_over = num_seen < num_imports
    others += [line for line in process.communicate(timeout=LIMIT_S)[0].splitlines() if "import time:" not in line]
    codes = ENDS[number] | ({0} if is_over else set())
    assert process.returncode in codes, (num_imports, others)
    assert not [line for line in others if "Traceback" in line or "Error" in line], (num_imports, others)
    assert not in_session(process.pid) and not [*scratch.iterdir()], num_imports
    return is_over


@pytest.mark.hostile
@pytest.mark.parametrize("number", ENDS)
@pytest.mark.parametrize(
    ("words", "step"),
    [("serve --port 0 --kinds generation", 160), ("generate a --max-tokens 1", 20), ("chat", 20)],
)
def test_a_signal_at_any_time_ends_a_command(words: str, step: int, number: signal.Signals, tmp_path: Path) -> None:
    places = itertools.count(0, step)
    assert next(place for place in places if is_over_after(place, words, number, tmp_path / str(place))) > 8 * step
