"""Runs random requests of a tiny model where Triton's launches are only noted; prints each that the rehearsal has not
noted.

A process of its own, `python -m tests.runtime.rehearsed KIND DIRECTORY ROUNDS`: Triton must not interpret here. A
driver without a card stands for an H200.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from archerfish import LLMEngine, SamplingParams
from archerfish.engine import inference_core, llm_loading
from archerfish.engine.inference_core import InferenceCore
from archerfish.kernels.batches import Segments
from archerfish.kernels.torch.reference import TorchOps
from archerfish.kernels.triton import compiling
from archerfish.kernels.triton.compile_worker import Job
from archerfish.kernels.triton.compiling import Rehearsal, rehearsing
from archerfish.kernels.triton.ops import TritonOps
from archerfish.layers.weights import Weights
from archerfish.models.adapter import TokenBatch, encoder_class
from archerfish.models.config import Config
from archerfish.types import Progress, no_progress
from tests.engine.tiny_llama import save_tiny_llama
from tests.engine.tiny_rwkv import save_tiny_rwkv
from tests.models.adapter_files import random_adapter

WIDE = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 200}
WINDOW = {
    **WIDE,
    "model_type": "gemma2",
    "sliding_window": 64,
    "query_pre_attn_scalar": 20,
    "attn_logit_softcapping": 3.0,
}
WINDOW |= {"final_logit_softcapping": 5.0, "hidden_activation": "gelu_pytorch_tanh"}
EXPERTS = {
    **WIDE,
    "model_type": "qwen2_moe",
    "num_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 64,
    "max_position_embeddings": 3000,
}
Model = tuple[Callable[..., Path], dict[str, Any], dict[str, Any]]
MODELS: dict[str, Model] = {  # how its files are made, what is changed in its configuration, and options of the engine
    "llama": (save_tiny_llama, {**WIDE, "max_position_embeddings": 2048}, {"speculation": "ngram"}),
    "int8": (
        save_tiny_llama,
        {**WIDE, "vocab_size": 193, "attention_bias": True},
        {"weights": "int8", "max_num_seqs": 70},
    ),
    "experts": (save_tiny_llama, EXPERTS, {"max_num_seqs": 70}),
    "gemma": (save_tiny_llama, {**WINDOW, "max_position_embeddings": 1024}, {"max_num_seqs": 33}),
    "deterministic": (save_tiny_llama, {**WIDE, "max_position_embeddings": 512}, {"deterministic": True}),
    "rwkv": (save_tiny_rwkv, {"max_position_embeddings": 512}, {"block_size": 16}),
    "adapters": (save_tiny_llama, {**WIDE, "max_position_embeddings": 512}, {"enable_lora": True, "max_loras": 2}),
}
BERT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 60,
    "max_position_embeddings": 128,
    "layer_norm_eps": 1e-5,
    "hidden_act": "gelu",
    "relative_attention_num_buckets": 8,
}
ENCODERS = {"bert": BERT, "roberta": {**BERT, "hidden_size": 60}, "mpnet": BERT}
OPTIONS: dict[str, Any] = {
    "dtype": "bfloat16",
    "load_format": "dummy",
    "max_cache_tokens": 16384,
    "max_num_seqs": 40,
    "num_threads": 1,
}
GREEDY = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
MAYBE: dict[str, Any] = {
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "min_tokens": 3,
    "prompt_logprobs": 2,
    "logit_bias": {5: 1.0},
    "allowed_token_ids": [4, 5, 6],
    "n": 2,
}
REHEARSED: list[Job] = []
REQUESTED: list[Job] = []


def pretend_card(capability: int = 90) -> None:
    """A driver for kernels that are compiled and never launched."""
    target = GPUTarget("cuda", capability, 32)
    names = {"get_current_device": 0, "get_current_target": target}
    card = SimpleNamespace(**{name: lambda value=value: value for name, value in names.items()})
    driver.set_active(card)


class NotedOps(TritonOps):
    """Tensors of the CPU, which no kernel ever sees, and a claim to record."""

    num_processors = 132

    def __init__(self, device: str = "cpu", dtype: str = "bfloat16") -> None:
        super().__init__("cpu", dtype)
        self.is_async = self.can_record = True

    @contextmanager
    def starting(self, key: str, rehearse: Callable[[], None], progress: Progress) -> Iterator[None]:
        requests, compiling._thread.rehearsal = compiling._thread.rehearsal, Rehearsal(REHEARSED.append)
        rehearse()
        compiling._thread.rehearsal = requests
        yield


def random_params(random: np.random.Generator) -> SamplingParams:
    options = {name: value for name, value in MAYBE.items() if random.random() < 0.15}
    if random.random() < 0.15:
        options["logprobs"] = int(random.integers(0, 20))
    if random.random() < 0.5:
        options = {**options, "temperature": 0.0, "n": 1}
    return SamplingParams(max_tokens=int(random.integers(3, 12)), ignore_eos=True, **options)


def generate(kind: str, directory: str, num_rounds: int) -> None:
    """Rounds of requests that begin alike or differently, of many lengths, few or many at once."""
    save, changes, options = MODELS[kind]
    llm_loading.choose_ops = NotedOps  # type: ignore[attr-defined]
    random = np.random.default_rng(1)
    with LLMEngine(str(save(Path(directory), **changes)), **{**OPTIONS, **options}) as engine:
        most, names = engine.facts.max_len - 20, list[Any]([None])
        if engine.adapters is not None:
            names += load_adapters(engine, Path(directory))
        for number in range(num_rounds):
            num = int(random.integers(1, (4, 12, 90)[number % 3]))
            shared = [7] * int(random.choice([0, 0, 20, min(600, most - 60)]))
            lengths = random.integers(1, max(2, (60, most - len(shared))[number % 2]), num)
            prompts = [shared + random.integers(0, 90, length).tolist() for length in lengths]
            is_plain = random.random() < 0.4
            params = [GREEDY if is_plain else random_params(random) for _ in prompts]
            engine.generate(prompts, params, lora_request=[names[random.integers(len(names))] for _ in prompts])


def load_adapters(engine: LLMEngine, directory: Path) -> list[Any]:
    assert engine.adapters is not None and engine.runner.ops.adapters is not None
    maps = engine.runner.ops.adapters.maps
    shapes = {name: (one.outputs.size, one.inputs.size) for name, [one] in maps.items() if not one.table.is_lookup}
    for name in ("a", "b", "c"):
        engine.adapters.load(name, random_adapter(directory / name, shapes, ord(name), target_modules=list(shapes)))
    return ["a", "b", "c"]


class Zeros(Weights[torch.Tensor]):
    """Weights of any name, with the biases that a model may have."""

    def has(self, name: str) -> bool:
        return True

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        made: Any = self.source
        kept: torch.Tensor = made.setdefault(f"{self.prefix}{name}", torch.zeros(shape))
        return kept


def embed(num_rounds: int) -> None:
    """Batches of few and many texts."""
    random = np.random.default_rng(1)
    inference_core.choose_ops = NotedOps  # type: ignore[attr-defined]
    for kind, model in ENCODERS.items():
        known, weights = Config({**model, "model_type": kind}), Zeros({}, TorchOps())
        architecture = encoder_class(known)
        architecture(weights.scope(architecture.prefix), known)
        core = InferenceCore(dict(weights.source), known.values, "cpu", dtype="bfloat16")
        packed: Future[None] = Future()
        packed.set_result(None)
        core.warm_up(packed, no_progress)
        for number in range(num_rounds):
            lengths = tuple(random.integers(1, 40, int(random.integers(1, (3, 60)[number % 2]))).tolist())
            ids = np.zeros(sum(lengths), dtype=np.int64)
            types = ids if number % 3 == 0 else None
            core.start(TokenBatch(ids, Segments(lengths), types), normalize=number % 4 == 0)()


def no_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return x.new_zeros(len(x), len(weight))


def main(kind: str, directory: str, num_rounds: int) -> None:
    pretend_card()
    torch.nn.functional.linear = no_product  # type: ignore[assignment]  # CPUs take long for 16 bits
    with rehearsing(Rehearsal(REQUESTED.append)):
        embed(num_rounds) if kind == "encoders" else generate(kind, directory, num_rounds)
    known = set(map(repr, REHEARSED))
    print(len(REHEARSED), "rehearsed,", len(REQUESTED), "requested")
    for job in REQUESTED:
        if repr(job) not in known:
            print(
                "late:", job.name, min((differences(job, one) for one in REHEARSED if one.name == job.name), default=())
            )


def differences(job: Job, other: Job) -> list[str]:
    parts = ("signature", "constants", "attributes", "options")
    pairs: list[tuple[Any, Any]] = [(getattr(job, part), getattr(other, part)) for part in parts]
    return [
        f"{name}: {mine.get(name)}, not {theirs.get(name)}"
        for mine, theirs in pairs
        for name in {**mine, **theirs}
        if mine.get(name) != theirs.get(name)
    ]


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
