"""From a model's name to an adapter with weights, a pool of blocks, and the facts that an engine needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from archerfish.cache.adaptive import LogitsCache
from archerfish.cache.block_manager import BlockManager
from archerfish.cache.radix import RadixCache
from archerfish.config import EngineConfig, HubConfig
from archerfish.engine.drafting import MAX_CHUNK, ModelDrafter
from archerfish.errors import ArcherfishError, CorruptFileError, InvalidOptionError, UnsupportedModelError
from archerfish.kernels.adapters import is_expert
from archerfish.kernels.formats import INT8, PLAIN, WeightFormat, choose_format
from archerfish.kernels.ranks import ALONE, Ranks
from archerfish.kernels.recurrent import StateShape
from archerfish.kernels.select import choose_backend, choose_device, choose_dtype, choose_ops, log_device
from archerfish.kernels.stored import GPU_BITS, GPU_GROUPS, GPU_SCALE_BYTES, random_stored
from archerfish.layers.weights import Weights
from archerfish.models.adapter import MemoryShape, ModelAdapter, model_class
from archerfish.models.config import Config
from archerfish.params import read_default_sampling
from archerfish.remarks import remark_blocks, remark_widened
from archerfish.runtime.kv_pool import MemoryPlan, allocate_pool, check_plan, plan_memory, work_bytes
from archerfish.runtime.runner import ModelRunner
from archerfish.sched.adapters import AdapterSlots
from archerfish.sched.drafts import MOST_DRAFTED, PromptLookup, Speculation
from archerfish.sched.masks import MaskFinder
from archerfish.sched.plan import check_step_tokens
from archerfish.sched.scheduler import Scheduler
from archerfish.store.converter import ensure_converted
from archerfish.store.format import Quantization, TensorInfo, block_bytes, buffer_bytes
from archerfish.store.loader import WeightLoader
from archerfish.store.metadata import is_converted, read_metadata
from archerfish.store.names import HUB_ID, ONLY_TOKENIZER, builtin_at, resolve_model
from archerfish.store.quantised_source import stated_quantization, states_int8_activations
from archerfish.store.source import reading
from archerfish.store.text_parts import text_config
from archerfish.text.text_tokenizer import find_text_tokenizer
from archerfish.text.tokenizer import Tokenizer, read_settings
from archerfish.types import DTYPE_BYTES, Progress, no_progress

CPU_STEP_TOKENS, GPU_STEP_TOKENS = 512, 16384
DETERMINISTIC_CHUNK = 256
MAX_DRAFTED, DRAFT_CACHE_TOKENS = 8, 16_384  # sequences of a draft model, and tokens of all of them


@dataclass(frozen=True)
class ModelFacts:
    """What is known of a model before its weights are touched."""

    directory: Path
    name: str
    config: Config
    generation_config: Mapping[str, Any]
    adapter: type[ModelAdapter[Any]]
    device: str
    dtype: str
    max_len: int
    step_tokens: int  # most in one step
    memory: MemoryPlan
    vocab_size: int
    weight_format: WeightFormat = PLAIN
    default_sampling: Mapping[str, Any] = field(default_factory=dict)  # for requests that state no parameters
    tokenizer_directory: Path | None = None  # None: prompts are token ids
    stored_bytes: int = 0  # of weights that stay in the formats of their file; 0: they take what the model computes in
    stored_types: frozenset[Quantization] = frozenset()  # of those
    draft: ModelFacts | None = None  # of the draft model
    ranks: Ranks = ALONE  # the place of this process among those that compute the model

    @property
    def weight_bytes(self) -> int:
        """What this rank's weights take in memory."""
        return (
            self.stored_bytes
            or self.adapter.noted(self.config, self.dtype, self.weight_format, self.ranks).total_bytes()
        )

    @property
    def num_bytes(self) -> int:
        """Of weights and of KV or states, those of a draft model and of ranks in the same memory included."""
        num = self.ranks.size * self.ranks.num_stages if self.device == "cpu" else 1
        return (self.weight_bytes + self.memory.num_bytes) * num + (0 if self.draft is None else self.draft.num_bytes)

    def find_tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, or the one that `tokenizer` names, which is parsed and checked at once."""
        root = self.tokenizer_directory
        if root is None:
            return None
        values, generation = self.config.values, self.generation_config
        find = partial(find_text_tokenizer, root, values, generation, self.vocab_size, self.max_len)
        if root == self.directory:
            return find()
        try:
            found = find()
            if found is None:
                raise CorruptFileError(f"{root.name} has no tokenizer.json.")
            _ = found.vocab_size
        except CorruptFileError as error:
            raise InvalidOptionError(f"[engine] tokenizer: {error.message}", hint=error.hint) from error
        return found

    @property
    def memory_shape(self) -> MemoryShape:
        return shape_on(self.ranks, self.adapter, self.config)

    @property
    def has_states(self) -> bool:
        """Whether sequences keep states in place of keys."""
        return isinstance(self.memory_shape, StateShape)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that model and memory hold."""
        return min(self.max_len, self.memory.num_tokens)

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """As the model's own files say."""
        found = self.generation_config.get("eos_token_id", self.config.values.get("eos_token_id"))
        return tuple(found) if isinstance(found, list) else () if found is None else (int(found),)


def read_facts(config: EngineConfig, hub: HubConfig, progress: Progress, *, rank: int = 0) -> ModelFacts:
    """Find a model and its draft model, convert them if need be, and compute what will fit. Nothing is allocated.

    rank: of this process, among those that compute the model together.
    """
    if not config.draft_model:
        return read_model_facts(config, hub, progress, rank=rank)
    try:
        draft = read_model_facts(draft_config(config), hub, progress)
    except ArcherfishError as error:
        error.message = f"[engine] draft_model: {error.message}"
        raise
    if draft.has_states:
        num_tokens = MAX_CHUNK * MAX_DRAFTED * (config.num_draft_tokens + 1)
        options = draft_config(config).replace(block_size=MAX_CHUNK, max_cache_tokens=num_tokens)
        draft = read_model_facts(options, hub, progress)
    memory = draft.memory
    facts = read_model_facts(config, hub, progress, memory.num_bytes + memory.weight_bytes + memory.work_bytes)
    check_draft(facts, draft)
    return replace(facts, draft=replace(draft, max_len=min(draft.max_len, facts.max_len)))


def check_draft(facts: ModelFacts, draft: ModelFacts) -> None:
    """Refuse a draft model with another vocabulary. Models of one may have more or fewer rows than it has tokens."""
    ours, theirs = facts.find_tokenizer(), draft.find_tokenizer()
    if ours is None or theirs is None:
        is_same = facts.vocab_size == draft.vocab_size
    else:
        size = ours.vocab_size
        is_same = size == theirs.vocab_size and all(ours.id_to_token(i) == theirs.id_to_token(i) for i in range(size))
    if not is_same:
        sizes = f"{draft.vocab_size:,} tokens, and {facts.name} {facts.vocab_size:,}"
        message = f"[engine] draft_model: {draft.name} has another vocabulary than {facts.name} ({sizes})."
        raise InvalidOptionError(
            message, hint="Give a smaller model of the same family: both must have the same tokens."
        )


@reading()
def read_model_facts(
    config: EngineConfig, hub: HubConfig, progress: Progress, reserved_bytes: int = 0, *, rank: int = 0
) -> ModelFacts:
    """The facts of one model. reserved_bytes: memory for other things than this model."""
    ranks = Ranks(*Ranks.place(rank, config.tensor_parallel_size, config.pipeline_parallel_size))
    device = choose_device(config.device).name
    dtype = choose_dtype(config.dtype, device)
    source, is_kept = resolve_model(config.model, hub, progress), choose_backend(device, dtype).keeps_quantised

    def make_facts(
        directory: Path,
        name: str,
        values: Mapping[str, Any],
        generation: Mapping[str, Any],
        tensors: Sequence[TensorInfo],
    ) -> ModelFacts:
        found = quantised_bytes(tensors, values, device, dtype) if is_kept else 0
        return facts_of(config, ranks, device, dtype, directory, name, values, generation, found, reserved_bytes)

    if config.load_format == "dummy" and not is_converted(source):
        values, generation = (read_settings(source / file) for file in ("config.json", "generation_config.json"))
        values = text_config(values)
        infos, kind = dummy_infos(values), ""
        facts = make_facts(source, source.name, values, generation, infos)
    else:

        def check(
            values: Mapping[str, Any], tensors: Sequence[TensorInfo]
        ) -> None:  # before a conversion, which takes minutes
            facts = make_facts(source, source.name, values, {}, tensors)
            facts.adapter.noted(facts.config).check({info.name: info.shape for info in tensors})
            check_memory(facts, config)

        directory = ensure_converted(
            source, dtype=dtype, keep_quantized=is_kept, hub=hub, progress=progress, check=check
        )
        metadata = read_metadata(directory)
        builtin = builtin_at(source, hub)
        generation = {**(metadata.generation_config or {}), **(builtin.sampling if builtin else {})}
        name = metadata.model_name
        infos = list(metadata.tensors)
        kind = str(metadata.source.get("kind"))
        facts = make_facts(directory, name, metadata.config, generation, infos)
        kept = metadata.quant_types if is_kept else set()
        remark_blocks(config.weights, name, kept)
        if is_kept:
            remark_widened(name, metadata.config, kept)
    check_quantization(config.quantization, facts.config.values, kind, facts.name)
    types = frozenset(info.quantization for info in infos if info.quantization)
    tokenizer = locate_tokenizer(config.tokenizer, facts.directory, hub, progress)
    return replace(facts, tokenizer_directory=tokenizer, stored_types=types)


def dummy_infos(values: Mapping[str, Any]) -> list[TensorInfo]:
    """The tensors of a model of which there is only a configuration, with matrices of layers quantised as that says."""
    config, settings = Config(values), values.get("quantization_config") or {}
    noted = model_class(config).noted(config)
    matrices = {name for names in noted.products for name in names if settings and ".layers." in name}
    return [
        TensorInfo(name, "float32", shape, stated_quantization(settings, name, shape) if name in matrices else None)
        for name, shape in noted.shapes.items()
    ]


def quantised_bytes(tensors: Sequence[TensorInfo], values: Mapping[str, Any], device: str, dtype: str) -> int:
    """What weights take that stay quantised; 0 if none do. On a GPU lookup tables become plain, and matrices that are
    stacked but quantised differently."""
    if device == "cpu" or not any(info.quantization for info in tensors):
        return block_bytes(tensors)
    config, total = Config(values), 0
    noted = model_class(config).noted(config)
    kinds = {info.name: info.quantization for info in tensors}
    mixed = {name for names in noted.products if len({kinds.get(name) for name in names}) > 1 for name in names}
    plain = mixed | noted.tables
    for info in tensors:
        kind = info.quantization
        if kind is None:
            total += sum(buffer_bytes(info))
        elif info.name in plain or kind.quant_type not in GPU_BITS:
            total += info.num_params * DTYPE_BYTES[dtype]
        else:
            num_groups = info.num_params // GPU_GROUPS.get(kind.quant_type, kind.group_size)
            total += info.num_params * GPU_BITS[kind.quant_type] // 8 + num_groups * GPU_SCALE_BYTES
    return total


def shape_on(ranks: Ranks, adapter: type[ModelAdapter[Any]], config: Config) -> MemoryShape:
    """What sequences keep on a rank."""
    return adapter.memory_shape(config) if ranks.is_alone else adapter.memory_shape(config, ranks)


def facts_of(
    config: EngineConfig,
    ranks: Ranks,
    device: str,
    dtype: str,
    directory: Path,
    name: str,
    values: Mapping[str, Any],
    generation: Mapping[str, Any],
    stored_bytes: int,
    reserved_bytes: int,
) -> ModelFacts:
    """stored_bytes: as in ModelFacts. reserved_bytes: for other things than this model."""
    model_config, weight_format = Config(values), choose_format(config.weights)
    adapter = model_class(model_config)
    if not ranks.is_alone and not adapter.can_divide:
        hint = "Leave out tensor_parallel_size and pipeline_parallel_size, or set can_divide (docs/parallel.md)."
        raise UnsupportedModelError(
            f"A model of type {model_config.model_type!r} cannot be divided over processes.", hint=hint
        )
    most = adapter.most_positions(model_config)
    if config.max_model_len > most:
        raise InvalidOptionError(f"[engine] max_model_len is {config.max_model_len}, but {name} has {most} positions.")
    max_len = config.max_model_len or adapter.max_positions(model_config)
    whole = adapter.noted(model_config, dtype, weight_format)
    shapes = whole.shapes.values()
    is_mapped = device == "cpu" and config.load_format != "dummy"
    own = whole if ranks.is_alone else adapter.noted(model_config, dtype, weight_format, ranks)
    weight_bytes = own.total_bytes(with_tables=not is_mapped)
    if stored_bytes:
        weight_bytes = stored_bytes = stored_bytes * weight_bytes // whole.total_bytes(with_tables=not is_mapped)
    step_tokens = choose_step_tokens(config, device)
    vocab_size = adapter.vocab_size(model_config)
    num_chosen = model_config.integer("num_experts_per_tok", 0) * (1 + config.lora_experts)
    work = work_bytes(shapes, vocab_size, step_tokens, config.max_num_seqs, dtype, num_chosen)
    is_dequantised = bool(stored_bytes) and device != "cpu"
    if config.enable_lora:
        item_bytes = DTYPE_BYTES["float32" if device == "cpu" else dtype]
        num_each = sum(  # of rank 1
            outputs + inputs
            for name, (outputs, inputs, _) in own.adapted.items()
            if config.lora_experts or not is_expert(name)
        )
        work += config.max_loras * config.max_lora_rank * num_each * item_bytes
    matrices = [shape for shape in shapes if len(shape) == 2]  # stacks of them are never dequantised
    work += (INT8 if is_dequantised else weight_format).work_bytes(matrices, dtype) + reserved_bytes
    memory = plan_memory(
        config, shape_on(ranks, adapter, model_config), device, dtype, weight_bytes, work, max_len=max_len
    )
    shown = name if Path(config.model).exists() else config.model
    stated = {} if config.generation_config == "none" else generation
    return ModelFacts(
        directory,
        shown,
        model_config,
        generation,
        adapter,
        device,
        dtype,
        max_len,
        step_tokens,
        memory,
        vocab_size,
        weight_format,
        read_default_sampling(stated, shown),
        stored_bytes=stored_bytes,
        ranks=ranks,
    )


def check_memory(facts: ModelFacts, config: EngineConfig) -> None:
    """Raise an OutOfMemoryError if the model does not fit."""
    check_plan(facts.name, config, facts.memory_shape, facts.device, facts.memory)


def check_quantization(wanted: str, values: Mapping[str, Any], source_kind: str, name: str) -> None:
    """Refuse a quantisation that the checkpoint does not have: nothing is quantised by this option."""
    stated = values.get("quantization_config") or {}
    found = str(stated.get("quant_method") or ("gguf" if source_kind == "gguf" else "none"))
    if wanted.lower() not in ("", "none", found.lower()):
        hint = "Leave it out: the files decide. weights='int8' quantises the matrices while they are loaded."
        raise InvalidOptionError(
            f"[engine] quantization is {wanted!r}, but the files of {name} say {found!r}.", hint=hint
        )


def locate_tokenizer(name: str, directory: Path, hub: HubConfig, progress: Progress) -> Path | None:
    """The directory of the tokenizer that the option `tokenizer` names; of a Hugging Face model no weights are
    downloaded."""
    if not name or name.lower() == "none":
        return None if name else directory
    is_id = HUB_ID.fullmatch(name) is not None and not Path(name).expanduser().exists() and ":" not in name
    found = resolve_model(f"{name}:{ONLY_TOKENIZER}" if is_id else name, hub, progress)
    return found.parent if found.is_file() else found


def make_runner(
    facts: ModelFacts,
    config: EngineConfig,
    executor: Executor | None = None,
    adapter: ModelAdapter[Any] | None = None,
    progress: Progress = no_progress,
    ranks: Ranks = ALONE,
) -> tuple[ModelRunner[Any], ModelFacts]:
    """A runner with weights and blocks, ready to compute, and the facts with the memory that it has.

    adapter: the model with its weights; None: they are loaded. ranks: the connection with those that do the same.
    """
    adapter = load_adapter(facts, config, ranks) if adapter is None else adapter
    pool, memory = allocate_pool(adapter.ops, facts.memory_shape, facts.memory)
    memory = memory._replace(num_blocks=ranks.min_over_ranks(memory.num_blocks))
    with adapter.ops.allocating(f"{config.max_num_seqs} sequences"):
        runner = ModelRunner(
            adapter,
            pool,
            vocab_size=facts.vocab_size,
            max_num_seqs=config.max_num_seqs,
            is_deterministic=config.deterministic,
            num_threads=config.num_threads,
            executor=executor,
            max_tokens=facts.step_tokens,
            num_draft_tokens=0 if config.speculation == "off" else config.num_draft_tokens,
        )
    runner.fit_kv_scales()
    weights = (
        facts.weight_format.name,
        sorted(facts.stored_types),
    )  # files of one model may be quantised in several ways
    described: tuple[Any, ...] = (
        facts.config.values,
        facts.dtype,
        weights,
        facts.max_len,
        memory.block_size,
        config.kv_dtype,
    )
    described += (config.max_loras, config.max_lora_rank, config.lora_experts) if config.enable_lora else ()
    place = (facts.ranks.index, facts.ranks.size, facts.ranks.stage, facts.ranks.num_stages)
    runner.warm_up(repr(described if facts.ranks.is_alone else (*described, place)), progress)
    return runner, replace(facts, memory=memory)


def load_adapter(facts: ModelFacts, config: EngineConfig, ranks: Ranks = ALONE) -> ModelAdapter[Any]:
    """The model with its weights, packed for the backend that this machine does fastest."""
    check_memory(facts, config)
    log_device(facts.name, config.device, facts.dtype)
    ops = choose_ops(facts.device, facts.dtype)
    ops.ranks, ops.can_record = ranks, ops.can_record and ranks.records
    ops.is_deterministic, ops.kv_dtype = config.deterministic, config.kv_dtype
    ops.rounds_rows = states_int8_activations(facts.config.values)
    if config.enable_lora:
        ops.adapters = ops.new_adapters(config.max_loras, config.max_lora_rank)
        ops.adapters.takes_experts = config.lora_experts
    loader = None if config.load_format == "dummy" else WeightLoader(facts.directory)

    def tensors() -> Mapping[str, Any]:
        if loader is None:
            infos = [info for info in dummy_infos(facts.config.values) if facts.stored_bytes]
            kept = {
                info.name: random_stored(info.shape, *info.quantization[::2]) for info in infos if info.quantization
            }
            shapes = facts.adapter.noted(facts.config).shapes
            return {**ops.random_weights({name: shape for name, shape in shapes.items() if name not in kept}), **kept}
        return loader.load_stored() if ops.reads_stored else loader.load_weights(keeps_quantised=True)

    with reading(facts.name), ops.allocating(facts.name):
        # Nothing here holds the tensors: each is released when it is packed; in the native backend, when all are.
        adapter = facts.adapter(Weights(tensors(), ops, weight_format=facts.weight_format), facts.config, facts.max_len)
        ops.prepare(loader.release if loader is not None else lambda: None)
        return adapter


def make_scheduler(
    config: EngineConfig,
    facts: ModelFacts,
    runner: ModelRunner[Any],
    wake: Callable[[], None] | None = None,
    adapters: AdapterSlots | None = None,
) -> tuple[Scheduler, LogitsCache]:
    """The scheduler over the model's memory, and the cache of logits beside it. wake: called when a grammar's mask is
    done."""
    blocks = BlockManager(facts.memory.num_blocks, facts.memory.block_size)
    logits = LogitsCache(config.logits_cache_mib << 20, config.logits_cache_ttl_s)
    cache = RadixCache(
        blocks,
        policy=config.eviction_policy,
        is_enabled=config.enable_prefix_caching,
        whole_blocks=facts.has_states,
        on_drop=logits.drop,
    )
    scheduler = Scheduler(
        blocks=blocks,
        cache=cache,
        logits_cache=logits,
        model_state_hash=f"{facts.name}/{facts.dtype}/{config.kv_dtype}/{facts.weight_format.name}",
        policy=config.scheduling_policy,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=facts.step_tokens,
        max_queue_size=config.max_queue_size,
        max_model_len=facts.max_len,
        max_requests=config.max_concurrent_requests,
        fixed_chunk=DETERMINISTIC_CHUNK if config.deterministic else 0,
        masks=MaskFinder(facts.vocab_size, wake),
        logits_row_bytes=4 * facts.vocab_size,
        speculation=make_speculation(config, facts, runner),
        adapters=adapters,
        plans_ahead=facts.device != "cpu",
    )
    return scheduler, logits


def make_speculation(config: EngineConfig, facts: ModelFacts, runner: ModelRunner[Any]) -> Speculation | None:
    """As configured. A draft model has memory of its own, and computes in the thread of the model's runner."""
    if config.speculation == "off":
        return None
    if config.deterministic:
        why = "steps of several tokens round otherwise (deterministic)"
        raise InvalidOptionError(f"[engine] speculation cannot be {config.speculation}: {why}.", hint="Leave it off.")
    model = None
    if facts.draft is not None:
        own, _ = make_runner(facts.draft, draft_config(config), runner.executor)
        num_states = config.num_draft_tokens + 1
        model = ModelDrafter(own, vocab_size=facts.vocab_size, max_sequences=MAX_DRAFTED, num_states=num_states)
    most = (
        MOST_DRAFTED if model is None and facts.device == "cpu" else MAX_DRAFTED
    )  # on a GPU more sequences gain nothing
    return Speculation(PromptLookup(), config.num_draft_tokens, most, model, is_flat=facts.device != "cpu")


def draft_config(config: EngineConfig) -> EngineConfig:
    """The options of a draft model."""
    return config.replace(
        model=config.draft_model,
        draft_model="",
        speculation="off",
        max_num_seqs=MAX_DRAFTED,
        max_model_len=0,
        block_size=0,
        max_cache_tokens=min(DRAFT_CACHE_TOKENS, config.max_cache_tokens or DRAFT_CACHE_TOKENS),
        max_num_batched_tokens=0,
        tokenizer="",
        quantization="",
        kv_dtype="auto",
        enable_prefix_caching=True,
        enable_lora=False,
        lora_modules="",
        lora_dir="",
    )


def check_changes(facts: ModelFacts, before: EngineConfig, config: EngineConfig) -> None:
    """Options that are changed while the engine runs must suit the memory that was planned at its start."""
    is_turned_on = config.enable_prefix_caching and not before.enable_prefix_caching
    if is_turned_on and facts.has_states and facts.memory.block_size >= facts.max_len:
        raise InvalidOptionError(
            f"[engine] enable_prefix_caching: {facts.name} was loaded with one state for each sequence, none to be reused.",
            hint="Load it again with prefix caching, or with a block_size.",
        )


def choose_step_tokens(config: EngineConfig, device: str) -> int:
    usual = CPU_STEP_TOKENS if device == "cpu" else GPU_STEP_TOKENS
    chunk = DETERMINISTIC_CHUNK if config.deterministic else 1
    wanted = config.max_num_batched_tokens or max(usual, config.max_num_seqs + chunk)
    check_step_tokens(wanted, config.max_num_seqs, chunk)
    return wanted
