"""What every decoder architecture provides, and the registry of them."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, cast

from archerfish.errors import UnsupportedModelError, did_you_mean
from archerfish.kernels.ops import KVLayer, Ops, PagedBatch, T
from archerfish.layers.weights import NotedWeights, Weights
from archerfish.models.config import Config

ENTRY_POINTS = "archerfish.models"  # the group; an entry point's name is a model_type, its value an adapter class


@dataclass(frozen=True)
class KVShape:
    """What a token keeps in KV memory: keys and values of num_kv_heads * head_dim numbers in every layer."""

    num_layers: int
    num_kv_heads: int
    head_dim: int

    def bytes_per_token(self, item_bytes: int) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * item_bytes


class ModelAdapter(ABC, Generic[T]):
    """One architecture. A subclass takes its weights in `__init__` and computes in `forward` and `logits`.

    max_len is the longest sequence that will be asked for. The class methods are used before any weights are there.
    """

    def __init__(self, weights: Weights[T], config: Config, max_len: int) -> None:
        self.ops: Ops[T] = weights.ops
        self.config = config
        self.max_len = max_len

    @abstractmethod
    def forward(self, batch: PagedBatch[T], kv: Sequence[KVLayer[T]]) -> T:
        """Hidden states after the last norm, (rows, width); keys and values of the new tokens go into kv."""

    @abstractmethod
    def logits(self, hidden: T) -> T:
        """float32 scores over the vocabulary for rows of hidden states."""

    @classmethod
    def kv_shape(cls, config: Config) -> KVShape:
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
        weights = NotedWeights({}, cast(Ops[Any], NoOps()))
        cls(weights, config, max_len=1)
        return weights.shapes


class NoOps:
    """Stands for a backend where nothing is computed: every operation gives None."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **options: None


_MODELS: dict[str, str | type[ModelAdapter[Any]]] = {
    "llama": "archerfish.models.llama:LlamaModel",
    "mistral": "archerfish.models.mistral:MistralModel",
    "qwen2": "archerfish.models.qwen2:Qwen2Model",
    "qwen3": "archerfish.models.qwen3:Qwen3Model",
    "gemma2": "archerfish.models.gemma2:Gemma2Model",
    "gemma3_text": "archerfish.models.gemma3:Gemma3Model",
    "phi3": "archerfish.models.phi3:Phi3Model",
}


def register_model(model_type: str, adapter: type[ModelAdapter[Any]]) -> None:
    """Add an architecture, or replace one, under the `model_type` of its config.json."""
    _MODELS[model_type] = adapter


def model_class(config: Config) -> type[ModelAdapter[Any]]:
    """The class for a configuration: a registered one, else an installed package's; an unknown one is refused."""
    found: str | type[ModelAdapter[Any]] | EntryPoint | None = _MODELS.get(config.model_type)
    if isinstance(found, type):
        return found
    if isinstance(found, str):
        module, _, name = found.partition(":")
        loaded: type[ModelAdapter[Any]] = getattr(importlib.import_module(module), name)
        return loaded
    installed = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if config.model_type in installed:
        return load_entry_point(installed[config.model_type])
    known = [*_MODELS, *installed]
    raise UnsupportedModelError(
        f"No text generation model for model_type {config.model_type!r}.",
        hint=did_you_mean(config.model_type, known) or f"Known: {', '.join(known)}.",
    )


def load_entry_point(point: EntryPoint) -> type[ModelAdapter[Any]]:
    try:
        loaded = point.load()
    except (ImportError, AttributeError) as error:
        raise UnsupportedModelError(f"The entry point {point.value!r} of model {point.name!r} is broken: {error}.") from error
    if not isinstance(loaded, type) or not issubclass(loaded, ModelAdapter):
        raise UnsupportedModelError(f"The entry point {point.value!r} of model {point.name!r} is no ModelAdapter class.")
    return loaded
