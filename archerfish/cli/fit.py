"""Whether a model fits into memory, from the headers of its files alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from archerfish.config import EngineConfig, HubConfig
from archerfish.errors import ArcherfishError, DeviceError, UnreachableError, UnsupportedModelError
from archerfish.types import DTYPE_BYTES

# Memory besides the weights. CPU: Python, torch and batches (340-430 MB measured with MiniLM). GPU: context and workspaces.
CPU_OVERHEAD_BYTES = 500_000_000
GPU_OVERHEAD_BYTES = 1_000_000_000
SPARE = 0.95  # usable share of the available memory
# Built-in models are judged before they are downloaded.
KNOWN_PARAMETERS = {"all-minilm-l6-v2": 22_713_216, "smollm2-135m-instruct": 134_515_008}


@dataclass(frozen=True)
class ModelSize:
    """Parameters of a model, and the bytes of its weight files; 0 when unknown."""

    name: str
    num_parameters: int
    file_bytes: int
    remark: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)

    def weight_bytes(self, dtype: str) -> int:
        """Bytes in memory in a type, or in a weight format with the rest in two bytes; 0: unknown for this model."""
        return self.num_parameters * DTYPE_BYTES[dtype] if dtype in DTYPE_BYTES else self._format_bytes(dtype)

    def _format_bytes(self, weight_format: str) -> int:
        from archerfish.kernels.formats import choose_format
        from archerfish.models.adapter import model_class
        from archerfish.models.config import Config

        config = Config(self.config)
        try:
            return sum(model_class(config).tensor_bytes(config, "bfloat16", choose_format(weight_format)).values())
        except UnsupportedModelError:
            return 0


@dataclass(frozen=True)
class Verdict:
    """Whether a model fits, and a phrase for the report."""

    fits: bool
    text: str


def judge(weight_bytes: int, available_bytes: int, total_bytes: int, overhead_bytes: int) -> Verdict:
    """Compare the memory that a model needs with the memory of the machine."""
    needed = weight_bytes + overhead_bytes
    if needed <= available_bytes * SPARE:
        return Verdict(True, "fits")
    needs = f"needs {needed / 1e9:.1f} GB"
    if needed <= total_bytes * SPARE:
        return Verdict(False, f"does not fit now: {needs}, {available_bytes / 1e9:.1f} GB free")
    return Verdict(False, f"does not fit: {needs}, there are {total_bytes / 1e9:.1f} GB")


def measure(name: str, hub: HubConfig) -> ModelSize:
    """The size of a model from its headers, or for a built-in model that is not on this machine from a table."""
    from archerfish.store.names import BUILTIN_MODELS, resolve_model

    try:
        path = resolve_model(name, hub.replace(offline=True))
    except UnreachableError:
        builtin = BUILTIN_MODELS.get(name.lower())
        if builtin is None:
            return ModelSize(name, 0, 0, f"not on this machine; `archerfish pull {name}` gets it")
        return ModelSize(name, KNOWN_PARAMETERS.get(builtin.name, 0), builtin.wheel_bytes, "not pulled yet")
    return measure_path(name, path)


def measure_path(name: str, path: Path) -> ModelSize:
    from archerfish.store.metadata import is_converted, read_metadata
    from archerfish.store.sources import open_source

    if is_converted(path):
        metadata = read_metadata(path)
        largest = max((record.num_bytes for file, record in metadata.files.items() if file.startswith("weights.")), default=0)
        return ModelSize(name, metadata.total_parameters, largest, f"converted, {metadata.dtype}", metadata.config)
    source = open_source(path)
    num_parameters = sum(tensor.info.num_params for tensor in source.tensors)
    return ModelSize(name, num_parameters, source.num_bytes, source.kind, source.config)


def kv_tokens(found: ModelSize, device: str, dtype: str) -> int | None:
    """Tokens whose KV an LLMEngine with default options has memory for; None for models without KV."""
    from archerfish.models.adapter import KVShape, model_class
    from archerfish.models.config import Config
    from archerfish.runtime.kv_pool import plan_memory

    config = Config(found.config)
    try:
        shape = model_class(config).memory_shape(config)
    except UnsupportedModelError:
        return None
    if not isinstance(shape, KVShape):
        return None
    try:
        return plan_memory(EngineConfig(), shape, device, dtype, found.weight_bytes(dtype)).num_tokens
    except DeviceError:
        return 0


def measure_all(names: Sequence[str], hub: HubConfig) -> list[ModelSize]:
    """Sizes of several models. The remark of a model with damaged files says what is wrong."""
    found = []
    for name in names:
        try:
            found.append(measure(name, hub))
        except ArcherfishError as error:
            found.append(ModelSize(name, 0, 0, error.message))
    return found
