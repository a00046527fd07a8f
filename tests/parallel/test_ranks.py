"""What each rank has: parts of numbers, heads and layers, and parts of matrices in every weight format."""

from __future__ import annotations

import os
import pickle
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from archerfish.engine.rank_processes import check_divided, for_others
from archerfish.errors import InvalidOptionError
from archerfish.kernels.formats import PLAIN, WeightFormat, choose_format
from archerfish.kernels.ranks import Part, Ranks
from archerfish.kernels.stored import StoredTensor
from archerfish.kernels.torch import ranks as torch_ranks
from archerfish.models.adapter import KVShape
from archerfish.models.config import Config
from archerfish.models.llama import LlamaModel
from archerfish.models.rwkv7 import Rwkv7Model
from archerfish.params import SamplingParams
from archerfish.step import RowEntry, StepInput
from tests.engine import tiny_llama, tiny_rwkv
from tests.kernels.test_from_store import random_stored


def test_parts_cover_everything_once() -> None:
    for total, unit, size in ((97, 1, 4), (96, 32, 2), (11008, 256, 2), (100, 32, 4)):
        parts = [Ranks(index, size).part(total, unit) for index in range(size)]
        assert [part.first for part in parts] == [0, *(part.end for part in parts[:-1])] and parts[-1].end == total
        assert not any(part.first % unit for part in parts)
        assert max(part.size for part in parts) - min(part.size for part in parts) <= max(unit, 2)
    with pytest.raises(InvalidOptionError, match=r"only 3 hidden units in groups of 32 to divide\. It takes at most 3"):
        Ranks(0, 4).part(96, 32, "hidden units")


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "expected"),
    [
        (8, 4, 2, [(4, 2), (4, 2)]),
        (9, 3, 2, [(3, 1), (6, 2)]),
        (9, 3, 3, [(3, 1)] * 3),
        (4, 2, 4, [(1, 1)] * 4),
        (9, 3, 6, [(1, 1), (2, 1)] * 3),
        (32, 1, 4, [(8, 1)] * 4),
    ],
)
def test_query_heads_stay_with_their_kv_head(
    heads: int, kv_heads: int, size: int, expected: list[tuple[int, int]]
) -> None:
    found = [Ranks(index, size).heads(heads, kv_heads) for index in range(size)]
    assert [(queries.size, keys.size) for queries, keys in found] == expected
    assert [head for queries, _ in found for head in range(queries.first, queries.end)] == list(range(heads))
    group = heads // kv_heads
    for queries, keys in found:
        assert (queries.first // group, (queries.end - 1) // group) == (keys.first, keys.end - 1)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "message"),
    [
        (9, 3, 4, "9 heads that share 3 KV heads .* one of: 1, 2, 3, 6, 9"),
        (4, 4, 8, "one of: 1, 2, 3, 4"),
    ],
)
def test_heads_that_cannot_be_divided_are_refused(heads: int, kv_heads: int, size: int, message: str) -> None:
    with pytest.raises(InvalidOptionError, match=message):
        Ranks(0, size).heads(heads, kv_heads)


def test_stages_have_all_layers_and_the_engine_is_in_the_last() -> None:
    places = [Ranks.place(rank, 2, 3) for rank in range(6)]
    assert places == [(0, 2, 2, 3), (1, 2, 2, 3), (0, 2, 1, 3), (1, 2, 1, 3), (0, 2, 0, 3), (1, 2, 0, 3)]
    assert [layer for stage in range(3) for layer in Ranks(0, 1, stage, 3).layers(7)] == list(range(7))
    assert Ranks(*places[0]).is_last and Ranks(*places[4]).is_first


def test_memory_of_a_rank() -> None:
    llama, rwkv = Config(tiny_llama.TINY), Config(tiny_rwkv.TINY)
    assert LlamaModel.memory_shape(llama, Ranks(0, 2, 0, 2)) == KVShape(1, 1, 8)
    whole, half = Rwkv7Model.memory_shape(rwkv), Rwkv7Model.memory_shape(rwkv, Ranks(1, 2))
    assert (half.num_heads, half.width) == (1, whole.width) and half.bytes_per_block(1, 4) < whole.bytes_per_block(1, 4)
    for adapter, config in ((LlamaModel, llama), (Rwkv7Model, rwkv)):
        every = adapter.noted(config).total_bytes()
        parts = [adapter.noted(config, ranks=Ranks(index, 2)).total_bytes() for index in range(2)]
        assert max(parts) < every < sum(parts) < 1.5 * every  # norms, tables and narrow ends of low ranks are on both


OUTPUTS, INPUTS = Part(3, 8, 12), Part(256, 512, 512)
FORMATS: list[WeightFormat] = [PLAIN, choose_format("int8"), choose_format("int4")]


@pytest.mark.parametrize("weight_format", FORMATS, ids=lambda each: each.name)
def test_a_part_of_a_matrix_means_a_part_of_its_numbers(weight_format: WeightFormat) -> None:
    weight = torch.randn(12, 512)
    whole = weight_format.dequantise(weight_format.load(weight), torch.float32)
    for outputs, inputs in ((OUTPUTS, Part.of(512)), (Part.of(12), INPUTS), (OUTPUTS, INPUTS)):
        part = weight_format.cut(weight, outputs, inputs)
        if isinstance(part, StoredTensor):  # all of a row decides on its numbers
            found = torch.from_numpy(part.as_floats())
        else:
            found = weight_format.dequantise(weight_format.load(part.clone()), torch.float32)
        torch.testing.assert_close(found, whole[outputs.first : outputs.end, inputs.first : inputs.end], rtol=0, atol=0)


@pytest.mark.parametrize(
    "kind", ["Q8_0", "Q4_0", "Q4_1", "MXFP4", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "FP8", "INT8", ""]
)
@pytest.mark.parametrize("group_size", [32, 128, 512])
@pytest.mark.parametrize(
    "inputs", [INPUTS, Part(64, 192, 512), Part(0, 480, 512)], ids=lambda part: f"{part.first}-{part.end}"
)
def test_parts_of_stored_matrices(kind: str, group_size: int, inputs: Part) -> None:
    """Those that do not end with a group become plain."""
    if not kind:
        stored = StoredTensor(
            (12, 512), "float32", np.random.default_rng(0).standard_normal((12, 512), dtype=np.float32)
        )
    else:
        stored = random_stored(kind, 12, group_size=group_size)
    part, whole = stored.cut(OUTPUTS, inputs), stored.as_floats()
    np.testing.assert_array_equal(part.as_floats(), whole[3:8, inputs.first : inputs.end])
    is_kept = not any(place % stored.cut_inputs for place in (inputs.first, inputs.end))
    assert part.quant_type == (kind if is_kept else "")
    rows = stored.cut(OUTPUTS, Part.of(512))
    assert rows.quant_type == kind and np.shares_memory(rows.data, stored.data)  # nothing else of the file is read


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speculation": "draft", "draft_model": "x"}, "ngram works"),
        ({"deterministic": True, "tensor_parallel_size": 4}, "order of sums"),
    ],
)
def test_options_that_do_not_go_together_are_refused(tmp_path: Any, options: dict[str, Any], message: str) -> None:
    config = tiny_llama.tiny_config(tmp_path, **{"tensor_parallel_size": 2, **options})
    with pytest.raises(InvalidOptionError, match=message):
        check_divided(config)


def test_functions_of_the_user_stay_on_rank_0() -> None:
    """Without the mark, other ranks would choose such a row's token in a recorded pass, and rank 0 behind it."""
    ids = np.arange(2)
    params = SamplingParams(logits_processors=[lambda ids, logits: logits])
    entries = [RowEntry(0, "plain", SamplingParams(), 3), RowEntry(1, "processed", params, 3)]
    step = StepInput(
        1, ids, ids, ids, ids, ids, ids, 2, entries=entries, mask_bits=np.ones((1, 2), dtype=np.int64), masked=[0]
    )
    sent = pickle.loads(pickle.dumps(for_others(step)))
    assert [entry.has_grammar for entry in sent.entries] == [False, True] and not sent.entries[
        1
    ].params.logits_processors
    assert sent.mask_bits.tolist() == [[1, 1]] and sent.masked == [0] and sent.num_decodes == 2
    assert all(
        getattr(sent, name).tolist() == [0, 1] for name in ("rows", "starts", "counts", "samples", "adapters", "tokens")
    )
    assert for_others(replace(step, entries=entries[:1])).entries == entries[:1]


def test_nccl_meets_on_this_machine_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red: a socket that other machines can reach, or an interface that the user chose and that is not used."""

    class Group:
        Options = SimpleNamespace

        def __init__(self, *_: Any) -> None:
            self.interface = os.environ["NCCL_SOCKET_IFNAME"]

    monkeypatch.setattr(torch_ranks, "distributed", SimpleNamespace(ProcessGroupNCCL=Group))
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")
    assert torch_ranks.new_group("nccl", None, 0, 2).interface == "eth0"
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    assert torch_ranks.new_group("nccl", None, 0, 2).interface == "lo"
