"""The engine hosts of a service, as front ends learn of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec


class FoundReplica(msgspec.Struct, frozen=True):
    """An engine host that runs. Equal means the same process at the same address."""

    name: str
    address: str
    public_key: str


class FrontState(msgspec.Struct):
    """What a front end gets as a line of its standard input, whenever it changes."""

    replicas: list[FoundReplica]


def changes(known: Iterable[FoundReplica], found: Iterable[FoundReplica]) -> tuple[list[FoundReplica], list[FoundReplica]]:
    """Which replicas are new, and which have gone. One that has moved is both."""
    before, after = set(known), set(found)
    return sorted(after - before, key=lambda one: one.name), sorted(before - after, key=lambda one: one.name)


def read_found(answers: Iterable[Any]) -> list[FoundReplica]:
    """The replicas of the answers to a broadcast. A replica that could not answer has an exception there and is left out."""
    found = [msgspec.convert(answer, FoundReplica) for answer in answers if isinstance(answer, dict)]
    return sorted(found, key=lambda one: one.name)
