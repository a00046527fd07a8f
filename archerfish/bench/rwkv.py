"""`archerfish bench rwkv | tts`: RWKV-7 models. Many streams against one, kept states against none, speech in real
time."""

from __future__ import annotations

import importlib.util
import json
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from archerfish.bench.generate import open_ours, run_continuous
from archerfish.bench.report import OURS, Found, Measurement
from archerfish.bench.worker import EngineGroup
from archerfish.config import EngineConfig
from archerfish.errors import UnsupportedModelError

SHAPES = {"tiny": (2, 128), "0.1b": (12, 768), "0.4b": (24, 1024)}  # layers, width; the last two are published models
VOCAB_SIZE = 65536
NUM_STREAMS = 32
PROMPT_TOKENS = 16
STREAM_OUTPUT = 32
SHARED_TOKENS = 1024
OWN_TOKENS = 16
PREFIX_OUTPUT = 16
DECODE_OUTPUT = 128
AUDIO_SECONDS = 4
TEXT = "The archerfish spits a jet of water at an insect above the surface, and waits."
COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 27}
STRATEGIES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
PACKAGE, PLAIN = "package rwkv", f"{OURS} without states"


def write_shape(name: str, directory: Path, vocab_size: int = VOCAB_SIZE) -> Path:
    """The configuration of a shape, for random weights."""
    num_layers, width = SHAPES[name]
    rank = max(32, width // 12 // 32 * 32)
    config = {
        "architectures": ["RWKV7ForCausalLM"],
        "model_type": "rwkv7",
        "vocab_size": vocab_size,
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": num_layers,
        "head_dim": 64,
        "norm_eps": 1e-5,
        "decay_low_rank_dim": rank,
        "a_low_rank_dim": rank,
        "v_low_rank_dim": 32,
        "gate_low_rank_dim": 2 * rank,
        "eos_token_id": 0,
    }
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@contextmanager
def random_model(options: Namespace, vocab_size: int) -> Iterator[Path]:
    """A scratch directory. Unless the options name a model, they get one with random weights in the wanted shape."""
    with tempfile.TemporaryDirectory(prefix="archerfish-") as scratch:
        if options.engine.model == EngineConfig().model:
            shape = write_shape(options.shape, Path(scratch) / f"rwkv7-{options.shape}", vocab_size)
            options.engine = options.engine.replace(model=str(shape), load_format="dummy")
        yield Path(scratch)


def random_prompts(num: int, length: int, vocab_size: int, seed: int) -> list[list[int]]:
    found: list[list[int]] = np.random.default_rng((seed, num, length)).integers(1, vocab_size, (num, length)).tolist()
    return found


def stream_s(group: EngineGroup, name: str, num: int, num_output: int, vocab_size: int, seed: int) -> float:
    """Seconds of so many streams at once, their short prompts included."""
    prompts = random_prompts(num, PROMPT_TOKENS, vocab_size, seed)
    return float(group.call(name, "generate", prompts=prompts, outputs=[num_output] * num))


def rwkv(options: Namespace) -> Found:
    """Streams, and requests with and without kept states. --block-size is the distance between two kept states."""
    with random_model(options, VOCAB_SIZE), EngineGroup() as group:
        facts = open_ours(group, options)[OURS]
        if not facts["has_states"]:
            raise UnsupportedModelError(
                f"{options.engine.model} is not a recurrent model.", hint="Give an RWKV-7 model."
            )
        group.open(PLAIN, "Archerfish", {"options": {**asdict(options.engine), "enable_prefix_caching": False}})
        yield Measurement("a state, MB", facts["block_bytes"] / 1e6)
        for name in group.names():
            stream_s(group, name, NUM_STREAMS, STREAM_OUTPUT, facts["vocab_size"], 0)  # warms up
        for number in range(options.rounds):
            yield from rwkv_round(group, facts["vocab_size"], number)


def rwkv_round(group: EngineGroup, vocab_size: int, number: int) -> Iterator[Measurement]:
    shared = random_prompts(1, SHARED_TOKENS, vocab_size, number)[0]
    prompts = [shared + own for own in random_prompts(NUM_STREAMS, OWN_TOKENS, vocab_size, number)]
    tokens = {}
    for name in group.names(number):
        for num in (1, NUM_STREAMS) if name != PLAIN else ():
            tokens_s = num * STREAM_OUTPUT / stream_s(group, name, num, STREAM_OUTPUT, vocab_size, number)
            yield Measurement(f"{stream_title(num)}, tokens/s", tokens_s, name)
        metric, engine = ("no states kept", OURS) if name == PLAIN else ("states kept", name)
        seconds = run_continuous(group, name, [(prompt, PREFIX_OUTPUT) for prompt in prompts])
        yield Measurement(f"{metric}, requests/s", len(prompts) / seconds, engine)
        tokens[name] = group.call(name, "last_outputs")["token_ids"]
    same = sum(own == other for own, other in zip(tokens[OURS], tokens[PLAIN], strict=True))
    yield Measurement("requests with the same tokens, share", same / len(prompts))


def tts(options: Namespace) -> Found:
    """Decodes and speech of several numbers of streams, and one stream of the package rwkv."""
    from archerfish.engine.tts import TOKENS_PER_SECOND
    from archerfish.engine.tts import VOCAB_SIZE as SPEECH_VOCAB_SIZE

    with random_model(options, SPEECH_VOCAB_SIZE) as scratch, EngineGroup() as group:
        facts = open_ours(group, options, enable_prefix_caching=False, max_num_seqs=max(options.streams))[OURS]
        rate = group.call(OURS, "copy_rate", num_bytes=COPY_BYTES[facts["device"]])
        yield Measurement("copy rate, GB/s", rate / 1e9)
        ours = group.names()
        for name in ours:
            for num in options.streams:
                decode_rate(group, name, num, 4, facts["vocab_size"], 0)  # compiles and records
        if (
            not options.no_peers
            and options.engine.load_format == "dummy"
            and importlib.util.find_spec("rwkv") is not None
        ):
            strategy = f"{facts['device']} {STRATEGIES[facts['dtype']]}"
            group.open(
                PACKAGE, "RwkvPackage", {"config": facts["config"], "strategy": strategy, "directory": str(scratch)}
            )
        for number in range(options.rounds):
            for num in options.streams:
                title = stream_title(num)
                for name in ours:
                    tokens_s = decode_rate(group, name, num, DECODE_OUTPUT, facts["vocab_size"], number)
                    yield Measurement(f"{title}, tokens/s", tokens_s, name)
                    yield Measurement(
                        f"{title}, share of the limit", step_bytes(facts, num) * tokens_s / num / rate, name
                    )
                    limit = AUDIO_SECONDS * TOKENS_PER_SECOND
                    speech = {"text": TEXT, "num_streams": num, "num_tokens": limit, "seed": number}
                    seconds, audio_s = group.call(name, "speech", **speech)
                    if num == 1:
                        yield Measurement("one stream, real-time factor", seconds / audio_s, name)
                    yield Measurement(f"{num} at once, streams in real time", audio_s / seconds, name)
            if seconds := group.call(PACKAGE, "decode", num_tokens=DECODE_OUTPUT):
                yield Measurement("one stream, tokens/s", DECODE_OUTPUT / seconds, PACKAGE)
        yield from group.notes


def stream_title(num: int) -> str:
    return f"{num} streams" if num > 1 else "one stream"


def decode_rate(group: EngineGroup, name: str, num: int, num_output: int, vocab_size: int, seed: int) -> float:
    """Tokens a second after the first of each stream."""
    first_s, all_s = (stream_s(group, name, num, count, vocab_size, seed) for count in (1, num_output + 1))
    return num * num_output / max(all_s - first_s, 1e-9)


def step_bytes(facts: dict[str, Any], num: int) -> int:
    """The bytes that a step of so many decodes must move: all weights but the embeddings once, every state twice."""
    item_bytes = 4 if facts["dtype"] == "float32" else 2
    embeddings = facts["vocab_size"] * facts["config"]["hidden_size"] * item_bytes
    return int(facts["weight_bytes"] - embeddings + 2 * num * facts["block_bytes"])
