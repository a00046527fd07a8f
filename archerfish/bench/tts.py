"""Work and measurements of `archerfish bench tts`: how fast an RWKV-7 TTS model decodes against its bytes, and speaks."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from archerfish.bench.generate import Report, engines, params_for
from archerfish.bench.targets import Bar, Judged
from archerfish.config import EngineConfig
from archerfish.engine.llm_engine import LLMEngine
from archerfish.engine.rwkv_sampler import RwkvSampler
from archerfish.engine.tts import TOKENS_PER_SECOND, TTSRequest
from archerfish.kernels.recurrent import StateShape
from archerfish.types import DTYPE_BYTES, Progress, no_progress

PROMPT_TOKENS = 16
DECODE_OUTPUT = 128
AUDIO_SECONDS = 4
TEXT = "The archerfish spits a jet of water at an insect above the surface, and waits."
COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 27}
PACKAGE = "tokens/s, one stream, package rwkv"
REAL_TIME_TARGET, STREAMS_TARGET, PACKAGE_TARGET = 0.05, 1000.0, 3.0
SHARE_TARGETS = {1: 0.4, 64: 0.5}  # of the copy rate, by streams


def decode_name(num: int) -> str:
    return f"tokens/s, {num} streams" if num > 1 else "tokens/s, one stream"


def share_name(num: int) -> str:
    return f"share of the copy rate, {num}"


def measure(
    config: EngineConfig, report: Report, rounds: int, streams: Sequence[int], progress: Progress = no_progress
) -> None:
    """Decodes and speech of so many streams at once, in every round."""
    with engines(config, {"enable_prefix_caching": False, "max_num_seqs": max(streams)}) as (engine,):
        rate = copy_rate(engine.facts.device)
        report.figures["copy rate, GB/s"] = rate / 1e9
        sampler = RwkvSampler(engine)
        for num in streams:  # compiles products, records steps
            run_decodes(engine, num, 4, seed=0)
        for round_index in range(rounds):
            for place, num in enumerate(streams):
                per_second = run_decodes(engine, num, DECODE_OUTPUT, round_index)
                report.add(decode_name(num), per_second)
                report.add(share_name(num), step_bytes(engine, num) * per_second / num / rate)
                seconds, audio = run_speech(sampler, num, round_index)
                if num == 1:
                    report.add("real-time factor, one stream", seconds / audio)
                report.add(f"streams in real time, {num} at once", audio / seconds)
                progress(round_index * len(streams) + place + 1, rounds * len(streams), f"{num} streams")


def run_decodes(engine: LLMEngine, num: int, num_output: int, seed: int) -> float:
    """Tokens a second after the first of each stream."""
    random = np.random.default_rng(seed)
    times = []
    for count in (1, num_output + 1):
        prompts = random.integers(1, engine.facts.vocab_size, (num, PROMPT_TOKENS)).tolist()
        started = time.perf_counter()
        engine.generate(prompts, params_for(count))
        times.append(time.perf_counter() - started)
    return num * num_output / max(times[1] - times[0], 1e-9)


def run_speech(sampler: RwkvSampler, num: int, seed: int) -> tuple[float, float]:
    """Seconds that so many texts at once take, and seconds of audio that their tokens are."""
    limit = AUDIO_SECONDS * TOKENS_PER_SECOND
    requests = [TTSRequest(text=TEXT, seed=1000 * seed + place, max_tokens=limit) for place in range(num)]
    started = time.perf_counter()
    found = sampler.generate_tts_tokens_batch(requests)
    seconds = time.perf_counter() - started
    for tokens in found:
        if tokens.error is not None:
            raise tokens.error
    return seconds, sum(tokens.seconds for tokens in found)


def step_bytes(engine: LLMEngine, num: int) -> int:
    """What a step of so many decodes has to move: all weights but the table of embeddings once, every state twice."""
    facts = engine.facts
    each = facts.adapter.tensor_bytes(facts.config, facts.dtype, facts.weight_format)
    weights = sum(num_bytes for name, num_bytes in each.items() if "embeddings" not in name)
    state = facts.memory_shape
    assert isinstance(state, StateShape)
    item_bytes = DTYPE_BYTES[facts.dtype]
    return weights + 2 * num * state.bytes_per_block(facts.memory.block_size, item_bytes)


def copy_rate(device: str) -> float:
    """Bytes a second that a copy reads and writes."""
    import torch

    source = torch.ones(COPY_BYTES[device] // 4, device=device)
    target = torch.empty_like(source)
    synchronize: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    times = []
    for _ in range(6):
        synchronize()
        started = time.perf_counter()
        target.copy_(source)
        synchronize()
        times.append(time.perf_counter() - started)
    return 2 * COPY_BYTES[device] / min(times)


def measure_package(report: Report, rounds: int, path: Path, strategy: str) -> None:
    """One stream of the package rwkv with the checkpoint of a path."""
    os.environ |= {"RWKV_V7_ON": "1", "RWKV_JIT_ON": "1", "RWKV_CUDA_ON": "0"}
    package: Any = importlib.import_module("rwkv.model")
    model = package.RWKV(model=str(path.with_suffix("")), strategy=strategy)
    state = model.forward([1, 2, 3], None)[1]
    for _ in range(rounds):
        started = time.perf_counter()
        for token in range(1, DECODE_OUTPUT + 1):
            logits, state = model.forward([token], state)
            float(logits[0])  # waits for a device
        report.add(PACKAGE, DECODE_OUTPUT / (time.perf_counter() - started))


def write_checkpoint(config: dict[str, Any], path: Path) -> Path:
    """Random weights of a configuration as BlinkDL's checkpoints have them, which the package reads."""
    import torch

    width, vocab_size, feed_forward = config["hidden_size"], config["vocab_size"], config["intermediate_size"]
    ranks = {letter: config[f"{name}_low_rank_dim"] for letter, name in zip("wavg", ("decay", "a", "v", "gate"), strict=True)}
    shapes: dict[str, tuple[int, ...]] = {"emb.weight": (vocab_size, width), "head.weight": (vocab_size, width)}
    norms = ["ln_out", "blocks.0.ln0"]
    for layer in range(config["num_hidden_layers"]):
        block = f"blocks.{layer}"
        norms += [f"{block}.{name}" for name in ("ln1", "ln2", "att.ln_x")]
        for letter, rank in ranks.items():
            shapes |= {f"{block}.att.{letter}1": (width, rank), f"{block}.att.{letter}2": (rank, width)}
        vectors = [*(f"x_{mix}" for mix in "rwkvag"), "w0", "a0", "v0", "k_k", "k_a"]
        shapes |= {f"{block}.att.{name}": (1, 1, width) for name in vectors} | {f"{block}.ffn.x_k": (1, 1, width)}
        shapes |= {f"{block}.att.{name}.weight": (width, width) for name in ("receptance", "key", "value", "output")}
        shapes[f"{block}.att.r_k"] = (width // 64, 64)
        shapes |= {f"{block}.ffn.key.weight": (feed_forward, width), f"{block}.ffn.value.weight": (width, feed_forward)}
    made = {name: torch.randn(shape) * 0.02 for name, shape in shapes.items()}
    made |= {f"{name}.weight": torch.ones(width) for name in norms} | {f"{name}.bias": torch.zeros(width) for name in norms}
    torch.save({name: tensor.bfloat16() for name, tensor in made.items()}, path)
    return path


def bars(report: Report) -> list[Judged]:
    """What the 0.4b shape is held to on a GPU."""
    one = report.summary("real-time factor, one stream")
    streams = [report.summary(name) for name in report.samples if name.startswith("streams in real time")]
    judged = [
        Bar("real-time factor of one stream", REAL_TIME_TARGET).judged(one.median if one else None),
        Bar("streams in real time", STREAMS_TARGET, at_least=True).judged(
            max((found.median for found in streams if found), default=None)
        ),
        Bar("one stream over the package rwkv", PACKAGE_TARGET, at_least=True).judged(
            report.ratio(decode_name(1), PACKAGE)
        ),
    ]
    for num, target in SHARE_TARGETS.items():
        found = report.summary(share_name(num))
        value = found.median if found else None
        judged.append(Bar(f"share of the copy rate, {num} streams", target, at_least=True).judged(value))
    return judged
