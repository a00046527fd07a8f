"""InferenceCore: an encoder on a device, from token ids to vectors or scores."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast, get_args

import numpy as np
import numpy.typing as npt

from archerfish.config import EmbedConfig, HubConfig
from archerfish.engine.text_batches import ACTIVATIONS
from archerfish.errors import InvalidInputError, StoppedError, UnsupportedModelError
from archerfish.kernels.batches import Segments
from archerfish.kernels.encoding import EncoderInputs
from archerfish.kernels.formats import PLAIN, choose_format
from archerfish.kernels.machine import fast_cpu_dtype
from archerfish.kernels.ops import Activation, LinearWeight, Pooling
from archerfish.kernels.room import check_room
from archerfish.kernels.select import OpsBackend, choose_backend, choose_device, choose_dtype, choose_ops
from archerfish.layers.encoder import MaskedHead
from archerfish.layers.weights import Weights
from archerfish.models.adapter import ENCODERS, MODELS, Encoder, TokenBatch, encoder_class
from archerfish.models.config import Config
from archerfish.remarks import remark_blocks
from archerfish.store.converter import ensure_converted
from archerfish.store.format import TensorInfo
from archerfish.store.loader import WeightLoader
from archerfish.store.metadata import is_converted, read_metadata
from archerfish.store.names import resolve_model
from archerfish.store.source import cross_encoder_settings, optional_json, read_embedding, transformer_directory
from archerfish.types import Progress

if TYPE_CHECKING:
    import torch

Vectors = npt.NDArray[np.float32]
Output = Literal["dense", "sparse", "multi_vector"]
RECORDED_TOKENS = (16, 32, 64, 128, 256, 512, 1024)  # sizes of the recorded passes, where the backend can record
REHEARSED_TOKENS = (1, 2, *(2**power + more for power in range(2, 9) for more in (0, 1)))  # no kernel changes elsewhere


class RecordedPass(NamedTuple):
    """A recorded pass over a fixed number of tokens: fill its inputs, then call `repeat`."""

    inputs: EncoderInputs[Any]
    repeat: Callable[[], Any]


class OutputLayers(NamedTuple):
    """What comes between hidden states and vectors."""

    dimension: int
    layers: tuple[tuple[LinearWeight[Any], Activation], ...] = ()
    is_of_tokens: bool = False  # a row for each token, not for each text
    masked: MaskedHead[Any] | None = None
    num_logs: int = 0  # how often a row becomes log(1 + row), what is below 0 being 0


def output_sizes(
    architecture: type[Encoder[Any]], config: Config, stated: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]
) -> dict[Output, int]:
    """The kinds of vectors that a model gives and their lengths, that which it is made for first."""
    size, made_for = architecture.width(config), stated.get("output", "dense")
    if config.is_classifier:
        return {"dense": size}
    if made_for == "sparse":
        return {"sparse": config.integer("vocab_size")}
    size = ([layer["sizes"][1] for layer in stated.get("layers") or ()] or [size])[-1]
    if made_for == "multi_vector":
        return {"multi_vector": size}
    found: dict[Output, int] = {"dense": size}
    if "sparse_linear.weight" in shapes:
        found["sparse"] = config.integer("vocab_size")
    if "colbert_linear.weight" in shapes:
        found["multi_vector"] = shapes["colbert_linear.weight"][0]
    return found


def read_outputs(
    weights: Weights[Any], architecture: type[Encoder[Any]], config: Config, stated: Mapping[str, Any]
) -> dict[Output, OutputLayers]:
    """The layers of each kind of vectors."""
    width, made_for = architecture.width(config), stated.get("output", "dense")
    sizes = output_sizes(architecture, config, stated, {name: each.shape for name, each in weights.source.items()})
    if made_for == "sparse" and not config.is_classifier:
        splade = stated["splade"]
        if splade["pooling_strategy"] != "max" or splade["activation_function"] not in ("relu", "log1p_relu"):
            raise UnsupportedModelError(f"SPLADE with {splade} is not supported.", hint="pooling_strategy 'max' is.")
        num_logs = 1 + (splade["activation_function"] == "log1p_relu")
        return {
            "sparse": OutputLayers(sizes["sparse"], masked=architecture.masked_head(weights, config), num_logs=num_logs)
        }
    layers: list[tuple[LinearWeight[Any], Activation]] = []
    for layer in stated.get("layers") or ():
        if layer["activation"] not in get_args(Activation):
            raise UnsupportedModelError(f"The activation {layer['activation']!r} of {layer['name']} is not supported.")
        inputs, size = layer["sizes"]
        name = ".".join(filter(None, (layer["name"], "linear")))
        layers.append((weights.linear(name, size, inputs), layer["activation"]))
    first: Output = next(iter(sizes))
    found = {first: OutputLayers(sizes[first], tuple(layers), is_of_tokens=first == "multi_vector")}
    if "sparse" in sizes:
        found["sparse"] = OutputLayers(sizes["sparse"], ((weights.linear("sparse_linear", 1, width), "relu"),), True)
    if first == "dense" and "multi_vector" in sizes:
        size = sizes["multi_vector"]
        found["multi_vector"] = OutputLayers(size, ((weights.linear("colbert_linear", size, width), "none"),), True)
    return found


class InferenceCore:
    """One encoder on one device. `run` takes packed batches, `forward` padded ones as other libraries use them."""

    def __init__(
        self,
        weights: Mapping[str, Any],
        config: Mapping[str, Any],
        device: str = "auto",
        *,
        dtype: str = "auto",
        pooling: str | None = None,
        weight_format: str = "auto",
    ) -> None:
        """`config` is the model's config.json, or the metadata of a converted model, which also states the pooling."""
        stated: Mapping[str, Any] = config.get("embedding") or {}
        is_stated = bool(stated or pooling)
        pooling = pooling or str(stated.get("pooling_mode", "mean"))
        if pooling not in get_args(Pooling):
            raise UnsupportedModelError(f"Unknown pooling {pooling!r}.", hint=f"Known: {', '.join(get_args(Pooling))}.")
        self.config = Config(config.get("config", config))
        self.device = choose_device(device).name
        self.dtype = choose_dtype(dtype, self.device)
        self.ops = choose_ops(self.device, self.dtype)
        self.ops.rounds_rows = True
        self.pooling = cast(Pooling, pooling)
        architecture = encoder_class(self.config, embeds=is_stated)
        chosen = choose_format(weight_format)
        self._format = chosen.name
        num_bytes = architecture.noted(self.config, self.dtype, chosen).total_bytes(with_tables=self.device != "cpu")
        ways_out = [*(["weights=int8"] if chosen is PLAIN else []), "a smaller model"]
        check_room("The model", self.device, {"weights": num_bytes}, ways_out)
        everything = Weights(weights, self.ops, weight_format=chosen)
        has_prefix = any(name.startswith(f"{architecture.prefix}.") for name in weights)
        with self.ops.allocating("The model"):
            self.encoder = architecture(
                everything.scope(architecture.prefix) if has_prefix else everything, self.config
            )
            self.head = architecture.head(everything, self.config) if self.config.is_classifier else None
            self.outputs = read_outputs(everything, architecture, self.config, stated)
        self.output = next(iter(self.outputs))
        self.is_closed = False
        self.max_positions = architecture.max_positions(self.config)
        expansion = stated.get("query_expansion") or {"length": 0, "attend": True}
        self.masks_expansion = self._check_expansion(architecture, expansion)
        self.dimension = self.outputs[self.output].dimension
        self._recorded: dict[tuple[Any, ...], RecordedPass] = {}
        self._replayed = {
            (output, is_scaled): self.ops.replayed(partial(self._compute, normalize=is_scaled, output=output))
            for output in self.outputs
            for is_scaled in (False, True)
        }
        self._recording = (
            threading.Lock()
        )  # held from filling the inputs until the results are being copied to the host

    def _check_expansion(self, architecture: type[Encoder[Any]], expansion: Mapping[str, Any]) -> bool:
        """Whether attention masks the expansion tokens of queries."""
        is_masked, length = not expansion.get("attend"), expansion["length"]
        most = architecture.most_expanded(self.config) if is_masked else self.max_positions
        if length > most:
            how = " with attend=False" if is_masked else ""
            message = f"query_expansion to {length} tokens{how} is not supported for this {self.config.model_type}."
            raise UnsupportedModelError(message, hint=f"At most {most} tokens are." if most else "Only attend=True is.")
        return is_masked

    @property
    def _stated_activation(self) -> str:
        values = self.config.values
        stated = values.get("sentence_transformers") or {}
        name = stated.get("activation_fn") or values.get("sbert_ce_default_activation_function") or ""
        return str(name).rpartition(".")[2].lower()

    @property
    def activation(self) -> str:
        """Of scores: what the files name, else a sigmoid when there is one label, as in sentence-transformers."""
        name = self._stated_activation or ("sigmoid" if self.config.num_labels == 1 else "identity")
        if name not in ACTIVATIONS:
            hint = f"Known: {', '.join(ACTIVATIONS)}."
            raise UnsupportedModelError(f"A classifier's activation {name!r} is not supported.", hint=hint)
        return name

    @property
    def label_activation(self) -> str:
        """Of the scores of labels, where probabilities are wanted: as transformers chooses it, if the files name
        none."""
        kind = self.config.values.get("problem_type")
        chosen = {"multi_label_classification": "sigmoid", "regression": "identity"}.get(kind or "")
        if chosen and not self._stated_activation:
            return chosen
        return "softmax" if self.activation == "identity" else self.activation

    def close(self) -> None:
        """Refuse further work and give the memory of the weights back."""
        if not self.is_closed:
            self.is_closed = True
            self._recorded.clear()
            self._replayed.clear()
            del self.encoder
            self.ops.release()

    def warm_up(self, packed: Future[None], progress: Progress) -> None:
        """Compile what any batch needs, where kernels are compiled. packed: done when the weights are packed."""
        if self.ops.can_record:
            packed.result()
            described = (
                self.config.values,
                self.dtype,
                self.pooling,
                self._format,
                self.outputs.keys(),
                self.masks_expansion,
            )
            with self.ops.starting(repr(described), self._rehearse, progress):
                pass

    def _rehearse(self) -> None:
        """Run passes of each kind: see `Ops.starting`."""
        with self.ops.computing():
            for normalize in (False, True):
                for num in REHEARSED_TOKENS:
                    ids = np.zeros(min(num, self.max_positions), dtype=np.int64)
                    for types in (ids,) if self.encoder.needs_types else (None, ids):
                        for output in self.outputs:
                            for num_attended in (None, 1) if self.masks_expansion else (None,):
                                self._compute(
                                    TokenBatch(ids, Segments((len(ids),)), types, num_attended), normalize, output
                                )
                for num in RECORDED_TOKENS if self.encoder.is_recordable else ():
                    inputs: Any = self.ops.encoder_inputs(num)
                    for types in (inputs.type_ids,) if self.encoder.needs_types else (None, inputs.type_ids):
                        for output in self.outputs:
                            self._compute(TokenBatch(inputs.token_ids, inputs.segments, types), normalize, output)

    def run(self, batch: TokenBatch, *, normalize: bool = False) -> Vectors:
        """One vector per sequence; for a cross-encoder one row of raw scores per sequence."""
        return self.start(batch, normalize=normalize)()

    def run_tokens(self, batch: TokenBatch) -> Vectors:
        """One vector per token."""
        with self.ops.computing():
            hidden = self.encoder.forward(self._checked(batch))
            return self.ops.to_numpy(hidden)[: len(batch.token_ids)]  # a backend may add empty rows

    def _checked(self, batch: TokenBatch) -> TokenBatch:
        """The batch with type ids, if the encoder needs some. Ids that its tables do not have are refused."""
        config = self.config
        tables = (
            (batch.token_ids, config.integer("vocab_size")),
            (batch.type_ids, config.integer("type_vocab_size", 2)),
        )
        for what, (ids, num_rows) in zip(("Token", "Type"), tables, strict=True):
            if ids is not None and len(ids) and ids.astype(np.uint64).max() >= max(num_rows, 1):  # also if negative
                raise InvalidInputError(
                    f"{what} ids must be from 0 to {num_rows - 1:,}: the table has {num_rows:,} rows."
                )
        if max(batch.segments.lengths, default=0) > self.max_positions:
            raise InvalidInputError(f"A text has more tokens than the {self.max_positions:,} positions of the model.")
        is_complete = batch.type_ids is not None or not self.encoder.needs_types
        return batch if is_complete else replace(batch, type_ids=np.zeros_like(batch.token_ids))

    def start(
        self, batch: TokenBatch, *, normalize: bool = False, output: Output | None = None
    ) -> Callable[[], Vectors]:
        """Begin what `run` does; calling the result waits for the vectors. On a CPU they are computed at once."""
        if self.is_closed:
            raise StoppedError("This model has been closed.", hint="Load it again.")
        batch, output = self._checked(batch), output or self.output
        with self.ops.computing():
            if not self.ops.is_async:
                is_replayed = self.encoder.is_recordable
                rows = (
                    self._replayed[output, normalize](batch) if is_replayed else self._compute(batch, normalize, output)
                )
                found = self._finish(self.ops.to_numpy(rows), output)
                return lambda: found
            fetched = self._repeat(batch, normalize, output) or self.ops.fetch(self._compute(batch, normalize, output))
            return lambda: self._finish(fetched(), output)

    def _compute(self, batch: TokenBatch, normalize: bool, output: Output) -> Any:
        """Rows in float32: of sequences, or of tokens."""
        hidden = self.encoder.forward(batch)
        if self.head is not None:
            return self.head(self.ops.pool(hidden, batch.segments, self.head.pooling))
        found = self.outputs[output]
        if not found.is_of_tokens and found.masked is None:
            hidden = self.ops.pool(hidden, batch.segments, self.pooling)
        for layer, activation in found.layers:
            hidden = self.ops.linear(hidden, layer, activation=activation)
        if found.masked is not None:
            return self.ops.pool(found.masked(hidden), batch.segments, "max")
        return self.ops.normalize(hidden) if normalize and output != "sparse" else hidden

    def _finish(self, rows: Vectors, output: Output) -> Vectors:
        """What is left to do on the host."""
        if self.head is not None:
            has_two = len(self.config.score_token_ids) == 2
            return rows[:, :1] - rows[:, 1:] if has_two else rows
        for _ in range(self.outputs[output].num_logs):
            rows = np.log1p(np.maximum(rows, 0.0))
        return rows

    def _repeat(self, batch: TokenBatch, normalize: bool, output: Output) -> Callable[[], Vectors] | None:
        """A small batch by a recorded pass, which costs the host a tenth of the work; None if no recorded pass fits."""
        num_tokens, num_rows = len(batch.token_ids), len(batch.segments.lengths)
        if num_tokens > RECORDED_TOKENS[-1] or not self.encoder.is_recordable or batch.num_attended is not None:
            return None
        num_rows = num_tokens if self.outputs[output].is_of_tokens else num_rows
        key = (RECORDED_TOKENS[bisect_left(RECORDED_TOKENS, num_tokens)], batch.type_ids is not None, normalize, output)
        with self._recording:
            recorded = self._recorded.get(key) or self._record(*key)
            if recorded is None or not recorded.inputs.fill(batch.token_ids, batch.segments, batch.type_ids):
                return None
            return self.ops.fetch(self.ops.first_rows(recorded.repeat(), num_rows))

    def _record(self, num_tokens: int, has_types: bool, normalize: bool, output: Output) -> RecordedPass | None:
        inputs: Any = self.ops.encoder_inputs(num_tokens)
        if inputs is None:
            return None
        batch = TokenBatch(inputs.token_ids, inputs.segments, inputs.type_ids if has_types else None)
        repeat = self.ops.capture(lambda: self._compute(batch, normalize, output))
        if repeat is None:
            return None
        recorded = self._recorded[num_tokens, has_types, normalize, output] = RecordedPass(inputs, repeat)
        return recorded

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Vectors (batch, width) of ids and mask (batch, length). Masked tokens are not computed."""
        import torch

        mask = attention_mask.cpu().bool()
        lengths = mask.sum(1).tolist()
        packed = input_ids.cpu()[mask].to(torch.int64).numpy()
        return torch.from_numpy(self.run(TokenBatch(packed, Segments(tuple(lengths)))))

    def mean_pooling(self, token_embeddings: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Mean over the unmasked tokens of (batch, length, width)."""
        mask = attention_mask.unsqueeze(-1).to(token_embeddings.dtype)
        return (token_embeddings * mask).sum(1) / mask.sum(1).clamp(min=1e-9)


def locate(config: EmbedConfig, hub: HubConfig, progress: Progress) -> Path:
    """The converted directory of a model. The first use pulls and converts the model."""
    dtype = config.storage_dtype
    if dtype == "auto":
        dtype = fast_cpu_dtype() if config.dtype == "auto" else config.dtype
    source = resolve_model(config.model, hub, progress)
    keeps_quantised = backend_of(config).keeps_quantised

    def check(values: Mapping[str, Any], tensors: Sequence[TensorInfo]) -> None:  # before a conversion of minutes
        noted = encoder_class(Config(values), embeds=True).noted(Config(values))
        noted.check({info.name: info.shape for info in tensors})

    return ensure_converted(
        source, dtype=dtype, keep_quantized=keeps_quantised, hub=hub, progress=progress, check=check
    )


def backend_of(config: EmbedConfig) -> OpsBackend:
    device = choose_device(config.device).name
    return choose_backend(device, choose_dtype(config.dtype, device))


def load_tensors(loader: WeightLoader, config: EmbedConfig) -> Mapping[str, Any]:
    backend = backend_of(config)
    if backend.keeps_quantised:
        remark_blocks(config.weights, loader.metadata.model_name, loader.metadata.quant_types)
    return (
        loader.load_stored() if backend.reads_stored else loader.load_weights(keeps_quantised=backend.keeps_quantised)
    )


def kind_of(path: Path) -> str:
    """What the model of a directory or file is for: generation, embedding or cross-encoder, as its configuration
    says."""
    if is_converted(path):
        metadata = read_metadata(path)
        stated, embedding = metadata.config, metadata.embedding
    else:
        directory = transformer_directory(path) if path.is_dir() else path
        stated, embedding = (
            optional_json(directory / "config.json") or {},
            read_embedding(path) if path.is_dir() else None,
        )
        stated = {**stated, **cross_encoder_settings(path)} if stated else {}
    if not stated:
        from archerfish.store.sources import open_source

        source = open_source(path)
        stated, embedding = source.config, source.embedding
    config = Config(stated)
    if config.is_classifier and config.model_type in (*ENCODERS, *MODELS):
        return "cross-encoder"
    return (
        "embedding" if config.model_type in ENCODERS or embedding is not None or not config.is_causal else "generation"
    )
