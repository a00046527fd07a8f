"""What an engine process reports to routers: the load of its models, and the changes of its prefix digest."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from archerfish.cache.digest import HASH_BYTES, PrefixDigest
from archerfish.route.router import ReplicaLoad

MAX_CHANGES_BYTES = 16 << 10  # of a digest in one answer
CHANGES_BYTES_PER_S = 45_000  # of a digest in all answers to one front end
NO_DIGEST = -1  # asked for instead of a version
MAX_ASKERS = 1024  # front ends that are remembered
LOAD_S = 3.0  # about what loading a model takes: one that has it loaded is preferred until its queue is as long


class Loaded(Protocol):
    """A loaded model."""

    def load(self) -> ReplicaLoad: ...


class Entry(Protocol):
    """A model of the process."""

    name: str
    waiting: list[Any]

    @property
    def hosted(self) -> Loaded | None: ...


class LoadReports:
    """Makes the answers to routers. Each front end gets at most CHANGES_BYTES_PER_S of the digest."""

    def __init__(self, digest: PrefixDigest | None, clock: Callable[[], float]) -> None:
        self._digest, self._clock = digest, clock
        self._rooms: dict[str, tuple[float, float]] = {}  # by front end: bytes left, and when it asked
        self.started_at = time.time()

    def report(self, since: int, entries: Sequence[Entry], source: str = "", *, is_stopping: bool) -> dict[str, Any]:
        """since: the version of the digest that the router has, or NO_DIGEST. source: a unique name of the front
        end."""
        loads = {
            one.name: ReplicaLoad(step_s=LOAD_S, num_waiting=len(one.waiting))
            if one.hosted is None
            else one.hosted.load()
            for one in entries
        }
        found = {"loads": loads, "is_stopping": is_stopping, "started_at": self.started_at}
        if self._digest is None or since == NO_DIGEST:
            return found
        now = self._clock()
        room, asked_at = self._rooms.pop(source, (MAX_CHANGES_BYTES, now))
        room = min(MAX_CHANGES_BYTES, room + CHANGES_BYTES_PER_S * (now - asked_at))
        version, changes, begins_anew = self._digest.changes(since, int(room) // HASH_BYTES * HASH_BYTES)
        self._rooms[source] = room - len(changes), now
        if len(self._rooms) > MAX_ASKERS:
            del self._rooms[next(iter(self._rooms))]
        return {**found, "version": version, "changes": changes, "begins_anew": begins_anew}
