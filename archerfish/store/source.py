"""What a reader of some format gives to the converter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from archerfish.errors import UnsupportedModelError
from archerfish.store.format import ITEM_BYTES, TensorInfo, make_info

if TYPE_CHECKING:
    import torch

    from archerfish.store.quants import QuantizedTensor


@dataclass(frozen=True)
class SourceTensor:
    """A tensor of a source. `load` reads it in the source's precision, dequantised if need be."""

    info: TensorInfo
    load: Callable[[], torch.Tensor]
    load_quantized: Callable[[], QuantizedTensor] | None = None


@dataclass(frozen=True)
class ModelSource:
    """An opened source."""

    kind: str  # safetensors, torch or gguf
    path: Path
    files: tuple[Path, ...]
    config: dict[str, Any]
    tensors: tuple[SourceTensor, ...]
    write_tokenizer: Callable[[Path], None]
    embedding: dict[str, Any] | None = None
    generation_config: dict[str, Any] | None = None
    skipped: tuple[str, ...] = field(default=())

    @property
    def num_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.files)

    def describe(self) -> dict[str, Any]:
        """What metadata.json says about the source."""
        files = [{"name": path.name, "bytes": path.stat().st_size} for path in self.files]
        return {"kind": self.kind, "name": self.path.name, "files": files, "skipped_buffers": list(self.skipped)}


def source_info(path: Path, name: Any, dtype: str, shape: Any) -> TensorInfo:
    """A TensorInfo of a source; a type that cannot be stored is refused."""
    if dtype not in ITEM_BYTES:
        raise UnsupportedModelError(f"{path}: the tensor {name!r} has the type {dtype}, which is not supported.")
    return make_info(str(path), name, dtype, shape)
