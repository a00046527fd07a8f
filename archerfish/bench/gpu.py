"""`archerfish bench gpu | startup`: our engine on the GPU workloads, and vLLM beside it, each in a process of its own.

Weights are random, in the shapes of published models: speed does not depend on their values. The work is that of the
peers' own script, token for token.
"""

from __future__ import annotations

import importlib.util
import json
import random
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from archerfish.bench.report import Found, Measurement
from archerfish.bench.worker import EngineGroup, chosen, versions
from archerfish.errors import InvalidOptionError

SHAPES: dict[str, dict[str, Any]] = {  # config.json by name; what it leaves out has its family's usual value
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "tie_word_embeddings": True,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "torch_dtype": "bfloat16",
    },
    "llama-3.1-8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "bos_token_id": 128000,
        "eos_token_id": 128009,
        "torch_dtype": "bfloat16",
    },
}
SHAPES |= {
    "llama-3.2-1b": {
        **SHAPES["llama-3.1-8b"],
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "qwen3-4b": {
        **SHAPES["qwen3-0.6b"],
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
    },
    "qwen3-14b": {
        **SHAPES["qwen3-0.6b"],
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "tie_word_embeddings": False,
    },
}
PLAIN_SHAPES = tuple(SHAPES)
FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
QUANTISED: dict[str, dict[str, Any]] = {  # quantization_config by the end of a shape's name
    "w4a16": {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False},
    "fp8": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**FP8, "strategy": "channel", "dynamic": False},
                "input_activations": {**FP8, "strategy": "token", "dynamic": True},
            }
        },
    },
}
STORED = {"w4a16": "int4", "fp8": "fp8"}  # how our converter names them
SHAPES |= {
    f"{shape}-{kind}": {**SHAPES[shape], "quantization_config": settings}
    for shape in ("qwen3-0.6b", "llama-3.1-8b")
    for kind, settings in QUANTISED.items()
}
SHAPES["qwen3-30b-a3b"] = {
    **SHAPES["qwen3-0.6b"],
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "tie_word_embeddings": False,
}
KV_SHAPE = "llama-3.1-8b-kvfp8"  # keys and values in FP8
SHAPES[KV_SHAPE] = SHAPES["llama-3.1-8b"]
VLLM = "vllm"
COMMON = {
    "dtype": "bfloat16",
    "load_format": "dummy",
    "max_model_len": 8704,
    "max_num_seqs": 512,
    "gpu_memory_utilization": 0.85,
    "enable_prefix_caching": True,
}
OUR_OPTIONS = {"device": "cuda", **COMMON}
VLLM_OPTIONS = {**COMMON, "skip_tokenizer_init": True, "disable_log_stats": True}
VLLM_ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
# Where torch, Triton, the driver and vLLM keep compiled code; `bench startup` begins with empty directories.
CACHES = ("XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH")
PARTS = {
    "offline": "256 requests of 100-1024 tokens in and out, tokens/s",
    "bs1": "one request, tokens/s",
    "prefill": "64 prompts of 2048 tokens, tokens/s",
    "shared": "256 requests on a shared prefix of 3072 tokens, requests/s",
    "four": "4 sequences, tokens/s",
    "drawn": "128 sequences, temperature alone, tokens/s",
    "sampled": "128 sequences, penalties and cuts, tokens/s",
    "logprobs": "128 sequences, 5 logprobs, tokens/s",
    "long": "32 prompts of 8192 tokens, 256 out, tokens/s",
    "contexts": "256 prompts of 2048 tokens, 512 out, tokens/s",
}
# Prompts of a part, tokens of each, and what it asks for beyond a temperature.
SAMPLING: dict[str, tuple[int, int, dict[str, Any]]] = {
    "four": (4, 128, {}),
    "drawn": (128, 128, {}),
    "logprobs": (128, 128, {"logprobs": 5}),
    "sampled": (128, 128, {"top_k": 50, "top_p": 0.9, "repetition_penalty": 1.1, "presence_penalty": 0.2}),
    "long": (32, 8192, {}),
    "contexts": (256, 2048, {}),
}
OUTPUT = dict.fromkeys(SAMPLING, 256) | {"contexts": 512}  # tokens; of fewer, prompts would take most of the time
FIRST_TOKEN = "one request, first token, ms"
MAX_TOKEN = 10000
SAMPLED, GREEDY = 0.6, 0.0  # temperatures
Generate = Callable[..., float | None]  # prompts, outputs, temperature and other sampling parameters to seconds


def measure(options: Namespace) -> Found:
    """All parts on all shapes; the engines of a shape follow one another, because each takes most of the card's
    memory."""
    parts = chosen("--only", options.only, PARTS)
    shapes, peers = prepare(options)
    for shape in shapes:
        for name in [*versions(options.against), *peers]:
            with EngineGroup() as group, model_directory(shape) as directory:
                started = open_engine(group, name, directory, options, kv_dtype="fp8" if shape == KV_SHAPE else "auto")
                if started:
                    yield Measurement(f"{shape}: imports, s", started["import_s"], name)
                    yield Measurement(f"{shape}: start after imports, s", started["load_s"], name)
                    generate = partial(group.call, name, "generate")
                    generate(prompts=[[1, 2, 3, 4]], outputs=[8], temperature=SAMPLED)
                    for number in range(options.repeats):
                        for metric, value in run_parts(generate, parts, number):
                            yield Measurement(f"{shape}: {metric}", value, name)
                yield from group.notes


def open_engine(
    group: EngineGroup,
    name: str,
    directory: Path,
    options: Namespace,
    *,
    load_format: str = "dummy",
    kv_dtype: str = "auto",
    environment: Mapping[str, str] | None = None,
) -> Any:
    given = {"model": str(directory), "load_format": load_format}
    if name == VLLM:
        return open_vllm(group, options, {**given, "kv_cache_dtype": kv_dtype})
    if kv_dtype != "auto":  # which older versions do not know
        given["kv_dtype"] = kv_dtype
    path = versions(options.against)[name]
    return group.open(name, "Archerfish", {"options": {**OUR_OPTIONS, **given}}, path=path, environment=environment)


def open_vllm(group: EngineGroup, options: Namespace, given: Mapping[str, Any]) -> Any:
    path = options.vllm_path and str(Path(options.vllm_path).absolute())
    return group.open(VLLM, "Vllm", {"options": {**VLLM_OPTIONS, **given}}, path=path, environment=VLLM_ENVIRONMENT)


def run_parts(generate: Generate, parts: Iterable[str], number: int) -> Iterator[tuple[str, float]]:
    """One repeat. All prompts are drawn in the same order, so that leaving a part out does not change the others."""
    draw = random.Random(number)
    prompts = [[draw.randint(0, MAX_TOKEN) for _ in range(draw.randint(100, 1024))] for _ in range(256)]
    outputs = [draw.randint(100, 1024) for _ in range(256)]
    draw = random.Random(100 + number)

    def tokens(count: int) -> list[int]:
        return [draw.randint(0, MAX_TOKEN) for _ in range(count)]

    first = tokens(128)
    single = tokens(128)
    long = [tokens(2048) for _ in range(64)]
    prefix = tokens(3072)
    shared = [prefix + tokens(128) for _ in range(256)]
    if "offline" in parts and (seconds := generate(prompts=prompts, outputs=outputs, temperature=SAMPLED)):
        yield PARTS["offline"], sum(outputs) / seconds
    if "bs1" in parts and (first_s := generate(prompts=[first], outputs=[1], temperature=GREEDY)):
        yield FIRST_TOKEN, first_s * 1000
        if seconds := generate(prompts=[single], outputs=[513], temperature=GREEDY):
            yield PARTS["bs1"], 512 / (seconds - first_s)
    if "prefill" in parts and (seconds := generate(prompts=long, outputs=[1] * 64, temperature=GREEDY)):
        yield PARTS["prefill"], 64 * 2048 / seconds
    if "shared" in parts:
        generate(prompts=[[*prefix, 5]], outputs=[1], temperature=GREEDY)  # computes the prefix
        if seconds := generate(prompts=shared, outputs=[64] * 256, temperature=SAMPLED):
            yield PARTS["shared"], 256 / seconds
    for part in (part for part in SAMPLING if part in parts):
        (num, length, sampling), draw = SAMPLING[part], random.Random(f"{part} {number}")
        work = {"prompts": [tokens(length) for _ in range(num)], "outputs": [OUTPUT[part]] * num}
        if seconds := generate(**work, temperature=SAMPLED, **sampling):
            yield PARTS[part], num * OUTPUT[part] / seconds


def startup(options: Namespace) -> Found:
    """From starting a process to its first token, twice: with empty caches of compiled code, and with filled ones."""
    folder = Path(options.scratch) if options.scratch else options.hub.cache_path() / "bench"
    for shape in prepare(options)[0]:
        store = random_store(shape, folder)
        for name in versions(options.against):
            with tempfile.TemporaryDirectory(prefix="archerfish-caches-") as caches:
                environment = {variable: str(Path(caches) / variable) for variable in CACHES}
                for start in ("first", "second"):
                    with EngineGroup() as group:
                        began = time.perf_counter()
                        started = open_engine(group, name, store, options, load_format="auto", environment=environment)
                        first_s = group.call(name, "generate", prompts=[[1, 2, 3, 4]], outputs=[1])
                        whole_s = time.perf_counter() - began
                    parts = {", imports": started["import_s"], ", load": started["load_s"], ", first token": first_s}
                    yield Measurement(f"{shape}: {start} start, s", whole_s, name)
                    for part, seconds in parts.items():
                        yield Measurement(f"{shape}: {start} start{part}, s", seconds, name)


def random_store(shape: str, folder: Path) -> Path:
    """A converted directory with random weights of a shape, written once; quantised as the end of its name says."""
    import torch
    from safetensors.torch import save_file

    from archerfish import ConversionConfig, ModelConverter
    from archerfish.models.adapter import model_class
    from archerfish.models.config import Config

    target, kind = (
        folder / f"{shape}-bfloat16-random",
        next((kind for kind in QUANTISED if shape.endswith(f"-{kind}")), ""),
    )
    values = SHAPES[shape.removesuffix(f"-{kind}")]
    if not (target / "weights.arrow").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        config = Config(values)
        with tempfile.TemporaryDirectory(prefix="archerfish-", dir=folder) as source:
            tensors = {
                name: torch.randn(size, dtype=torch.bfloat16) * 0.02
                for name, size in model_class(config).noted(config).shapes.items()
            }
            save_file(tensors, Path(source) / "model.safetensors")
            (Path(source) / "config.json").write_text(json.dumps(values), encoding="utf-8")
            wanted = ConversionConfig(
                dtype="bfloat16",
                weights=STORED.get(kind, "auto"),
                write_parquet=False,
                validate_output=False,
                report=False,
                overwrite=True,
            )
            ModelConverter(wanted).convert(source, target)
    return target


def prepare(options: Namespace) -> tuple[list[str], list[str]]:
    """The shapes and the peers to measure. A machine without a GPU is refused, and a directory without vLLM."""
    from archerfish.kernels.select import choose_device

    shapes = chosen("--shapes", options.shapes, SHAPES) if options.shapes else list(PLAIN_SHAPES)
    peers = vllm_peers(options)
    choose_device("cuda")
    return shapes, peers


def vllm_peers(options: Namespace) -> list[str]:
    """vLLM, where it is installed or a directory with it is given, unless no peers are wanted."""
    if options.vllm_path and not (Path(options.vllm_path) / "vllm" / "__init__.py").is_file():
        hint = "Give the directory that would be on PYTHONPATH."
        raise InvalidOptionError(f"{options.vllm_path} has no vllm package.", hint=hint)
    has_vllm = options.vllm_path or importlib.util.find_spec("vllm") is not None
    return [VLLM] if has_vllm and not options.no_peers else []


@contextmanager
def model_directory(shape: str) -> Iterator[Path]:
    """A directory with the configuration of a shape and nothing else."""
    with tempfile.TemporaryDirectory(prefix="archerfish-bench-") as folder:
        directory = Path(folder) / shape
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(SHAPES[shape]), encoding="utf-8")
        yield directory
