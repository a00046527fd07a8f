"""A converted directory with random weights, for measuring starts of models that are not here."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any


def write_random_store(source: Path, target: Path, options: dict[str, Any]) -> int:
    """Write a converted directory for a config.json, one tensor in memory at a time; returns its bytes. Runs in the worker."""
    import torch

    from archerfish.engine.llm_loading import read_json
    from archerfish.kernels.select import choose_ops
    from archerfish.models.adapter import model_class
    from archerfish.models.config import Config
    from archerfish.store.converter import stored_dtype_of
    from archerfish.store.files import check_free_space, new_directory, write_errors, write_file
    from archerfish.store.format import ARROW_NAME, ITEM_BYTES, METADATA_NAME, Row, TensorInfo, as_bytes
    from archerfish.store.loader import write_arrow
    from archerfish.store.metadata import StoreMetadata, encode_metadata

    values, dtype = read_json(source / "config.json"), options["dtype"]
    config, ops = Config(values), choose_ops(options["device"], dtype)
    infos = tuple(
        TensorInfo(name, stored_dtype_of("float32", shape, dtype), shape)
        for name, shape in model_class(config).dummy_shapes(config).items()
    )
    check_free_space(target, sum(info.num_params * ITEM_BYTES[info.dtype] for info in infos))

    def random_row(info: TensorInfo) -> Row:
        made = ops.random_weights({info.name: info.shape})[info.name]
        return Row(info, as_bytes(made.to("cpu", getattr(torch, info.dtype))))

    with new_directory(target) as temporary, write_errors(target):
        record = write_arrow(temporary / ARROW_NAME, infos, map(random_row, infos))
        metadata = StoreMetadata(
            model_name=target.name, dtype=dtype, created=datetime.now(UTC).isoformat(timespec="seconds"),
            source={"kind": "random", "name": source.name}, config=values, tensors=infos,
            files={ARROW_NAME: record},
        )  # fmt: skip
        write_file(temporary / METADATA_NAME, encode_metadata(metadata))
    return record.num_bytes
