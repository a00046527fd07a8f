"""The engines of one bench, each in a worker process; only one is at work at any time."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

from archerfish.bench.report import OURS
from archerfish.bench.worker import Worker, WorkerError
from archerfish.errors import InvalidOptionError, ServiceError, did_you_mean


class EngineGroup(AbstractContextManager["EngineGroup"]):
    """Engines by name. A peer that fails is noted and left out; a failure of archerfish, of any version, ends the bench."""

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
        names = list(self._workers)
        at = rotation % len(names) if names else 0
        return names[at:] + names[:at]

    def close(self) -> None:
        while self._workers:
            self._workers.popitem()[1].close()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def versions(against: str) -> dict[str, str]:
    """Names and import paths of the versions of archerfish to measure: this one, and another checkout where one is given."""
    return {OURS: ""} | ({Path(against).resolve().name: str(Path(against).resolve())} if against else {})


def chosen(flag: str, text: str, known: Iterable[str]) -> list[str]:
    """The names in a flag, separated by commas, in the order of the known ones; all of them where none is given."""
    names = [word.strip() for word in text.split(",") if word.strip()]
    for name in names:
        if name not in known:
            raise InvalidOptionError(f"{flag} does not know {name!r}.", hint=did_you_mean(name, known))
    return [name for name in known if not names or name in names]
