"""`archerfish bench throughput | latency | prefix`: text generation by us and by the peers that are installed."""

from __future__ import annotations

import dataclasses
import importlib.util
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import numpy as np

from archerfish.bench.report import OURS, Found, Measurement
from archerfish.bench.worker import EngineGroup, versions
from archerfish.config import EngineConfig
from archerfish.observe.summary import percentile

PEER_BATCH = 32
MEAN_OUTPUT = 64
MIN_OUTPUT = 4
MAX_OUTPUT = 512
MIN_PROMPT, MAX_PROMPT = 16, 256
SHARED_TOKENS = 800
OWN_TOKENS = 200
PREFIX_OUTPUT = 16
PREFIX_REQUESTS = 64
LATENCY_PROMPTS = (16, 128, 512, 1024)
LATENCY_OUTPUT = 64
Job = tuple[list[int], int]  # prompt, number of output tokens


def open_ours(group: EngineGroup, options: Namespace, suffix: str = "", **changes: Any) -> dict[str, dict[str, Any]]:
    """Start our engine, and another version of it where one is given; the facts of each, by name."""
    usual = dataclasses.asdict(EngineConfig())  # another version may not know all of these options
    stated = {name: value for name, value in dataclasses.asdict(options.engine).items() if value != usual[name]}
    arguments = {"options": {**stated, **changes}}
    facts = {}
    for name, path in versions(options.against).items():
        group.open(name + suffix, "Archerfish", arguments, path=path)
        facts[name] = group.call(name + suffix, "facts")
    return facts


def open_peers(group: EngineGroup, options: Namespace, facts: dict[str, Any], *, is_latency: bool) -> None:
    """Start the peers that this machine has, on the same weights."""
    if options.no_peers:
        return
    threads = options.engine.num_threads
    if importlib.util.find_spec("transformers") is not None:
        given = {key: facts[key] for key in ("directory", "dtype", "config")}
        group.open("transformers", "Transformers", {**given, "num_threads": threads})
    if is_latency and importlib.util.find_spec("llama_cpp") is not None:
        from archerfish.store.names import resolve_model

        source = resolve_model(options.engine.model)
        file = source if source.suffix == ".gguf" else next(source.glob("*.gguf"), None)
        if file is not None:
            group.open("llama.cpp", "LlamaCpp", {"model_path": str(file), "num_threads": threads})


def mixed_jobs(num_jobs: int, vocab_size: int, seed: int) -> list[Job]:
    """Prompts of 16 to 256 random tokens; output lengths from an exponential of mean 64, cut to 4 to 512."""
    draw = np.random.default_rng(seed)
    outputs = np.clip(np.rint(draw.exponential(MEAN_OUTPUT, num_jobs)), MIN_OUTPUT, MAX_OUTPUT).astype(int)
    lengths = draw.integers(MIN_PROMPT, MAX_PROMPT + 1, num_jobs)
    return [(draw.integers(0, vocab_size, n).tolist(), int(output)) for n, output in zip(lengths, outputs, strict=True)]


def run_continuous(group: EngineGroup, name: str, jobs: list[Job]) -> float:
    """The seconds of all jobs in our engine, whose requests join and leave at every step."""
    group.call(name, "clear_cache")
    return float(group.call(name, "generate", prompts=[p for p, _ in jobs], outputs=[n for _, n in jobs]))


def run_static(group: EngineGroup, name: str, jobs: list[Job], batch: int) -> float | None:
    """The seconds of the same jobs in fixed batches, each of which runs as long as its longest output."""
    total = 0.0
    for first in range(0, len(jobs), batch):
        part = jobs[first : first + batch]
        longest = max(output for _, output in part)
        seconds = group.call(name, "generate", prompts=[p for p, _ in part], outputs=[longest] * len(part))
        if seconds is None:
            return None
        total += seconds
    return total


def throughput(options: Namespace) -> Found:
    """Continuous against static batching at several sizes, and against peers at PEER_BATCH; all in every round."""
    with EngineGroup() as group:
        for batch in options.batches:
            facts = open_ours(group, options, f" {batch}", max_num_seqs=batch)
            for name, found in facts.items():
                run_continuous(group, f"{name} {batch}", mixed_jobs(batch, found["vocab_size"], 99))  # warms up
        if PEER_BATCH in options.batches:
            open_peers(group, options, facts[OURS], is_latency=False)
        for number in range(options.rounds):
            for batch in options.batches:
                yield from throughput_round(
                    group, batch, mixed_jobs(4 * batch, facts[OURS]["vocab_size"], number), list(facts)
                )
        yield from group.notes


def throughput_round(group: EngineGroup, batch: int, jobs: list[Job], ours: list[str]) -> Iterator[Measurement]:
    num_tokens = sum(output for _, output in jobs)
    metric = f"continuous, {batch} sequences, tokens/s"
    for name in ours:
        yield Measurement(metric, num_tokens / run_continuous(group, f"{name} {batch}", jobs), name)
        utilisation = group.call(f"{name} {batch}", "facts")["kv_utilization"]
        yield Measurement(f"{batch} sequences, utilisation", utilisation, name)
    group.call(f"{OURS} {batch}", "clear_cache")
    if seconds := run_static(group, f"{OURS} {batch}", jobs, batch):
        yield Measurement(f"static, {batch} sequences, tokens/s", num_tokens / seconds)
    if batch == PEER_BATCH and (seconds := run_static(group, "transformers", jobs, batch)):
        yield Measurement(metric, num_tokens / seconds, "transformers")


def latency(options: Namespace) -> Found:
    """One request at a time after prompts of several lengths: first token, tokens a second, gaps between tokens."""
    with EngineGroup() as group:
        facts = open_ours(group, options)
        open_peers(group, options, facts[OURS], is_latency=True)
        for number in range(-1, options.rounds):
            for length in LATENCY_PROMPTS if number >= 0 else LATENCY_PROMPTS[:1]:
                prompt = (
                    np.random.default_rng((length, number + 1)).integers(0, facts[OURS]["vocab_size"], length).tolist()
                )
                for name in group.names(number):
                    times = group.call(name, "token_times", prompt=prompt, num_output=LATENCY_OUTPUT)
                    if times and number >= 0:  # the first round warms up
                        yield from latency_figures(times, length, name)
        yield from group.notes


def latency_figures(times: list[float], length: int, name: str) -> Iterator[Measurement]:
    gaps = (np.diff(times) * 1000).tolist()
    yield Measurement(f"first token after {length} tokens, ms", times[0] * 1000, name)
    yield Measurement(f"after {length} tokens, tokens/s", len(gaps) / (times[-1] - times[0]), name)
    for share in (50, 99):
        yield Measurement(f"gap between tokens p{share}, ms", percentile(gaps, share / 100), name)


def prefix(options: Namespace) -> Found:
    """64 prompts of 1,000 tokens, 800 of them shared, with the cache and without; first tokens of miss, hit and
    repeat."""
    with EngineGroup() as group:
        facts = open_ours(group, options, enable_prefix_caching=True)
        plain = f"{OURS} without cache"
        group.open(
            plain, "Archerfish", {"options": {**dataclasses.asdict(options.engine), "enable_prefix_caching": False}}
        )
        for number in range(options.rounds):
            draw = np.random.default_rng(number)
            vocab_size = facts[OURS]["vocab_size"]
            shared = draw.integers(0, vocab_size, SHARED_TOKENS).tolist()
            prompts = [shared + draw.integers(0, vocab_size, OWN_TOKENS).tolist() for _ in range(PREFIX_REQUESTS)]
            jobs = [(prompt, PREFIX_OUTPUT) for prompt in prompts]
            for name in group.names(number):
                rate = len(jobs) / run_continuous(group, name, jobs)
                if name == plain:
                    yield Measurement("cache off, requests/s", rate)
                    continue
                yield Measurement("cache on, requests/s", rate, name)
                num_cached = group.call(name, "last_outputs")["num_cached"]
                yield Measurement("requests, hit rate", sum(n > 0 for n in num_cached) / len(jobs), name)
                yield Measurement("tokens, hit rate", sum(num_cached) / sum(map(len, prompts)), name)
                yield from first_tokens(group, name, prompts[0])


def first_tokens(group: EngineGroup, name: str, prompt: list[int]) -> Iterator[Measurement]:
    """Milliseconds to the first token: an unknown prompt, a prompt of which all but the last token is known, a
    repeat."""

    def first_ms(prompt: list[int], clear: bool) -> float:
        return 1000.0 * float(group.call(name, "token_times", prompt=prompt, num_output=1, clear=clear)[0])

    yield Measurement("first token, miss, ms", first_ms(prompt, clear=True), name)
    yield Measurement("first token, full hit, ms", first_ms([*prompt, 1], clear=False), name)
    before = group.call(name, "facts")["num_passes"]
    yield Measurement("first token, exact repeat, ms", first_ms(prompt, clear=False), name)
    yield Measurement("forward passes of an exact repeat", group.call(name, "facts")["num_passes"] - before, name)
