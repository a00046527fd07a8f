"""Graphs for the peers that need one, exported once from the model's own torch code and kept in the cache."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any


def exported_path(source: Path, cache_dir: Path, suffix: str) -> Path:
    """Where the exported graph of a source is kept; another source or other files have another place."""
    files = sorted((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in source.iterdir() if path.is_file())
    digest = hashlib.sha256(repr((str(source.absolute()), files)).encode()).hexdigest()[:16]
    return cache_dir / "bench" / f"{source.name}-{digest}{suffix}"


def pooled_model(source: Path) -> Any:
    """The encoder with its pooling and normalisation, as one torch module over (ids, mask)."""
    import torch
    from transformers import AutoModel

    from archerfish.store.source import read_embedding

    embedding = read_embedding(source) or {}
    use_cls, scale = embedding.get("pooling") == "cls", bool(embedding.get("normalize"))
    encoder = AutoModel.from_pretrained(source, dtype=torch.float32, attn_implementation="eager").eval()

    class Pooled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = encoder

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
            weights = attention_mask.unsqueeze(-1).to(hidden.dtype)
            pooled = hidden[:, 0] if use_cls else (hidden * weights).sum(1) / weights.sum(1).clamp(min=1e-9)
            return torch.nn.functional.normalize(pooled, dim=-1) if scale else pooled

    return Pooled().eval()


def example_inputs() -> tuple[Any, Any]:
    import torch

    ids = torch.randint(5, 1000, (2, 9))
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    return ids, mask


def export_openvino(source: Path, path: Path) -> None:
    """Write OpenVINO's graph; weights stay float32 and are rounded by the runtime's own precision hint."""
    import openvino

    ids, mask = example_inputs()
    graph = openvino.convert_model(pooled_model(source), example_input={"input_ids": ids, "attention_mask": mask})
    path.parent.mkdir(parents=True, exist_ok=True)
    openvino.save_model(graph, path, compress_to_fp16=False)


def export_onnx(source: Path, path: Path) -> None:
    """Write the ONNX graph with free batch and length."""
    import torch

    free = {0: "batch", 1: "length"}
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.onnx.export(
        pooled_model(source),
        example_inputs(),
        str(path),
        input_names=["input_ids", "attention_mask"],
        output_names=["vectors"],
        dynamic_axes={"input_ids": free, "attention_mask": free, "vectors": {0: "batch"}},
        opset_version=17,
        dynamo=False,
    )
