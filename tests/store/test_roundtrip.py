"""Converted directories: what is written is read again, and damage is found."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.torch import save_file

from archerfish.config import COMPRESSIONS, HubConfig
from archerfish.errors import (
    ArcherfishError,
    CorruptFileError,
    ModelNotFoundError,
    UnknownLayerError,
    UnsupportedModelError,
)
from archerfish.store import WeightLoader
from archerfish.store import loader as loader_module
from archerfish.store.format import Row, TensorInfo, arrow_writer
from archerfish.store.loader import arrow_record
from archerfish.store.metadata import CHECKSUM_END, CHECKSUM_KEY, read_metadata
from archerfish.store.sources import open_source
from tests.store.models import convert, cut_off, flip_byte, some_weights, write_model

DTYPES = ("float32", "float16", "bfloat16")
COLUMNS = (
    "layer_name",
    "shape",
    "dtype",
    "data",
    "num_params",
    "quant_type",
    "scales",
    "zero_points",
    "quant_axis",
    "group_size",
)


@pytest.mark.parametrize(("dtype", "compression"), [*zip(itertools.cycle(DTYPES), COMPRESSIONS, strict=False)])
def test_every_dtype_and_compression(
    source: Path, tmp_path: Path, hub: HubConfig, dtype: str, compression: str
) -> None:
    loader = convert(source, tmp_path / "out", dtype=dtype, compression=compression)
    narrowed = {name: tensor.to(getattr(torch, dtype)) for name, tensor in some_weights().items()}
    expected = {name: narrowed[name] if tensor.dim() > 1 else tensor for name, tensor in some_weights().items()}
    assert loader.get_layer_names() == sorted(expected, key=loader.get_layer_names().index)
    for name, tensor in loader.load_weights().items():
        assert tensor.dtype == expected[name].dtype
        assert torch.equal(tensor, expected[name])
    loader.verify()
    (tmp_path / "out" / "weights.arrow").unlink()
    for name, tensor in WeightLoader(tmp_path / "out", hub=hub).load_weights().items():
        assert torch.equal(tensor, expected[name])


def test_pyarrow_reads_both_files(converted: Path) -> None:
    table = pq.read_table(converted / "weights.parquet")
    with pa.memory_map(str(converted / "weights.arrow")) as file:
        mapped = pa.ipc.open_file(file).read_all()
    assert tuple(table.column_names) == tuple(mapped.column_names) == COLUMNS
    assert table.to_pylist() == mapped.to_pylist()
    row = next(row for row in table.to_pylist() if row["layer_name"] == "encoder.layer.0.output.dense.weight")
    assert (row["shape"], row["dtype"], row["num_params"], row["quant_type"]) == ([8, 16], "float32", 128, None)
    values = np.frombuffer(row["data"], np.float32).reshape(row["shape"])
    assert np.array_equal(values, some_weights()[row["layer_name"]].numpy())


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    arrays=st.lists(
        st.sampled_from(["float32", "float16", "float64", "int64", "int32", "int16", "int8", "uint8", "bool"]).flatmap(
            lambda kind: hnp.arrays(kind, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))
        ),
        min_size=1,
        max_size=6,
    ),
    names=st.sets(st.text(min_size=1, max_size=40).filter(lambda text: text.isprintable()), min_size=6, max_size=6),
    large=st.booleans(),
)
def test_tensors_round_trip_and_are_aligned(
    tmp_path_factory: pytest.TempPathFactory, arrays: list[Any], names: set[str], large: bool
) -> None:
    path = tmp_path_factory.mktemp("any") / "weights.arrow"
    rows = []
    for name, array in zip(sorted(names), arrays, strict=False):
        rows.append(Row(TensorInfo(name, array.dtype.name, array.shape), array))
    with arrow_writer(path, large=large) as write:
        for row in rows:
            write(row)
    data = path.read_bytes()
    assert pa.ipc.open_file(data).schema.field("data").type == (pa.large_binary() if large else pa.binary())
    for row, ((offset, num_bytes),) in zip(rows, arrow_record(path).spans, strict=True):
        assert offset % 64 == 0
        assert data[offset : offset + num_bytes] == row.data.tobytes()


def test_integers_and_odd_shapes_are_kept(tmp_path: Path) -> None:
    weights = {
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(2.5),
        "counts": torch.arange(5),
        "flags": torch.tensor([True, False]),
        "embeddings.position_ids": torch.arange(4),
    }
    loader = convert(write_model(tmp_path / "s", weights), tmp_path / "out", dtype="bfloat16")
    assert "embeddings.position_ids" not in loader.get_layer_names()
    assert loader.get_metadata()["source"].pop("skipped_buffers") == ["embeddings.position_ids"]
    assert "skipped_buffers" in WeightLoader(loader.directory).get_metadata()["source"]  # loaders share nothing
    found = loader.load_weights()
    assert found["counts"].tolist() == [0, 1, 2, 3, 4] and found["counts"].dtype == torch.int64
    assert found["flags"].tolist() == [True, False]
    assert found["empty"].shape == (0, 3) and found["scalar"].shape == ()
    assert found["scalar"].dtype == torch.float32 and found["scalar"].item() == 2.5


def test_loader_methods(converted: Path) -> None:
    loader = WeightLoader(str(converted / "weights.arrow"))
    assert sorted(loader.get_layer_names()) == sorted(some_weights())
    assert loader.config["hidden_size"] == 8
    assert loader.get_metadata()["total_parameters"] == 12 * 8 + 8 * 16 + 8 + 1
    data, scales, zero_points = loader.get_buffers("encoder.layer.0.output.dense.bias")
    assert data.readonly and scales is None and zero_points is None
    assert bytes(data) == some_weights()["encoder.layer.0.output.dense.bias"].numpy().tobytes()
    with pytest.raises(UnknownLayerError, match=r"encoder\.layer\.0\.output\.dense\.bias"):
        loader.get_layer("encoder.layer.0.output.dense.bais")
    with pytest.raises(UnknownLayerError, match="not quantised"):
        loader.get_quantized("scale")


def test_tensors_outlive_their_loader(converted: Path) -> None:
    with WeightLoader(converted) as loader:
        tensor = loader.get_layer("encoder.layer.0.output.dense.bias")
    del loader
    assert torch.equal(tensor, some_weights()["encoder.layer.0.output.dense.bias"])
    closed = WeightLoader(converted)
    closed.close()
    with pytest.raises(ValueError, match="closed"):
        closed.get_layer("scale")


def test_incomplete_directories_are_refused(tmp_path: Path, source: Path, converted: Path) -> None:
    for name in ("nowhere", "weights.arrow"):
        with pytest.raises(ModelNotFoundError, match="does not exist"):
            WeightLoader(tmp_path / name)
    with pytest.raises(ModelNotFoundError, match=r"no metadata\.json"):
        WeightLoader(source)
    for name in ("weights.arrow", "weights.parquet"):
        (converted / name).unlink()
    with pytest.raises(CorruptFileError, match=r"neither weights\.arrow nor weights\.parquet"):
        WeightLoader(converted)


# A truncated or altered file raises a CorruptFileError that names the file


def test_flipped_byte_in_metadata_is_found(converted: Path) -> None:
    num_bytes = (converted / "metadata.json").stat().st_size
    check_flipped_bytes(converted, "metadata.json", range(0, num_bytes, 7))


def check_flipped_bytes(converted: Path, name: str, positions: Sequence[int]) -> None:
    good = (converted / name).read_bytes()
    for position in positions:
        flip_byte(converted / name, position)
        with pytest.raises(CorruptFileError, match=re.escape(name)):
            WeightLoader(converted)
        (converted / name).write_bytes(good)


def test_flipped_byte_outside_tensors_is_found_on_open(converted: Path) -> None:
    record = read_metadata(converted).files["weights.arrow"]
    inside = {at for ((offset, num_bytes),) in record.spans for at in range(offset, offset + num_bytes)}
    check_flipped_bytes(converted, "weights.arrow", [at for at in range(record.num_bytes) if at not in inside][::41])


@pytest.mark.parametrize("name", ["weights.arrow", "weights.parquet", "tokenizer/tokenizer.json"])
def test_verify_checks_all_files(converted: Path, name: str) -> None:
    WeightLoader(converted).verify()
    tensor_byte = read_metadata(converted).files["weights.arrow"].spans[0][0].offset + 3
    flip_byte(converted / name, tensor_byte if name == "weights.arrow" else 50)
    seen: list[int] = []
    with pytest.raises(CorruptFileError, match=f"{name} was altered"):
        WeightLoader(converted).verify(lambda done, total, what: seen.append(done))
    assert seen


@pytest.mark.parametrize("load", [WeightLoader.load_stored, WeightLoader.load_weights, WeightLoader.verify])
def test_altered_weights_are_found_and_the_tensor_is_named(converted: Path, load: Callable[[Any], Any]) -> None:
    record, infos = read_metadata(converted).files["weights.arrow"], WeightLoader(converted).get_layer_names()
    for name, (span,) in zip(infos, record.spans, strict=True):
        flip_byte(converted / "weights.arrow", span.offset + span.num_bytes - 1)
        with pytest.raises(
            CorruptFileError, match=rf"weights\.arrow was altered: .* {name!r} .* Convert the model again"
        ):
            load(WeightLoader(converted))
        flip_byte(converted / "weights.arrow", span.offset + span.num_bytes - 1)
    load(WeightLoader(converted))


def test_loading_checks_a_random_sample_of_bounded_size(source: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("archerfish.store.format.PIECE_BYTES", 16)
    monkeypatch.setattr("archerfish.store.loader.SAMPLE_BYTES", 64)
    loader = convert(source, tmp_path / "pieces", dtype="float32")
    crc32_at, seen = loader_module.crc32_at, list[Any]()

    def noted(memory: Any, *piece: int) -> int:
        seen.append(piece)
        return crc32_at(memory, *piece)

    monkeypatch.setattr(loader_module, "crc32_at", noted)
    for _ in range(20):
        loader.load_stored()
    assert 20 * 48 < sum(size for _, size in seen) <= 20 * 64 and len(set(seen)) > 5


def test_a_store_without_checksums_of_tensors_is_loaded(converted: Path) -> None:
    rewrite(converted, lambda d: d["files"]["weights.arrow"].pop("piece_crc32s"))
    assert WeightLoader(converted).load_weights().keys() == some_weights().keys()


@pytest.mark.parametrize("num_bytes", [0, 1, 6, 100, -100, -1])
@pytest.mark.parametrize("name", ["metadata.json", "weights.arrow"])
def test_truncated_files_are_refused(converted: Path, name: str, num_bytes: int) -> None:
    cut_off(converted / name, num_bytes)
    with pytest.raises(CorruptFileError, match=re.escape(name)):
        WeightLoader(converted)


def rewrite(directory: Path, change: object) -> None:
    """Change values of metadata.json and give it a matching checksum, as an attacker would."""
    path = directory / "metadata.json"
    document = json.loads(path.read_text())
    del document["checksum"]
    change(document)  # type: ignore[operator]
    body = json.dumps(document)[:-1].encode()
    path.write_bytes(body + CHECKSUM_KEY + hashlib.sha256(body).hexdigest().encode() + CHECKSUM_END)


CHANGES = {
    "offset beyond the end": lambda d: d["files"]["weights.arrow"]["buffers"][0].__setitem__(0, 1 << 40),
    "negative offset": lambda d: d["files"]["weights.arrow"]["buffers"][0].__setitem__(0, -64),
    "not aligned": lambda d: d["files"]["weights.arrow"]["buffers"][0].__setitem__(0, 8),
    "wrong length": lambda d: d["files"]["weights.arrow"]["buffers"][0].__setitem__(1, 4),
    "too few buffers": lambda d: d["files"]["weights.arrow"]["buffers"].pop(),
    "no offsets": lambda d: d["files"]["weights.arrow"]["buffers"].__setitem__(0, []),
    "size is text": lambda d: d["files"]["weights.arrow"].__setitem__("bytes", "1"),
    "shape is huge": lambda d: d["tensors"][0].__setitem__(2, [1 << 40, 1 << 40]),
    "shape is negative": lambda d: d["tensors"][0].__setitem__(2, [-1]),
    "shape of floats": lambda d: d["tensors"][0].__setitem__(2, [1.5]),
    "unknown type": lambda d: d["tensors"][0].__setitem__(1, "complex64"),
    "twice": lambda d: d["tensors"].__setitem__(0, d["tensors"][1]),
    "name is a number": lambda d: d["tensors"][0].__setitem__(0, 3),
    "quantised without scales": lambda d: d["tensors"][1].extend(["Q4_0", 1, 8]),
    "impossible axis": lambda d: d["tensors"][1].extend(["Q4_0", 7, 32]),
    "too few checksums": lambda d: d["files"]["weights.arrow"]["piece_crc32s"].pop(),
    "count": lambda d: d.__setitem__("num_tensors", 3),
    "config is a list": lambda d: d.__setitem__("config", []),
    "no tensors": lambda d: d.__setitem__("tensors", None),
    "other format": lambda d: d.__setitem__("format", "x"),
    "dtype": lambda d: d.__setitem__("dtype", "int3"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_impossible_metadata_values_are_refused(converted: Path, what: str) -> None:
    rewrite(converted, CHANGES[what])
    with pytest.raises(CorruptFileError):
        WeightLoader(converted)


def test_newer_format_version_is_refused(converted: Path) -> None:
    rewrite(converted, lambda d: d.__setitem__("format_version", 99))
    with pytest.raises(UnsupportedModelError, match="version 99"):
        WeightLoader(converted)


def refuse(source: Path, target: Path) -> ArcherfishError:
    with pytest.raises(ArcherfishError) as caught:
        convert(source, target)
    assert not target.exists()
    assert not list(target.parent.glob(f".{target.name}*"))
    return caught.value


@pytest.mark.parametrize("num_bytes", [0, 5, 8, 60, -1, -200])
def test_truncated_safetensors_is_refused(source: Path, tmp_path: Path, num_bytes: int) -> None:
    cut_off(source / "model.safetensors", num_bytes)
    error = refuse(source, tmp_path / "out")
    assert isinstance(error, CorruptFileError) and "model.safetensors" in str(error)


def test_flipped_byte_in_safetensors_header(source: Path) -> None:
    path = source / "model.safetensors"
    good = path.read_bytes()
    num_refused = 0
    for position in range(0, 8 + struct.unpack("<Q", good[:8])[0], 5):
        flip_byte(path, position)
        try:
            open_source(source)  # a changed byte of a name or of a blank leaves a sound file
        except (CorruptFileError, UnsupportedModelError):
            num_refused += 1
        path.write_bytes(good)
    assert num_refused > 10


def test_inconsistent_shards_are_refused(source: Path, tmp_path: Path) -> None:
    weights = some_weights()
    names = list(weights)
    (source / "model.safetensors").unlink()
    save_file({name: weights[name] for name in names[:2]}, source / "model-1.safetensors")
    save_file({name: weights[name] for name in names[2:]}, source / "model-2.safetensors")
    weight_map = {name: f"model-{1 if name in names[:2] else 2}.safetensors" for name in names}
    index = source / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert sorted(convert(source, tmp_path / "good").get_layer_names()) == sorted(names)
    for file, message in (
        ("model-1.safetensors", "no tensor 'missing'"),
        ("model-3.safetensors", "model-3.safetensors is missing"),
        ("../model-1.safetensors", "not a plain file name"),
    ):
        index.write_text(json.dumps({"weight_map": {**weight_map, "missing": file}}))
        assert message in str(refuse(source, tmp_path / "out"))
    save_file(weights, source / "model-1.safetensors")
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert "in both" in str(refuse(source, tmp_path / "out"))


def test_broken_or_missing_files_are_refused(source: Path, tmp_path: Path) -> None:
    (source / "config.json").write_text("{")
    assert "config.json is not valid JSON" in str(refuse(source, tmp_path / "out"))
    (source / "config.json").unlink()
    assert "no config.json" in str(refuse(source, tmp_path / "out"))
    (source / "model.safetensors").unlink()
    assert "no weights" in str(refuse(source, tmp_path / "out"))


def test_unsupported_dtype_is_refused(tmp_path: Path) -> None:
    source = write_model(tmp_path / "s", {"w": torch.zeros(4, dtype=torch.float8_e4m3fn)})
    error = refuse(source, tmp_path / "out")
    assert isinstance(error, UnsupportedModelError) and "'w'" in str(error)
