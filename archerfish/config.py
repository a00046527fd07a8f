"""Options, each declared once.

A field of a frozen dataclass below is a keyword of the Python API, a flag of the command line (`--max-batch-size`), an
environment variable (`ARCHERFISH_EMBED_MAX_BATCH_SIZE`), a TOML key (`max_batch_size` under `[embed]`) and a row of
`docs/options.md`. A keyword or flag wins over the environment, the environment over the TOML file, the file over the
default.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

from archerfish.errors import InvalidOptionError, refuse_unknown

ENV_PREFIX = "ARCHERFISH_"
CONFIG_ENV = "ARCHERFISH_CONFIG"
DTYPES = ("auto", "float32", "bfloat16", "float16")
DTYPE_NAMES = {"half": "float16", "float": "float32", "fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
WEIGHTS = (
    "Format of matrices in memory; a registered name: int8 (a byte a number, a scale a row), int4 (a scale and a minimum for "
    "each 32 inputs; heads and projections to queries, keys and values as int8); auto: as `dtype`. Blocks of a GGUF file stay "
    "as they are on a CPU."
)
NUM_THREADS = "CPU cores to use; 0: all that others leave to this process."
PIN_THREADS = "Bind each CPU thread that helps a pass to a core of its own (Linux)."
DEVICE = "Where to compute; auto: on a CUDA card if there is one, else on the CPU."
COMPRESSIONS = ("lz4", "zstd", "snappy", "gzip", "none")
LOADS = ("start", "idle", "demand")
SHAPE_HINT = "Leave it out: the model's files state it. Write max_cache_tokens for the size of the KV cache."
TRUE_WORDS = ("1", "true", "yes", "on")
FALSE_WORDS = ("0", "false", "no", "off")


def option(
    default: Any,
    description: str,
    *,
    choices: tuple[str, ...] | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
) -> Any:
    """Declare one option: its default, its description and its possible values."""
    metadata = {"description": description, "choices": choices, "minimum": minimum, "maximum": maximum}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Base of all sections of options. Every value is checked when an object is made."""

    section: ClassVar[str] = ""
    hints: ClassVar[Mapping[str, str]] = {}  # for names that are no options here

    def __post_init__(self) -> None:
        for spec in dataclasses.fields(self):
            value = check_value(self.section, spec, getattr(self, spec.name))
            object.__setattr__(self, spec.name, value)

    def __new__(cls, **values: Any) -> Self:
        """Raise an error for an unknown keyword, with the nearest known one."""
        refuse_unknown(values, cls.names(), f"option of [{cls.section}]", cls.hints)
        return super().__new__(cls)

    @classmethod
    def names(cls) -> list[str]:
        return [spec.name for spec in dataclasses.fields(cls)]

    def replace(self, **changes: Any) -> Self:
        """A new object with some values changed."""
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True, kw_only=True)
class HubConfig(Options):
    """Where models come from and where they are kept."""

    section: ClassVar[str] = "hub"

    cache_dir: str = option(
        "",
        "Directory for downloaded and converted models; empty: `$XDG_CACHE_HOME/archerfish` or `~/.cache/archerfish`.",
    )
    offline: bool = option(False, "Never use the network; `HF_HUB_OFFLINE=1` has the same effect.")
    revision: str = option("main", "Branch, tag or commit of a Hugging Face model.")

    def cache_path(self) -> Path:
        if self.cache_dir:
            return Path(self.cache_dir).expanduser()
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        return Path(base).expanduser() / "archerfish"


@dataclass(frozen=True, kw_only=True)
class ConversionConfig(Options):
    """How ModelConverter turns a model into a directory of the Arrow store."""

    section: ClassVar[str] = "convert"

    use_float16: bool = option(True, "Store weights as float16; false: as float32. `dtype` overrides this.")
    dtype: str = option("auto", "Type of stored weights; auto: as `use_float16` says.", choices=DTYPES)
    weights: str = option(
        "auto",
        "Quantise the matrices of linear maps: int8 and fp8 with a scale a row, int4 with a scale and a minimum for "
        "each `group_size` inputs (heads as int8: their errors go straight into logits); auto: leave them in `dtype`.",
        choices=("auto", "int8", "int4", "fp8"),
    )
    group_size: int = option(
        128,
        "Inputs that share a scale in int4, a multiple of 32; less where a matrix does not divide into such groups.",
        minimum=32,
        maximum=4096,
    )
    method: str = option(
        "rtn",
        "How matrices are quantised: rtn rounds each number; gptq (needs torch) rounds so that products with the inputs "
        "of the calibration text change least; awq (int4, needs torch) rounds after it has scaled inputs that are large there.",
        choices=("rtn", "gptq", "awq"),
    )
    calibration: str = option(
        "",
        "File with text to calibrate and measure with: plain text, or .jsonl with a `text` in each line; empty: the model "
        "writes its own.",
    )
    layout: str = option(
        "store",
        "What is written: store is a directory of the Arrow store; gptq (int4) and compressed-tensors are checkpoints "
        "that vLLM and transformers load, whose int4 groups have no minimum and whose heads stay plain.",
        choices=("store", "gptq", "compressed-tensors"),
    )
    report: bool = option(
        True,
        "Measure what quantising cost, on a fifth of the text that calibration does not see, into quality.json; needs "
        "torch, and for encoders a calibration file.",
    )
    merge: str = option(
        "", "Directory of a LoRA adapter that PEFT saved, which becomes part of the matrices; empty: none."
    )
    compression: str = option("lz4", "Compression of weights.parquet.", choices=COMPRESSIONS)
    keep_quantized: bool = option(
        False,
        "Keep matrices of GGUF types Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, MXFP4 (gpt-oss's safetensors, too), Q4_K, Q5_K and "
        "Q6_K quantised instead of widening them to `dtype`.",
    )
    validate_output: bool = option(True, "Compare every written tensor with its source before the directory appears.")
    write_parquet: bool = option(True, "Write weights.parquet (interchange) beside weights.arrow (mapping).")
    overwrite: bool = option(False, "Replace an output directory that already holds a model.")

    def stored_dtype(self) -> str:
        if self.dtype != "auto":
            return self.dtype
        return "float16" if self.use_float16 else "float32"


@dataclass(frozen=True, kw_only=True)
class EmbedConfig(Options):
    """ArrowEngine: embeddings and reranking."""

    section: ClassVar[str] = "embed"

    model: str = option("all-minilm-l6-v2", "Built-in name, directory, file, or Hugging Face id of the model.")
    device: str = option("auto", DEVICE, choices=("cpu", "cuda", "mps", "auto"))
    dtype: str = option("auto", "Type to compute in; auto: the fastest type of this machine.", choices=DTYPES)
    weights: str = option("auto", f"For embedding models. {WEIGHTS}")
    storage_dtype: str = option(
        "auto",
        "Type of stored weights when a model is converted; auto: float32 if `dtype` is float32, else 2 bytes.",
        choices=DTYPES,
    )
    max_batch_size: int = option(
        32,
        "Size of a batch, in units of 32 tokens: texts are packed by tokens, never padded.",
        minimum=1,
        maximum=65536,
    )
    max_length: int = option(0, "Cut texts after this many tokens; 0: the limit of the model.", minimum=0)
    max_text_bytes: int = option(1_000_000, "Refuse a text of more than this many bytes.", minimum=1)
    num_threads: int = option(0, NUM_THREADS, minimum=0, maximum=1024)
    pin_threads: bool = option(False, PIN_THREADS)
    use_fast_tokenizer: bool = option(True, "Use the Rust tokenizer. False is refused: there is no other tokenizer.")


@dataclass(frozen=True, kw_only=True)
class EngineConfig(Options):
    """LLMEngine: text generation."""

    section: ClassVar[str] = "engine"
    hints: ClassVar[Mapping[str, str]] = dict.fromkeys(("num_layers", "kv_dim"), SHAPE_HINT)

    model: str = option("smollm2-135m-instruct", "Built-in name, directory, file, or Hugging Face id of the model.")
    device: str = option("auto", DEVICE, choices=("cpu", "cuda", "mps", "auto"))
    dtype: str = option(
        "auto", "Type of computation and of KV; auto: the fastest type of this machine.", choices=DTYPES
    )
    weights: str = option("auto", WEIGHTS)
    kv_dtype: str = option(
        "auto",
        "Type of keys and values; auto: as `dtype`. Of a byte: int8 with a scale for each token and head (CPU), fp8 "
        "with a scale for each head (GPU).",
        choices=("auto", "int8", "fp8"),
    )
    generation_config: str = option(
        "auto",
        "Sampling parameters of requests that state none: auto: those of the model's generation_config.json; none: the "
        "fixed ones of SamplingParams.",
        choices=("auto", "none"),
    )
    tokenizer: str = option(
        "",
        "Another tokenizer than the model's: a directory, a built-in name or a Hugging Face id; none: no tokenizer, "
        "prompts are token ids.",
    )
    quantization: str = option(
        "", "What the checkpoint's files say of its quantisation, to be checked; empty: as they say."
    )
    load_format: str = option("auto", "The model's weights, or random ones for measuring.", choices=("auto", "dummy"))
    max_model_len: int = option(
        0, "Longest sequence, prompt and output; 0: the model's limit, without the long factors of longrope.", minimum=0
    )
    max_num_seqs: int = option(256, "Most sequences that run at once.", minimum=1, maximum=65536)
    max_batch_size: int = option(0, "Another name of max_num_seqs; 0: not given.", minimum=0, maximum=65536)
    max_concurrent_requests: int = option(
        0, "Most requests that run or wait; above this they are refused; 0: only `max_queue_size` counts.", minimum=0
    )
    max_num_batched_tokens: int = option(
        0,
        "Most tokens in one step; long prompts are computed in chunks of this; 0: 512 on a CPU, 16384 on a GPU.",
        minimum=0,
    )
    max_queue_size: int = option(4096, "Most waiting requests; above this requests are refused.", minimum=1)
    grammar_seconds: int = option(
        3, "CPU time that compiling one grammar or JSON schema may take; above this it is refused.", minimum=1
    )
    block_size: int = option(
        0,
        "Tokens in a block of KV memory, the unit of allocation; of a recurrent model, tokens from one kept state to the "
        "next; 0: 16, of a recurrent model 64, on a GPU 256, and one state for all without a prefix cache.",
        minimum=0,
        maximum=1 << 20,
    )
    max_cache_tokens: int = option(
        0, "Tokens that the KV pool holds; 0: as many as the memory budget allows.", minimum=0
    )
    memory_budget_gib: float = option(
        0.0,
        "Memory for KV blocks on a CPU, in GiB; 0: a quarter of what is free beside the weights, at most 4.",
        minimum=0,
    )
    tensor_parallel_size: int = option(1, "Processes that share every layer, with a card each.", minimum=1, maximum=64)
    pipeline_parallel_size: int = option(
        1,
        "Stages that have some of the layers each; every stage has `tensor_parallel_size` processes.",
        minimum=1,
        maximum=64,
    )
    gpu_memory_utilization: float = option(
        0.9, "Share of a GPU's memory for weights and KV.", minimum=0.05, maximum=1.0
    )
    enable_prefix_caching: bool = option(
        True, "Keep the KV of finished requests and reuse it for prompts that begin alike."
    )
    eviction_policy: str = option(
        "lru", "Which cached blocks are evicted first: lru, lfu, fifo or another registered name."
    )
    logits_cache_mib: int = option(
        64,
        "Memory for logits of whole prompts: an exact repeat needs no forward pass; of a recurrent model only if the "
        "prompt's length is a multiple of `block_size`.",
        minimum=0,
    )
    logits_cache_ttl_s: float = option(600.0, "Age at which cached logits expire.", minimum=0)
    scheduling_policy: str = option(
        "fcfs",
        "Order of requests: fcfs, priority, longest-prefix-first, deadline, fair-share or another registered name.",
    )
    pipeline_depth: int = option(1, "Steps planned before the step before them is done: 0 or 1.", minimum=0, maximum=1)
    schedule_interval_ms: float = option(
        1.0, "Longest wait of an idle engine loop; a request wakes it at once.", minimum=0.01, maximum=10_000
    )
    speculation: str = option(
        "off",
        "Propose tokens and verify them together, with the same tokens as result: off; ngram: what followed when the "
        "last tokens stood in the sequence before (summaries, edits of code); draft: what `draft_model` computes.",
        choices=("off", "ngram", "draft"),
    )
    draft_model: str = option(
        "",
        "A small model with the same vocabulary, for speculation=draft: a path, a built-in name or a Hugging Face id. It "
        "proposes tokens for up to 8 sequences, and keeps up to 16384 tokens of them.",
    )
    num_draft_tokens: int = option(
        15, "Most tokens that are proposed at once; measured speed decides.", minimum=1, maximum=31
    )
    enable_lora: bool = option(False, "Serve LoRA adapters beside the model; `lora_modules` and `lora_dir` imply it.")
    max_loras: int = option(8, "Adapters on the device, for requests that run at once.", minimum=1, maximum=512)
    max_lora_rank: int = option(16, "Highest rank of an adapter; all slots have room for it.", minimum=1, maximum=256)
    lora_experts: bool = option(False, "Take adapters of experts too: every slot has room for each expert.")
    max_cpu_loras: int = option(0, "Adapters in the machine's memory; 0: four times `max_loras`.", minimum=0)
    lora_modules: str = option("", "Adapters to load at the start: name=path, separated by commas.")
    lora_dir: str = option(
        "",
        "Directory of adapters: a request that names one of its directories has it loaded, and `/v1/load_lora_adapter` "
        "takes paths within it; empty: none.",
    )
    deterministic: bool = option(
        False, "Make the logits of a request independent of other requests, bit for bit; slower."
    )
    num_threads: int = option(0, NUM_THREADS, minimum=0, maximum=1024)
    pin_threads: bool = option(False, PIN_THREADS)
    seed: int = option(0, "Source of the seeds of requests without a seed; 0: a new one at each start.", minimum=0)
    max_prompt_bytes: int = option(
        4_000_000, "Refuse a prompt of more than this many bytes before tokenising it.", minimum=1
    )

    @property
    def lora_paths(self) -> dict[str, str]:
        """`lora_modules` by name."""
        found: dict[str, str] = {}
        text, hint = self.lora_modules.strip(), "Write name=path, and separate several by commas."
        parts: list[Any] = [part.strip().partition("=")[::2] for part in text.split(",") if part.strip()]
        if text.startswith(("{", "[")):  # as vLLM has it
            with suppress(ValueError, TypeError, KeyError):
                parts = [(each["name"], each["path"]) for each in json.loads(f"[{text.strip('[]')}]")]
        for name, path in parts:
            if not name or not path or name in found:
                problem = "names an adapter twice" if name in found else "is not name=path"
                raise InvalidOptionError(f"[engine] lora_modules: {(name or path)!r} {problem}.", hint=hint)
            found[name] = path
        return found

    @property
    def num_ranks(self) -> int:
        """Processes that compute the model together."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_batch_size:
            object.__setattr__(self, "max_num_seqs", self.max_batch_size)
            object.__setattr__(self, "max_batch_size", 0)
        if self.lora_modules or self.lora_dir:
            object.__setattr__(self, "enable_lora", True)
        if self.draft_model and self.speculation == "off":
            object.__setattr__(self, "speculation", "draft")
        if (self.speculation == "draft") != bool(self.draft_model):
            raise InvalidOptionError(
                f"[engine] speculation is {self.speculation!r}, and draft_model {self.draft_model!r}.",
                hint="speculation='draft' takes a draft_model; others take none.",
            )


@dataclass(frozen=True, kw_only=True)
class ServeConfig(Options):
    """The HTTP service."""

    section: ClassVar[str] = "serve"

    host: str = option("127.0.0.1", "Address to listen on.")
    port: int = option(8000, "Port to listen on; 0: any free one.", minimum=0, maximum=65535)
    kinds: str = option(
        "all",
        "Which models are served: text generation, embeddings, or both.",
        choices=("all", "generation", "embedding"),
    )
    served_model_name: str = option(
        "",
        "Names of the first model for requests, separated by commas; answers show the first of them; empty: its own name.",
    )
    accept_any_model: bool = option(
        False, "Answer a request for an unknown model with the first model that serves its route; a remark says so."
    )
    rerank_model: str = option("", "Cross-encoder for /v1/rerank; empty: rank by the cosine of the embedding model.")
    num_front_ends: int = option(
        1, "Processes that speak HTTP; one is enough for some thousand tokens a second.", minimum=1, maximum=64
    )
    replicas: int = option(
        1, "Engine processes that share the requests; each has a card, or a share of the cores.", minimum=1, maximum=64
    )
    api_keys_file: str = option(
        "",
        "File with hashed API keys and limits of tenants, or env:NAME for a variable with its contents; empty: no keys.",
    )
    zmq_address: str = option(
        "",
        "Where other programs reach the engine over ZMQ, as `tcp://127.0.0.1:5555` or `ipc:///run/fish`; empty: nowhere.",
    )
    zmq_key_file: str = option(
        "",
        "File with the CURVE keys of the ZMQ server (`zmq.auth.create_certificates` makes one); other machines need them.",
    )
    zmq_client_keys: str = option(
        "", "Public CURVE keys of the ZMQ clients that may connect, separated by commas; empty: all."
    )
    latency_budget_ms: float = option(
        50.0, "About how long a batch of texts may delay a step of generation.", minimum=1, maximum=10_000
    )
    max_gap_ms: float = option(
        0.0,
        "About how long a step with prompts may take, so that other answers go on meanwhile; 0: 80 on a CPU, 30 on a GPU.",
        minimum=0,
        maximum=10_000,
    )
    max_wait_s: float = option(
        60.0, "Refuse a request that would wait longer than this before it runs; 0: no limit.", minimum=0
    )
    allow_lora_updates: bool = option(
        False, "Take `/v1/load_lora_adapter` and `/v1/unload_lora_adapter`; where there are keys, from operators alone."
    )
    max_prompt_tokens: int = option(0, "Refuse longer prompts; 0: as the model takes.", minimum=0)
    max_output_tokens: int = option(0, "Lower max_tokens to this, of all n together; 0: as the model takes.", minimum=0)
    result_cache_mib: int = option(
        0, "Memory of all front ends for answers to equal deterministic requests; 0: off.", minimum=0, maximum=1 << 20
    )
    result_cache_ttl_s: float = option(600.0, "Age at which cached answers expire.", minimum=0.001)
    reasoning: str = option(
        "auto",
        "What becomes of `<think>` in answers; auto: it is their reasoning_content; none: it stays in the text.",
        choices=("auto", "none"),
    )
    loads: str = option(
        "start", "When models are loaded: at the start, in idle time, or at the first request.", choices=LOADS
    )
    memory_gib: float = option(
        0.0, "Memory of all loaded models; above it the least recently used ones are unloaded; 0: no limit.", minimum=0
    )
    hang_s: float = option(
        120.0, "The engine process is started again if a step takes longer; new and slow models get more.", minimum=1
    )
    drain_s: float = option(
        0.0,
        "Seconds after SIGTERM in which new requests are still taken, while `/ready` answers 503 and balancers move on.",
        minimum=0,
    )
    grace_s: float = option(30.0, "Seconds that running requests then have to finish.", minimum=0)
    keep_alive_s: float = option(
        15.0,
        "Seconds without data after which a stream sends a comment, so that proxies keep it open; 0: never.",
        minimum=0,
    )
    max_queue_texts: int = option(8192, "Most waiting texts; above this the answer is 503.", minimum=1)
    max_texts_per_request: int = option(2048, "Most texts in one request.", minimum=1)
    max_body_bytes: int = option(32_000_000, "Refuse a request body of more than this many bytes.", minimum=1024)
    allowed_hosts: str = option(
        "",
        "Host names that a server without API keys accepts beside localhost and loopback addresses, separated by commas; *: "
        "all; empty: none if `host` is a loopback address, else all.",
    )
    cors_origins: str = option(
        "",
        "Origins of web pages that may use the service (CORS), as `https://chat.example`, separated by commas; *: all; "
        "empty: none.",
    )
    access_log: bool = option(True, "Log a line for every request, refused ones too.")
    log_format: str = option("pretty", "Log lines for people, or a JSON object a line.", choices=("pretty", "json"))
    log_prompts: bool = option(False, "Log prompts and answers of text generation too, in the lines of requests.")
    log_level: str = option("info", "Least level of log messages.", choices=("debug", "info", "warning", "error"))
    otlp_endpoint: str = option(
        "",
        "Collector that gets traces, by OTLP over HTTP, as `http://127.0.0.1:4318`; empty: as OTEL_EXPORTER_OTLP_ENDPOINT.",
    )


@dataclass(frozen=True, kw_only=True)
class DeployConfig(Options):
    """The service on a Ray cluster."""

    section: ClassVar[str] = "deploy"

    name: str = option("archerfish", "Name of the service on the cluster.")
    address: str = option(
        "http://127.0.0.1:8265",
        "Ray's dashboard, which takes deployments; where none answers on this machine, Ray is started.",
    )
    min_replicas: int = option(1, "Fewest engine processes.", minimum=1)
    max_replicas: int = option(0, "Most engine processes; 0: as many as the fewest.", minimum=0)
    cpus: float = option(1.0, "CPU cores of a replica; it computes with so many threads.", minimum=0)
    gpus: float = option(0.0, "GPUs of a replica.", minimum=0)
    front_ends: int = option(0, "Nodes that accept HTTP, at [serve] host and port; 0: every node.", minimum=0)
    target_wait_s: float = option(1.0, "Expected wait for a first token at which replicas are added.", minimum=0.001)
    target_use: float = option(
        0.8,
        "Share of a replica's KV memory and of `max_num_seqs` in use at which replicas are added.",
        minimum=0.05,
        maximum=1.0,
    )
    upscale_delay_s: float = option(10.0, "Replicas are added after more are needed for so long.", minimum=0)
    downscale_delay_s: float = option(300.0, "Replicas are removed after fewer are needed for so long.", minimum=0)
    surge: bool = option(
        True, "An update starts a new replica before it ends an old one. Needs room for one more; without it, off."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if 0 < self.max_replicas < self.min_replicas:
            message = (
                f"[deploy] max_replicas is {self.max_replicas}, less than min_replicas, which is {self.min_replicas}."
            )
            raise InvalidOptionError(message, hint="Leave max_replicas out for a fixed number of replicas.")


SECTIONS: tuple[type[Options], ...] = (
    HubConfig,
    ConversionConfig,
    EmbedConfig,
    EngineConfig,
    ServeConfig,
    DeployConfig,
)
T = TypeVar("T", bound=Options)


def check_value(section: str, spec: dataclasses.Field[Any], value: Any) -> Any:
    """The value of one option in its declared type. Raises an InvalidOptionError that names the option."""
    where = f"[{section}] {spec.name}"
    kind = type(spec.default)
    if isinstance(value, str) and kind is not str:
        value = parse_text(where, kind, value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if kind is str and isinstance(value, os.PathLike):
        value = os.fspath(value)
    if type(value) is not kind:
        raise InvalidOptionError(f"{where} must be {kind.__name__}, not {type(value).__name__} ({value!r}).")
    choices = spec.metadata["choices"]
    if choices is DTYPES:
        value = DTYPE_NAMES.get(str(value), value)
    if choices and value not in choices:
        raise InvalidOptionError(f"{where} cannot be {value!r}.", hint=f"It takes one of: {', '.join(choices)}.")
    low, high = spec.metadata["minimum"], spec.metadata["maximum"]
    if (low is not None and value < low) or (high is not None and value > high):
        bounds = f"at least {low}" if high is None else f"from {low} to {high}"
        hint = spec.metadata["description"] if low == high else f"It must be {bounds}."
        raise InvalidOptionError(f"{where} cannot be {value}.", hint=hint)
    return value


def parse_text(where: str, kind: type, text: str) -> Any:
    if kind is bool:
        word = text.strip().lower()
        if word in TRUE_WORDS or word in FALSE_WORDS:
            return word in TRUE_WORDS
        raise InvalidOptionError(f"{where} must be true or false, not {text!r}.")
    try:
        return kind(text.replace("_", ""))
    except ValueError:
        raise InvalidOptionError(f"{where} must be a number ({kind.__name__}), not {text!r}.") from None


def env_name(cls: type[Options], name: str) -> str:
    return f"{ENV_PREFIX}{cls.section}_{name}".upper()


def split_names(text: str) -> tuple[str, ...]:
    """The names in an option that separates them by commas."""
    return tuple(filter(None, map(str.strip, text.split(","))))


def read_environment(environ: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Options of the environment by section. An unknown ARCHERFISH_ variable is an error."""
    known = {env_name(cls, name): (cls.section, name) for cls in SECTIONS for name in cls.names()}
    found: dict[str, dict[str, str]] = {}
    for variable, text in environ.items():
        if not variable.startswith(ENV_PREFIX) or variable == CONFIG_ENV:
            continue
        refuse_unknown([variable], [*known, CONFIG_ENV], "environment variable")
        section, name = known[variable]
        found.setdefault(section, {})[name] = text
    return found


def read_toml(path: str | Path) -> dict[str, dict[str, Any]]:
    """Options of a TOML file by section. Unknown sections and keys are errors."""
    data = parse_toml(path)
    data.pop("models", None)
    by_section = {cls.section: cls for cls in SECTIONS}
    refuse_unknown(data, [*by_section, "models"], f"section of {path}")
    for section, values in data.items():
        if not isinstance(values, dict):
            raise InvalidOptionError(f"In {path}, {section!r} must be a section: [{section}].")
        refuse_unknown(values, by_section[section].names(), f"key in [{section}] of {path}", by_section[section].hints)
    return data


def parse_toml(path: str | Path) -> dict[str, Any]:
    import tomllib

    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidOptionError(f"The configuration file {path} cannot be read: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidOptionError(f"The configuration file {path} is not valid TOML: {error}.") from error


def resolve(cls: type[T], given: Mapping[str, Any] | None = None, *, config_file: str | Path = "") -> T:
    """Options of one section, from `given`, the environment, the TOML file and the defaults, in this order."""
    path = config_file or os.environ.get(CONFIG_ENV, "")
    values: dict[str, Any] = dict(read_toml(path).get(cls.section, {})) if path else {}
    values.update(read_environment(os.environ).get(cls.section, {}))
    values.update(given or {})
    return cls(**values)
