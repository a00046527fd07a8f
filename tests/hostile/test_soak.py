"""Mixed load for MINUTES (10) on a service with a small cache. No process grows once the cache is full. `make test-soak`."""

from __future__ import annotations

import os
import random
import re
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from .target import CHAT, LIMIT_S, MIB, ROLES, Target

GROWTH = (
    1.03  # most growth of a process's median memory, from the first to the last third of the time with a full cache
)
NUM_CLIENTS = 6
WORDS = ["the", "cat", "a", "b", "s", "1", "2", "你"]
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["b", "s"]}}, "required": ["a"], "additionalProperties": False}


def words(rng: random.Random, most: int) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(1, most)))


def chat(rng: random.Random, most: int = 30, **more: Any) -> dict[str, Any]:
    content = words(rng, most)
    return {"messages": [{"role": "user", "content": content}], "max_tokens": rng.randint(1, 48), **more}


def post(client: httpx.Client, path: str, body: Any, *expected: int) -> None:
    answer = client.post(path, json=body)
    assert answer.status_code in (expected or (200, 429, 503)), answer.text


def stream(client: httpx.Client, rng: random.Random) -> None:
    """Read a stream to its end, or leave in the middle."""
    most = rng.choice((3, 1 << 30))
    with client.stream("POST", CHAT, json=chat(rng, stream=True)) as answer:
        for number, _ in enumerate(answer.iter_lines()):
            if number > most:
                break


def with_schema(client: httpx.Client, rng: random.Random) -> None:
    """A schema that was not seen before."""
    schema = {**SCHEMA, "title": words(rng, 8)}
    shape = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    post(client, CHAT, chat(rng, response_format=shape))


ACTIONS: list[Callable[[httpx.Client, random.Random], None]] = [
    lambda client, rng: post(client, CHAT, chat(rng)),
    lambda client, rng: post(client, CHAT, chat(rng, 1500)),
    lambda client, rng: post(client, "/v1/completions", {"prompt": words(rng, 20), "n": 3, "max_tokens": 8}),
    lambda client, rng: post(client, "/v1/embeddings", {"input": [words(rng, 60) for _ in range(8)]}),
    lambda client, rng: post(client, CHAT, {**chat(rng), "max_tokens": "many"}, 400),
    lambda client, rng: post(client, "/v1/embeddings", {"input": [{}]}, 400),
    lambda client, rng: post(client, f"/{rng.random()}", {}, 404),
    stream,
    stream,
    with_schema,
]


def resident_bytes(target: Target) -> dict[str, int]:
    """By process."""
    pids = {f"{role} {pid}": pid for role in ROLES for pid in target.of_role(role)} | {"main": target.process.pid}
    texts = {name: Path(f"/proc/{pid}/status").read_text() for name, pid in pids.items()}
    return {name: int(re.findall(r"VmRSS:\s+(\d+)", text)[0]) * 1024 for name, text in texts.items()}


def load(target: Target, seed: int, is_over: threading.Event, done: Counter[str]) -> None:
    rng = random.Random(seed)
    with httpx.Client(base_url=target.url, timeout=LIMIT_S) as client:
        while not is_over.is_set():
            action = rng.randrange(len(ACTIONS))
            ACTIONS[action](client, rng)
            done["requests"] += 1


@pytest.mark.soak
def test_memory_is_flat_once_the_cache_is_full(tmp_path: Path) -> None:
    """Prints a table: time, requests, tokens in the cache of the budget, memory of each process in MiB."""
    most_s = 60 * float(os.environ.get("MINUTES", "10"))
    end, is_over, done = time.monotonic() + most_s, threading.Event(), Counter[str]()
    samples: list[dict[str, int]] = []
    flags = ("--kinds", "all", "--max-cache-tokens", "16384", "--logits-cache-mib", "1", "--num-front-ends", "2")
    with (
        Target(tmp_path, *flags, most_s=2 * most_s + 600) as target,
        ThreadPoolExecutor() as pool,
        ExitStack() as stack,
    ):
        stack.callback(is_over.set)
        clients = [pool.submit(load, target, seed, is_over, done) for seed in range(NUM_CLIENTS)]
        num_seconds = 0
        while time.monotonic() < end and not any(client.done() for client in clients):
            is_over.wait(1)
            now, num_seconds = resident_bytes(target), num_seconds + 1
            found = httpx.get(f"{target.url}/stats", timeout=LIMIT_S).json()["models"]["tiny"]
            if samples or found["cache"]["total_cached"] > 0.8 * found["cache"]["total_capacity"]:
                samples.append(now)
            if num_seconds % 20 == 1:
                cached = f"{found['cache']['total_cached']:,} of {found['cache']['total_capacity']:,} tokens"
                memory = ", ".join(f"{name}: {num_bytes / MIB:.1f}" for name, num_bytes in now.items())
                print(f"{num_seconds:5} s  {done['requests']:7,} requests  {cached}  {memory}", flush=True)
        is_over.set()
        for client in clients:
            client.result()
        third = len(samples) // 3
        assert third > 10, "the cache was not full in time"
        for name in samples[0]:
            first, last = (
                statistics.median(each[name] for each in part) for part in (samples[:third], samples[-third:])
            )
            print(f"{name}: {first / MIB:.1f} MiB, then {last / MIB:.1f} MiB ({last / first:.3f})")
            assert last <= GROWTH * first, name
        target.check()
