"""Options of vLLM's LLM and engine arguments, as options of archerfish.

What changes nothing here is accepted with a remark. What cannot be done is refused with a reason and what to use
instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from archerfish.config import HubConfig
from archerfish.errors import InvalidOptionError, refuse_unknown
from archerfish.remarks import remark

# Options that change nothing here, and why.
IGNORED = {
    "trust_remote_code": "no code of a checkpoint is run",
    "enforce_eager": "steps are recorded where the backend can, with the same results",
    "swap_space": "the context of a preempted request stays in the prefix cache or is computed again",
    "disable_log_stats": "statistics are not logged; engine_stats() has them",
    "disable_custom_all_reduce": "ranks exchange by torch.distributed",
    "max_seq_len_to_capture": "steps of every length are recorded",
    "cuda_graph_sizes": "the sizes of recorded steps are chosen by the engine",
    "compilation_config": "kernels are compiled ahead",
    "distributed_executor_backend": "ranks are processes of this machine",
    "max_parallel_loading_workers": "weights are mapped, not read",
    "tokenizer_pool_size": "tokenizers run in threads",
    "num_scheduler_steps": "the next step is always planned while one computes",
    "async_scheduling": "the next step is always planned while one computes",
    "disable_async_output_proc": "text is made while the next step computes",
    "use_v2_block_manager": "there is one block manager",
    "max_logprobs": "a request may ask for up to 64",
    "guided_decoding_backend": "grammars are compiled by llguidance",
    "structured_outputs_config": "grammars are compiled by llguidance",
    "disable_cascade_attn": "the attention kernel is chosen by the engine",
    "limit_mm_per_prompt": "prompts are text",
    "hf_token": "huggingface_hub reads HF_TOKEN",
    "tokenizer_revision": "`revision` holds for the tokenizer too",
    "code_revision": "no code of a checkpoint is run",
}
# Options with the values that change nothing here, and what to do in place of others.
ONLY: dict[str, tuple[tuple[Any, ...], str]] = {
    "enable_chunked_prefill": (
        (True,),
        "Long prompts are always computed in chunks; max_num_batched_tokens is their size.",
    ),
    "tokenizer_mode": (("auto", "fast", "hf"), "The Rust tokenizer of tokenizer.json is the only one."),
    "kv_cache_dtype": (("auto", "int8", "fp8", "fp8_e4m3"), "It takes one of: auto, int8 (on a CPU), fp8 (on a GPU)."),
    "cpu_offload_gb": ((0,), "Weights lie on one device: choose a smaller model, or weights='int8'."),
    "data_parallel_size": ((1,), "Start one engine for each device."),
    "logits_processors": (([], ()), "Give functions to SamplingParams(logits_processors=...)."),
    "hf_overrides": (({},), "Change the model's config.json, or max_model_len."),
    "rope_scaling": (({},), "Change the model's config.json."),
    "enable_sleep_mode": ((True, False), ""),
}
ENCODER_TASKS = ("embed", "embedding", "score", "classify", "encode", "pooling")
TASKS = ("auto", "generate", *ENCODER_TASKS)
LOAD_FORMATS = ("safetensors", "pt", "gguf", "hf")
OWN_CHOICE = {"prompt_lookup_max", "prompt_lookup_min"}  # of speculative_config


class EngineArgs(SimpleNamespace):
    """The arguments of `from_engine_args`: options of EngineConfig, and vLLM's names of them."""


class AsyncEngineArgs(EngineArgs):
    """The arguments of `AsyncLLMEngine.from_engine_args`."""


def as_options(given: Any) -> dict[str, Any]:
    """Options of an EngineArgs, of a mapping or of any object with attributes."""
    return dict(given) if isinstance(given, Mapping) else dict(vars(given))


def read_task(options: dict[str, Any]) -> str:
    """Take `task`, or its newer names `runner` and `convert`, out of options."""
    given = [options.pop(name, None) or "auto" for name in ("task", "runner", "convert")]
    for task in given:
        if task not in (*TASKS, "none"):
            raise InvalidOptionError(
                f"The option task cannot be {task!r}.", hint=f"It takes one of: {', '.join(TASKS)}."
            )
    return next((task for task in given if task not in ("auto", "none")), "auto")


def read_options(given: Mapping[str, Any], hub: HubConfig | None) -> tuple[dict[str, Any], HubConfig]:
    """Options as EngineConfig takes them, and where models come from. Values that are None are left out."""
    options = {name: value for name, value in given.items() if value is not None}
    for name in [name for name in options if name in IGNORED]:
        options.pop(name)
        remark(name, f"The option {name} has no effect: {IGNORED[name]}.")
    for name in [name for name in options if name in ONLY]:
        values, advice = ONLY[name]
        value = options.pop(name)
        if not any(value == one and type(value) is type(one) for one in values):
            raise InvalidOptionError(f"The option {name} cannot be {value!r}.", hint=advice)
    hub = hub or HubConfig()
    for name, target in (("revision", "revision"), ("download_dir", "cache_dir")):
        if name in options:
            hub = hub.replace(**{target: str(options.pop(name))})
    if given.get("kv_cache_dtype") is not None:
        options["kv_dtype"] = str(given["kv_cache_dtype"]).removesuffix("_e4m3")
    if "speculative_config" in options:
        options |= read_speculation(options.pop("speculative_config"))
    if "dtype" in options:
        options["dtype"] = str(options["dtype"]).removeprefix("torch.")
    if options.get("load_format") in LOAD_FORMATS:
        options["load_format"] = "auto"  # the files say what they are
    if options.pop("skip_tokenizer_init", False):
        options["tokenizer"] = "none"
    return options, hub


def read_speculation(given: Any) -> dict[str, Any]:
    """vLLM's speculative_config as options of EngineConfig."""
    stated = dict(given) if isinstance(given, Mapping) else {}
    method = stated.get("method", "draft_model" if stated.get("model") else None)
    if method not in ("ngram", "draft_model") or (method == "draft_model" and not stated.get("model")):
        hint = "{'method': 'ngram'} proposes what followed earlier in the sequence; {'model': ...} what a small model computes."
        raise InvalidOptionError(f"The option speculative_config cannot be {given!r}.", hint=hint)
    refuse_unknown(stated, ("method", "model", "num_speculative_tokens", *OWN_CHOICE), "option of speculative_config")
    for name in stated.keys() & OWN_CHOICE:
        remark(f"speculative_config.{name}", f"The option {name} has no effect: speculation chooses it.")
    found = (
        {"speculation": "ngram"} if method == "ngram" else {"speculation": "draft", "draft_model": str(stated["model"])}
    )
    return found | (
        {"num_draft_tokens": stated["num_speculative_tokens"]} if "num_speculative_tokens" in stated else {}
    )
