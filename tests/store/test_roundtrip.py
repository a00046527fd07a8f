"""What goes into a converted directory comes out of it."""

from __future__ import annotations

import itertools
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

from archerfish.config import COMPRESSIONS, HubConfig
from archerfish.errors import CorruptFileError, ModelNotFoundError, UnknownLayerError
from archerfish.store import WeightLoader
from archerfish.store.format import Row, TensorInfo, arrow_writer
from archerfish.store.loader import arrow_record
from tests.store.models import convert, some_weights, write_model

DTYPES = ("float32", "float16", "bfloat16")
COLUMNS = (
    "layer_name", "shape", "dtype", "data", "num_params", "quant_type", "scales", "zero_points", "quant_axis", "group_size",
)  # fmt: skip


@pytest.mark.parametrize(("dtype", "compression"), [*zip(itertools.cycle(DTYPES), COMPRESSIONS, strict=False)])
def test_every_dtype_and_compression(source: Path, tmp_path: Path, hub: HubConfig, dtype: str, compression: str) -> None:
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
    for row, spans in zip(rows, arrow_record(path).spans, strict=True):
        assert spans.data.offset % 64 == 0
        assert data[spans.data.offset : spans.data.offset + spans.data.num_bytes] == row.data.tobytes()


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
