"""`archerfish bench embed`: every engine in its own process, one at work at any time, rounds interleaved.

A noisy neighbour then hits all engines alike, and a ratio means something where a single figure does not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from archerfish.bench.driver import PeerFailedError, WorkerProcess, worker_command
from archerfish.bench.peers import ENGINES, REFERENCE, PeerOptions
from archerfish.bench.stats import Summary, summarize
from archerfish.bench.texts import PROBES, SHORT_TEXT, TextMaker, documents
from archerfish.types import Progress, no_progress

WORKLOADS = ("short", "fixed", "mixed")
WORKLOAD_NAMES = {"short": "10 tokens", "fixed": "128 tokens", "mixed": "5-256 tokens"}
GPU_FACTOR = 16  # a GPU needs this many times the texts to be busy for as long
DOCUMENT_SAMPLE = 2_000  # of the documents, for the peers of a quick run


@dataclass(frozen=True)
class Effort:
    """How much is measured."""

    rounds: int = 5
    num_texts: tuple[int, int, int] = (1024, 256, 256)  # short, fixed, mixed
    min_seconds: float = 1.0
    calls: int = 200
    num_documents: int = 10_000
    sample_documents: bool = False
    document_rounds: int = 3
    settle_s: float = 0.2  # until the threads of the engine before have gone to sleep


QUICK = Effort(rounds=2, num_texts=(256, 64, 64), min_seconds=0.3, calls=50, sample_documents=True, document_rounds=1)


REPORTED = ("label", "state", "reason", "version", "memory", "late_imports", "min_cosine")


@dataclass
class EngineResult:
    """All samples of one engine. `state` is ok, skipped or failed."""

    key: str
    label: str
    state: str = "ok"
    reason: str = ""
    version: str = ""
    batch_sizes: list[int] = field(default_factory=list)
    samples: dict[str, list[float]] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)
    late_imports: list[str] = field(default_factory=list)
    min_cosine: float | None = None

    def add(self, metric: str, value: float) -> None:
        self.samples.setdefault(metric, []).append(value)

    def summary(self, metric: str) -> Summary | None:
        found = self.samples.get(metric)
        return summarize(found) if found else None

    def best(self, workload: str) -> tuple[int, Summary] | None:
        """The batch size with the highest median of a workload, and that median."""
        found = [
            (int(metric.rpartition("@")[2]), summarize(values))
            for metric, values in self.samples.items()
            if metric.startswith(f"{workload}@")
        ]
        return max(found, key=lambda item: item[1].median, default=None)

    def as_dict(self) -> dict[str, Any]:
        return {
            **{name: getattr(self, name) for name in REPORTED},
            "metrics": {metric: summarize(values).as_dict() for metric, values in self.samples.items()},
        }


Launch = Callable[[str], WorkerProcess]


class EmbedBench:
    """One run over some engines; `launch` starts the worker of an engine."""

    def __init__(
        self,
        keys: Sequence[str],
        options: PeerOptions,
        effort: Effort,
        *,
        launch: Launch | None = None,
        progress: Progress = no_progress,
    ) -> None:
        self.options = options
        self.effort = effort
        self.results = {key: EngineResult(key, ENGINES[key].label if key in ENGINES else key) for key in keys}
        self._launch = launch or (lambda key: WorkerProcess(worker_command(key, options)))
        self._workers: dict[str, WorkerProcess] = {}
        self._progress = progress
        self._num_done = 0
        self._best_batch: dict[tuple[str, str], int] = {}

    def run(self, texts: dict[str, list[str]]) -> dict[str, EngineResult]:
        """Measure everything; an engine that fails is reported and left out from there on."""
        for key, result in self.results.items():
            reason = ENGINES[key].missing(self.options.device) if key in ENGINES else ""
            if reason:
                result.state, result.reason = "skipped", reason
        try:
            self._starts()
            self._send(texts)
            self._agreement()
            self._each("choosing batch sizes", self._choose_batches)
            for number in range(self.effort.rounds):
                for workload in WORKLOADS:
                    self._each(f"round {number + 1}: {WORKLOAD_NAMES[workload]}", self._throughput(workload), number)
                self._each(f"round {number + 1}: one text", self._latency, number)
            for number in range(self.effort.document_rounds):
                self._each("documents in one call", self._documents, number)
            self._each("memory", self._memory)
        finally:
            for worker in self._workers.values():
                worker.close()
        return self.results

    def _alive(self, rotation: int = 0) -> list[str]:
        keys = [key for key, result in self.results.items() if result.state == "ok"]
        return keys[rotation % len(keys) :] + keys[: rotation % len(keys)] if keys else []

    def _num_steps(self) -> int:
        each = 4 + self.effort.rounds * (len(WORKLOADS) + 2) + self.effort.document_rounds + 1
        return each * sum(result.state != "skipped" for result in self.results.values())

    def _each(self, what: str, work: Callable[[str], None], rotation: int = 0) -> None:
        """Do something with every engine that still lives, starting with another one every round."""
        for key in self._alive(rotation):
            self._progress(self._num_done, self._num_steps(), f"{key}: {what}")
            try:
                work(key)
            except PeerFailedError as error:
                self.results[key].state, self.results[key].reason = "failed", str(error)
                self._close(key)
            self._num_done += 1

    def _close(self, key: str) -> None:
        worker = self._workers.pop(key, None)
        if worker is not None:
            worker.close()

    def _starts(self) -> None:
        """Fresh processes: the first converts or exports and warms the page cache, the last stays."""
        self._each("first start", self._start)
        for key in self._alive():
            self.results[key].samples.clear()
        for number in range(self.effort.rounds):
            self._each(f"start {number + 1}", self._start, number)

    def _start(self, key: str) -> None:
        self._close(key)
        worker = self._workers[key] = self._launch(key)
        answer, result = worker.ask("start"), self.results[key]
        result.version, result.batch_sizes = answer["version"], answer["batch_sizes"]
        result.late_imports = answer["late_imports"]
        result.memory["rss_loaded"] = answer["rss_loaded"]
        for metric in ("import_s", "load_s"):
            result.add(metric, answer[metric])
        result.add("first_vector_s", answer["load_s"] + answer["first_s"])

    def _send(self, texts: dict[str, list[str]]) -> None:
        def send(key: str) -> None:
            for name, items in texts.items():
                self._workers[key].ask("texts", key=name, texts=items)
            self._workers[key].ask("texts", key="probes", texts=list(PROBES))

        self._each("texts", send)

    def _num_documents(self, key: str) -> int:
        is_ours = key in ENGINES and ENGINES[key].is_ours
        count = self.effort.num_documents
        return min(count, DOCUMENT_SAMPLE) if self.effort.sample_documents and not is_ours else count

    def _agreement(self) -> None:
        import numpy as np

        found: dict[str, Any] = {}

        def ask(key: str) -> None:
            found[key] = np.asarray(self._workers[key].ask("vectors", key="probes")["vectors"])

        self._each("agreement", ask)
        reference = found.get(REFERENCE)
        if reference is None:
            return
        for key, vectors in found.items():
            lengths = np.linalg.norm(vectors, axis=1) * np.linalg.norm(reference, axis=1)
            self.results[key].min_cosine = float(((vectors * reference).sum(axis=1) / lengths).min())

    def _choose_batches(self, key: str) -> None:
        """One pass with every batch size that the engine offers; the best one is measured beside its default."""
        sizes = self.results[key].batch_sizes
        for workload in WORKLOADS:
            rates = {
                size: self._workers[key].ask("throughput", key=workload, batch_size=size, min_seconds=0)["texts_per_s"]
                for size in sizes
            }
            self._best_batch[key, workload] = max(rates, key=lambda size: rates[size])

    def _throughput(self, workload: str) -> Callable[[str], None]:
        def measure(key: str) -> None:
            for size in sorted({self.results[key].batch_sizes[0], self._best_batch[key, workload]}):
                time.sleep(self.effort.settle_s)
                request = {"key": workload, "batch_size": size, "min_seconds": self.effort.min_seconds}
                self.results[key].add(f"{workload}@{size}", self._workers[key].ask("throughput", **request)["texts_per_s"])

        return measure

    def _latency(self, key: str) -> None:
        time.sleep(self.effort.settle_s)
        answer = self._workers[key].ask("latency", text=SHORT_TEXT, calls=self.effort.calls)
        for metric in ("latency_p50_ms", "latency_p99_ms"):
            self.results[key].add(metric, answer[metric])

    def _documents(self, key: str) -> None:
        """In a fresh process, because one that has worked before keeps memory that then does not show as growth."""
        with self._launch(key) as fresh:
            fresh.ask("start")
            fresh.ask("texts", key="documents", texts=documents(self._num_documents(key)))
            time.sleep(self.effort.settle_s)
            answer = fresh.ask("documents", key="documents", batch_size=self._best_batch[key, "short"])
        scale = self.effort.num_documents / self._num_documents(key)
        self.results[key].add("documents_s", answer["seconds"] * scale)
        self.results[key].add("documents_growth_bytes", answer["peak_growth_bytes"])

    def _memory(self, key: str) -> None:
        answer = self._workers[key].ask("memory")
        memory = self.results[key].memory
        memory["rss_after_work"] = answer["rss"]
        if answer["weights"]:
            memory["weights"] = sum(answer["weights"].values())
            memory.update({f"weights_{kind}": size for kind, size in answer["weights"].items()})


def make_texts(maker: TextMaker, effort: Effort, device: str = "cpu") -> dict[str, list[str]]:
    """The texts of the three workloads, distinct and of exactly known lengths."""
    short, fixed, mixed = (count * (GPU_FACTOR if device == "cuda" else 1) for count in effort.num_texts)
    return {"short": maker.fixed(short, 10), "fixed": maker.fixed(fixed, 128), "mixed": maker.mixed(mixed, 5, 256)}
