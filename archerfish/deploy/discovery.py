"""The engine hosts of a service, as front ends learn of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from archerfish.serve.client import AsyncClient
from archerfish.serve.routing import RoutedBackend


class FoundReplica(msgspec.Struct, frozen=True):
    """An engine host that runs. Its name, address and key stay the same as long as its actor lives."""

    name: str
    address: str
    public_key: str


def changes(
    known: Iterable[FoundReplica], found: Iterable[FoundReplica]
) -> tuple[list[FoundReplica], list[FoundReplica]]:
    """Which replicas are new, and which have gone."""
    before, after = {one.name: one for one in known}, {one.name: one for one in found}
    return [after[name] for name in after if name not in before], [before[name] for name in before if name not in after]


def read_replicas(answers: Iterable[Any]) -> list[FoundReplica]:
    """The replicas of the answers to a broadcast. A replica that could not answer has an exception there and is left
    out."""
    found = [msgspec.convert(answer, FoundReplica) for answer in answers if isinstance(answer, dict)]
    return sorted(found, key=lambda one: one.name)


class Follower:
    """Keeps a backend's replicas equal to those that were found. `update` runs in the event loop.

    own_keys: the public and secret CURVE key of front ends. on_change: called when there may be other models than
    before.
    """

    def __init__(self, backend: RoutedBackend, own_keys: tuple[str, str], on_change: Callable[[], None]) -> None:
        self.known: list[FoundReplica] = []
        self._backend = backend
        self._own_keys = own_keys
        self._on_change = on_change
        self._removals: set[asyncio.Task[None]] = set()

    def update(self, found: list[FoundReplica]) -> None:
        added, removed = changes(self.known, found)
        if not added and not removed:
            return
        self.known = found
        for one in removed:
            task = asyncio.ensure_future(self._backend.remove(one.name))
            self._removals.add(task)
            task.add_done_callback(self._removals.discard)
            task.add_done_callback(lambda _: self._on_change())
        for one in added:
            self._backend.add(one.name, AsyncClient(one.address, server_key=one.public_key, own_keys=self._own_keys))
        self._on_change()
