"""Weight formats: what they keep, and every backend's products against the dequantised matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from archerfish.errors import InvalidOptionError
from archerfish.kernels import formats, int4
from archerfish.kernels.formats import PLAIN, Int8Rows, WeightFormat, choose_format
from archerfish.kernels.ops import Activation, LinearWeight
from archerfish.kernels.torch.reference import TorchOps, TorchWeight
from archerfish.layers.weights import Weights
from archerfish.models.adapter import model_class
from archerfish.models.config import Config
from tests.kernels.native_support import native_ops
from tests.kernels.paged import CPU_TYPES as TYPES
from tests.models.decoding import Driver, make, random_tokens

Tensor = torch.Tensor
INT8, INT4 = Int8Rows(), formats.Int4Groups()
Backend = Callable[..., Any]
BACKENDS = [TorchOps, native_ops]
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}
NATIVE_TOLERANCE = 0.012  # scales of int8 have 16 bits, products of many rows, too
SIZES = [(40, 64), (37, 100), (3, 33), (130, 192)]  # what has no blocks of 32 inputs stays plain in the native backend


def linear_weights(
    ops: Any, num_outputs: int, width: int, dtype: str = "float32", *, has_bias: bool = False
) -> tuple[LinearWeight[Tensor], LinearWeight[Tensor]]:
    """In int8 for a backend, and for the reference in float32."""
    weight = (torch.randn(num_outputs, width) * width**-0.5).to(getattr(torch, dtype))
    bias = torch.randn(num_outputs).to(weight.dtype) if has_bias else None
    wide = TorchOps().linear_weight([weight], [None if bias is None else bias.float()], INT8)
    return ops.linear_weight([weight], [bias], INT8), wide


def check(y: Tensor, expected: Tensor, tolerance: float) -> None:
    assert float((y.float() - expected).norm()) <= tolerance * float(expected.norm())


def test_option_names_a_format() -> None:
    assert choose_format("auto") is PLAIN
    assert choose_format("int8").name == "int8"
    with pytest.raises(InvalidOptionError) as caught:
        choose_format("int9")
    assert "int8" in str(caught.value.hint)


@pytest.mark.parametrize("weight_format", [PLAIN, INT8, INT4])
def test_stacking_commutes_with_dequantising(weight_format: WeightFormat) -> None:
    parts = [weight_format.load(torch.randn(num, 128)) for num in (24, 40)]
    wide = [weight_format.dequantise(part, torch.float32) for part in parts]
    stacked = weight_format.stack(parts)
    assert weight_format.num_outputs(stacked) == 64
    assert torch.equal(weight_format.dequantise(stacked, torch.float32), torch.cat(wide))
    held = sum(tensor.nbytes for tensor in stacked.values())
    assert weight_format.num_bytes(64, 128, "float32") == held


@pytest.mark.parametrize("made", [INT8, INT4])
@pytest.mark.parametrize("kind", ["llama", "llama-tied", "qwen3", "gemma2", "phi3"])
def test_sizes_of_a_model_are_known_before_it_is_loaded(kind: str, made: WeightFormat) -> None:
    model, values = make(kind)
    config = Config(values)
    ops = TorchOps()
    loaded = model_class(config)(Weights(model.state_dict(), ops, weight_format=made), config, 64)
    packed = [weight.get() for weight in ops._linear_weights]
    linear = sum(tensor.nbytes for each in packed if isinstance(each, TorchWeight) for tensor in each.tensors.values())
    sizes = type(loaded).noted(config, "float32", made).num_bytes
    is_other = [name for name in sizes if "norm" in name or "embed" in name or name.endswith("bias")]
    assert sum(size for name, size in sizes.items() if name not in is_other) == linear
    assert type(loaded).noted(config).total_bytes() > sum(sizes.values())


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 40),
    st.integers(1, 70),
    st.integers(0, 1000),
    st.floats(1e-20, 1e20),
    st.sampled_from(["float32", "bfloat16", "float16"]),
)
def test_int8_is_off_by_half_a_step_at_most(num_rows: int, width: int, seed: int, scale: float, dtype: str) -> None:
    torch.manual_seed(seed)
    weight = (torch.randn(num_rows, width) * (1.0 if dtype == "float16" else scale)).to(getattr(torch, dtype))
    weight[::3] = 0.0
    tensors = INT8.load(weight)
    matrix, scales = tensors["weight"], tensors["scales"]
    assert (matrix.dtype, scales.dtype, matrix.shape, scales.shape) == (
        torch.int8,
        torch.float32,
        weight.shape,
        (num_rows,),
    )
    wide = INT8.dequantise(tensors, torch.float32)
    assert bool(((wide - weight.float()).abs() <= 0.5001 * scales[:, None]).all())
    assert not wide[::3].any()
    assert bool(((matrix.abs().amax(1) == 127) | (weight == 0).all(1)).all())
    again = INT8.load(wide)  # what int8 can hold stays as it is
    assert torch.equal(again["weight"], matrix)
    torch.testing.assert_close(again["scales"], scales, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("weight_format", [INT8, INT4])
def test_numbers_do_not_depend_on_the_pieces_of_loading(
    weight_format: WeightFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = torch.randn(150, 32).bfloat16()
    whole = weight_format.load(weight)
    monkeypatch.setattr(formats, "PIECE_ELEMENTS", 100)
    monkeypatch.setattr(int4, "PIECE_BLOCKS", 7)
    for name, tensor in weight_format.load(weight).items():
        assert torch.equal(tensor, whole[name])


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 40), st.integers(1, 5), st.integers(0, 1000), st.floats(1e-3, 1e3), st.floats(-3, 3))
def test_int4_is_nearer_than_equal_steps(num_rows: int, num_blocks: int, seed: int, scale: float, mean: float) -> None:
    """Than sixteen steps from a block's lowest number to its highest, rounded as they must be."""
    torch.manual_seed(seed)
    weight = (torch.randn(num_rows, 32 * num_blocks) + mean) * scale
    weight[::3, :32] = scale
    wide, blocks = INT4.dequantise(INT4.load(weight), torch.float32), weight.view(num_rows, num_blocks, 32)
    low = blocks.amin(2, keepdim=True)
    step = ((blocks.amax(2, keepdim=True) - low) / 15).half().float()
    low = low.half().float()
    equal = ((blocks - low) / step).round().nan_to_num().clamp(0, 15) * step + low
    off, equal_off = ((each - blocks).square().sum(2) for each in (wide.view_as(blocks), equal))
    assert bool((off <= 1.001 * equal_off + 1e-9 * scale**2).all())
    if num_rows * num_blocks > 50 and abs(mean) < 1:
        assert float(off.sum()) < 0.9 * float(equal_off.sum())


def test_int4_leaves_other_matrices_to_int8() -> None:
    assert INT4.chosen(64) is INT4
    assert (INT4.chosen(64, is_sensitive=True).name, INT4.chosen(50).name) == ("int8", "plain")
    model, config = make("llama")
    weights, tokens = dict(model.state_dict()), random_tokens(2)
    expected = torch.cat(Driver(TorchOps(), weights, config, tokens, weight_format=INT4).step([(0, 9), (1, 5)]))
    ops = native_ops()
    found = torch.cat(Driver(ops, weights, config, tokens, weight_format=INT4).step([(0, 9), (1, 5)]))
    check(found, expected, 2 * NATIVE_TOLERANCE)
    names = [weight.get().format_name for weight in ops.inner._linear_weights]
    assert names == ["Q8_0", "Q4_1", "Q4_1", "Q4_1"] * 3 + ["Q8_0"]


@pytest.mark.parametrize("weight_format", [INT8, INT4])
@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_of_a_weight_is_not_hidden(backend: Backend, weight_format: WeightFormat) -> None:
    weight = torch.randn(2, 64)
    weight[1, 3] = float("nan")
    ops = backend()
    y = ops.linear(torch.ones(1, 64), ops.linear_weight([weight], [None], weight_format))
    assert y.isnan().tolist() == [[False, True]]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scale", [0.0, 1e-9, 1e-5, 1e6])
def test_int8_rows_of_any_size(backend: Backend, scale: float) -> None:
    """Scales of 16 bits end at 6e-8 and at 65,504."""
    ops, weight = backend(), torch.randn(8, 64) * scale
    y = ops.linear(torch.ones(1, 64), ops.linear_weight([weight], [None], INT8))
    torch.testing.assert_close(y, weight.sum(1)[None], atol=64 * max(6e-8, 0.01 * scale), rtol=0.0)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("num_rows", [1, 3, 9, 40])
def test_native_int8_products(num_rows: int, size: tuple[int, int], dtype: str) -> None:
    ops = native_ops(dtype=dtype)
    weight, wide = linear_weights(ops, *size, dtype, has_bias=True)
    x, residual = (torch.randn(num_rows, width) for width in reversed(size))
    before = residual.clone()
    check(ops.linear(x, weight), TorchOps().linear(x, wide), NATIVE_TOLERANCE)
    check(ops.linear(x, weight, residual=residual), TorchOps().linear(x, wide, residual=residual), NATIVE_TOLERANCE)
    assert torch.equal(residual, before)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("activation", get_args(Activation))
def test_activations_of_int8_products(activation: Activation, dtype: str) -> None:
    for ops, tolerance in ((TorchOps(dtype=dtype), TOLERANCE[dtype]), (native_ops(dtype=dtype), 2 * NATIVE_TOLERANCE)):
        weight, wide = linear_weights(ops, 40, 64, dtype)
        x = torch.randn(5, 64).to(getattr(torch, dtype)).float()
        given = x.to(ops.torch_dtype) if isinstance(ops, TorchOps) else x
        check(
            ops.linear(given, weight, activation=activation),
            TorchOps().linear(x, wide, activation=activation),
            tolerance,
        )


@pytest.mark.parametrize("backend", BACKENDS)
def test_sums_of_integers_do_not_leave_the_range_of_float16(backend: Backend) -> None:
    """127 * 127 * 64 is beyond it; the outputs are not."""
    ops = backend(dtype="float16")
    weight = ops.linear_weight([torch.full((8, 64), 1e-3)], [None], INT8)
    x = torch.full((2, 64), 127.0)
    y = ops.linear(x.half() if backend is TorchOps else x, weight)
    torch.testing.assert_close(y.float(), torch.full((2, 8), 8.128), rtol=2e-3, atol=0.0)
