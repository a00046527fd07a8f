"""Requests of a simulation: drawn at random, or read from a file."""

from __future__ import annotations

import json
import zlib
from array import array
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from archerfish.cache.block_manager import BlockManager
from archerfish.cache.radix import RadixCache, RadixKey
from archerfish.errors import InvalidInputError, NotFoundError
from archerfish.sequence import NO_NAMESPACE, Namespace, pack_tokens
from archerfish.simulate.pace import BLOCK_TOKENS
from archerfish.simulate.replica import ANSWER

MOONCAKE_TOKENS = 512  # that one of the `hash_ids` of a Mooncake trace stands for
EXAMPLE = '{"arrival_s": 0.5, "tenant": "a", "parts": [["system", 900], ["question", 80]], "output_tokens": 99}'
ANSWER_PART = 0  # the number of the parts of a prompt that were answers before
ANSWER_TOKEN_S = 0.02  # about, until the next turn is thought of
BURST_S = 10.0  # from one burst to the next
SPREAD = 0.6  # of lengths: standard deviation of their logarithm
Part = tuple[int, int]  # number and length: parts with one number begin alike


@dataclass(slots=True)
class Arrival:
    """A request of a trace. Its prompt is `tokens`, or else the parts one after the other."""

    at_s: float
    tenant: str
    parts: tuple[Part, ...]
    output_tokens: int
    tokens: array[int] | None = None

    def prompt(self) -> array[int]:
        return self.tokens or array("I", b"".join(part_tokens(*part) for part in self.parts))

    @property
    def num_prompt(self) -> int:
        return len(self.tokens) if self.tokens else sum(length for _, length in self.parts)


@lru_cache(4096)
def part_tokens(number: int, length: int) -> bytes:
    """The tokens of a part. Parts with different numbers differ in their first token."""
    if number == ANSWER_PART:
        return np.full(length, ANSWER, np.uint32).tobytes()
    return (np.arange(length, dtype=np.uint32) + np.uint32(number * 2_654_435_761 % 2**32)).tobytes()


@dataclass(frozen=True)
class Workload:
    """Conversations of several tenants. Lengths are means of log-normal distributions; a conversation has `turns` on
    average.

    A tenant's prompts begin with one of its `system_prompts`; the first tenant is the most popular one (Zipf). burst:
    of every BURST_S seconds, all first turns come in this part, such as a quarter for 4.
    """

    rate: float = 10.0  # requests a second
    seconds: float = 60.0
    tenants: int = 8
    system_prompts: int = 1
    system_tokens: int = 1000
    user_tokens: int = 200
    output_tokens: int = 200
    turns: float = 3.0
    think_s: float = 10.0  # from an answer to the next turn
    burst: float = 1.0
    seed: int = 0

    def arrivals(self) -> list[Arrival]:
        """Requests by time."""
        random = Random(self.seed)
        found = list[Arrival]()
        number = 0
        at_s = (
            -3 * (self.turns - 1) * (self.think_s + ANSWER_TOKEN_S * self.output_tokens)
        )  # some conversations go on already
        weights = [1 / (1 + i) for i in range(self.tenants)]
        stems = [[self._length(random, self.system_tokens) for _ in range(self.system_prompts)] for _ in weights]
        last = self.tenants * self.system_prompts  # of the numbers of system prompts
        while (at_s := at_s + random.expovariate(self.rate / self.turns)) < self.seconds:
            (tenant,) = random.choices(range(self.tenants), weights)
            which = random.randrange(self.system_prompts)
            parts: tuple[Part, ...] = ((1 + tenant * self.system_prompts + which, stems[tenant][which]),)
            turn_s = at_s - at_s % BURST_S * (1 - 1 / self.burst)
            while turn_s < self.seconds:
                number += 1
                output = self._length(random, self.output_tokens)
                parts = (*parts, (last + number, self._length(random, self.user_tokens)))
                if turn_s >= 0:
                    found.append(Arrival(turn_s, f"tenant-{tenant}", parts, output))
                parts = (*parts, (ANSWER_PART, output))
                if random.random() < 1 / self.turns:
                    break
                turn_s += ANSWER_TOKEN_S * output + random.expovariate(1 / self.think_s)
        return sorted(found, key=lambda arrival: arrival.at_s)

    @staticmethod
    def _length(random: Random, mean: int) -> int:
        return max(1, round(mean * random.lognormvariate(-SPREAD * SPREAD / 2, SPREAD)))


def read_trace(path: Path) -> list[Arrival]:
    """A file with a JSON object a line: arrival_s, tenant, output_tokens, and tokens (ids) or parts ([name, length]).

    Lines of Mooncake's traces are taken too: timestamp (ms), input_length, output_length and hash_ids.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise NotFoundError(f"The trace {path} cannot be read: {error.strerror}.") from None
    found = []
    for number, line in enumerate(lines, 1):
        try:
            found.append(read_arrival(json.loads(line)))
        except (ValueError, TypeError, KeyError, AttributeError, InvalidInputError) as error:
            hint = f"A line is, for example, {EXAMPLE}."
            raise InvalidInputError(f"{path}, line {number}, is no request: {error!r}.", hint=hint) from None
    if not found:
        raise InvalidInputError(f"{path} has no requests.")
    return sorted(found, key=lambda arrival: arrival.at_s)


def read_arrival(line: dict[str, Any]) -> Arrival:
    tokens = pack_tokens(line["tokens"]) if "tokens" in line else None
    if "hash_ids" in line:
        at_s = float(line["timestamp"]) / 1000
        output = int(line["output_length"])
        length = int(line["input_length"])
        sizes = [min(MOONCAKE_TOKENS, length - start) for start in range(0, length, MOONCAKE_TOKENS)]
        parts = tuple((1 + int(one), size) for one, size in zip(line["hash_ids"], sizes, strict=True))
    else:
        at_s, output = float(line["arrival_s"]), int(line["output_tokens"])
        parts = tuple((1 + zlib.crc32(str(name).encode()), int(length)) for name, length in line.get("parts", ()))
    arrival = Arrival(at_s, str(line.get("tenant", "")), parts, output, tokens)
    if (
        arrival.num_prompt < 1
        or output < 1
        or not 0 <= at_s < float("inf")
        or min([1, *(size for _, size in parts)]) < 1
    ):
        raise ValueError("times must not be negative, lengths must be at least 1")
    return arrival


def one_cache_hit_rate(trace: list[Arrival], num_tokens: int) -> float:
    """The share of prompt tokens found in one cache of so many tokens, if each request ended before the next one
    came."""
    size = BLOCK_TOKENS
    blocks = BlockManager(num_tokens // size + 1, size)
    cache = RadixCache(blocks, num_ghosts=0)
    for arrival in trace:
        prompt, namespace = arrival.prompt(), Namespace(arrival.tenant) if arrival.tenant else NO_NAMESPACE
        match = cache.match_prefix(RadixKey(prompt, namespace), limit=len(prompt) - 1)
        whole = RadixKey(prompt + array("I", [ANSWER]) * (arrival.output_tokens - 1), namespace)
        wanted = -(-len(whole.tokens) // size)
        cache.lock(match.node)
        cache.evict(max(0, wanted - match.num_tokens // size - blocks.num_free))
        shared = match.blocks[: match.num_tokens // size]
        blocks.share(shared)
        own = blocks.allocate(wanted - len(shared))
        cache.insert(whole, shared + own, handle=match.node)
        cache.unlock(match.node)
        blocks.free(shared + own)
    return cache.stats().hit_rate
