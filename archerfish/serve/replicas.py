"""The replicas of one machine: what each of them gets of it, and how they are restarted one after another."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import msgspec

from archerfish.background import signals_to
from archerfish.config import EngineConfig
from archerfish.errors import InvalidOptionError
from archerfish.kernels.machine import memory, num_usable_cores, usable_cores
from archerfish.kernels.room import GIB
from archerfish.kernels.select import choose_device, import_torch
from archerfish.runtime.kv_pool import CPU_MOST_BYTES, CPU_SHARE
from archerfish.serve.processes import HostConfig, KeptProcess, ModelSpec, engine_process

logger = logging.getLogger("archerfish.serve")
VISIBLE_CARDS = "CUDA_VISIBLE_DEVICES"
SETTLE_S = 1.0  # for which all have served when one is stopped: the front ends know of them then
WAIT_S = 600.0  # until all serve, before one is stopped


def replica_name(number: int) -> str:
    return f"replica-{number}"


def replica_processes(host: HostConfig, count: int) -> list[KeptProcess]:
    """The engine processes of a service. host: the configuration of one that has the whole machine."""
    if count == 1:
        return [engine_process(host)]
    devices = {choose_device(spec.options.get("device", "auto")).name for spec in host.models}
    cores, cards = core_shares(usable_cores(), count), list[str]()
    if "cuda" in devices:
        cards = cards_of(count, max(spec.num_ranks for spec in host.models))
    elif count > len(usable_cores()):
        logger.warning(
            "%d replicas share %d cores: more than one on a core makes nothing faster.", count, len(usable_cores())
        )
    models = tuple(
        msgspec.structs.replace(spec, options=divided(spec, count, has_card=bool(cards))) for spec in host.models
    )
    memory_gib = host.memory_gib if cards else host.memory_gib / count
    found = []
    for number in range(count):
        name = replica_name(number)
        own = msgspec.structs.replace(
            host, name=name, address=f"{host.address}-{number}", models=models, memory_gib=memory_gib
        )
        options: dict[str, Any] = {"environment": {VISIBLE_CARDS: cards[number]}} if cards else {"cores": cores[number]}
        found.append(engine_process(own, **options))
    return found


def can_bind() -> bool:
    """Whether processes can be bound to cores, and the cores limit this process, not a quota."""
    return hasattr(os, "sched_setaffinity") and num_usable_cores() >= len(usable_cores())


def core_shares(cores: Sequence[int], count: int) -> list[list[int]]:
    """The cores of each replica; none where they are not bound."""
    if not can_bind():
        return [[]] * count
    if count > len(cores):
        return [[cores[number % len(cores)]] for number in range(count)]
    bounds = [number * len(cores) // count for number in range(count + 1)]
    return [list(cores[begin:end]) for begin, end in itertools.pairwise(bounds)]


def cards_of(count: int, num_each: int) -> list[str]:
    """The cards of each replica, as CUDA_VISIBLE_DEVICES names them. num_each: processes that a model is divided
    over."""
    num_cards = import_torch("A card for each replica").cuda.device_count()
    if num_cards < count * num_each:
        each = "one" if num_each == 1 else f"{num_each}, as many as its model is divided over"
        message = f"[serve] replicas is {count}, but there are {num_cards} cards; each replica takes {each}."
        hint = f"Set replicas to {num_cards // num_each} at most, or device to cpu." if num_cards >= num_each else None
        raise InvalidOptionError(message, hint=hint)
    named = [name.strip() for name in os.environ.get(VISIBLE_CARDS, "").split(",") if name.strip()]
    names = named or [str(number) for number in range(num_cards)]
    return [",".join(names[first : first + num_each]) for first in range(0, count * num_each, num_each)]


def with_threads(spec: ModelSpec, num_cores: int) -> dict[str, Any]:
    """The options of a model that computes with so many cores, or with the threads that it states. 0: with all
    cores."""
    share = num_cores and max(1, num_cores // spec.num_ranks)
    return {**spec.options, "num_threads": spec.options.get("num_threads") or share}


def divided(spec: ModelSpec, count: int, *, has_card: bool) -> dict[str, Any]:
    """The options of a model with a share of threads and memory."""
    options = dict(spec.options) if has_card or can_bind() else with_threads(spec, max(1, num_usable_cores() // count))
    if spec.kind == "generation" and not has_card:
        engine = EngineConfig(**options)
        usual_gib = min(CPU_SHARE * memory().available_bytes, CPU_MOST_BYTES) / GIB
        if engine.memory_budget_gib or not engine.max_cache_tokens:
            engine = engine.replace(memory_budget_gib=(engine.memory_budget_gib or usual_gib) / count)
        options = dataclasses.asdict(engine)
    return options


class RollingRestart:
    """Restarts replicas one after another when SIGHUP comes. Each is stopped only while all of them serve."""

    def __init__(self, replicas: Sequence[KeptProcess]) -> None:
        self._replicas = replicas
        self._is_asked = threading.Event()
        if len(replicas) > 1:
            threading.Thread(target=self._run, name="archerfish-restart", daemon=True).start()

    def on_signal(self) -> AbstractContextManager[None]:
        """One replica leaves SIGHUP as it is: it ends the service."""
        return signals_to(lambda *_: self._is_asked.set(), *([signal.SIGHUP] if len(self._replicas) > 1 else []))

    def _run(self) -> None:
        while True:
            self._is_asked.wait()
            self._is_asked.clear()  # another signal from here on asks for another restart
            logger.warning("All %d replicas are restarted, one after another.", len(self._replicas))
            for number, replica in enumerate(self._replicas, 1):
                if not (self._all_serve(replica) and replica.replace()):
                    if not replica.is_ending:
                        logger.error("The restart ends at the %s: not all replicas serve.", replica.name)
                    break
                logger.warning("The %s was restarted (%d of %d).", replica.name, number, len(self._replicas))

    def _all_serve(self, replica: KeptProcess) -> bool:
        """Wait until all have served for SETTLE_S. False if they do not within WAIT_S, or at the end of the service."""
        end, told = time.monotonic() + WAIT_S, ""
        while time.monotonic() < end and not replica.is_ending:
            away = ", ".join(one.name for one in self._replicas if not one.is_serving)
            time.sleep(SETTLE_S)
            if not away and all(one.is_serving for one in self._replicas):
                return True
            if away not in ("", told):
                logger.warning("The %s is restarted when all replicas serve; it waits for: %s.", replica.name, away)
                told = away
        return False
