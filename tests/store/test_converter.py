"""Conversions that end well, end badly, or are cut short."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from safetensors.torch import save_file

from archerfish import errors
from archerfish.config import ConversionConfig
from archerfish.store import ModelConverter, WeightLoader, loader
from archerfish.store.converter import fingerprint_parts
from archerfish.store.format import read_parquet_rows
from archerfish.store.sources import open_source
from tests.models.recurring import SIZES, blink_weights
from tests.store.gguf_models import make_tensors, write_gguf
from tests.store.models import (
    MATRIX,
    convert,
    file_size_limit,
    flip_byte,
    snapshot,
    some_weights,
    write_json,
    write_model,
)


def leftovers(target: Path) -> list[str]:
    return [path.name for path in target.parent.iterdir() if path.name.startswith(f".{target.name}")]


def test_conversion_result(source: Path, tmp_path: Path) -> None:
    seen: list[str] = []
    result = ModelConverter(ConversionConfig(use_float16=True, compression="zstd")).convert(
        model_name_or_path=str(source),
        output_dir=str(tmp_path / "a" / "out"),
        progress=lambda done, total, what: seen.append(what),
    )
    assert result.success and result.validation_passed and result.error_message is None
    assert result.model_name == "source" and result.total_parameters == 233
    assert result.parquet_path is not None and result.parquet_path.stat().st_size == pytest.approx(
        result.file_size_mb * 1e6
    )
    assert (
        result.compression_ratio == (source / "model.safetensors").stat().st_size / result.parquet_path.stat().st_size
    )
    assert result.tokenizer_path is not None and (result.tokenizer_path / "tokenizer.json").is_file()
    assert result.arrow_path.is_file() and result.metadata_path.is_file() and result.conversion_time_sec > 0
    assert any(what.startswith("writing") for what in seen) and any(what.startswith("validating") for what in seen)
    assert WeightLoader(result.output_dir).get_metadata()["dtype"] == "float16"
    assert leftovers(result.output_dir) == []


def test_without_parquet(source: Path, tmp_path: Path) -> None:
    result = ModelConverter(ConversionConfig(write_parquet=False)).convert(source, tmp_path / "out")
    assert result.parquet_path is None and not (tmp_path / "out" / "weights.parquet").exists()
    assert result.file_size_mb * 1e6 == pytest.approx(result.arrow_path.stat().st_size)


def test_too_large_tensor_for_parquet_is_refused(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("archerfish.store.converter.LARGE_TENSOR_BYTES", 100)
    with pytest.raises(errors.UnsupportedModelError, match="write_parquet=False"):
        convert(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_existing_output_needs_overwrite(source: Path, converted: Path, tmp_path: Path) -> None:
    before = snapshot(converted)
    with pytest.raises(errors.InvalidOptionError, match="already holds a model"):
        convert(source, converted)
    assert snapshot(converted) == before
    assert convert(source, converted, dtype="bfloat16", overwrite=True).get_layer(MATRIX).dtype == torch.bfloat16
    assert leftovers(converted) == []
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(errors.InvalidOptionError, match="holds other files"):
        convert(source, tmp_path / "mine", overwrite=True)
    (tmp_path / "empty").mkdir()
    assert convert(source, tmp_path / "empty").get_layer_names()
    with pytest.raises(errors.InvalidOptionError, match="is a file"):
        convert(source, tmp_path / "mine" / "thesis.txt")


def test_unwritable_output_raises_write_error(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(errors.WriteError, match="Cannot write"):
        convert(source, tmp_path / "file" / "out")


@pytest.mark.parametrize("num_bytes", [0, 700, 2000, 3000])
def test_full_disk_leaves_the_old_directory(source: Path, converted: Path, num_bytes: int) -> None:
    before = snapshot(converted)
    with file_size_limit(num_bytes), pytest.raises(errors.WriteError, match="File too large"):
        convert(source, converted, overwrite=True)
    assert snapshot(converted) == before and leftovers(converted) == []


def test_too_little_disk_space_is_refused_first(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=5000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(errors.WriteError, match="MB free"):
        convert(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("step", ["writing", "validating"])
def test_interruption_leaves_the_old_directory(
    source: Path, converted: Path, error: type[BaseException], step: str
) -> None:
    before = snapshot(converted)

    def interrupt(done: int, total: int, what: str) -> None:
        if what.startswith(step) and done == 2:
            raise error

    with pytest.raises(error):
        convert(source, converted, progress=interrupt, overwrite=True)
    assert snapshot(converted) == before and leftovers(converted) == []


KILLED = """
import os, signal, sys
import numpy, pyarrow.parquet, tokenizers  # once for all: a process is forked for each point
from archerfish.config import ConversionConfig
from archerfish.store import ModelConverter, files
rename, renames = files.Path.rename, []
def die():
    os.kill(os.getpid(), signal.SIGKILL)
def convert(source, target, point):
    def progress(done, total, what):
        if what.startswith(point) and done == 2:
            die()
    def watched(self, other):
        renames.append(other)
        if point == f"before rename {len(renames)}":
            die()
        rename(self, other)
        if point == f"after rename {len(renames)}":
            die()
    files.Path.rename = watched
    ModelConverter(ConversionConfig(dtype="bfloat16", overwrite=True)).convert(source, target, progress=progress)
source, folder, *points = sys.argv[1:]
for point in points:
    child = os.fork()
    if not child:
        convert(source, os.path.join(folder, point), point)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL, point
"""
KILL_POINTS = ("writing", "validating", "before rename 1", "after rename 1", "after rename 2")


def test_kill_leaves_the_old_or_the_new_directory(source: Path, converted: Path, tmp_path: Path) -> None:
    for point in KILL_POINTS:
        shutil.copytree(converted, tmp_path / point)
    subprocess.run([sys.executable, "-c", KILLED, str(source), str(tmp_path), *KILL_POINTS], check=True)
    for point in KILL_POINTS:
        loader = WeightLoader(tmp_path / point)
        loader.verify()
        if point == "after rename 2":
            assert loader.get_layer(MATRIX).dtype == torch.bfloat16
        else:
            assert snapshot(tmp_path / point) == snapshot(converted)
        assert (
            convert(source, tmp_path / point, dtype="float16", overwrite=True).get_layer(MATRIX).dtype == torch.float16
        )
        assert leftovers(tmp_path / point) == []


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # an import of it fails
from pathlib import Path
from archerfish.store import WeightLoader, ensure_converted
for source in sys.argv[1:]:
    for dtype in ("float16", "bfloat16"):
        stored = WeightLoader(ensure_converted(Path(source), dtype=dtype, keep_quantized=True)).load_stored()
        print(*sorted({tensor.quant_type or tensor.dtype for tensor in stored.values()}))
"""


def test_conversion_needs_no_torch(source: Path, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", make_tensors("llama"), "Q8_0")
    rwkv = tmp_path / "rwkv.safetensors"
    save_file(blink_weights(SIZES["tiny"], dtype=torch.bfloat16), rwkv)
    command = [sys.executable, "-c", WITHOUT_TORCH, *map(str, (source, path, rwkv))]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    both = ["float16 float32", "bfloat16 float32"]
    assert done.stdout.splitlines() == [*both, "Q8_0 float32", "Q8_0 float32", *both]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", ["float64", "float32", "float16", "bfloat16"])
def test_rounding_is_that_of_torch(kind: str, dtype: str, tmp_path: Path) -> None:
    bits = torch.randint(-(2**31), 2**31, (64, 8192), generator=torch.Generator().manual_seed(0)).int()
    values = bits.view(torch.float32)
    edges = torch.tensor(
        [0.0, -0.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 65519.0, -65519.0, 2**-25, 3 * 2**-25, 1e-45]
    )
    values = torch.cat([values[values.isfinite() & (values.abs() < 65000)], edges]).to(getattr(torch, kind))
    values = values[: len(values) // 2 * 2].view(2, -1)
    values = torch.where(values.to(getattr(torch, dtype)).isfinite(), values, 0)
    found = convert(write_model(tmp_path / "s", {"w": values}), tmp_path / "out", dtype=dtype).get_layer("w")
    assert torch.equal(found.view(torch.int16), values.to(getattr(torch, dtype)).view(torch.int16))


def test_unaligned_safetensors(source: Path, tmp_path: Path) -> None:
    """Older files do not pad their header to 8 bytes."""
    data = (source / "model.safetensors").read_bytes()
    num_bytes = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + num_bytes].rstrip()
    header += b" " * ((4 - len(header)) % 8 + 1)
    (source / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data[8 + num_bytes :])
    for dtype in ("float32", "bfloat16"):
        assert torch.equal(
            convert(source, tmp_path / dtype, dtype=dtype).get_layer(MATRIX).float(),
            some_weights()[MATRIX].to(getattr(torch, dtype)).float(),
        )


def test_every_nan_is_found(tmp_path: Path) -> None:
    """Red: NaN whose bits carry into the sign when they are rounded to bfloat16."""
    for index, bits in enumerate((0x7FFFFFFF, 0x7F800001, 0x7FC00000, -1, -0x7FFFFF)):
        weights = {"w": torch.tensor([[0, bits]], dtype=torch.int32).view(torch.float32)}
        with pytest.raises(errors.ValidationError, match="'w' of the source holds NaN"):
            convert(write_model(tmp_path / str(index), weights), tmp_path / "out", dtype="bfloat16")


def test_nan_and_overflow_are_refused(tmp_path: Path) -> None:
    weights = {**some_weights(), "huge": torch.tensor([[1.0, 70000.0]])}
    source = write_model(tmp_path / "huge", weights)
    with pytest.raises(errors.ValidationError, match="'huge' holds 70000, which float16 cannot hold"):
        convert(source, tmp_path / "out")
    convert(source, tmp_path / "wide", dtype="bfloat16")
    weights["huge"] = torch.tensor([[1.0, float("nan")]])
    source = write_model(tmp_path / "nan", weights)
    with pytest.raises(errors.ValidationError, match="'huge' of the source holds NaN"):
        convert(source, tmp_path / "out", validate_output=False)
    assert not (tmp_path / "out").exists()
    weights["huge"] = torch.tensor([1.0, float("-inf")])
    convert(write_model(tmp_path / "inf", weights), tmp_path / "out")


def test_validation_finds_damage_after_writing(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged_record(path: Path) -> Any:
        record = loader.arrow_record(path)
        flip_byte(path, record.spans[1][0].offset + 1)
        return record

    def damaged_rows(path: Path, infos: Any) -> Any:
        yield from (row._replace(data=pa.py_buffer(bytes(row.data.size))) for row in read_parquet_rows(path, infos))

    for name, damage in (("arrow_record", damaged_record), ("read_parquet_rows", damaged_rows)):
        with monkeypatch.context() as patch, pytest.raises(errors.ValidationError):
            patch.setattr(f"archerfish.store.converter.{name}", damage)
            convert(source, tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_model_type_is_checked(source: Path, tmp_path: Path) -> None:
    with pytest.raises(errors.InvalidOptionError, match="auto"):
        convert(source, tmp_path / "out", model_type="autoo")
    for hint in ("gguf", "torch", "sentence-transformers", "cross-encoder"):
        with pytest.raises(errors.UnsupportedModelError, match="not what model_type"):
            convert(source, tmp_path / "out", model_type=hint)
    convert(source, tmp_path / "out", model_type="transformers")
    with pytest.raises(errors.UnsupportedModelError, match="already converted"):
        convert(tmp_path / "out", tmp_path / "again")


def torch_source(directory: Path, state: Any, **options: Any) -> Path:
    write_model(directory)
    (directory / "model.safetensors").unlink()
    torch.save(state, directory / "pytorch_model.bin", **options)
    return directory


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("nested", [True, False])
def test_torch_checkpoints(tmp_path: Path, zipped: bool, nested: bool) -> None:
    weights = some_weights()
    weights["transposed"] = torch.randn(3, 5).t()
    state = {"state_dict": weights, "epoch": 3} if nested else weights
    source = torch_source(tmp_path / "s", state, _use_new_zipfile_serialization=zipped)
    for name, tensor in convert(source, tmp_path / "out", model_type="torch", dtype="float32").load_weights().items():
        assert torch.equal(tensor, weights[name])


def test_single_pth_and_sharded_bin(tmp_path: Path) -> None:
    weights = some_weights()
    torch.save(weights, tmp_path / "rwkv.pth")
    loader = convert(tmp_path / "rwkv.pth", tmp_path / "out", dtype="float32")
    assert loader.config == {} and not loader.tokenizer_path.exists() and loader.get_metadata()["model_name"] == "rwkv"
    source = torch_source(tmp_path / "sharded", {})
    (source / "pytorch_model.bin").unlink()
    weight_map = {}
    for index, (name, tensor) in enumerate(weights.items()):
        torch.save({name: tensor}, source / f"part{index}.bin")
        weight_map[name] = f"part{index}.bin"
    write_json(source / "pytorch_model.bin.index.json", {"weight_map": weight_map})
    assert convert(source, tmp_path / "sharded-out", dtype="float32").get_layer_names() == list(weights)


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch evil",)


def test_damaged_torch_checkpoints_are_refused(tmp_path: Path) -> None:
    with pytest.raises(errors.UnsupportedModelError, match="more than tensors"):
        open_source(torch_source(tmp_path / "evil", {"w": Evil()}))
    with pytest.raises(errors.UnsupportedModelError, match="is not a tensor"):
        open_source(torch_source(tmp_path / "number", {"w": 3}))
    for zipped in (True, False):
        path = torch_source(tmp_path / f"cut{zipped}", some_weights(), _use_new_zipfile_serialization=zipped)
        good = (path / "pytorch_model.bin").read_bytes()
        for num_bytes in (0, 1, 100, len(good) // 2, len(good) - 30):
            (path / "pytorch_model.bin").write_bytes(good[:num_bytes])
            with pytest.raises(errors.CorruptFileError, match=r"pytorch_model\.bin"):
                open_source(path)


def test_ambiguous_and_unknown_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(errors.ModelNotFoundError, match="does not exist"):
        open_source(tmp_path / "no")
    (tmp_path / "weights.h5").write_bytes(b"x")
    with pytest.raises(errors.UnsupportedModelError, match="not a supported kind of weight file"):
        open_source(tmp_path / "weights.h5")
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(errors.UnsupportedModelError, match=r"a\.gguf, b\.gguf"):
        open_source(tmp_path)


def test_metadata_keeps_the_configuration(source: Path, tmp_path: Path) -> None:
    write_json(source / "generation_config.json", {"temperature": 0.5})
    config = {
        "architectures": ["BertForSequenceClassification"],
        "id2label": {"0": "L"},
        "sentence_transformers": {"v": 1},
    }
    write_json(source / "config.json", {**json.loads((source / "config.json").read_text()), **config})
    found = convert(source, tmp_path / "out", model_type="cross-encoder").get_metadata()
    assert found["generation_config"] == {"temperature": 0.5} and found["embedding"] is None
    assert {key: found["config"][key] for key in config} == config
    assert found["source"]["kind"] == "safetensors" and found["created"].startswith("20")


def test_broken_links_are_not_part_of_the_fingerprint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    before = fingerprint_parts(tmp_path)
    (tmp_path / "lock").symlink_to(tmp_path / "nothing")
    assert fingerprint_parts(tmp_path) == before
    (tmp_path / "more").symlink_to(tmp_path / "config.json")
    assert [name for name, _, _ in fingerprint_parts(tmp_path)] == ["config.json", "more"]
