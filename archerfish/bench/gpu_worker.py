"""A process with one engine on the GPU workloads, driven by JSON lines as `worker` is; the other end is `gpu`.

The work is that of the peers' own script, token for token, whichever parts of it run. Only what this file needs itself is
imported before the clock starts.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

SAMPLED, GREEDY = 0.6, 0.0  # temperatures
FIRST_PROMPT = [1, 2, 3, 4]
WARM_UP_OUTPUT = 8
PREFIX_END = 5  # the token after the shared prefix when it is computed for the first time


@dataclass(frozen=True)
class Work:
    """How much of everything one repeat does; tests make it small."""

    max_token: int = 10000
    num_requests: int = 256
    least_tokens: int = 100  # of prompts and of outputs
    most_tokens: int = 1024
    single_prompt: int = 128
    single_output: int = 513
    num_prefills: int = 64
    prefill_tokens: int = 2048
    prefix_tokens: int = 3072
    num_shared: int = 256
    own_tokens: int = 128
    shared_output: int = 64


@dataclass(frozen=True)
class Inputs:
    """Prompts and output lengths of one repeat."""

    offline: list[list[int]]
    offline_outputs: list[int]
    first: list[int]
    single: list[int]
    prefills: list[list[int]]
    prefix: list[int]
    shared: list[list[int]]


@lru_cache(maxsize=1)
def draw_inputs(work: Work, repeat: int) -> Inputs:
    """The prompts of a repeat. All are drawn, in one order, so that leaving a part out does not change the others."""
    rng = random.Random(repeat)
    low, high, top = work.least_tokens, work.most_tokens, work.max_token
    offline = [[rng.randint(0, top) for _ in range(rng.randint(low, high))] for _ in range(work.num_requests)]
    outputs = [rng.randint(low, high) for _ in range(work.num_requests)]
    rng = random.Random(100 + repeat)

    def tokens(count: int) -> list[int]:
        return [rng.randint(0, top) for _ in range(count)]

    first, single = tokens(work.single_prompt), tokens(work.single_prompt)
    prefills = [tokens(work.prefill_tokens) for _ in range(work.num_prefills)]
    prefix = tokens(work.prefix_tokens)
    shared = [prefix + tokens(work.own_tokens) for _ in range(work.num_shared)]
    return Inputs(offline, outputs, first, single, prefills, prefix, shared)


class Engine(Protocol):
    """What is asked of an engine. Parameters are its own kind, made before the clock starts."""

    def imports(self) -> str:
        """Import what the first token needs; returns the version."""
        ...

    def load(self, directory: str, options: dict[str, Any]) -> None: ...

    def params(self, num_output: int, temperature: float) -> Any: ...

    def generate(self, prompts: list[list[int]], params: Any) -> list[int]:
        """Run the prompts with one parameter for all or one for each; returns how many tokens each gave."""
        ...


class Archerfish:
    """Our engine."""

    def imports(self) -> str:
        from archerfish import __version__
        from archerfish.config import EngineConfig
        from archerfish.engine.llm_engine import LLMEngine
        from archerfish.params import SamplingParams

        self._config, self._engine_class, self._params = EngineConfig, LLMEngine, SamplingParams
        return __version__

    def load(self, directory: str, options: dict[str, Any]) -> None:
        self.engine = self._engine_class(self._config(model=directory, **options))

    def params(self, num_output: int, temperature: float) -> Any:
        return self._params(temperature=temperature, max_tokens=num_output, ignore_eos=True)

    def generate(self, prompts: list[list[int]], params: Any) -> list[int]:
        return [len(output.token_ids) for output in self.engine.generate(prompts, params)]


class Vllm:
    """vLLM's own LLM class."""

    def imports(self) -> str:
        self._vllm: Any = importlib.import_module("vllm")
        return str(getattr(self._vllm, "__version__", ""))

    def load(self, directory: str, options: dict[str, Any]) -> None:
        self.engine = self._vllm.LLM(model=directory, **options)

    def params(self, num_output: int, temperature: float) -> Any:
        return self._vllm.SamplingParams(temperature=temperature, max_tokens=num_output, ignore_eos=True, detokenize=False)

    def generate(self, prompts: list[list[int]], params: Any) -> list[int]:
        outputs = self.engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]


ENGINES: dict[str, Callable[[], Engine]] = {"archerfish": Archerfish, "vllm": Vllm}
Samples = dict[str, float]


class GpuWorker:
    """Answers requests with one engine; every measurement is a dictionary of samples."""

    def __init__(self, engine: Engine, directory: str, options: dict[str, Any], work: Work) -> None:
        self.engine, self.directory, self.options, self.work = engine, directory, options, work
        self.operations: dict[str, Callable[..., dict[str, Any]]] = {
            "start": self.start, "first_token": self.first_token, "warm_up": self.warm_up, "offline": self.offline,
            "bs1": self.bs1, "prefill": self.prefill, "shared": self.shared, "write_store": self.write_store,
        }

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """What to answer to one request; an error of the engine becomes {"error": ...} with the place it came from."""
        operation = self.operations[request.pop("op")]
        try:
            return operation(**request)
        except Exception as error:  # whatever an engine raises belongs into the report
            traceback.print_exc()
            last = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{Path(last.filename).name}:{last.lineno}"
            return {"error": f"{type(error).__name__}: {str(error).strip()[:500]} ({place})"}

    def start(self) -> dict[str, Any]:
        """Import and load, each timed."""
        began = time.perf_counter()
        version = self.engine.imports()
        imported = time.perf_counter()
        self.engine.load(self.directory, self.options)
        loaded = time.perf_counter()
        return {"version": version, "import_s": imported - began, "start_s": loaded - imported}

    def first_token(self) -> Samples:
        return {"first_token_s": self._run([FIRST_PROMPT], 1, GREEDY)}

    def warm_up(self) -> Samples:
        self._run([FIRST_PROMPT], WARM_UP_OUTPUT, SAMPLED)
        return {}

    def offline(self, repeat: int) -> Samples:
        """Many requests of mixed lengths at once."""
        inputs = draw_inputs(self.work, repeat)
        seconds = self._run(inputs.offline, inputs.offline_outputs, SAMPLED)
        return {"offline256_tok_s": sum(inputs.offline_outputs) / seconds}

    def bs1(self, repeat: int) -> Samples:
        """One request alone: its first token, then those after the first."""
        inputs = draw_inputs(self.work, repeat)
        first = self._run([inputs.first], 1, GREEDY)
        seconds = self._run([inputs.single], self.work.single_output, GREEDY)
        return {"bs1_decode_tok_s": (self.work.single_output - 1) / (seconds - first), "bs1_ttft_ms": first * 1000}

    def prefill(self, repeat: int) -> Samples:
        """Long prompts, one token out."""
        prompts = draw_inputs(self.work, repeat).prefills
        return {"prefill_tok_s": sum(map(len, prompts)) / self._run(prompts, 1, GREEDY)}

    def shared(self, repeat: int) -> Samples:
        """Prompts that begin alike, after one request has computed what they share."""
        inputs = draw_inputs(self.work, repeat)
        self._run([[*inputs.prefix, PREFIX_END]], 1, GREEDY)
        return {"shared_prefix_req_s": len(inputs.shared) / self._run(inputs.shared, self.work.shared_output, SAMPLED)}

    def write_store(self, target: str) -> dict[str, Any]:
        from archerfish.bench.random_store import write_random_store

        return {"num_bytes": write_random_store(Path(self.directory), Path(target), self.options)}

    def _run(self, prompts: list[list[int]], num_output: int | list[int], temperature: float) -> float:
        """Seconds that the prompts take; output of another length than asked for is an error, not a measurement."""
        each = [num_output] * len(prompts) if isinstance(num_output, int) else num_output
        params: Any
        if isinstance(num_output, int):
            params = self.engine.params(num_output, temperature)
        else:
            params = [self.engine.params(count, temperature) for count in num_output]
        began = time.perf_counter()
        counts = self.engine.generate(prompts, params)
        seconds = time.perf_counter() - began
        if counts != each:
            raise RuntimeError(f"{sum(each)} tokens were asked for, {sum(counts)} came")
        return seconds


def main() -> None:
    given = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # libraries that print must not disturb the answers
    engine = ENGINES[given["engine"]]()
    worker = GpuWorker(engine, given["directory"], given["options"], Work(**given["work"]))
    for line in sys.stdin:
        answers.write(json.dumps(worker.answer(json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
