"""A truncated or altered file raises a CorruptFileError that names the file."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from archerfish.errors import ArcherfishError, CorruptFileError, UnsupportedModelError
from archerfish.store import WeightLoader
from archerfish.store.metadata import CHECKSUM_END, CHECKSUM_KEY, read_metadata
from archerfish.store.sources import open_source
from tests.store.models import convert, cut_off, flip_byte, some_weights, write_model


def test_flipped_byte_in_metadata_is_found(converted: Path) -> None:
    path = converted / "metadata.json"
    good = path.read_bytes()
    for position in range(0, len(good), 7):
        flip_byte(path, position)
        with pytest.raises(CorruptFileError, match=r"metadata\.json"):
            WeightLoader(converted)
        path.write_bytes(good)
    for num_bytes in (0, 1, len(good) // 2, len(good) - 1):
        path.write_bytes(good[:num_bytes])
        with pytest.raises(CorruptFileError, match=r"metadata\.json"):
            WeightLoader(converted)


def test_flipped_byte_outside_tensors_is_found_on_open(converted: Path) -> None:
    path = converted / "weights.arrow"
    good = path.read_bytes()
    spans = read_metadata(converted).files["weights.arrow"].spans
    inside = {at for row in spans for at in range(row.data.offset, row.data.offset + row.data.num_bytes)}
    for position in [at for at in range(len(good)) if at not in inside][::41]:
        flip_byte(path, position)
        with pytest.raises(CorruptFileError, match=r"weights\.arrow"):
            WeightLoader(converted)
        path.write_bytes(good)


@pytest.mark.parametrize("name", ["weights.arrow", "weights.parquet", "tokenizer/tokenizer.json"])
def test_verify_checks_all_files(converted: Path, name: str) -> None:
    WeightLoader(converted).verify()
    tensor_byte = read_metadata(converted).files["weights.arrow"].spans[0].data.offset + 3
    flip_byte(converted / name, tensor_byte if name == "weights.arrow" else 50)
    seen: list[int] = []
    with pytest.raises(CorruptFileError, match=f"{name} was altered"):
        WeightLoader(converted).verify(lambda done, total, what: seen.append(done))
    assert seen


@pytest.mark.parametrize("num_bytes", [0, 6, 100, -1])
def test_truncated_arrow_is_refused(converted: Path, num_bytes: int) -> None:
    cut_off(converted / "weights.arrow", num_bytes)
    with pytest.raises(CorruptFileError, match=r"weights\.arrow"):
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
        ("model-1.safetensors", "no tensor 'missing'"), ("model-3.safetensors", "model-3.safetensors is missing"),
        ("../model-1.safetensors", "not a plain file name"),
    ):  # fmt: skip
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
