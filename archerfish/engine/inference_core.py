"""InferenceCore: an encoder on a device, from token ids to vectors or scores."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast, get_args

import numpy as np
import numpy.typing as npt

from archerfish.config import EmbedConfig, HubConfig
from archerfish.errors import StoppedError, UnsupportedModelError
from archerfish.kernels.encoding import EncoderInputs
from archerfish.kernels.formats import PLAIN, choose_format
from archerfish.kernels.machine import fast_cpu_dtype
from archerfish.kernels.ops import Pooling, Segments
from archerfish.kernels.room import check_room
from archerfish.kernels.select import OpsBackend, choose_backend, choose_device, choose_dtype, choose_ops
from archerfish.layers.weights import Weights
from archerfish.models.adapter import ENCODERS, TokenBatch, encoder_class
from archerfish.models.config import Config
from archerfish.remarks import remark_blocks
from archerfish.store.converter import ensure_converted
from archerfish.store.loader import WeightLoader
from archerfish.store.metadata import is_converted, read_metadata
from archerfish.store.names import resolve_model
from archerfish.store.source import optional_json
from archerfish.types import Progress

if TYPE_CHECKING:
    import torch

Vectors = npt.NDArray[np.float32]
RECORDED_TOKENS = (16, 32, 64, 128, 256, 512, 1024)  # sizes of the recorded passes, where the backend can record
REHEARSED_TOKENS = (1, 2, *(2**power + more for power in range(2, 9) for more in (0, 1)))  # no kernel changes elsewhere


class RecordedPass(NamedTuple):
    """A recorded pass over a fixed number of tokens: fill its inputs, then call `repeat`."""

    inputs: EncoderInputs[Any]
    repeat: Callable[[], Any]


class InferenceCore:
    """One encoder on one device. `run` takes packed batches, `forward` padded ones as other libraries use them."""

    def __init__(
        self, weights: Mapping[str, Any], config: Mapping[str, Any], device: str = "auto", *, dtype: str = "auto",
        pooling: str | None = None, weight_format: str = "auto",
    ) -> None:
        """`config` is the model's config.json, or the metadata of a converted model, which also states the pooling."""
        stated: Mapping[str, Any] = config.get("embedding") or {}
        pooling = pooling or str(stated.get("pooling_mode", "mean"))
        if pooling not in get_args(Pooling):
            raise UnsupportedModelError(f"Unknown pooling {pooling!r}.", hint=f"Known: {', '.join(get_args(Pooling))}.")
        self.config = Config(config.get("config", config))
        self.device = choose_device(device).name
        self.dtype = choose_dtype(dtype, self.device)
        self.ops = choose_ops(self.device, self.dtype)
        self.ops.rounds_rows = True
        self.pooling = cast(Pooling, pooling)
        architecture = encoder_class(self.config)
        chosen = choose_format(weight_format)
        self._format = chosen.name
        num_bytes = architecture.copied_bytes(self.config, self.dtype, chosen, with_tables=self.device != "cpu")
        ways_out = [*(["weights=int8"] if chosen is PLAIN else []), "a smaller model"]
        check_room("The model", self.device, {"weights": num_bytes}, ways_out)
        everything = Weights(weights, self.ops, weight_format=chosen)
        has_prefix = any(name.startswith(f"{architecture.prefix}.") for name in weights)
        with self.ops.allocating("The model"):
            self.encoder = architecture(everything.scope(architecture.prefix) if has_prefix else everything, self.config)
            self.head = architecture.head(everything, self.config) if self.config.is_classifier else None
        self.is_closed = False
        self.max_positions = architecture.max_positions(self.config)
        self.dimension = self.encoder.shape.width
        self._recorded: dict[tuple[int, bool, bool], RecordedPass] = {}
        self._replayed = {
            is_scaled: self.ops.replayed(partial(self._compute, normalize=is_scaled)) for is_scaled in (False, True)
        }
        self._recording = threading.Lock()  # held from filling the inputs until the results are being copied to the host

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
            described = self.config.values, self.dtype, self.pooling, self._format
            with self.ops.starting(repr(described), self._rehearse, progress):
                pass

    def _rehearse(self) -> None:
        """Run passes of each kind: see `Ops.starting`."""
        with self.ops.computing():
            for normalize in (False, True):
                for num in REHEARSED_TOKENS:
                    ids = np.zeros(min(num, self.max_positions), dtype=np.int64)
                    for types in (None, ids):
                        self._compute(TokenBatch(ids, Segments((len(ids),)), types), normalize)
                for num in RECORDED_TOKENS if self.encoder.is_recordable else ():
                    inputs: Any = self.ops.encoder_inputs(num)
                    for types in (None, inputs.type_ids):
                        self._compute(TokenBatch(inputs.token_ids, inputs.segments, types), normalize)

    def run(self, batch: TokenBatch, *, normalize: bool = False) -> Vectors:
        """One vector per sequence; for a cross-encoder one row of raw scores per sequence."""
        return self.start(batch, normalize=normalize)()

    def run_tokens(self, batch: TokenBatch) -> Vectors:
        """One vector per token."""
        with self.ops.computing():
            return self.ops.to_numpy(self.encoder.forward(batch))[: len(batch.token_ids)]  # a backend may add empty rows

    def start(self, batch: TokenBatch, *, normalize: bool = False) -> Callable[[], Vectors]:
        """Begin what `run` does; calling the result waits for the vectors. On a CPU they are computed at once."""
        if self.is_closed:
            raise StoppedError("This model has been closed.", hint="Load it again.")
        with self.ops.computing():
            if not self.ops.is_async:
                is_replayed = self.encoder.is_recordable
                found = self._replayed[normalize](batch) if is_replayed else self._compute(batch, normalize)
                vectors = self.ops.to_numpy(found)
                return lambda: vectors
            return self._repeat(batch, normalize) or self.ops.fetch(self._compute(batch, normalize))

    def _compute(self, batch: TokenBatch, normalize: bool) -> Any:
        """Rows in float32."""
        hidden = self.encoder.forward(batch)
        if self.head is not None:
            return self.head(self.ops.pool(hidden, batch.segments, "cls"))
        pooled = self.ops.pool(hidden, batch.segments, self.pooling)
        return self.ops.normalize(pooled) if normalize else pooled

    def _repeat(self, batch: TokenBatch, normalize: bool) -> Callable[[], Vectors] | None:
        """A small batch by a recorded pass, which costs the host a tenth of the work; None if no recorded pass fits."""
        num_tokens, num_rows = len(batch.token_ids), len(batch.segments.lengths)
        if num_tokens > RECORDED_TOKENS[-1] or not self.encoder.is_recordable:
            return None
        key = (RECORDED_TOKENS[bisect_left(RECORDED_TOKENS, num_tokens)], batch.type_ids is not None, normalize)
        with self._recording:
            recorded = self._recorded.get(key) or self._record(*key)
            if recorded is None or not recorded.inputs.fill(batch.token_ids, batch.segments, batch.type_ids):
                return None
            return self.ops.fetch(self.ops.first_rows(recorded.repeat(), num_rows))

    def _record(self, num_tokens: int, has_types: bool, normalize: bool) -> RecordedPass | None:
        inputs: Any = self.ops.encoder_inputs(num_tokens)
        if inputs is None:
            return None
        batch = TokenBatch(inputs.token_ids, inputs.segments, inputs.type_ids if has_types else None)
        repeat = self.ops.capture(lambda: self._compute(batch, normalize))
        if repeat is None:
            return None
        recorded = self._recorded[num_tokens, has_types, normalize] = RecordedPass(inputs, repeat)
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
    return ensure_converted(source, dtype=dtype, keep_quantized=keeps_quantised, hub=hub, progress=progress)


def backend_of(config: EmbedConfig) -> OpsBackend:
    device = choose_device(config.device).name
    return choose_backend(device, choose_dtype(config.dtype, device))


def load_tensors(loader: WeightLoader, config: EmbedConfig) -> Mapping[str, Any]:
    backend = backend_of(config)
    if backend.keeps_quantised:
        remark_blocks(config.weights, loader.metadata.model_name, loader.metadata.quant_types)
    return loader.load_stored() if backend.reads_stored else loader.load_weights(keeps_quantised=backend.keeps_quantised)


def kind_of(path: Path) -> str:
    """What the model of a directory or file is for: generation, embedding or cross-encoder, as its configuration says."""
    stated = read_metadata(path).config if is_converted(path) else optional_json(path / "config.json")
    if not stated:
        from archerfish.store.sources import open_source

        stated = open_source(path).config
    config = Config(stated)
    if config.model_type not in ENCODERS:
        return "generation"
    return "cross-encoder" if config.is_classifier else "embedding"
