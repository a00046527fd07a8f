"""Encoders in Triton against the reference, and recorded passes against computed ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, get_args
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from tests.kernels.triton_support import DEVICE, HAS_CUDA, TOLERANCE, TYPES, assert_near, combine, random, untraced

from archerfish.engine import inference_core  # isort: skip (triton must be told to interpret first)
from archerfish.errors import UnreachableError  # isort: skip
from archerfish.store.names import resolve_model  # isort: skip
from archerfish.engine.inference_core import RECORDED_TOKENS, InferenceCore  # isort: skip
from archerfish.kernels.batches import Segments  # isort: skip
from archerfish.kernels.ops import HeadShape, NormWeights, Pooling, Rotary, Rotation  # isort: skip
from archerfish.kernels.torch.reference import TorchOps  # isort: skip
from archerfish.kernels.triton.encoder import FixedInputs, lay_out  # isort: skip
from archerfish.kernels.triton.ops import TritonOps  # isort: skip
from archerfish.kernels.triton.plan import Tile  # isort: skip
from archerfish.layers.weights import Weights  # isort: skip
from archerfish.models.config import Config  # isort: skip
from archerfish.models.adapter import TokenBatch, encoder_class  # isort: skip

pytestmark = [
    untraced,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]  # numpy's, where the interpreter meets infinity
Tensor = torch.Tensor
LENGTHS = (7, 1, 19, 33, 16, 17)
SHAPES = [  # heads, and whether there is a bias
    (HeadShape(2, 2, 32, 0.2, is_causal=False), False),
    (HeadShape(2, 2, 64, 0.125, is_causal=False), True),
    (HeadShape(3, 3, 12, 0.3, is_causal=False), True),
    (HeadShape(1, 1, 80, 0.11, is_causal=False), False),
    (HeadShape(4, 2, 32, 0.2), False),
    (HeadShape(2, 1, 64, 0.125, window=5, softcap=2.0), False),
    (HeadShape(2, 1, 32, 0.2, window=6, is_causal=False), False),
]
SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "num_attention_heads": 4,
    "intermediate_size": 80,
    "vocab_size": 60,
    "num_hidden_layers": 2,
    "max_position_embeddings": 70,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-5,
    "type_vocab_size": 2,
    "pad_token_id": 1,
}
DISTIL = {"dim": 48, "n_heads": 4, "hidden_dim": 80, "n_layers": 2, "activation": "gelu"}
CONFIGS: dict[str, dict[str, Any]] = {
    "bert": SIZES,
    "roberta": SIZES,
    "distilbert": {**SIZES, **DISTIL},
    "mpnet": {**SIZES, "relative_attention_num_buckets": 32},
    "modernbert": {**SIZES, "hidden_activation": "gelu", "local_attention": 12},
    "gte": SIZES,
    "qwen3": {**SIZES, "num_key_value_heads": 2, "head_dim": 12, "hidden_act": "silu", "is_causal": False},
}


@pytest.mark.parametrize(
    ("shape", "tile", "dtype"), combine(SHAPES, [None, Tile(16, 16, 1, 1), Tile(32, 16, 2, 1)], TYPES)
)
def test_attention(shape: tuple[HeadShape, bool], tile: Tile | None, dtype: str) -> None:
    heads, has_bias = shape
    ops = TritonOps(DEVICE, dtype)
    ops.encoder_tile = tile
    segments = Segments(LENGTHS)
    qkv = random(segments.num_tokens, (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim, dtype=dtype)
    bias = random(heads.num_heads, max(LENGTHS), max(LENGTHS), dtype=dtype) if has_bias else None
    out = ops.attention(qkv, segments, heads, bias=bias)
    wide = None if bias is None else bias.float()
    expected = TorchOps(DEVICE).attention(qkv.float(), Segments(LENGTHS), heads, bias=wide)
    assert out.dtype == qkv.dtype
    assert_near(out, expected, dtype)


@pytest.mark.parametrize(
    ("rotary_dim", "is_interleaved", "normed"),
    [
        (16, False, 1),
        (6, False, 1),
        (0, False, 1),
        (16, True, 1),
        (6, True, 4),
        (16, False, 4),
    ],
)
def test_rotated(rotary_dim: int, is_interleaved: bool, normed: int) -> None:
    """normed: heads of queries whose norm is one; of keys half as many."""
    heads, positions = HeadShape(4, 2, 16, 0.25), torch.from_numpy(Segments(LENGTHS[:3]).positions).to(DEVICE)
    qkv, norms = random(len(positions), 8 * 16), [random(1, num * 16)[0] for num in (normed, max(1, normed // 2))]
    rotary = Rotary(random(40, rotary_dim), rotary_dim, is_interleaved) if rotary_dim else None
    rotation = Rotation(rotary, norms[0], norms[1], 1e-5)
    expected = TorchOps(DEVICE).rotated(qkv, positions, heads, rotation)
    assert_near(TritonOps(DEVICE, "float32").rotated(qkv, positions, heads, rotation), expected, "float32")


@pytest.mark.skipif(not HAS_CUDA, reason="too long for the interpreter")
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("num_heads", "head_dim"), [(12, 32), (12, 64), (16, 64), (4, 128), (2, 256), (3, 96)])
@pytest.mark.parametrize("lengths", [(512, 300, 129, 128, 64, 63, 1), (10,) * 500, (128,) * 40, (24,) * 60])
def test_attention_of_real_sizes(lengths: tuple[int, ...], num_heads: int, head_dim: int, dtype: str) -> None:
    heads = HeadShape(num_heads, num_heads, head_dim, head_dim**-0.5, is_causal=False)
    qkv = random(sum(lengths), 3 * num_heads * head_dim, dtype=dtype)
    for bias in (None, random(num_heads, max(lengths), max(lengths), dtype=dtype)):
        out = TritonOps(DEVICE, dtype).attention(qkv, Segments(lengths), heads, bias=bias)
        wide = None if bias is None else bias.double()
        expected = TorchOps(DEVICE, "float64").attention(qkv.double(), Segments(lengths), heads, bias=wide)
        torch.testing.assert_close(out.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_a_neighbour_full_of_nan_does_not_spread() -> None:
    segments = Segments((5, 20, 3))
    qkv = random(28, 3 * 32)
    ops, heads = TritonOps(DEVICE, "float32"), HeadShape(2, 2, 16, 0.25, is_causal=False)
    expected = ops.attention(qkv, segments, heads)
    qkv[5:25] = float("nan")
    out = ops.attention(qkv, segments, heads)
    assert torch.equal(out[:5], expected[:5])
    assert torch.equal(out[25:], expected[25:])
    for mode in get_args(Pooling):
        assert ops.pool(out, segments, mode)[[0, 2]].isfinite().all()


def test_tiles_suit_the_lengths_and_layers_share_them() -> None:
    suiting = [
        lay_out(Segments(lengths), torch.device(DEVICE)).rows for lengths in ((1,), (16,), (16, 17), (40,), (500,))
    ]
    assert suiting == [16, 16, 32, 64, 64]
    segments = Segments((40, 3))
    layout = lay_out(segments, torch.device(DEVICE), 16)
    assert layout.tile_sequences.tolist() == [0, 0, 0, 1]
    assert layout.tile_firsts.tolist() == [0, 16, 32, 0]
    assert lay_out(Segments((40, 3)), torch.device(DEVICE), 16) is layout


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("width", [48, 384, 1100])
def test_layer_norm(width: int, dtype: str) -> None:
    ops, reference = TritonOps(DEVICE, dtype), TorchOps(DEVICE)
    norm = NormWeights(random(width), random(width), 1e-5)
    x = random(9, 2 * width, dtype=dtype)[:7, :width] * 3 + 5
    for given in (x, x.float()):
        out = ops.layer_norm(given, norm)
        assert out.dtype == ops.torch_dtype
        expected = reference.layer_norm(given.float(), norm)
        assert_near(out, expected, dtype)
    matrix = random(width, 24, dtype=dtype) / 24
    shift = random(width, dtype=dtype)
    x = random(7, 24, dtype=dtype)
    residual = random(7, width, dtype=dtype)
    out = ops.linear_layer_norm(x, ops.linear_weight([matrix], [shift]), residual, norm)
    wide = reference.linear_weight([matrix.float()], [shift.float()])
    expected = reference.linear_layer_norm(x.float(), wide, residual.float(), norm)
    assert out.dtype == ops.torch_dtype
    assert_near(out, expected, dtype, factor=2)


@pytest.mark.parametrize("num_tables", [1, 2, 3, 4])
def test_embed(num_tables: int) -> None:
    types = ["float16", "float32", "float16", "float32"]
    tables = [random(11 + i, 48, dtype=types[i]) for i in range(num_tables)]
    ids = [torch.randint(0, 11, (13,), device=DEVICE) for _ in tables]
    out = TritonOps(DEVICE, "float16").embed(tables, ids)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, TorchOps(DEVICE).embed(tables, ids), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("mode", get_args(Pooling))
def test_pool_and_normalize(mode: Pooling, dtype: str) -> None:
    ops, reference = TritonOps(DEVICE, dtype), TorchOps(DEVICE)
    x = random(sum(LENGTHS), 200, dtype=dtype)
    pooled = ops.pool(x, Segments(LENGTHS), mode)
    expected = reference.pool(x.float(), Segments(LENGTHS), mode)
    assert pooled.dtype == torch.float32
    torch.testing.assert_close(pooled, expected, atol=1e-5, rtol=1e-5)
    pooled[1] = 0
    torch.testing.assert_close(ops.normalize(pooled), reference.normalize(pooled), atol=1e-5, rtol=1e-5)


@dataclass(frozen=True)
class RandomWeights(Weights[Tensor]):
    """Makes what a model asks for, and keeps it in `source`."""

    def has(self, name: str) -> bool:
        return True

    def tensor(self, name: str, *shape: int) -> Tensor:
        made: Any = self.source
        tensor = torch.randn(shape, generator=torch.Generator().manual_seed(len(made)))
        tensor = 1 + 0.2 * tensor if len(shape) == 1 and name == "weight" else tensor * shape[-1] ** -0.5
        kept: Tensor = made.setdefault(f"{self.prefix}{name}", tensor)
        return kept


def make_core(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, ops: TorchOps | None, **stated: Any
) -> InferenceCore:
    """A core on given ops, with weights that are the same for the same configuration; None: on the CPU as users get
    it."""
    known = Config(config)
    weights = RandomWeights({}, TorchOps())
    encoder_class(known)(weights.scope(encoder_class(known).prefix), known)
    if known.is_classifier:
        encoder_class(known).head(weights, known)
    with monkeypatch.context() as patch:
        if ops is not None:
            patch.setattr(inference_core, "choose_ops", lambda device, dtype: ops)
        return InferenceCore(dict(weights.source), {"config": config, "embedding": stated}, "cpu", dtype="float32")


def batch_of(lengths: tuple[int, ...], vocab_size: int = 60, *, has_types: bool = False) -> TokenBatch:
    numbers = np.random.default_rng(len(lengths))
    types = numbers.integers(0, 2, sum(lengths)) if has_types else None
    return TokenBatch(numbers.integers(3, vocab_size, sum(lengths)), Segments(lengths), types)


@pytest.mark.parametrize("kind", CONFIGS)
def test_encoders(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {**CONFIGS[kind], "model_type": kind}
    core, plain = make_core(config, monkeypatch, TritonOps(DEVICE, "float32")), make_core(config, monkeypatch, None)
    for num_attended in (None, 3) if core.encoder.most_expanded(core.config) else (None,):
        batch = replace(batch_of((7, 3, 20)), num_attended=num_attended)
        expected = plain.run(batch, normalize=True)
        for _ in range(2):  # recorded, then repeated, where that can be
            np.testing.assert_allclose(core.run(batch, normalize=True), expected, atol=1e-4)


@pytest.mark.parametrize(("kind", "output"), [("roberta", "dense"), ("modernbert", "multi_vector")])
def test_recorded_passes(kind: str, output: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any batch that fits is given to the recorded pass of its size, and its rows are those of a computed one."""
    ops = TritonOps(DEVICE, "float32")
    config = {**CONFIGS[kind], "model_type": kind, "num_hidden_layers": 1}
    core, plain = (make_core(config, monkeypatch, each, output=output) for each in (ops, None))
    capture = Mock(side_effect=lambda call: call)
    if not HAS_CUDA:
        monkeypatch.setattr(ops, "is_async", True)
        monkeypatch.setattr(ops, "capture", capture)
    lists = ((5,), (16,), (9, 2, 5), (30,), (2, 1, 3, 14, 1, 1))
    waiting = [core.start(batch_of(lengths)) for lengths in lists]
    for lengths, wait in zip(lists, waiting, strict=True):
        np.testing.assert_allclose(wait(), plain.run(batch_of(lengths)), atol=2e-4, rtol=1e-4)
    assert set(core._recorded) == {(16, False, False, output), (32, False, False, output)}
    assert HAS_CUDA or capture.call_count == 2
    crowd = batch_of((1,) * 9)  # more sequences than there is room for
    np.testing.assert_allclose(core.run(crowd), plain.run(crowd), atol=2e-4, rtol=1e-4)


def test_recorded_scores_of_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = TritonOps(DEVICE, "float32")
    labels = {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "x", "1": "y"}}
    config = {**SIZES, **labels, "model_type": "bert", "num_hidden_layers": 1}
    core, plain = make_core(config, monkeypatch, ops), make_core(config, monkeypatch, None)
    if not HAS_CUDA:
        monkeypatch.setattr(ops, "is_async", True)
        monkeypatch.setattr(ops, "capture", lambda call: call)
    for has_types in (True, False):
        batch = batch_of((6, 4, 3), has_types=has_types)
        found = core.run(batch)
        assert found.shape == (3, 2)
        np.testing.assert_allclose(found, plain.run(batch), atol=2e-4, rtol=1e-4)
    assert set(core._recorded) == {(16, has_types, False, "dense") for has_types in (True, False)}


def test_inputs_that_do_not_fit_are_refused() -> None:
    inputs = FixedInputs(16, torch.device(DEVICE))
    assert inputs.fill(np.arange(16), Segments((4, 4, 4, 4)), None)
    for lengths in ((17,), (1,) * 5):
        assert not inputs.fill(np.arange(sum(lengths)), Segments(lengths), None)
    assert inputs.token_ids.tolist() == list(range(16))


MINILM: dict[str, Any] = {
    **SIZES,
    "hidden_size": 384,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "vocab_size": 3000,
    "max_position_embeddings": 512,
    "model_type": "bert",
}


@pytest.mark.skipif(not HAS_CUDA, reason="graphs are CUDA's")
@pytest.mark.parametrize(("dtype", "least"), [("float32", 0.99999), ("float16", 0.9999), ("bfloat16", 0.998)])
def test_a_minilm_on_the_card(dtype: str, least: float, monkeypatch: pytest.MonkeyPatch) -> None:
    core, plain = make_core(MINILM, monkeypatch, TritonOps(DEVICE, dtype)), make_core(MINILM, monkeypatch, None)
    batches = [batch_of((10,) * 300, 3000), batch_of((512, 300, 128, 77, 1), 3000)]
    batches += [
        batch_of((num,) if num <= 512 else (512, num - 512), 3000)
        for size in RECORDED_TOKENS
        for num in (size - 1, size)
    ]
    waiting = [core.start(batch, normalize=True) for batch in batches * 2]
    for batch, wait in zip(batches * 2, waiting, strict=True):
        assert (wait() * plain.run(batch, normalize=True)).sum(1).min() > least


@pytest.mark.skipif(not HAS_CUDA, reason="there is no card")
def test_the_engine_on_the_card() -> None:
    from archerfish import ArrowEngine

    try:
        model = str(resolve_model("all-minilm-l6-v2"))
    except UnreachableError:
        pytest.skip("there is no network to get the model from")
    texts = [
        "hello",
        "",
        "word " * 600,
        "今天天气很好",
        *(f"document {i} " + "some words " * (i % 60) for i in range(700)),
    ]
    expected = ArrowEngine(model, dtype="float32", storage_dtype="float32").encode(texts)
    engine = ArrowEngine(model, device="cuda", dtype="float16")
    assert (engine.encode(texts) * expected).sum(1).min() > 0.9999
    for text, row in zip(texts[:8], expected, strict=False):
        assert (engine.encode(text) * row).sum() > 0.9999
