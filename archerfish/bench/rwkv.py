"""Work and measurements of `archerfish bench rwkv`: many streams against one, kept states against none, and how far apart."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from archerfish.bench.generate import Report, engines, params_for
from archerfish.bench.targets import Bar, Judged
from archerfish.config import EngineConfig
from archerfish.engine.llm_engine import LLMEngine
from archerfish.errors import UnsupportedModelError
from archerfish.types import Progress, no_progress

SHAPES = {"tiny": (2, 128), "0.1b": (12, 768), "0.4b": (24, 1024)}  # layers, width; the last two as they are published
VOCAB_SIZE = 65536
NUM_STREAMS, PROMPT_TOKENS, STREAM_OUTPUT = 32, 16, 32
SHARED_TOKENS, OWN_TOKENS, PREFIX_OUTPUT = 1024, 16, 16
UNEVEN_TOKENS = 1000  # shared, where a state lies only every so many tokens
SPACINGS = (32, 64, 128, 256, 512, 1024)
STREAMS_TARGET, PREFIX_TARGET = 8.0, 5.0
WITH, WITHOUT = "with kept states", "without"
ONE, MANY = "tokens/s, one stream", f"tokens/s, {NUM_STREAMS} streams"


def write_shape(name: str, directory: Path, vocab_size: int = VOCAB_SIZE) -> Path:
    """The configuration of a shape, for random weights."""
    num_layers, width = SHAPES[name]
    rank = max(32, width // 12 // 32 * 32)
    config = {
        "architectures": ["RWKV7ForCausalLM"], "model_type": "rwkv7", "vocab_size": vocab_size, "hidden_size": width,
        "intermediate_size": 4 * width, "num_hidden_layers": num_layers, "head_dim": 64, "norm_eps": 1e-5,
        "decay_low_rank_dim": rank, "a_low_rank_dim": rank, "v_low_rank_dim": 32, "gate_low_rank_dim": 2 * rank,
        "eos_token_id": 0,
    }  # fmt: skip
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def measure(
    config: EngineConfig, report: Report, rounds: int, spacings: Sequence[int], progress: Progress = no_progress
) -> None:
    """With and without kept states in every round; then distances between them one after the other, for want of memory."""
    total = rounds * (2 + len(spacings))
    done = 0

    def advance(what: str) -> None:
        nonlocal done
        done += 1
        progress(done, total, what)

    with engines(config, {}, {"enable_prefix_caching": False}) as (kept, plain):
        if not kept.facts.has_states:
            raise UnsupportedModelError(f"{config.model} is no recurrent model.", hint="Give an RWKV-7 model.")
        state_bytes = kept.facts.memory.block_bytes
        report.figures["MB of a state"] = state_bytes / 1e6
        for engine in (kept, plain):
            run_streams(engine, NUM_STREAMS, 0)  # compiles products, faults memory in
        for round_index in range(rounds):
            report.add(ONE, run_streams(plain, 1, round_index))
            report.add(MANY, run_streams(plain, NUM_STREAMS, round_index))
            advance("streams")
            compare_prefixes(report, kept, plain, round_index)
            advance("prefixes")
    for size in spacings:
        with engines(config, {"block_size": size}) as (engine,):
            run_streams(engine, NUM_STREAMS, 0)
            for round_index in range(rounds):
                measure_spacing(report, engine, size, round_index)
                advance(f"a state every {size} tokens")
        report.figures[f"MB kept of 1,024 tokens, every {size}"] = -(-1024 // size) * state_bytes / 1e6


def run_streams(engine: LLMEngine, num: int, seed: int) -> float:
    """Tokens a second of so many streams at once, their short prompts included."""
    random = np.random.default_rng(seed)
    prompts = random.integers(1, engine.facts.vocab_size, (num, PROMPT_TOKENS)).tolist()
    started = time.perf_counter()
    engine.generate(prompts, params_for(STREAM_OUTPUT))
    return num * STREAM_OUTPUT / (time.perf_counter() - started)


def shared_prompts(vocab_size: int, num_shared: int, seed: int) -> list[list[int]]:
    random = np.random.default_rng(seed)
    shared = random.integers(1, vocab_size, num_shared).tolist()
    return [shared + random.integers(1, vocab_size, OWN_TOKENS).tolist() for _ in range(NUM_STREAMS)]


def run_prompts(engine: LLMEngine, prompts: list[list[int]]) -> tuple[float, list[list[int]]]:
    """Seconds for all, from an empty cache, and the tokens of each."""
    engine.clear_cache()
    started = time.perf_counter()
    outputs = engine.generate(prompts, params_for(PREFIX_OUTPUT))
    return time.perf_counter() - started, [output.token_ids for output in outputs]


def compare_prefixes(report: Report, kept: LLMEngine, plain: LLMEngine, seed: int) -> None:
    """32 requests of 1,024 shared and 16 own tokens, 16 out."""
    prompts = shared_prompts(kept.facts.vocab_size, SHARED_TOKENS, seed)
    seconds, tokens = run_prompts(kept, prompts)
    report.add(f"requests/s, {WITH}", len(prompts) / seconds)
    seconds, others = run_prompts(plain, prompts)
    report.add(f"requests/s, {WITHOUT}", len(prompts) / seconds)
    same = sum(own == other for own, other in zip(tokens, others, strict=True))
    report.add("requests with the same tokens, share", same / len(prompts))


def measure_spacing(report: Report, engine: LLMEngine, size: int, seed: int) -> None:
    """Memory against recomputation: what lies between the last kept state and the end of what is shared is computed again."""
    random = np.random.default_rng(seed)
    seconds, _ = run_prompts(engine, random.integers(1, engine.facts.vocab_size, (1, SHARED_TOKENS)).tolist())
    report.add(f"prompt tokens/s, every {size}", SHARED_TOKENS / seconds)
    prompts = shared_prompts(engine.facts.vocab_size, UNEVEN_TOKENS, seed)
    report.add(f"requests/s, every {size}", len(prompts) / run_prompts(engine, prompts)[0])


def bars(report: Report) -> list[Judged]:
    """What a CPU is held to."""
    same = report.summary("requests with the same tokens, share")
    return [
        Bar(f"{NUM_STREAMS} streams over one", STREAMS_TARGET, at_least=True).judged(
            report.ratio(MANY, ONE)
        ),
        Bar("requests with kept states over without", PREFIX_TARGET, at_least=True).judged(
            report.ratio(f"requests/s, {WITH}", f"requests/s, {WITHOUT}")
        ),
        Bar("share with the same tokens (in float32)", 1.0, at_least=True).judged(same.low if same else None),
    ]
