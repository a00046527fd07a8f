"""An LLMEngine whose steps compute nothing and take a given time: to measure what is around them."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from archerfish.config import EngineConfig
from archerfish.engine.llm_engine import LLMEngine
from archerfish.step import StepInput, StepResult
from archerfish.text.text_tokenizer import byte_alphabet

NAME = "paced"
NUM_WORDS = 4096  # a step brings the same one to every sequence, so that a reader knows which step it was
FIRST_WORD = 258
MAX_LEN = 4096
TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message.role }}\n{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


class Pace(msgspec.Struct, frozen=True):
    """How long a step takes, and in how many waits, between which the thread asks for the interpreter's lock.

    One is as a GPU with a recorded graph: a step begins where the one before it ends, if it was launched by then. Many are as
    a CPU, with a call for every operation: each wait begins when the thread gets to it.
    """

    step_s: float
    num_waits: int = 1


NO_WAIT = Pace(0.0)


@dataclass(frozen=True, slots=True)
class Step:
    """One that is done. Processor times are those at its launch."""

    number: int
    num_sequences: int
    launched_s: float
    ended_s: float
    loop_cpu_s: float  # of the thread that plans
    process_cpu_s: float
    core_wait_s: float  # what the thread that steps has waited for a core so far


class PacedRunner:
    """Takes the place of a ModelRunner. Nothing is computed, so nothing but the waiting costs time."""

    def __init__(
        self, executor: Executor | None = None, pace: Pace = NO_WAIT, *, clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.pace = pace
        self.steps: list[Step] = []
        self._clock, self._sleep = clock, sleep
        self._own = None if executor is not None else ThreadPoolExecutor(1, thread_name_prefix="archerfish-step")
        self._thread: Executor = executor or self._own  # type: ignore[assignment]
        self._free_s = 0.0  # when the last step was due to end
        self._number = 0
        self._waited = CoreWait()

    def launch(self, step: StepInput) -> Future[StepResult]:
        number, size = self._number, step.num_sequences
        self._number += 1
        now, loop_cpu_s, process_cpu_s = self._clock(), time.thread_time(), time.process_time()

        def run() -> StepResult:
            self._wait(now)
            self.steps.append(Step(number, size, now, self._clock(), loop_cpu_s, process_cpu_s, self._waited.seconds()))
            return StepResult(np.full((size, 1), FIRST_WORD + number % NUM_WORDS))

        return self._thread.submit(run)

    def _wait(self, launched_s: float) -> None:
        pace = self.pace
        if pace.num_waits > 1:
            for _ in range(pace.num_waits):
                self._sleep(pace.step_s / pace.num_waits)
        elif pace.step_s:
            self._free_s = max(self._free_s, launched_s) + pace.step_s
            self._sleep(max(0.0, self._free_s - self._clock()))

    def use_idle_time(self) -> bool:
        return False

    def close(self) -> None:
        if self._own is not None:
            self._own.shutdown()
        self._waited.close()


class CoreWait:
    """How long the thread that asks first has been ready to run without a core; 0 where the system does not tell."""

    def __init__(self) -> None:
        self._file: int | None = None

    def seconds(self) -> float:
        try:
            if self._file is None:
                self._file = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)
            return int(os.pread(self._file, 100, 0).split()[1]) / 1e9
        except (OSError, IndexError, ValueError):
            return 0.0

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def word(number: int) -> str:
    """The text of what a step brings."""
    return f" {number % NUM_WORDS:04d}"


def save_model(directory: Path) -> Path:
    """The files of a model with a byte-level vocabulary, a chat template and nearly no weights."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = byte_alphabet()
    space = next(character for character, value in vocabulary.items() if value == 0x20)
    vocabulary |= {f"{space}{number:04d}": FIRST_WORD + number for number in range(NUM_WORDS)}
    vocabulary |= {"<|end|>": 256, "<|start|>": 257}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in ("<|end|>", "<|start|>")])
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16, "intermediate_size": 16,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": MAX_LEN,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "vocab_size": FIRST_WORD + NUM_WORDS, "tie_word_embeddings": True,
        "hidden_act": "silu", "eos_token_id": 256,
    }  # fmt: skip
    model = directory / NAME
    model.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(model / "tokenizer.json"))
    (model / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>", "chat_template": TEMPLATE}))
    (model / "config.json").write_text(json.dumps(config))
    return model


def make_engine(model: Path, executor: Executor | None = None, **options: Any) -> tuple[LLMEngine, PacedRunner]:
    """An engine with all that a real one has but the computing."""
    config = EngineConfig(
        model=str(model), load_format="dummy", dtype="float32", max_cache_tokens=256 * 3000, max_num_seqs=256, num_threads=1,
        logits_cache_mib=0, max_num_batched_tokens=16384,
    )
    engine = LLMEngine(config, executor=executor, **options)
    engine.runner.close()
    runner = PacedRunner(executor)
    engine.runner = runner  # type: ignore[assignment]
    return engine, runner


def full_stretch(steps: list[Step], num_sequences: int) -> list[Step]:
    """The longest run of steps that have so many sequences, without the first of them."""
    stretches = [list(found) for is_full, found in groupby(steps, lambda step: step.num_sequences == num_sequences) if is_full]
    return max(stretches, key=len, default=[])[1:]


def figures_of(steps: list[Step], num_sequences: int) -> dict[str, float]:
    """What an engine loop did while so many sequences ran."""
    full = full_stretch(steps, num_sequences)
    if len(full) < 2:
        return {}
    first, last, num_steps = full[0], full[-1], len(full) - 1
    num_tokens = num_steps * num_sequences
    return {
        "steps": float(num_steps),
        "steps_s": num_steps / (last.ended_s - first.ended_s),
        "tokens_s": num_tokens / (last.ended_s - first.ended_s),
        "loop_us_token": (last.loop_cpu_s - first.loop_cpu_s) / num_tokens * 1e6,
        "core_wait_share": (last.core_wait_s - first.core_wait_s) / (last.ended_s - first.ended_s),
        "engine_us_token": (last.process_cpu_s - first.process_cpu_s) / num_tokens * 1e6,
    }
