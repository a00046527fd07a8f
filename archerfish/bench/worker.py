"""The engines of one bench, each in a process of its own: ours, another version of ours, or a peer.

A process runs `engines.py`, so that the `archerfish` that it imports may be that of another checkout. It reads a line
of JSON for every call of a method and answers with one line. A fresh process makes imports and loading measurable and
keeps the thread pools of engines apart; only one engine is at work at any time.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, TypeVar

from archerfish.bench.report import OURS
from archerfish.errors import ServiceError, refuse_unknown

ENGINES_FILE = Path(__file__).with_name("engines.py")
PACKAGE_PATH = str(Path(__file__).parents[2])
TIMEOUT_S = 1800.0
STOP_S = 5.0
T = TypeVar("T")


class WorkerError(Exception):
    """An engine raised an error, crashed or did not answer; the other engines go on without it."""


class Worker:
    """The process of one engine."""

    def __init__(
        self,
        engine: str,
        arguments: Mapping[str, Any],
        *,
        path: str = "",
        environment: Mapping[str, str] | None = None,
        file: Path | None = None,
    ) -> None:
        """engine: the name of a class in a file (default: `engines.py`); path: imported first, in place of this
        checkout."""
        self.engine = engine
        paths = [path, PACKAGE_PATH, os.environ.get("PYTHONPATH", "")]
        variables = {**os.environ, **(environment or {}), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        variables.pop(
            "PYTHONDONTWRITEBYTECODE", None
        )  # installed packages have their bytecode: a checkout is to have it too
        command = [sys.executable, "-P", str(file or ENGINES_FILE), engine, json.dumps(dict(arguments))]
        with tempfile.NamedTemporaryFile(prefix="archerfish-bench-", delete=False) as log:
            self._log = Path(log.name)
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                encoding="utf-8",
                env=variables,
            )

    def call(self, method: str, **arguments: Any) -> Any:
        """Call a method of the engine and wait for its result."""
        requests, answers = self._process.stdin, self._process.stdout
        assert requests is not None and answers is not None
        try:
            requests.write(json.dumps({"method": method, "arguments": arguments}) + "\n")
            requests.flush()
        except OSError:
            raise WorkerError(self._reason_of_end()) from None
        # An answer is one line and comes only after a request, so Python's own buffer is empty here.
        if not select.select([answers], [], [], TIMEOUT_S)[0]:
            raise WorkerError(f"no answer to {method!r} in {TIMEOUT_S:.0f} s")
        line = answers.readline()
        if not line:
            raise WorkerError(self._reason_of_end())
        answer = json.loads(line)
        if "error" in answer:
            raise WorkerError(answer["error"])
        return answer["result"]

    def close(self) -> None:
        """End the process: close its input, and kill it if that does not help."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._log.unlink()

    def _reason_of_end(self) -> str:
        """The exit code and the last line that the process wrote."""
        code = self._process.wait()
        lines = self._log.read_text(encoding="utf-8", errors="replace").split("\n")
        return ": ".join(
            [f"the process ended with {code}", *[line.strip()[:300] for line in lines if line.strip()][-1:]]
        )


class EngineGroup(AbstractContextManager["EngineGroup"]):
    """Engines by name. A peer that fails is noted and left out; a failure of archerfish, of any version, ends the
    bench."""

    def __init__(self) -> None:
        self._workers: dict[str, Worker] = {}
        self.notes: list[str] = []

    def open(self, name: str, engine: str, arguments: dict[str, Any], **options: Any) -> Any:
        """Start an engine, in place of one that had the name before; returns its times, None if it failed."""
        if name in self._workers:
            self._workers.pop(name).close()
        self._workers[name] = Worker(engine, arguments, **options)
        return self.call(name, "start")

    def call(self, name: str, method: str, **arguments: Any) -> Any:
        """The result of a method of an engine; None if the engine has failed."""
        if name not in self._workers:
            return None
        try:
            return self._workers[name].call(method, **arguments)
        except WorkerError as error:
            worker = self._workers.pop(name)
            worker.close()
            if worker.engine.startswith("Archerfish"):
                raise ServiceError(f"{name} failed: {error}", hint="") from None
            self.notes.append(f"{name} failed: {error}")
            return None

    def names(self, rotation: int = 0) -> list[str]:
        """The engines that work, beginning with another one in every round, so that no engine is always first."""
        return rotated(list(self._workers), rotation)

    def __exit__(self, *_: object) -> None:
        while self._workers:
            self._workers.popitem()[1].close()


def rotated(items: list[T], number: int) -> list[T]:
    """The items, beginning with another one in every round."""
    at = number % len(items) if items else 0
    return items[at:] + items[:at]


def versions(against: str) -> dict[str, str]:
    """Names and import paths of the versions of archerfish to measure: this one, and another checkout where one is
    given."""
    return {OURS: ""} | ({Path(against).resolve().name: str(Path(against).resolve())} if against else {})


def chosen(flag: str, text: str, known: Collection[str]) -> list[str]:
    """The names in a flag, separated by commas, in the order of the known ones; all of them where none is given."""
    names = [word.strip() for word in text.split(",") if word.strip()]
    refuse_unknown(names, known, f"name in {flag}")
    return [name for name in known if not names or name in names]
