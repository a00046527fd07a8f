"""A process with one engine in it, driven by JSON lines on its standard input; it answers each with one line.

Fresh processes make imports and loading measurable, and keep the thread pools of the engines apart. Only what this file
needs itself is imported before the clock starts.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

from archerfish.bench.memory import reset_peak, status_bytes
from archerfish.bench.peers import Peer, PeerOptions, make_peer

MIN_LATENCY_WARMUP = 10


class Worker:
    """Answers requests with one engine."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.texts: dict[str, list[str]] = {}
        self.operations: dict[str, Callable[..., dict[str, Any]]] = {
            "start": self.start, "texts": self.keep_texts, "throughput": self.throughput, "latency": self.latency,
            "vectors": self.vectors, "documents": self.documents, "memory": self.memory,
        }  # fmt: skip

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """What to answer to one request; an error of the engine becomes {"error": ...}."""
        operation = self.operations[request.pop("op")]
        try:
            return operation(**request)
        except Exception as error:  # whatever a peer raises belongs into the report
            return {"error": f"{type(error).__name__}: {error}".strip()[:500]}

    def start(self) -> dict[str, Any]:
        """Import, load and encode one text, each timed."""
        clock = time.perf_counter
        began = clock()
        version = self.peer.imports()
        imported, modules = clock(), top_level_modules()
        self.peer.load()
        loaded, rss_loaded = clock(), status_bytes("VmRSS")
        self.peer.encode(["Hello."], self.peer.batch_sizes[0])
        encoded = clock()
        return {
            "version": version,
            "batch_sizes": list(self.peer.batch_sizes),
            "import_s": imported - began,
            "load_s": loaded - imported,
            "first_s": encoded - loaded,
            "late_imports": sorted(top_level_modules() - modules),
            "rss_loaded": rss_loaded,
        }

    def keep_texts(self, key: str, texts: list[str]) -> dict[str, Any]:
        self.texts[key] = texts
        return {}

    def throughput(self, key: str, batch_size: int, min_seconds: float) -> dict[str, Any]:
        """Encode the same list again and again until enough time has passed."""
        texts = self.texts[key]
        began, num_done = time.perf_counter(), 0
        while True:
            self.peer.encode(texts, batch_size)
            num_done += len(texts)
            elapsed = time.perf_counter() - began
            if elapsed >= min_seconds:
                return {"texts_per_s": num_done / elapsed}

    def latency(self, text: str, calls: int) -> dict[str, Any]:
        from archerfish.bench.stats import percentile

        batch_size = self.peer.batch_sizes[0]
        for _ in range(MIN_LATENCY_WARMUP):
            self.peer.encode([text], batch_size)
        times = []
        for _ in range(calls):
            began = time.perf_counter()
            self.peer.encode([text], batch_size)
            times.append((time.perf_counter() - began) * 1000)
        return {"latency_p50_ms": percentile(times, 0.5), "latency_p99_ms": percentile(times, 0.99)}

    def vectors(self, key: str) -> dict[str, Any]:
        return {"vectors": self.peer.encode(self.texts[key], self.peer.batch_sizes[0]).tolist()}

    def documents(self, key: str, batch_size: int) -> dict[str, Any]:
        """One call with many short texts: time, and by how much the resident memory grew at most."""
        texts = self.texts[key]
        reset_peak()
        before = status_bytes("VmRSS")
        began = time.perf_counter()
        self.peer.encode(texts, batch_size)
        elapsed = time.perf_counter() - began
        return {"seconds": elapsed, "peak_growth_bytes": max(0, status_bytes("VmHWM") - before)}

    def memory(self) -> dict[str, Any]:
        return {"rss": status_bytes("VmRSS"), "weights": self.peer.weight_bytes()}


def top_level_modules() -> set[str]:
    return {name for name in sys.modules if "." not in name and not name.startswith("_")}


def serve_requests(worker: Worker, requests: TextIO, answers: TextIO) -> None:
    for line in requests:
        answers.write(json.dumps(worker.answer(json.loads(line))) + "\n")
        answers.flush()


def main() -> None:
    key, options = sys.argv[1], PeerOptions(**json.loads(sys.argv[2]))
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # libraries that print must not disturb the answers
    serve_requests(Worker(make_peer(key, options)), sys.stdin, answers)


if __name__ == "__main__":
    main()
