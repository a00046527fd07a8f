"""`archerfish bench embed`: embeddings by us and by the peers that are installed, on the same texts.

Every engine has a process of its own, and rounds are interleaved: a busy neighbour slows all engines alike.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import random
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from archerfish.bench import cpu_peers
from archerfish.bench.report import OURS, Found, Measurement
from archerfish.bench.words import random_text
from archerfish.bench.worker import EngineGroup, chosen, versions
from archerfish.observe.summary import percentile

EXPORTED = ("onnx", "transformers")  # what exporting needs
Peer = tuple[
    str, dict[str, Any], tuple[str, ...]
]  # its class, the class's own arguments, and the packages that it needs
PEERS: dict[str, Peer] = {
    "st-float32": ("SentenceTransformers", {}, ("sentence_transformers",)),
    "st-bfloat16": ("SentenceTransformers", {"dtype": "bfloat16"}, ("sentence_transformers",)),
    "onnx-float32": ("OnnxRuntime", {"precision": "float32"}, ("onnxruntime", *EXPORTED)),
    "onnx-int8": ("OnnxRuntime", {"precision": "int8"}, ("onnxruntime", *EXPORTED)),
    "openvino-float32": ("OpenVino", {"precision": "float32"}, ("openvino", *EXPORTED)),
    "openvino-default": ("OpenVino", {"precision": "default"}, ("openvino", *EXPORTED)),
    "openvino-int8": ("OpenVino", {"precision": "int8"}, ("openvino", "nncf", *EXPORTED)),
}
REFERENCE = "st-float32"
WORKLOADS = {
    "10 tokens, texts/s": (1024, 10, 10),
    "128 tokens, texts/s": (256, 128, 128),
    "5-256 tokens, texts/s": (256, 5, 256),
}  # texts, and their shortest and longest in tokens
GPU_FACTOR = 16  # a GPU needs this many times the texts to be busy for as long
SHORT_TEXT = "The quick brown fox jumps over the lazy dog."
PROBES = [
    "",
    "a",
    "Hello, world!",
    SHORT_TEXT,
    "今天天气很好，我们去公园散步吧。",
    "日本語の文章も混ざっています。",
    "🙂 🚀 emoji 👩‍👩‍👧‍👦 all the way 🎉",
    "Ünïcödé naïve café Straße",
    "x = [i ** 2 for i in range(10)]  # code",
    "UPPER lower MiXeD 1234567890 3.14159 -1e-9",
    "A man is eating food. " * 12,
    " ".join(f"word{i}" for i in range(600)),
    "the answer to every question " * 120,
]
SETTLE_S = 0.2  # until the threads of the engine before have gone to sleep
MIN_SECONDS, NUM_CALLS = 1.0, 200  # of one measurement
NUM_SPECIAL = 2  # tokens that the tokenizer adds to a text
Launch = Callable[[str], Any]


def measure(options: Namespace) -> Found:
    from archerfish.kernels.select import choose_device
    from archerfish.store.names import resolve_model

    options.embed = options.embed.replace(device=choose_device(options.embed.device).name)  # peers know no "auto"
    peers = [name for name, peer in PEERS.items() if options.embed.device == "cpu" or not hasattr(cpu_peers, peer[0])]
    names = chosen("--engines", options.engines, [OURS, *peers])
    source = resolve_model(options.embed.model, options.hub)
    texts = make_texts(options.embed.device)
    given = {"cache_dir": str(options.hub.cache_path()), "options": dataclasses.asdict(options.embed)}
    arguments: dict[str, Any] = {"source": str(source), **given}
    with EngineGroup() as group:

        def launch(name: str) -> Any:
            if name in PEERS:
                return open_peer(group, name, PEERS[name], arguments)
            return group.open(name, "ArcherfishEmbeddings", arguments, path=versions(options.against)[name])

        for name in [*names, *(name for name in versions(options.against) if name != OURS)]:
            needed = PEERS[name][2] if name in PEERS else ()
            if absent := [module for module in needed if importlib.util.find_spec(module) is None]:
                yield f"{name} was not measured: not installed: {', '.join(absent)}"
            else:
                launch(name)  # converts or exports, and warms the page cache; not measured
        yield from measure_starts(group, launch, options.rounds)
        yield from agreement(group)
        yield from measure_work(group, texts, options)
        yield from measure_documents(group, launch, options)
        yield from group.notes


def open_peer(group: EngineGroup, name: str, peer: Peer, arguments: dict[str, Any]) -> Any:
    """Start a peer, whose class is in engines.py or cpu_peers.py."""
    engine, own, _ = peer
    return group.open(
        name, engine, arguments | own, file=Path(cpu_peers.__file__) if hasattr(cpu_peers, engine) else None
    )


def measure_starts(group: EngineGroup, launch: Launch, rounds: int) -> Iterator[Measurement]:
    """Fresh processes in every round; those of the last round stay."""
    for number in range(rounds):
        for name in group.names(number):
            started = launch(name)
            if started:
                yield Measurement("imports, s", started["import_s"], name)
                yield Measurement("load after imports, ms", started["load_s"] * 1000, name)
                yield Measurement("load and first text, ms", (started["load_s"] + started["first_s"]) * 1000, name)
                yield Measurement("resident after load, MB", started["rss_bytes"] / 1e6, name)


def agreement(group: EngineGroup) -> Iterator[Measurement]:
    """The smallest cosine of any text's vector with that of the reference."""
    found = {name: np.asarray(group.call(name, "vectors", texts=PROBES)) for name in group.names()}
    reference = found.get(REFERENCE)
    if reference is not None:
        for name, vectors in found.items():
            lengths = np.linalg.norm(vectors, axis=1) * np.linalg.norm(reference, axis=1)
            cosines = (vectors * reference).sum(axis=1) / lengths
            yield Measurement("smallest cosine with st-float32", float(cosines.min()), name)


def measure_work(group: EngineGroup, texts: dict[str, list[str]], options: Namespace) -> Iterator[Measurement]:
    """Throughput with the best of an engine's batch sizes, and the latency of one text."""
    sizes = {(name, m): group.call(name, "best_batch_size", texts=texts[m]) for m in texts for name in group.names()}
    for number in range(options.rounds):
        for metric, own in texts.items():
            for name in group.names(number):
                time.sleep(SETTLE_S)
                arguments = {"texts": own, "batch_size": sizes[name, metric], "min_seconds": MIN_SECONDS}
                if (rate := group.call(name, "throughput", **arguments)) is not None:
                    yield Measurement(metric, rate, name)
        for name in group.names(number):
            time.sleep(SETTLE_S)
            if seconds := group.call(name, "latencies", text=SHORT_TEXT, calls=NUM_CALLS):
                for share in (50, 99):
                    yield Measurement(f"one text p{share}, ms", percentile(seconds, share / 100) * 1000, name)
    for name in group.names():
        if num_bytes := group.call(name, "rss_bytes"):
            yield Measurement("resident after work, MB", num_bytes / 1e6, name)


def measure_documents(group: EngineGroup, launch: Launch, options: Namespace) -> Iterator[Measurement]:
    """Many short documents in one call of a fresh process: one that has worked before keeps memory, which hides
    growth."""
    for number in range(min(options.rounds, 3)):
        for name in group.names(number):
            if launch(name) and (found := group.call(name, "documents", count=options.documents, batch_size=32)):
                yield Measurement(f"{options.documents:,} documents in one call, s", found[0], name)
                yield Measurement("peak growth in that call, MB", found[1] / 1e6, name)


def make_texts(device: str) -> dict[str, list[str]]:
    """The texts of every workload, the same in every run."""
    draw, scale = random.Random(20), GPU_FACTOR if device == "cuda" else 1
    return {
        metric: [random_text(draw, draw.randint(shortest, longest) - NUM_SPECIAL) for _ in range(count * scale)]
        for metric, (count, shortest, longest) in WORKLOADS.items()
    }
