"""Worker processes, and the group of engines of a bench."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import pytest

from archerfish.bench import worker as workers
from archerfish.bench.worker import EngineGroup, Worker, WorkerError, versions
from archerfish.errors import ServiceError

ENGINES = """
import os, sys, time
from archerfish.bench.engines import main

class Good:
    def __init__(self, base):
        self.base = base
        print("a library that prints")

    def start(self):
        return {"paths": sys.path, "variable": os.environ.get("SOME_VARIABLE")}

    def add(self, number):
        return self.base + number

class Bad(Good):
    def add(self, number):
        raise ValueError("no sums today")

class ArcherfishBad(Bad):
    pass

class Mortal(Good):
    def add(self, number):
        sys.stderr.write("last words\\n")
        os._exit(3)

class Slow(Good):
    def add(self, number):
        time.sleep(60)

if __name__ == "__main__":
    main(globals())
"""


@pytest.fixture(autouse=True)
def engines_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "engines.py"
    path.write_text(ENGINES)
    monkeypatch.setattr(workers, "ENGINES_FILE", path)
    monkeypatch.setattr(workers, "STOP_S", 0.2)


def test_worker_calls_methods_with_its_own_paths_and_variables() -> None:
    variables = {"SOME_VARIABLE": "yes"}
    with closing(Worker("Good", {"base": 40}, path="/some/checkout", environment=variables)) as worker:
        started = worker.call("start")
        assert started["variable"] == "yes"
        assert started["paths"][0] == "/some/checkout"
        assert not any(path.endswith("archerfish/bench") for path in started["paths"])
        assert [worker.call("add", number=number) for number in (1, 2)] == [41, 42]


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ("Bad", r"ValueError: no sums today \(engines.py:"),
        ("Mortal", "the process ended with 3: last words"),
        ("Slow", "no answer to 'add' in 0 s"),
        ("Absent", "the process ended with 1"),
    ],
)
def test_failures_of_an_engine_are_described(engine: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "TIMEOUT_S", 0.2 if engine == "Slow" else 60)
    with closing(Worker(engine, {"base": 1})) as worker, pytest.raises(WorkerError, match=said):
        worker.call("add", number=1)
        worker.call("add", number=1)


def test_failed_peers_are_noted_and_left_out() -> None:
    with EngineGroup() as group:
        for name, engine in (("archerfish", "Good"), ("peer", "Bad"), ("other", "Good")):
            assert group.open(name, engine, {"base": 1})
        assert group.names(1) == ["peer", "other", "archerfish"]
        assert [group.call(name, "add", number=1) for name in group.names()] == [2, None, 2]
        assert group.names() == ["archerfish", "other"] and group.call("peer", "add", number=1) is None
        assert "peer failed: ValueError" in group.notes[0] and len(group.notes) == 1
        assert group.open("other", "Good", {"base": 5}) and group.call("other", "add", number=1) == 6
        group.open("before", "ArcherfishBad", {"base": 1})
        with pytest.raises(ServiceError, match="before failed: ValueError"):
            group.call("before", "add", number=1)


def test_another_checkout_is_named_by_its_directory(tmp_path: Path) -> None:
    assert versions("") == {"archerfish": ""}
    assert versions(str(tmp_path) + os.sep) == {"archerfish": "", tmp_path.name: str(tmp_path)}
