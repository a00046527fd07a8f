"""The table of benches: a name, a summary, options, and the function that measures.

A function takes the options as a Namespace, in which a section of options (`engine`, `embed`, `hub`) is one object, and
yields measurements and notes. Its module is imported when the bench runs.
"""

from __future__ import annotations

import argparse
import importlib
from dataclasses import dataclass
from typing import Any

from archerfish.config import EmbedConfig, EngineConfig, HubConfig, Options
from archerfish.errors import InvalidOptionError


@dataclass(frozen=True)
class Flag:
    """An option of a bench. Its default says what it takes: text, a number, a tuple of them, yes or no, or a list of
    texts."""

    name: str
    description: str
    default: Any = ""
    metavar: str = ""
    choices: tuple[str, ...] = ()
    minimum: float = 1  # of numbers

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        keywords: dict[str, Any] = {"help": self.description, "default": self.default}
        if isinstance(self.default, bool):
            keywords["action"] = "store_true"
        elif isinstance(self.default, int | float | tuple):
            keywords |= {"type": self._read, "metavar": {int: "N", float: "X"}.get(type(self.default), "A,B")}
        elif self.choices:
            keywords["choices"] = self.choices
        else:
            keywords["metavar"] = self.metavar or "TEXT"
            if isinstance(self.default, list):
                keywords |= {"action": "append"} if self.name.startswith("--") else {"nargs": "*"}
        parser.add_argument(self.name, **keywords)

    def _read(self, text: str) -> Any:
        """A number of the kind of the default; for a tuple, numbers that commas separate."""
        is_tuple = isinstance(self.default, tuple)
        try:
            values = tuple(
                float(word) if isinstance(self.default, float) or (is_tuple and "." in word) else int(word)
                for word in (text.split(",") if is_tuple else [text])
            )
        except ValueError:
            values = ()
        if not values or not all(self.minimum <= value < float("inf") for value in values):
            kind = "numbers, separated by commas, each" if is_tuple else "a number"
            raise InvalidOptionError(f"{self.name} must be {kind} of at least {self.minimum:g}, not {text!r}.")
        return values if is_tuple else values[0]


@dataclass(frozen=True)
class Bench:
    """One entry of the table. function: "module:name" below archerfish.bench."""

    name: str
    summary: str
    function: str
    flags: tuple[Flag, ...] = ()
    sections: tuple[type[Options], ...] = ()
    usage: str = ""


def load(place: str) -> Any:
    """The function at a place such as "embed:measure"."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(f"archerfish.bench.{module}"), name)


def rounds(default: int) -> Flag:
    return Flag("--rounds", f"rounds of every measurement (default: {default})", default)


NO_PEERS = Flag("--no-peers", "measure archerfish alone", False)
AGAINST = Flag("--against", "a checkout of another version of archerfish, measured in the same rounds", metavar="DIR")
VLLM_PATH = Flag("--vllm-path", "directory with vLLM (default: the installed one)", metavar="DIR")
GENERATION = (rounds(5), NO_PEERS, AGAINST)
RWKV_SHAPES = ("tiny", "0.1b", "0.4b")
GPU = (
    Flag(
        "--shapes",
        "qwen3-0.6b, llama-3.1-8b, llama-3.2-1b, qwen3-4b, qwen3-14b (default: all these); and the first two with "
        "-w4a16 or -fp8 behind the name: quantised",
        metavar="A,B",
    ),
    VLLM_PATH,
    NO_PEERS,
    AGAINST,
)


def rwkv_shape(default: str) -> Flag:
    text = f"random weights of this shape, unless --model names a model (default: {default})"
    return Flag("--shape", text, default, choices=RWKV_SHAPES)


SERVE = (
    Flag(
        "scenarios",
        "chat8, embed, table, streams, overload, overload-embed, disconnect, overhead, frontends (default: a "
        "load that flags describe)",
        [],
        "SCENARIO",
    ),
    Flag("--server", "a server to load; may be repeated (default: start `archerfish serve`)", [], "NAME=URL"),
    Flag("--start", "a command that starts that server before and is ended afterwards", [], "NAME=COMMAND"),
    Flag("--model", "model that generates (default: the server's first)", metavar="MODEL"),
    Flag("--embedding-model", "model that embeds (default: the server's first)", metavar="MODEL"),
    Flag("--api-key-env", "environment variable that holds an API key", metavar="VARIABLE"),
    Flag(
        "--workload",
        "chat:64/16, completions:32-512/16-128, ids:64/16 (token ids) or embeddings:32; repeated, a mix "
        "(default: chat:64/16)",
        [],
        "KIND:IN/OUT",
    ),
    Flag("--concurrency", "closed loop: requests at once (default: 8)", ()),
    Flag("--rate", "open loop: Poisson arrivals a second", (), minimum=0.001),
    Flag("--requests", "requests of a measurement (default: 200)", 0, minimum=0),
    Flag("--duration", "seconds of a measurement, instead of a number of requests", 0.0, minimum=0),
    rounds(3),
    Flag("--timeout", "seconds a request may take (default: 120)", 120.0, minimum=0.001),
    Flag("--e2e-target", "milliseconds in which a whole answer must come to count as goodput", 0.0, minimum=0),
)
BENCHES = (
    Bench("embed", "measure embeddings against the peers that are installed", "embed:measure", (
        rounds(5), Flag("--engines", "only these engines (default: all that are installed)", metavar="A,B"),
        Flag("--documents", "documents in one call (default: 10000)", 10_000), AGAINST,
    ), (EmbedConfig, HubConfig)),
    Bench("throughput", "measure continuous against static batching, and against peers", "generate:throughput", (
        Flag("--batches", "numbers of sequences at once (default: 8,16,32,64)", (8, 16, 32, 64)), *GENERATION,
    ), (EngineConfig,)),
    Bench("latency", "measure first tokens and gaps between tokens, one request at a time", "generate:latency",
          GENERATION, (EngineConfig,)),
    Bench("prefix", "measure what the prefix cache gives on prompts that begin alike", "generate:prefix", GENERATION,
          (EngineConfig,)),
    Bench("rwkv", "measure an RWKV model: many streams, states kept of prompts that begin alike", "rwkv:rwkv", (
        rwkv_shape("0.1b"), *GENERATION,
    ), (EngineConfig,)),
    Bench("tts", "measure an RWKV-7 TTS model: streams in real time, with the package rwkv beside it", "rwkv:tts", (
        rwkv_shape("0.4b"), Flag("--streams", "streams at once (default: 1,64,1000)", (1, 64, 1000)), *GENERATION,
    ), (EngineConfig,)),
    Bench("scheduler", "measure what planning a step and keeping the cache cost, without a model", "scheduler:measure", (
        Flag("--sequences", "running sequences (default: 256)", 256),
        Flag("--steps", "steps to measure (default: 2000)", 2000),
        Flag("--nodes", "largest tree, in nodes (default: 1000000)", 10**6),
    )),
    Bench("replicas", "measure routing over paced engine processes: throughput, hit rates, costs", "replicas:measure", (
        rounds(5), Flag("--only", "parts to run: throughput, prefixes, router, digest (default: all)", metavar="A,B"),
    )),
    Bench("cpu", "measure everything on the CPU against the peers that are installed, in one run", "cpu:measure", (
        rounds(5), Flag("--engines", "only these engines (default: all that are installed)", metavar="A,B"),
        Flag("--only", "parts to run: decode, prefill, batch, start, http, embed, rwkv, draw, drafts (default: all)",
             metavar="A,B"),
        Flag("--llama-server", "llama.cpp's server (default: llama-server, else that of llama-cpp-python)", metavar="FILE"),
        AGAINST,
    ), (HubConfig,)),
    Bench("gpu", "measure generation on a GPU, against vLLM where it is there", "gpu:measure", (
        Flag("--repeats", "repeats of every measurement (default: 3)", 3),
        Flag("--only", "parts to run: offline, bs1, prefill, shared, four, drawn, sampled, logprobs, long (default: all)",
             metavar="A,B"), *GPU,
    )),
    Bench("startup", "measure the time from starting a process to its first token on a GPU", "gpu:startup", (
        *GPU, Flag("--scratch", "where the weights are written, once (default: the cache)", metavar="DIR"),
    ), (HubConfig,)),
    Bench("adapters", "measure requests spread over LoRA adapters against none, and against vLLM", "adapters:measure", (
        Flag("--adapters", "LoRA adapters (default: 32)", 32), Flag("--rank", "of each (default: 16)", 16),
        Flag("--requests", "requests at once (default: 64)", 64), Flag("--prompt-tokens", "of each request (default: 64)", 64),
        Flag("--output-tokens", "of each request (default: 32)", 32), rounds(3),
        Flag("--shape", "random weights of a shape of `bench gpu`, such as llama-3.1-8b (default: those of --model)"),
        VLLM_PATH, NO_PEERS,
    ), (EngineConfig,)),
    Bench("kernels", "measure the GPU kernels against the card's limits and against PyTorch", "kernels:measure"),
    Bench("serve", "load servers over HTTP, ours and others side by side", "serve:measure", SERVE, usage="[SCENARIO ...] "),
    Bench("store", "measure opening and converting weights", "store:measure", (
        Flag("--model", "the model whose weights are used", EmbedConfig().model, "MODEL"), rounds(5),
    ), (HubConfig,)),
)  # fmt: skip
