"""What every decoder architecture provides, and the registry of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any, ClassVar, Generic, cast

from archerfish.errors import UnsupportedModelError, did_you_mean
from archerfish.kernels.ops import Ops, T
from archerfish.kernels.recurrent import StateShape
from archerfish.layers.weights import NotedWeights, Weights
from archerfish.models.config import Config
from archerfish.models.known import ENCODERS, MODELS, class_of

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

    `memory_shape` says what its sequences keep, and so what `forward` takes: with a KVShape a PagedBatch and KVLayers, with a
    StateShape a RecurrentBatch and StateLayers. max_len is the longest sequence that will be asked for. The class methods are
    used before any weights are there.
    """

    gives_kept_rows: ClassVar[bool] = False  # `forward` heeds kept_rows of a batch
    weight_formats: ClassVar[tuple[str, ...]] = ("auto",)  # those that its quality has been measured in

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
        """float32 scores over the vocabulary for rows of hidden states."""

    @classmethod
    def memory_shape(cls, config: Config) -> MemoryShape:
        """What its sequences keep; usually keys and values of all their tokens."""
        heads = config.heads()
        return KVShape(config.integer("num_hidden_layers"), heads.num_kv_heads, heads.head_dim)

    @classmethod
    def vocab_size(cls, config: Config) -> int:
        return config.integer("vocab_size")

    @classmethod
    def max_positions(cls, config: Config) -> int:
        """Longest sequence that the model is made for."""
        return config.integer("max_position_embeddings")

    @classmethod
    def dummy_shapes(cls, config: Config) -> Mapping[str, tuple[int, ...]]:
        """Names and shapes of all its tensors, found by building it over weights that are not there."""
        return cls._note_weights(config).shapes

    @classmethod
    def tensor_bytes(cls, config: Config, dtype: str, weight_format: str = "auto") -> Mapping[str, int]:
        """What each of its tensors takes in memory."""
        weights = cls._note_weights(config)
        return {name: weights.num_bytes(name, dtype, weight_format) for name in weights.shapes}

    @classmethod
    def _note_weights(cls, config: Config) -> NotedWeights:
        weights = NotedWeights({}, cast(Ops[Any], NoOps()))
        cls(weights, config, max_len=1)
        return weights


class NoOps:
    """Stands for a backend where nothing is computed: every operation gives None."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **options: None


def register_model(model_type: str, adapter: type[ModelAdapter[Any]]) -> None:
    """Add an architecture, or replace one, under the `model_type` of its config.json."""
    MODELS[model_type] = adapter


def model_class(config: Config) -> type[ModelAdapter[Any]]:
    """The class for a configuration: a registered one, else an installed package's; an unknown one is refused."""
    if config.model_type in MODELS:
        return class_of(MODELS[config.model_type])
    installed = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if config.model_type in installed:
        return load_entry_point(installed[config.model_type])
    known = [*MODELS, *installed]
    hint = did_you_mean(config.model_type, known) or f"Known: {', '.join(known)}."
    if config.model_type.startswith("rwkv"):
        hint = "Of the RWKV family only RWKV-7 is supported."
    elif config.model_type in ENCODERS:
        hint = "It embeds texts or ranks them: ArrowEngine and `archerfish embed` take it."
    raise UnsupportedModelError(f"No text generation model for model_type {config.model_type!r}.", hint=hint)


def load_entry_point(point: EntryPoint) -> type[ModelAdapter[Any]]:
    try:
        loaded = point.load()
    except (ImportError, AttributeError) as error:
        raise UnsupportedModelError(f"The entry point {point.value!r} of model {point.name!r} is broken: {error}.") from error
    if not isinstance(loaded, type) or not issubclass(loaded, ModelAdapter):
        raise UnsupportedModelError(f"The entry point {point.value!r} of model {point.name!r} is no ModelAdapter class.")
    return loaded
