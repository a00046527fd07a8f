"""Mapping is zero-copy: proved from what the kernel says about this process's memory."""

from __future__ import annotations

import json
import mmap
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from archerfish.config import HubConfig
from archerfish.errors import CorruptFileError, WriteError
from archerfish.store import WeightLoader, ensure_converted
from archerfish.store import loader as loader_module
from archerfish.store.metadata import FileRecord
from tests.store.models import MATRIX, convert, cut_off, file_size_limit, flip_byte, some_weights, write_model

pytestmark = pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs /proc")
NUM_ROWS, NUM_COLUMNS = 2048, 2048
BIG_BYTES = NUM_ROWS * NUM_COLUMNS * 4


def smaps(path: Path) -> dict[str, int]:
    """Totals of the mappings of a file in this process, in bytes."""
    totals: dict[str, int] = {}
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            inside = line.endswith(str(path))
        elif inside and len(words) == 3 and words[2] == "kB":
            totals[words[0].rstrip(":")] = totals.get(words[0].rstrip(":"), 0) + int(words[1]) * 1024
    return totals


@pytest.fixture
def big(tmp_path: Path) -> Path:
    weights = {
        "big": torch.arange(NUM_ROWS * NUM_COLUMNS, dtype=torch.float32).view(NUM_ROWS, NUM_COLUMNS),
        **some_weights(),
    }
    source = write_model(tmp_path / "big-source", weights)
    return convert(source, tmp_path / "big", dtype="float32", write_parquet=False).directory


def test_tensors_are_pages_of_the_file_until_released(big: Path) -> None:
    loader = WeightLoader(big)
    tensor = loader.get_layer("big")
    untouched = smaps(loader.arrow_path)["Rss"]
    assert untouched < BIG_BYTES // 4
    assert float(tensor.sum()) > 0
    touched = smaps(loader.arrow_path)
    assert touched["Rss"] >= BIG_BYTES  # the tensor is the mapping: reading it has made the file's pages resident
    assert touched.get("Private_Dirty", 0) == 0
    loader.release(["big"])
    assert smaps(loader.arrow_path)["Rss"] < BIG_BYTES // 4
    assert float(tensor[-1, -1]) == NUM_ROWS * NUM_COLUMNS - 1


TOUCH = """
import sys, json
from archerfish.store import WeightLoader
loader = WeightLoader(sys.argv[1])
data = loader.get_buffers("big")[0]
total = sum(data[::4096])
print("ready", flush=True)
sys.stdin.readline()
"""


def test_processes_share_pages(big: Path) -> None:
    loader = WeightLoader(big)
    assert sum(loader.get_buffers("big")[0][::4096]) >= 0
    command = [sys.executable, "-c", TOUCH, str(big)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        shared = smaps(loader.arrow_path)
        child.communicate("\n")
    assert child.returncode == 0
    assert shared["Shared_Clean"] >= BIG_BYTES
    assert shared["Pss"] <= shared["Rss"] * 0.6


def test_open_while_the_directory_is_replaced(converted: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    map_file = loader_module.map_file
    replaced: list[Path] = []

    def replace_first(path: Path, record: FileRecord) -> mmap.mmap:
        if not replaced:
            replaced.append(path)
            convert(source, converted, dtype="bfloat16", overwrite=True, validate_output=False)
        return map_file(path, record)

    monkeypatch.setattr("archerfish.store.loader.map_file", replace_first)
    assert WeightLoader(converted).get_layer(MATRIX).dtype == torch.bfloat16 and replaced


def parquet_only(directory: Path) -> bytes:
    """Take the mapped file away and return what it was."""
    data = (directory / "weights.arrow").read_bytes()
    (directory / "weights.arrow").unlink()
    return data


def test_parquet_only_directory_gets_an_arrow_file(
    converted: Path, hub: HubConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = parquet_only(converted)
    loader = WeightLoader(converted / "weights.parquet", hub=hub)
    assert loader.arrow_path == converted / "weights.arrow"
    assert loader.arrow_path.read_bytes() == before
    loader.verify()
    monkeypatch.setattr(loader_module, "arrow_writer", None)
    assert torch.equal(WeightLoader(converted).get_layer("scale"), some_weights()["scale"])
    assert not list(converted.glob(".weights.arrow.tmp*"))


def test_parquet_in_a_read_only_directory_is_mapped_from_the_cache(
    converted: Path, hub: HubConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    parquet_only(converted)
    monkeypatch.setattr("archerfish.store.loader.os.access", lambda path, mode: False)
    loader = WeightLoader(converted, hub=hub)
    assert hub.cache_path() / "mapped" in loader.arrow_path.parents
    assert not (converted / "weights.arrow").exists()
    assert torch.equal(loader.get_layer("scale"), some_weights()["scale"])
    loader.verify()
    assert loader.arrow_path == WeightLoader(converted, hub=hub).arrow_path


@pytest.mark.parametrize("flipped", [None, 1, 700, -20])
def test_damaged_parquet_is_refused(converted: Path, hub: HubConfig, flipped: int | None) -> None:
    parquet_only(converted)
    path = converted / "weights.parquet"
    if flipped is None:
        cut_off(path, -100)
    else:
        flip_byte(path, flipped)
    with pytest.raises(CorruptFileError, match=r"weights\.parquet"):
        WeightLoader(converted, hub=hub)
    assert {path.name for path in converted.iterdir()} == {"metadata.json", "tokenizer", "weights.parquet"}


def test_full_disk_raises_write_error(converted: Path, hub: HubConfig) -> None:
    parquet_only(converted)

    with file_size_limit(700), pytest.raises(WriteError, match="File too large"):
        WeightLoader(converted, hub=hub)
    assert not (converted / "weights.arrow").exists() and not list(converted.glob(".weights.arrow.tmp*"))


def test_concurrent_callers_make_one_file(converted: Path, source: Path, hub: HubConfig) -> None:
    """Threads stand for processes: a file lock excludes them as well."""
    parquet_only(converted)
    with ThreadPoolExecutor(2) as pool:
        loaders = list(pool.map(lambda _: WeightLoader(converted, hub=hub), range(2)))
        paths = list(pool.map(lambda _: ensure_converted(source, dtype="float16", hub=hub), range(2)))
    for loader in loaders:
        assert torch.equal(loader.get_layer("scale"), some_weights()["scale"])
    assert paths[0] == paths[1] and len(list((hub.cache_path() / "converted").iterdir())) == 1


def test_ensure_converted(source: Path, converted: Path, hub: HubConfig) -> None:
    assert ensure_converted(converted, dtype="float16", hub=hub) == converted
    assert ensure_converted(converted / "weights.arrow", dtype="float16", hub=hub) == converted
    first = ensure_converted(source, dtype="bfloat16", hub=hub)
    inode = (first / "weights.arrow").stat().st_ino
    assert ensure_converted(source, dtype="bfloat16", hub=hub) == first
    assert (first / "weights.arrow").stat().st_ino == inode
    assert ensure_converted(source, dtype="float32", hub=hub) != first
    write_model(source, some_weights(seed=1))
    again = ensure_converted(source, dtype="bfloat16", hub=hub)
    assert again != first
    expected = some_weights(seed=1)["scale"].bfloat16()
    assert torch.equal(WeightLoader(again).get_layer("scale"), expected)
    assert json.loads((again / "metadata.json").read_text())["dtype"] == "bfloat16"


def test_writes_to_a_tensor_do_not_reach_the_file(converted: Path) -> None:
    """The mapping is copy-on-write: red if writing kills the process or reaches the file."""
    before = (converted / "weights.arrow").read_bytes()
    loader = WeightLoader(converted)
    tensor = loader.get_layer(MATRIX)
    expected = tensor.clone() + 1
    tensor.add_(1)
    assert torch.equal(tensor, expected)
    assert (converted / "weights.arrow").read_bytes() == before
    assert not torch.equal(WeightLoader(converted).get_layer(MATRIX), expected)
