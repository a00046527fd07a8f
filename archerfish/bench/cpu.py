"""`archerfish bench cpu`: generation, embeddings, RWKV, HTTP, starts and sampling on the CPU, by us and by installed
peers.

Every engine has a process of its own and uses all cores; rounds are interleaved. The model that generates is one GGUF
file, which all engines read.
"""

from __future__ import annotations

import asyncio
import bisect
import importlib.util
import json
import os
import shutil
import socket
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import cached_property
from itertools import chain, product
from pathlib import Path
from typing import Any

import numpy as np

from archerfish.bench import embed
from archerfish.bench.drafts import write_shapes
from archerfish.bench.engines import timed
from archerfish.bench.gpu import VLLM_ENVIRONMENT, VLLM_OPTIONS
from archerfish.bench.load import Load, Shape
from archerfish.bench.report import OURS, Found, Measurement
from archerfish.bench.rwkv import PACKAGE, random_prompts, stream_title, write_shape
from archerfish.bench.serve import ServeBench, running
from archerfish.bench.worker import PACKAGE_PATH, EngineGroup, chosen, rotated, versions
from archerfish.config import EmbedConfig
from archerfish.errors import InvalidOptionError, ServiceError
from archerfish.kernels.machine import READ_PEAK, fast_cpu_dtype
from archerfish.observe.summary import percentile
from archerfish.store.names import resolve_model

TEXT_MODEL, EMBEDDING_MODEL = "smollm2-135m-instruct", "all-minilm-l6-v2"
PARTS = ("decode", "prefill", "batch", "start", "http", "embed", "rwkv", "draw", "drafts")
LLAMA = "llama.cpp"
VLLM = "vllm"
SORTED = "numpy sort"
OURS_INT8 = "archerfish-int8"
PEERS_FILE, PACED_FILE = (Path(__file__).with_name(name) for name in ("cpu_peers.py", "drafts.py"))
EMBEDDERS: dict[str, embed.Peer] = {
    OURS_INT8: ("ArcherfishVectors", {"options": asdict(EmbedConfig(device="cpu", weights="int8"))}, ()),
    **embed.PEERS,
}
PEERS = {
    LLAMA: ("LlamaCpp", {}, ("llama_cpp",)),
    VLLM: ("Vllm", {}, ("vllm",)),
    **EMBEDDERS,
    PACKAGE: ("RwkvPackage", {}, ("rwkv",)),
    SORTED: ("", {}, ()),
}
OUR_OPTIONS: dict[str, Any] = {"device": "cpu"}
PROMPT_TOKENS = 4
PREFILL_TOKENS = 512
MAX_TOKEN = 10_000  # short prompts: a rate is the difference of two times
DECODES = {
    1: ("decode, tokens/s", 128),
    8: ("8 sequences, tokens/s", 64),
    32: ("32 sequences, tokens/s", 64),
}  # tokens of each
CHAT, CHAT_CONTEXT = Shape("chat", (300, 300), (64, 64)), 1024  # the context: 300 words, the template and the answer
CHATS_AT_ONCE = 8
NUM_CHATS = 16
CHATS_TITLE = "8 chats over HTTP"
CHAT_FIGURES = ("end to end p50, ms", "end to end p99, ms", "first token p50, ms", "tokens/s", "not answered")
EMBED_WORKLOADS, NUM_TEXTS = ("128 tokens, texts/s", "5-256 tokens, texts/s"), 64
RWKV_SHAPES = ("0.1b", "0.4b")
RWKV_STREAMS = 32
RWKV_OUTPUT = 24
DRAW_LOGITS, NUM_DRAWS = 50_000, 200
DRAW_OPTIONS: dict[str, Any] = {"temperature": 0.8, "top_k": 50, "top_p": 0.9}
DRAFTED = {  # chats whose answers repeat much of the question, and do not
    "edit of code": "Add a comment to this code and print the whole code:\n\n",
    "story": "Write a story about a dragon who learns to sail.",
}
EDITED_FILE = Path(bisect.__file__)
EDITED_CHARACTERS = 2500
DRAFTED_OUTPUT = 200
DRAFTED_RATE = "{}: {}, tokens/s"
PACED = "draft model (paced, 70% right)"
PACED_SHARE = 0.7
PACED_OUTPUT = 100
FULL_BATCH, FULL_BATCH_OUTPUT = 64, 48  # sequences, and tokens of each
HOW = {False: "one by one", True: "with speculation"}


def measure(options: Namespace) -> Found:
    parts = set(chosen("--only", options.only, PARTS))
    bench = CpuBench(options, chosen("--engines", options.engines, [OURS, *PEERS]))
    yield from bench.leave_out_absent()
    yield from bench.roofline()
    if parts & {"decode", "prefill", "batch"}:
        yield from bench.generation(parts)
    wanted = {
        "start": bench.starts,
        "http": bench.http,
        "embed": bench.embed,
        "rwkv": bench.rwkv,
        "draw": bench.draw,
        "drafts": bench.drafts,
    }
    for part, function in wanted.items():
        if part in parts:
            yield from function()


class CpuBench:
    """The parts of the bench; each is a generator of measurements."""

    read_rate = 0.0  # of memory, in bytes a second

    def __init__(self, options: Namespace, names: list[str]) -> None:
        """names: the engines that are wanted, ours among them or not."""
        self.options = options
        self.wanted = names
        self.peers = [name for name in names if name in PEERS]
        self.ours = versions(options.against) if OURS in names else {}

    def leave_out_absent(self) -> Iterator[str]:
        for name in list(self.peers):
            if absent := [module for module in PEERS[name][2] if importlib.util.find_spec(module) is None]:
                self.peers.remove(name)
                yield f"{name} was not measured: not installed: {', '.join(absent)}"

    def names(self, *peers: str) -> list[str]:
        """Our versions, and those of these peers that are to be measured."""
        return [*self.ours, *(name for name in self.peers if name in peers)]

    @cached_property
    def text_file(self) -> Path:
        source = resolve_model(TEXT_MODEL, self.options.hub)
        return source if source.suffix == ".gguf" else next(source.glob("*.gguf"))

    def open(self, group: EngineGroup, name: str, engine: str, ours: dict[str, Any], theirs: dict[str, Any]) -> None:
        """Start an engine: ours is the class `engine`, a peer has its own."""
        if name in self.ours:
            group.open(name, engine, ours, path=self.ours[name])
        else:
            embed.open_peer(group, name, PEERS[name], theirs)

    def open_text(self, group: EngineGroup, name: str) -> None:
        options = {"model": str(self.text_file), **OUR_OPTIONS}
        self.open(group, name, "Archerfish", {"options": options}, {"model_path": options["model"], "num_threads": 0})

    def open_embedder(self, group: EngineGroup, name: str) -> None:
        hub = self.options.hub
        given: dict[str, Any] = {"source": str(resolve_model(EMBEDDING_MODEL, hub)), "cache_dir": str(hub.cache_path())}
        given["options"] = asdict(EmbedConfig(device="cpu"))
        self.open(group, name, "ArcherfishVectors", given, given)

    def roofline(self) -> Found:
        with EngineGroup() as group:
            group.open("machine", "Roofline", {}, file=PEERS_FILE)
            for _ in range(self.options.rounds):
                for what, rate in (group.call("machine", "peaks") or {}).items():
                    yield Measurement(f"machine: {what}", rate)
                    if what == READ_PEAK:
                        self.read_rate = max(self.read_rate, rate * 1e9)
            yield from group.notes

    def generation(self, parts: set[str]) -> Found:
        """The rates of one sequence, of several at once, and of reading a prompt."""
        batches = [num for num in DECODES if ("decode" if num == 1 else "batch") in parts]
        with EngineGroup() as group, tempfile.TemporaryDirectory(prefix="archerfish-bench-") as scratch:
            for name in self.names(LLAMA):
                self.open_text(group, name)
            if VLLM in self.peers and OURS in self.ours:
                config = group.call(OURS, "facts")["config"]
                (Path(scratch) / "config.json").write_text(json.dumps(config), encoding="utf-8")
                dtype = "bfloat16" if fast_cpu_dtype() == "bfloat16" else "float32"  # of random weights
                options = {**VLLM_OPTIONS, "model": scratch, "max_model_len": 2 * PREFILL_TOKENS, "dtype": dtype}
                group.open(VLLM, "Vllm", {"options": options}, environment=VLLM_ENVIRONMENT)
            for number in range(-1, self.options.rounds):
                found = chain(
                    self.decode_round(group, batches, number), self.prefill_round(group, "prefill" in parts, number)
                )
                yield from (one for one in found if number >= 0)  # the first round warms up
            yield from group.notes

    def decode_round(self, group: EngineGroup, batches: list[int], number: int) -> Iterator[Measurement]:
        for num, name in product(batches, group.names(number)):
            metric, num_output = DECODES[num]
            if rate := decode_rate(group, name, num, num_output, number):
                yield Measurement(metric, rate, name)
                if num == 1 and self.read_rate:
                    share = rate * self.text_file.stat().st_size / self.read_rate
                    yield Measurement("decode, share of the limit", share, name)

    def prefill_round(self, group: EngineGroup, is_wanted: bool, number: int) -> Iterator[Measurement]:
        prompts = random_prompts(1, PREFILL_TOKENS, MAX_TOKEN, number + 1)
        for name in group.names(number) if is_wanted else ():
            if seconds := group.call(name, "generate", prompts=prompts, outputs=[1]):
                yield Measurement("prefill, tokens/s", PREFILL_TOKENS / seconds, name)

    def starts(self) -> Found:
        """From starting a process to its first token, and to its first vector; the first round fills the page cache."""
        openers = {"token": (self.open_text, LLAMA), "vector": (self.open_embedder, "st-float32")}
        for number, (what, (opener, peer)) in product(range(-1, self.options.rounds), openers.items()):
            for name in rotated(self.names(peer), number):
                with EngineGroup() as group:
                    began = time.perf_counter()
                    opener(group, name)  # an embedder has made a vector then
                    if what == "token":
                        group.call(name, "token_times", prompt=[1, 2, 3, 4], num_output=1)
                    seconds = time.perf_counter() - began
                    yield from group.notes
                    if number >= 0 and group.names():
                        yield Measurement(f"process to first {what}, s", seconds, name)

    def http(self) -> Found:
        """Chats over HTTP, so many at once: ours against llama.cpp's server."""
        given = {"rounds": self.options.rounds, "timeout": 600.0, "requests": 0, "duration": 0.0, "e2e_target": 0.0}
        options = Namespace(**given, model="", embedding_model="", api_key_env="")
        with ExitStack() as stack, asyncio.Runner() as runner:
            servers = []
            for name, (url, command) in self.server_commands().items():
                server = stack.enter_context(running(name, url, options, command))
                try:
                    yield from runner.run(server.prepare((CHAT,)))
                    servers.append(server)
                except ServiceError as error:
                    if name in self.ours:
                        raise
                    yield f"{name} was not measured over HTTP: {error}"
            bench = ServeBench(servers, options, runner)
            for one in bench.rounds(CHATS_TITLE, Load((CHAT,), concurrency=CHATS_AT_ONCE, count=NUM_CHATS)):
                if isinstance(one, str) or one.metric.removeprefix(f"{CHATS_TITLE}: ") in CHAT_FIGURES:
                    yield one

    def server_commands(self) -> dict[str, tuple[str, list[str]]]:
        """The address of each server, "" where it announces one, and the command that starts it."""
        found, own = (
            {},
            ["serve", "--port", "0", "--kinds", "generation", "--device", "cpu", "--model", str(self.text_file)],
        )
        for name, path in self.ours.items():
            paths = os.pathsep.join(filter(None, (path, PACKAGE_PATH, os.environ.get("PYTHONPATH", ""))))
            found[name] = "", ["env", f"PYTHONPATH={paths}", sys.executable, "-P", "-m", "archerfish", *own]
        binary = shutil.which(self.options.llama_server or "llama-server")
        if self.options.llama_server and not binary:
            raise InvalidOptionError(f"--llama-server names {self.options.llama_server}, which cannot be run.")
        if LLAMA in self.peers or (LLAMA in self.wanted and binary):
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port, threads = str(free.getsockname()[1]), str(os.cpu_count())
            address = ["--host", "127.0.0.1", "--port", port, "--model", str(self.text_file)]
            sizes = [
                "--parallel",
                str(CHATS_AT_ONCE),
                "--ctx-size",
                str(CHATS_AT_ONCE * CHAT_CONTEXT),
                "--threads",
                threads,
            ]
            python = [sys.executable, "-m", "llama_cpp.server", "--n_ctx", str(CHAT_CONTEXT), "--n_threads", threads]
            python += ["--interrupt_requests", "False"]  # else a new request ends the one before
            found[LLAMA] = f"http://127.0.0.1:{port}", [binary, *sizes, *address] if binary else [*python, *address]
        return found

    def embed(self) -> Found:
        with EngineGroup() as group:
            for name in self.names(*EMBEDDERS):
                self.open_embedder(group, name)
            made = embed.make_texts("cpu")
            texts = {metric: made[metric][:NUM_TEXTS] for metric in EMBED_WORKLOADS}
            for one in chain(embed.agreement(group), embed.measure_work(group, texts, self.options)):
                yield replace(one, metric=f"embed, {one.metric}")
            yield from group.notes

    def rwkv(self) -> Found:
        """One stream against the package, in float32, and many streams; random weights."""
        for shape in RWKV_SHAPES:
            with EngineGroup() as group, tempfile.TemporaryDirectory(prefix="archerfish-bench-") as scratch:
                model = write_shape(shape, Path(scratch) / shape)
                config = json.loads((model / "config.json").read_text(encoding="utf-8"))
                options = {**OUR_OPTIONS, "model": str(model), "load_format": "dummy"}
                theirs = {"config": config, "strategy": "cpu fp32", "directory": scratch}
                for name in self.names(PACKAGE):
                    self.open(group, name, "Archerfish", {"options": options}, theirs)
                for number in range(-1, self.options.rounds):
                    for name in group.names(number):
                        found = self.rwkv_round(group, name, f"rwkv {shape}", number)
                        yield from (one for one in found if number >= 0)
                yield from group.notes

    def rwkv_round(self, group: EngineGroup, name: str, title: str, number: int) -> Iterator[Measurement]:
        if name in self.ours:
            for num in (1, RWKV_STREAMS):
                rate = decode_rate(group, name, num, RWKV_OUTPUT, number)
                yield Measurement(f"{title}, {stream_title(num)}, tokens/s", rate or 0.0, name)
        elif seconds := group.call(name, "decode", num_tokens=RWKV_OUTPUT):
            yield Measurement(f"{title}, {stream_title(1)}, tokens/s", RWKV_OUTPUT / seconds, name)

    def drafts(self) -> Found:
        """Answers with and without speculation, after the first token."""
        options, code = {"model": str(self.text_file), **OUR_OPTIONS}, EDITED_FILE.read_text(encoding="utf-8")
        with EngineGroup() as group:
            for name in self.ours:
                self.open(group, name, "Archerfish", {"options": {**options, "speculation": "ngram"}}, {})
            for number, (title, question), name in product(range(-1, self.options.rounds), DRAFTED.items(), self.ours):
                content = question + (code[:EDITED_CHARACTERS] if question.endswith("\n") else "")
                for speculate in HOW:
                    found = group.call(name, "answer", content=content, num_output=DRAFTED_OUTPUT, speculate=speculate)
                    if found and number >= 0:
                        yield Measurement(DRAFTED_RATE.format(title, HOW[speculate]), found["rate"], name)
                        if found["proposed"]:
                            yield Measurement(f"{title}: share accepted", found["accepted"] / found["proposed"], name)
            for number, name, speculate in product(range(-1, self.options.rounds), self.ours, HOW):
                rate = decode_rate(group, name, FULL_BATCH, FULL_BATCH_OUTPUT, number, speculate=speculate)
                if rate is not None and number >= 0:
                    yield Measurement(DRAFTED_RATE.format(f"{FULL_BATCH} sequences", HOW[speculate]), rate, name)
            yield from group.notes
        yield from self.paced_drafts()

    def paced_drafts(self) -> Found:
        """One sequence with a draft model of a tenth of the model's size."""
        with tempfile.TemporaryDirectory(prefix="archerfish-") as scratch, EngineGroup() as group:
            options = {**write_shapes(Path(scratch)), **OUR_OPTIONS, "max_cache_tokens": 4096}
            for name, path in self.ours.items():
                group.open(
                    name, "ArcherfishPaced", {"options": options, "share": PACED_SHARE}, path=path, file=PACED_FILE
                )
            for number, name, speculate in product(range(-1, self.options.rounds), self.ours, HOW):
                found = group.call(name, "decode", num_output=PACED_OUTPUT, speculate=speculate)
                if found and number >= 0:
                    yield Measurement(DRAFTED_RATE.format(PACED, HOW[speculate]), found["rate"], name)
                    if found["proposed"]:
                        yield Measurement(f"{PACED}: share accepted", found["accepted"] / found["proposed"], name)

    def draw(self) -> Found:
        """One token out of many, with top-k and top-p."""
        from archerfish.runtime.host_sampling import sample_row

        draw = np.random.default_rng(20)
        rows = draw.normal(0, 3, (NUM_DRAWS, DRAW_LOGITS)).astype(np.float32)
        ways = {
            OURS: lambda row: sample_row(row, **DRAW_OPTIONS),
            SORTED: lambda row: draw_sorted(row, draw, **DRAW_OPTIONS),
        }
        for number in range(-1, self.options.rounds):
            for name in rotated([name for name in ways if name in (*self.ours, *self.peers)], number):
                times = [timed(lambda row=row, way=ways[name]: way(row))[0] for row in rows]  # type: ignore[misc]
                if number >= 0:
                    yield Measurement("one draw, us", 1e6 * percentile(times, 0.5), name)


def decode_rate(group: EngineGroup, name: str, num: int, num_output: int, number: int, **others: Any) -> float | None:
    """Tokens a second after the first of each sequence. No cache has the prompts: those of both runs differ."""
    seconds = []
    for place, count in enumerate((1, num_output + 1)):
        prompts = random_prompts(num, PROMPT_TOKENS, MAX_TOKEN, 2 * (number + 1) + place)
        seconds.append(group.call(name, "generate", prompts=prompts, outputs=[count] * num, **others))
    return None if None in seconds else num * num_output / max(seconds[1] - seconds[0], 1e-9)


def draw_sorted(row: Any, draw: np.random.Generator, temperature: float, top_k: int, top_p: float) -> int:
    """The plain way: sort all logits, keep top_k and top_p of them, draw one."""
    order = np.argsort(-row)[:top_k]
    weights = np.exp((row[order] - row[order[0]]) / temperature)
    shares = weights / weights.sum()
    num_kept = int(shares.cumsum().searchsorted(top_p)) + 1
    return int(draw.choice(order[:num_kept], p=shares[:num_kept] / shares[:num_kept].sum()))
