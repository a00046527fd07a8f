"""What every architecture provides, decoder or encoder, and the tables of them."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, ClassVar, Generic

import numpy as np

from archerfish.errors import UnsupportedModelError
from archerfish.kernels.batches import Ids, Segments, T
from archerfish.kernels.formats import PLAIN, WeightFormat
from archerfish.kernels.ops import Ops
from archerfish.kernels.ranks import ALONE, Ranks
from archerfish.kernels.recurrent import StateShape
from archerfish.layers.encoder import BlockShape, ClassifierHead, MaskedHead
from archerfish.layers.weights import NoOps, NotedWeights, Weights
from archerfish.models.config import Config

# By the `model_type` of a config.json: a class, or "module:class" of one that is not imported yet.
MODELS: dict[str, str | type[Any]] = {
    "llama": "archerfish.models.llama:LlamaModel",
    "mistral": "archerfish.models.llama:MistralModel",
    "qwen2": "archerfish.models.llama:Qwen2Model",
    "qwen3": "archerfish.models.llama:Qwen3Model",
    "smollm3": "archerfish.models.llama:SmolLM3Model",
    "ministral": "archerfish.models.llama:MistralModel",
    "ministral3": "archerfish.models.llama:Ministral3Model",
    "granite": "archerfish.models.llama:GraniteModel",
    "glm": "archerfish.models.llama:GlmModel",
    "glm4": "archerfish.models.llama:Glm4Model",
    "olmo2": "archerfish.models.olmo:Olmo2Model",
    "olmo3": "archerfish.models.olmo:Olmo3Model",
    "exaone4": "archerfish.models.olmo:Exaone4Model",
    "cohere": "archerfish.models.cohere:CohereModel",
    "cohere2": "archerfish.models.cohere:Cohere2Model",
    "starcoder2": "archerfish.models.gpt2:Starcoder2Model",
    "gpt2": "archerfish.models.gpt2:Gpt2Model",
    "gemma": "archerfish.models.gemma:GemmaModel",
    "gemma2": "archerfish.models.gemma:Gemma2Model",
    "gemma3_text": "archerfish.models.gemma:Gemma3Model",
    "olmoe": "archerfish.models.experts:OlmoeModel",
    "phi3": "archerfish.models.llama:Phi3Model",
    "mixtral": "archerfish.models.experts:MixtralModel",
    "gpt_oss": "archerfish.models.experts:GptOssModel",
    "qwen2_moe": "archerfish.models.experts:Qwen2MoeModel",
    "qwen3_moe": "archerfish.models.experts:Qwen3MoeModel",
    "rwkv7": "archerfish.models.rwkv7:Rwkv7Model",
}
ENCODERS: dict[str, str | type[Any]] = {
    "bert": "archerfish.models.bert:BertEncoder",
    "distilbert": "archerfish.models.bert:DistilBertEncoder",
    "roberta": "archerfish.models.bert:RobertaEncoder",
    "xlm-roberta": "archerfish.models.bert:RobertaEncoder",
    "camembert": "archerfish.models.bert:RobertaEncoder",
    "mpnet": "archerfish.models.bert:MPNetEncoder",
    "modernbert": "archerfish.models.rotary_encoders:ModernBertEncoder",
    "nomic_bert": "archerfish.models.rotary_encoders:NomicEncoder",
    "gte": "archerfish.models.rotary_encoders:GteEncoder",
    "new": "archerfish.models.rotary_encoders:NewEncoder",
    "jina_embeddings_v3": "archerfish.models.rotary_encoders:JinaEncoder",
    "eurobert": "archerfish.models.decoder_encoder:EuroBertEncoder",
}
# Of architectures that are not supported: what is nearest by structure where the name does not say so, and those whose
# layers keep both keys and recurrent states.
NEAREST = {
    "apertus": "qwen3", "arcee": "llama", "baichuan": "llama", "bloom": "gpt2", "chatglm": "glm", "data2vec-text": "roberta",
    "diffllama": "llama", "electra": "bert", "ernie": "bert", "ernie4_5": "glm", "exaone": "llama", "falcon": "cohere",
    "gpt_bigcode": "gpt2", "gpt_neo": "gpt2", "gpt_neox": "starcoder2", "gptj": "cohere", "helium": "glm",
    "hunyuan_v1_dense": "qwen3", "internlm": "llama", "internlm2": "llama", "internlm3": "llama", "minicpm": "granite",
    "mpt": "gpt2", "nemotron": "starcoder2", "olmo": "llama", "opt": "gpt2", "orion": "llama", "phi": "cohere",
    "phimoe": "mixtral", "qwen": "llama", "qwen2_5_omni": "qwen2", "qwen2_audio": "qwen2", "seed_oss": "qwen2",
    "stablelm": "starcoder2", "yi": "llama",
}  # fmt: skip
HYBRIDS = frozenset({
    "bamba", "falcon_h1", "granitemoehybrid", "jamba", "kimi_linear", "lfm2", "lfm2_moe", "nemotron_h", "olmo_hybrid",
    "qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_next", "recurrent_gemma", "zamba", "zamba2",
})  # fmt: skip
REFUSED = {  # what is missing for a model_type
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3", "kimi_k2", "minicpm3", "mistral4"),
        "It attends over compressed keys (MLA), which are not supported.",
    ),
}
MASKED = -30_000.0  # is added to attention scores of masked tokens; float16 has it
DECODER_ENCODER = "archerfish.models.decoder_encoder:DecoderEncoder"
ENTRY_POINTS = "archerfish.models"  # the group; an entry point's name is a model_type, its value an adapter class


@dataclass(frozen=True)
class KVShape:
    """What a token keeps in KV memory: keys and values of num_kv_heads * head_dim numbers in every layer."""

    num_layers: int
    num_kv_heads: int
    head_dim: int

    def bytes_per_block(self, block_size: int, item_bytes: int) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * item_bytes * block_size


MemoryShape = KVShape | StateShape


class ModelAdapter(ABC, Generic[T]):
    """One architecture. A subclass takes its weights in `__init__` and computes in `forward` and `logits`.

    `memory_shape` says what its sequences keep, and so what `forward` takes: with a KVShape a PagedBatch and KVLayers,
    with a StateShape a RecurrentBatch and StateLayers. max_len is the longest sequence that will be asked for. The
    class methods are used before any weights are there.
    """

    gives_kept_rows: ClassVar[bool] = False  # `forward` heeds kept_rows of a batch
    can_divide: ClassVar[bool] = False  # it takes the part of its weights that `ops.ranks` says

    def __init__(self, weights: Weights[T], config: Config, max_len: int) -> None:
        self.ops: Ops[T] = weights.ops
        self.config = config
        self.max_len = max_len

    @abstractmethod
    def forward(self, batch: Any, layers: Sequence[Any]) -> T:
        """Hidden states after the last norm, (rows, width), of all rows or of those kept.

        What the new tokens leave behind goes into the layers' memory.
        """

    @abstractmethod
    def logits(self, hidden: T) -> T:
        """float32 scores over the vocabulary for rows of hidden states; in a stage before the last one, these rows."""

    def pass_on(self, batch: Any, *tensors: T) -> T:
        """Give rows to the next stage; the first tensor's rows that are wanted of a pass, as `forward` has to give."""
        self.ops.ranks.send(*tensors)
        return tensors[0] if batch.kept_rows is None else self.ops.rows(tensors[0], batch.kept_rows)

    @classmethod
    def memory_shape(cls, config: Config, ranks: Ranks = ALONE) -> MemoryShape:
        """What its sequences keep on a rank; usually keys and values of all their tokens."""
        heads = config.heads()
        num_kv_heads = ranks.heads(heads.num_heads, heads.num_kv_heads)[1].size
        return KVShape(len(ranks.layers(config.integer("num_hidden_layers"))), num_kv_heads, heads.head_dim)

    @classmethod
    def vocab_size(cls, config: Config) -> int:
        return config.integer("vocab_size")

    @classmethod
    def max_positions(cls, config: Config) -> int:
        """Longest sequence, unless `max_model_len` asks for longer ones."""
        return config.integer("max_position_embeddings")

    @classmethod
    def most_positions(cls, config: Config) -> int:
        """Longest sequence that the model is made for."""
        return cls.max_positions(config)

    @classmethod
    def noted(
        cls, config: Config, dtype: str = "float32", weight_format: WeightFormat = PLAIN, ranks: Ranks = ALONE
    ) -> NotedWeights:
        """Names, shapes and sizes of its tensors on a rank, found by building it over weights that are not there."""
        weights = NotedWeights(ops=NoOps(ranks), weight_format=weight_format, dtype=dtype)
        cls(weights, config, max_len=1)
        return weights


@dataclass(frozen=True)
class TokenBatch:
    """Packed input of one forward pass."""

    token_ids: Ids
    segments: Segments
    type_ids: Ids | None = None
    num_attended: int | None = None  # first tokens of each sequence; attention masks the others; None: all tokens
    kept_rows: ClassVar[None] = None  # decoders ask

    @property
    def positions(self) -> Ids:
        return self.segments.positions


class Encoder(ABC, Generic[T]):
    """One architecture. A subclass reads its configuration and weights in `__init__` and computes in `forward`."""

    prefix: ClassVar[str]  # what its checkpoints put before every name when they carry a head
    # What its configuration calls width, heads, feed-forward width and activation.
    shape_names: ClassVar[tuple[str, str, str, str]] = (
        "hidden_size",
        "num_attention_heads",
        "intermediate_size",
        "hidden_act",
    )
    is_recordable: ClassVar[bool] = (
        False  # forward sends ids by `ops.tensor` and reads nothing else of a batch on the host
    )
    masked_parts: ClassVar[tuple[str, ...]] = ()  # of `masked_head`
    table_name: ClassVar[str] = "embeddings.word_embeddings"
    needs_types = False  # batches must have type_ids

    def __init__(self, weights: Weights[T], config: Config) -> None:
        self.ops: Ops[T] = weights.ops
        self.config = config
        self.shape = self.block_shape(config)

    @abstractmethod
    def forward(self, batch: TokenBatch) -> T:
        """Hidden states, (tokens, width)."""

    @classmethod
    def most_expanded(cls, config: Config) -> int:
        """Longest query whose expansion tokens (as ColBERT appends them) are not attended to."""
        return cls.max_positions(config)

    def attention_bias(self, batch: TokenBatch) -> T | None:
        """What is added to the scores of attention."""
        if batch.num_attended is None:
            return None
        is_masked = np.arange(max(batch.segments.lengths)) >= batch.num_attended
        table = np.repeat(np.array([[0], [MASKED]], np.float32), self.shape.num_heads, 1)
        return self.ops.relative_bias(self.ops.tensor(table), np.tile(is_masked, (len(is_masked), 1)).astype(np.int64))

    @classmethod
    @abstractmethod
    def head(cls, weights: Weights[T], config: Config) -> ClassifierHead[T]:
        """The head of its sequence classification checkpoints."""

    @classmethod
    def masked_head(cls, weights: Weights[T], config: Config) -> MaskedHead[T]:
        """The head of its checkpoints that fill masks, from which SPLADE is made."""
        if not cls.masked_parts:
            raise UnsupportedModelError(f"Sparse vectors of a {config.model_type} (SPLADE) are not supported.")
        table, shape = f"{cls.prefix}.{cls.table_name}", cls.block_shape(config)
        return MaskedHead(weights, cls.masked_parts, shape, table, config.integer("vocab_size"))

    @classmethod
    def noted(cls, config: Config, dtype: str = "float32", weight_format: WeightFormat = PLAIN) -> NotedWeights:
        """As `ModelAdapter.noted`, with a classifier's head."""
        weights = NotedWeights(weight_format=weight_format, dtype=dtype)
        cls(weights.scope(cls.prefix) if cls.prefix else weights, config)
        if config.is_classifier:
            cls.head(weights, config)
        return weights

    @classmethod
    def block_shape(cls, config: Config) -> BlockShape:
        return config.block_shape(*cls.shape_names)

    @classmethod
    def width(cls, config: Config) -> int:
        """Of hidden states."""
        return cls.block_shape(config).width

    @classmethod
    def max_positions(cls, config: Config) -> int:
        """Longest sequence that its position table allows."""
        return config.integer("max_position_embeddings")


def register_model(model_type: str, adapter: type[ModelAdapter[Any]]) -> None:
    """Add an architecture, or replace one, under the `model_type` of its config.json."""
    MODELS[model_type] = adapter


def model_class(config: Config) -> type[ModelAdapter[Any]]:
    """The class of a model that generates text; one that cannot is refused."""
    found = find_model(config)
    if not config.is_causal:
        hint = "It embeds texts: ArrowEngine and `archerfish embed` take it."
        raise UnsupportedModelError(
            f"This {config.model_type} sees both directions, so it cannot generate text.", hint=hint
        )
    return found


def find_model(config: Config) -> type[ModelAdapter[Any]]:
    """The class for a configuration: a registered one, else an installed package's; an unknown one is refused."""
    if config.model_type in MODELS:
        return class_of(MODELS[config.model_type])
    from importlib.metadata import entry_points  # takes long to import

    installed = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if config.model_type in installed:
        point = installed[config.model_type]
        about = f"The entry point {point.value!r} of model {point.name!r} is"
        try:
            loaded = point.load()
        except (ImportError, AttributeError) as error:
            raise UnsupportedModelError(f"{about} broken: {error}.") from error
        if not isinstance(loaded, type) or not issubclass(loaded, ModelAdapter):
            raise UnsupportedModelError(f"{about} no ModelAdapter class.")
        return loaded
    hint, text = architecture_hint(config.model_type, [*MODELS, *installed]), config.values.get("text_config")
    if config.model_type in HYBRIDS:
        hint = "Some of its layers keep keys, others a recurrent state; here all layers of a model keep the same."
    elif isinstance(text, Mapping) and text.get("model_type") in MODELS:
        hint = f"Its text part is of type {text['model_type']!r}, which is supported where it is saved alone. {hint}"
    elif config.model_type.startswith("rwkv"):
        hint = "Of the RWKV family only RWKV-7 is supported."
    elif config.model_type in ENCODERS:
        hint = "It embeds texts or ranks them: ArrowEngine and `archerfish embed` take it."
    hint = REFUSED.get(config.model_type, hint)
    raise UnsupportedModelError(unknown("text generation model", config), hint=hint)


def is_encoder(config: Config) -> bool:
    """Whether it can only embed or rank: an encoder, or a decoder that sees both directions."""
    return config.model_type in ENCODERS or not config.is_causal


def encoder_class(config: Config, *, embeds: bool = False) -> type[Encoder[Any]]:
    """The class for a configuration; an unknown architecture is refused with the known ones.

    embeds: the model's files say how it embeds texts, as decoders' must.
    """
    found = ENCODERS.get(config.model_type)
    if found is None and config.model_type in MODELS:
        if embeds or config.is_classifier or not config.is_causal:
            return class_of(DECODER_ENCODER)
        hint = "It writes text: LLMEngine and `archerfish generate` take it. To embed, it needs a modules.json: docs/embed.md."
        raise UnsupportedModelError(f"No encoder for model_type {config.model_type!r}.", hint=hint)
    if found is None:
        page = "docs/embed.md lists what embeds texts, CONTRIBUTING.md shows how an architecture is added"
        hint = architecture_hint(config.model_type, ENCODERS, page)
        raise UnsupportedModelError(unknown("encoder", config), hint=hint)
    return class_of(found)


def unknown(what: str, config: Config) -> str:
    if not config.model_type:
        return "The config.json states no model_type, which says what the model is."
    return f"No {what} for model_type {config.model_type!r}."


def architecture_hint(
    model_type: str, known: Iterable[str], page: str = "docs/add-a-model.md shows how an architecture is added"
) -> str:
    """A name that differs in spelling alone; else the nearest one, by structure or by how its family is called, and
    all."""

    def letters(name: str) -> str:
        return "".join(filter(str.isalnum, name)).lower()

    names = list(known)
    same = [name for name in names if letters(name) == letters(model_type)]
    if same:
        return f"Did you mean {same[0]!r}?"
    family = [name for name in names if letters(model_type).startswith("".join(takewhile(str.isalpha, name)) or "?")]
    nearest = NEAREST.get(model_type) or (family[-1] if family else None)
    found = f"The nearest that is supported is {nearest!r}. " if nearest in names else ""
    return f"{found}{page}. Supported: {', '.join(names)}."


def class_of(found: str | type[Any]) -> type[Any]:
    """An entry of these tables as a class."""
    if isinstance(found, type):
        return found
    module, _, name = found.partition(":")
    loaded: type[Any] = getattr(importlib.import_module(module), name)
    return loaded
