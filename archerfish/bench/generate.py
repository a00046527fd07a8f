"""Work and measurements of `archerfish bench throughput | latency | prefix`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from archerfish.bench.memory import status_bytes
from archerfish.bench.stats import Summary, percentile, summarize
from archerfish.bench.targets import Bar, BenchmarkConfig, Judged, TestCase
from archerfish.config import EngineConfig
from archerfish.engine.llm_engine import LLMEngine
from archerfish.errors import ServiceError
from archerfish.params import SamplingParams
from archerfish.types import Progress, no_progress

BATCHES = (8, 16, 32, 64)
STATIC_TARGETS = {8: 1.8, 16: 1.8, 32: 2.0, 64: 2.5}
PEER_BATCH, PEER_TARGET = 32, 2.0
MEAN_OUTPUT, LEAST_OUTPUT, MOST_OUTPUT = 64, 4, 512
LEAST_PROMPT, MOST_PROMPT = 16, 256
SHARED_TOKENS, OWN_TOKENS, PREFIX_OUTPUT, PREFIX_REQUESTS = 800, 200, 16, 64
LATENCY_PROMPTS = (16, 128, 512, 1024)
LATENCY_OUTPUT = 64


@dataclass(frozen=True)
class Job:
    """One request of a workload: its prompt and how many tokens it asks for."""

    prompt: list[int]
    num_output: int


@dataclass
class Report:
    """Samples by name, and plain figures. `tell` hears of every sample at once: a run takes long."""

    samples: dict[str, list[float]] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)
    tell: Callable[[str, float], None] = lambda name, value: None

    def add(self, name: str, value: float) -> None:
        self.samples.setdefault(name, []).append(value)
        self.tell(name, value)

    def summary(self, name: str) -> Summary | None:
        return summarize(self.samples[name]) if self.samples.get(name) else None

    def ratio(self, ours: str, theirs: str) -> float | None:
        own, other = self.summary(ours), self.summary(theirs)
        return None if own is None or other is None or other.median <= 0 else own.median / other.median

    def as_dict(self) -> dict[str, Any]:
        samples = {name: summarize(values).as_dict() for name, values in self.samples.items()}
        return {"samples": samples, "figures": self.figures}


def mixed_jobs(num_jobs: int, vocab_size: int, seed: int) -> list[Job]:
    """Prompts of 16 to 256 random tokens, outputs from an exponential of mean 64 cut to 4 to 512."""
    rng = np.random.default_rng(seed)
    outputs = np.clip(np.rint(rng.exponential(MEAN_OUTPUT, num_jobs)), LEAST_OUTPUT, MOST_OUTPUT).astype(int)
    lengths = rng.integers(LEAST_PROMPT, MOST_PROMPT + 1, num_jobs)
    return [
        Job(rng.integers(0, vocab_size, length).tolist(), int(output)) for length, output in zip(lengths, outputs, strict=True)
    ]


def params_for(num_output: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_output, temperature=0.0, ignore_eos=True)


def run_continuous(engine: LLMEngine, jobs: Sequence[Job]) -> float:
    """Useful tokens a second when requests join and leave at every step."""
    engine.clear_cache()
    started = time.perf_counter()
    outputs = engine.generate([job.prompt for job in jobs], [params_for(job.num_output) for job in jobs])
    seconds = time.perf_counter() - started
    assert all(len(output.token_ids) == job.num_output for output, job in zip(outputs, jobs, strict=True))
    return sum(job.num_output for job in jobs) / seconds


def run_static(engine: LLMEngine, jobs: Sequence[Job], batch: int) -> float:
    """The same in fixed batches: each starts when the one before has ended, and all its rows run as long as its longest."""
    engine.clear_cache()
    started = time.perf_counter()
    for first in range(0, len(jobs), batch):
        group = jobs[first : first + batch]
        longest = max(job.num_output for job in group)
        engine.generate([job.prompt for job in group], params_for(longest))
    return sum(job.num_output for job in jobs) / (time.perf_counter() - started)


Peer = Callable[[Sequence[Job], int], float]  # jobs and batch size to useful tokens a second


def measure_throughput(
    config: EngineConfig, report: Report, rounds: int, batches: Sequence[int], peers: dict[str, Peer],
    progress: Progress = no_progress,
) -> None:
    """Continuous against static batching at several sizes, and against peers at PEER_BATCH; all of them in every round."""
    total = rounds * (2 * len(batches) + len(peers))
    done = 0

    def advance(what: str) -> None:
        nonlocal done
        done += 1
        progress(done, total, what)

    with engines(config, *({"max_num_seqs": batch} for batch in batches)) as made:
        for batch, engine in zip(batches, made, strict=True):
            run_continuous(engine, mixed_jobs(batch, engine.facts.vocab_size, 99))  # compiles products, faults memory in
        for round_index in range(rounds):
            for batch, engine in zip(batches, made, strict=True):
                jobs = mixed_jobs(4 * batch, engine.facts.vocab_size, round_index)
                report.add(f"continuous {batch}", run_continuous(engine, jobs))
                advance(f"continuous, {batch} sequences")
                report.add(f"static {batch}", run_static(engine, jobs, batch))
                advance(f"static, {batch} sequences")
                for name, peer in peers.items() if batch == PEER_BATCH else ():
                    report.add(name, peer(jobs, batch))
                    advance(name)
                report.figures[f"kv utilisation {batch}"] = engine.scheduler.stats().kv_utilization


def throughput_bars(report: Report, batches: Sequence[int], peers: Iterable[str]) -> list[Judged]:
    """Continuous over static batching, over the peers, and how full the blocks were."""
    found = [
        Bar(f"continuous over static at {batch}", STATIC_TARGETS[batch], at_least=True).judged(
            report.ratio(f"continuous {batch}", f"static {batch}")
        )
        for batch in batches if batch in STATIC_TARGETS
    ]  # fmt: skip
    for name in peers:
        over_peer = Bar(f"over {name} at {PEER_BATCH}", PEER_TARGET, at_least=True)
        found.append(over_peer.judged(report.ratio(f"continuous {PEER_BATCH}", name)))
    return found + [
        Bar(name, 0.9, at_least=True).judged(value)
        for name, value in report.figures.items() if name.startswith("kv utilisation")
    ]  # fmt: skip


@contextmanager
def engines(config: EngineConfig, *variants: dict[str, Any]) -> Iterator[list[LLMEngine]]:
    made: list[LLMEngine] = []
    try:
        made.extend(LLMEngine(config, **variant) for variant in variants)
        yield made
    finally:
        for engine in made:
            engine.close()


def measure_prefix(config: EngineConfig, report: Report, rounds: int, progress: Progress = no_progress) -> None:
    """64 prompts of 1,000 tokens, 800 of them shared, with the cache and without; first tokens of hit, miss and repeat."""
    with engines(config, {"enable_prefix_caching": True}, {"enable_prefix_caching": False}) as (cached, plain):
        vocab_size = cached.facts.vocab_size
        for round_index in range(rounds):
            rng = np.random.default_rng(round_index)
            shared = rng.integers(0, vocab_size, SHARED_TOKENS).tolist()
            prompts = [shared + rng.integers(0, vocab_size, OWN_TOKENS).tolist() for _ in range(PREFIX_REQUESTS)]
            for name, engine in (("cache on", cached), ("cache off", plain)):
                engine.clear_cache()
                started = time.perf_counter()
                outputs = engine.generate(prompts, params_for(PREFIX_OUTPUT))
                report.add(f"requests/s, {name}", len(prompts) / (time.perf_counter() - started))
                if engine is cached:
                    report.add("hit rate, requests", sum(o.num_cached_tokens > 0 for o in outputs) / len(outputs))
                    report.add("hit rate, tokens", sum(o.num_cached_tokens for o in outputs) / sum(map(len, prompts)))
            measure_first_tokens(report, cached, prompts[0])
            progress(round_index + 1, rounds, "")


def prefix_bars(report: Report) -> list[Judged]:
    """What the cache must give."""
    hit_rate, passes = report.summary("hit rate, requests"), report.summary("forward passes of an exact repeat")
    return [
        Bar("rate with the cache over without", 2.5, at_least=True).judged(
            report.ratio("requests/s, cache on", "requests/s, cache off")
        ),
        Bar("hit rate", 0.8, at_least=True).judged(hit_rate.median if hit_rate else None),
        Bar("first token of a full hit, share of a miss", 0.15).judged(
            report.ratio("first token, full hit, ms", "first token, miss, ms")
        ),
        Bar("forward passes of an exact repeat", 0).judged(passes.high if passes else None),
    ]


def measure_first_tokens(report: Report, engine: LLMEngine, prompt: list[int]) -> None:
    """Milliseconds to the first token: unknown prompt; all but its last token known; the very same prompt."""
    engine.clear_cache()
    report.add("first token, miss, ms", first_token_ms(engine, prompt))
    report.add("first token, full hit, ms", first_token_ms(engine, [*prompt, 1]))
    before = engine.runner.num_forward_passes
    report.add("first token, exact repeat, ms", first_token_ms(engine, prompt))
    report.add("forward passes of an exact repeat", engine.runner.num_forward_passes - before)


def first_token_ms(engine: LLMEngine, prompt: list[int]) -> float:
    started = time.perf_counter()
    stream = engine.stream(prompt, params_for(1))
    next(stream)
    seconds = time.perf_counter() - started
    list(stream)
    return seconds * 1000


LatencyPeer = Callable[[list[int], int], list[float]]  # prompt and output length to the moments of the tokens, from 0
OURS = "archerfish"


def latency_benchmark(rounds: int) -> BenchmarkConfig:
    """One request at a time, after prompts of several lengths."""
    cases = tuple(TestCase(f"after {length} tokens", length, params_for(LATENCY_OUTPUT)) for length in LATENCY_PROMPTS)
    return BenchmarkConfig(cases, warmup_iterations=1, measurement_iterations=rounds)


def our_moments(engine: LLMEngine, case: TestCase, prompt: list[int], timeout_s: float | None) -> list[float]:
    """The moments of the tokens of one request, from 0."""
    engine.clear_cache()
    started = time.perf_counter()
    moments: list[float] = []
    for delta in engine.stream(prompt, case.sampling_args, deadline_s=timeout_s):
        if delta.finish_reason == "deadline":
            raise ServiceError(f"The case {case.name!r} took longer than {timeout_s:g} s.", hint="Give it more time.")
        if delta.token_ids:
            moments.append(time.perf_counter() - started)
    return moments


def measure_latency(
    config: EngineConfig, report: Report, benchmark: BenchmarkConfig, peers: dict[str, LatencyPeer],
    progress: Progress = no_progress,
) -> None:
    """One request at a time: first token and whole answer of every case, the gaps between tokens, and what it takes of the
    machine; memory only where no peers share the process.
    """
    rounds, cpu_percents = benchmark.measurement_iterations, list[float]()
    with LLMEngine(config) as engine:
        vocab_size = engine.facts.vocab_size

        def run_all(case: TestCase, round_index: int) -> Iterator[tuple[str, list[float]]]:
            prompt = case.tokens(vocab_size, round_index)
            began, used = time.perf_counter(), time.process_time()
            moments = our_moments(engine, case, prompt, benchmark.timeout_s)
            cpu_percents.append(100 * (time.process_time() - used) / (time.perf_counter() - began))
            yield OURS, moments
            for name, peer in peers.items():
                yield name, peer(prompt, case.sampling_args.max_tokens or LATENCY_OUTPUT)

        for number in range(benchmark.warmup_iterations):
            for _ in run_all(benchmark.test_cases[0], -1 - number):
                pass
        for round_index in range(rounds):
            for case in benchmark.test_cases:
                for name, moments in run_all(case, round_index):
                    gaps = (np.diff(moments) * 1000).tolist()
                    report.add(f"{name}: first token {case.name}, ms", moments[0] * 1000)
                    report.add(f"{name}: answer {case.name}, ms", moments[-1] * 1000)
                    if gaps:
                        report.add(f"{name}: tokens/s {case.name}", len(gaps) / (moments[-1] - moments[0]))
                        report.add(f"{name}: gap p50, ms", percentile(gaps, 0.5))
                        report.add(f"{name}: gap p99, ms", percentile(gaps, 0.99))
                report.add(f"{OURS}: CPU, %", cpu_percents[-1])
                if not peers and (resident := status_bytes("VmRSS")):
                    report.add(f"{OURS}: memory, MB", resident / 1e6)
            progress(round_index + 1, rounds, "")


def run_benchmark(config: EngineConfig, benchmark: BenchmarkConfig) -> tuple[Report, list[Judged]]:
    """All cases of a bench of one's own on an engine made for it: what was measured, and what the cases expect of it."""
    report = Report()
    measure_latency(config, report, benchmark, {})
    return report, latency_bars(report, benchmark)


def latency_bars(report: Report, benchmark: BenchmarkConfig) -> list[Judged]:
    """What the cases expect of our figures."""
    found = []
    for case in benchmark.test_cases:
        for target in case.expected_performance.bars():
            what, comma, unit = target.name.partition(", ")
            summary = report.summary(f"{OURS}: {what} {case.name}{comma}{unit}") or report.summary(f"{OURS}: {target.name}")
            named = Bar(f"{case.name}: {target.name}", target.wanted, target.at_least)
            found.append(named.judged(summary.median if summary else None))
    return found
