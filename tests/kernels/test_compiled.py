"""Kernels compiled for a Hopper, which needs no card: the interpreter takes much that the compiler does not."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

COMPILE = """
import sys
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

SCALARS = {"eps": "fp32", "scale": "fp32", "ids": "*i64", "previous": "*i64", "targets": "*i64"}
SCALARS |= {"cap": "fp32", "window": "i32"}
FACTORS = ("norm", "norm_bias", "factors")

def build(kernel, fixed, types, other="bf16", num_warps=1, num_stages=3):
    names = kernel.arg_names
    fixed = {name: None for name in names if name.endswith(("scales", "sinks")) and name not in types} | fixed
    known = {name: "i32" for name in names if name.startswith("num_") or name.endswith("_stride")}
    known |= {name: "*fp32" for name in FACTORS} | SCALARS | {name: f"*{kind}" for name, kind in types.items()}
    signature = {name: "constexpr" if name in fixed else known.get(name, f"*{other}") for name in names}
    places = {(names.index(name),): value for name, value in fixed.items()}
    pointers = [(names.index(name),) for name in names if signature[name].startswith("*") or name.endswith("_stride")]
    source = ASTSource(kernel, signature, places, {place: [["tt.divisibility", 16]] for place in pointers})
    return compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps, "num_stages": num_stages})
"""
PRODUCTS = """
from archerfish.kernels.triton.products import multiply_rows_kernel as kernel

fixed = {
    "width": 256, "outputs": 4, "columns": 128, "num_pieces": 1, "activation": "none", "has_bias": False, "has_residual": True,
    "is_early": False,
}
for type_name in ("fp32", "bf16"):
    for rows, is_normed, is_gated in ((3, True, False), (4, False, False), (4, True, True)):
        build(kernel, {**fixed, "rows": rows, "is_normed": is_normed, "is_gated": is_gated}, {}, type_name)
"""
MANY_ROWS = """
import torch
from archerfish.kernels.triton.mixes import multiply_parts_kernel
from archerfish.kernels.triton.products import add_rows_kernel
from archerfish.kernels.triton.recurrent import PART_ROWS, choose_part_tile
from archerfish.kernels.triton.tiles import SHARED_BYTES, add_tile

tile = add_tile(64, torch.empty(768, 3072, dtype=torch.bfloat16), 2, SHARED_BYTES)
added = {"width": 3072, "rows": tile.rows, "outputs": tile.outputs, "columns": tile.columns, "parts": tile.parts}
added["is_early"] = True
built = [build(add_rows_kernel, added, {"total": "fp32"}, num_warps=tile.num_warps)]
built.append(build(add_rows_kernel, added, {"total": "fp32", "weight": "i8", "scales": "fp32"}, num_warps=tile.num_warps))
tile = choose_part_tile(2, torch.device("cpu"))
parts = {"width": 768, "rows": PART_ROWS, "outputs": tile.outputs, "columns": tile.columns, "num_outputs": 768}
parts |= {name: 64 for name in ("decay_rank", "rate_rank", "gate_rank", "value_rank")}
parts |= {"is_time": True, "is_narrow": False, "is_early": True}
built.append(build(multiply_parts_kernel, parts, {}, num_warps=tile.num_warps))
for each in built:
    assert "wgmma.mma_async" in each.asm["ptx"] and "cp.async" in each.asm["ptx"]
"""
GROUPS = """
from archerfish.kernels.triton.group_products import multiply_few_kernel, multiply_many_kernel
from archerfish.kernels.triton.norm import add_scaled_kernel, gated_kernel, quantise_kernel, rms_norm_kernel
from archerfish.kernels.triton.products import multiply_rows_kernel, multiply_tiles_kernel, stream_kernel

flags = ("has_bias", "has_residual", "is_gated")
fixed = {"width": 4096, "rows": 8, "outputs": 16, "is_early": True, "in_pairs": True, "activation": "none"}
fixed |= dict.fromkeys(flags, False) | {"size": 32, "planes": 4, "coding": "signed"}
for half in ("bf16", "fp16"):
    for size, is_gated, coding in ((128, False, "signed"), (128, True, "mins"), (32, False, "mins"), (32, True, "mxfp4")):
        own = {"group_size": size, "per_scale": size // 32, "parts": 4, "coding": coding, "is_gated": is_gated}
        words = {"codes": "i16", "scales": "i32" if coding == "mins" else "fp32"}
        built = build(multiply_few_kernel, {**fixed, **own}, words, half, 4)
        assert "cp.async" in built.asm["ptx"] and "mma.sync" in built.asm["ptx"]
        assert "cvt.rn.f32.s" not in built.asm["ptx"] and "cvt.rn.f32.u" not in built.asm["ptx"]  # conversions are slow
        many = {**fixed, **own, "rows": 128, "outputs": 128}
        del many["is_gated"], many["parts"]
        built = build(multiply_many_kernel, many, words, half, 8)
        assert "wgmma.mma_async" in built.asm["ptx"]
        loop = built.asm["ttgir"].split("scf.for")[1].split("scf.yield")[0]
        assert "local_store" not in loop and "local_alloc" not in loop  # weights stay in registers
        assert "pendings = 0" not in loop  # and are unpacked while the tensor cores are at work
    own = {"group_size": 128, "size": 128, "planes": 1, "per_scale": 1, "parts": 4}
    for kind in ("i8", "fp8e4nv"):
        build(multiply_few_kernel, {**fixed, **own}, {"codes": kind, "scales": "fp32"}, half, 4)
    kinds = {"weight": "fp8e4nv", "scales": "fp32"}
    rows = {"width": 500, "columns": 128, "activation": "none", "is_early": True}
    rows |= dict.fromkeys(flags, False) | {"is_normed": False, "num_pieces": 3}
    build(multiply_rows_kernel, {**rows, "rows": 2, "outputs": 4}, kinds, half, 4)
    tiles = {name: value for name, value in rows.items() if name not in ("is_normed", "num_pieces")}
    build(multiply_tiles_kernel, {**tiles, "rows": 8, "outputs": 16, "parts": 4}, kinds, half, 4)
    build(stream_kernel, {**rows, "outputs": 4, "columns": 512}, kinds, half, 4)
    row, fp8 = {"width": 500, "block": 512}, {"scales": "fp32", "row_scales": "fp32", "weight": "fp32"}
    build(quantise_kernel, {**row, "is_early": True}, {"out": "fp8e4nv", **fp8}, half)
    build(rms_norm_kernel, {**row, "is_early": True, "has_residual": True}, {"normed": "fp8e4nv", **fp8}, half)
    build(gated_kernel, {**row, "is_silu": True}, fp8, half)
    build(add_scaled_kernel, {**row, "is_early": True, "has_total": True}, {"total": "fp32", "out": "fp32", **fp8}, half)
    build(add_scaled_kernel, {**row, "is_early": True, "has_total": False}, {"x": "i32", **fp8}, half)
    build(quantise_kernel, {**row, "is_early": True}, {"out": "i8", **fp8}, half)
"""
EXPERTS = """
from archerfish.kernels.triton.experts import add_up_kernel, choose_tile, multiply_experts_kernel, order_kernel, route_kernel
from archerfish.kernels.experts import Routing

kinds = {name: "i32" for name in ("ids", "order", "tile_experts", "counts", "nths")} | {"weights": "fp32", "bias": "fp32"}
routed = {"num_experts": 60, "experts": 64, "is_early": True}
flags = {"is_sigmoid": True, "is_normed": True, "has_bias": True, "is_lone": False}
build(route_kernel, {**routed, **flags, "num_chosen": 4, "slots": 4, "rows": 16}, kinds, num_warps=4)
build(order_kernel, {**routed, "places": 128, "tiles": 64, "tile_rows": 16}, kinds, num_warps=8)
summed = {"width": 2048, "num_chosen": 4, "columns": 1024, "gate": 60, "has_shared": True, "is_early": True}
build(add_up_kernel, summed, kinds, num_warps=4)
tile, small = (choose_tile(num_rows, Routing(60, 4), 2, is_gated=True) for num_rows in (4096, 128))
fixed = {"width": 2048, "per_row": 4, "rows": tile.rows, "outputs": tile.outputs, "activation": "silu", "is_gated": True}
fixed |= {"is_lone": False, "in_pairs": True, "is_early": True, "coding": "signed", "has_bias": False}
plain = {"group_size": 0, "size": tile.columns, "planes": 1, "per_scale": 1}
words = {"group_size": 128, "size": 32, "planes": 4, "per_scale": 4}
packed, biased = {"codes": "i16", "scales": "fp32"}, {"coding": "mxfp4", "activation": "swiglu_oai", "has_bias": True}
fp4 = {**words, "group_size": 32, "per_scale": 1, **biased}
for own, types in ((plain, {}), (plain, {"codes": "i8", "scales": "fp32"}), (words, packed), (fp4, packed)):
    built = build(multiply_experts_kernel, {**fixed, **own}, kinds | types, num_warps=tile.num_warps)
    assert "wgmma.mma_async" in built.asm["ptx"] and "cp.async" in built.asm["ptx"]
few = {**fixed, **plain, "rows": small.rows, "outputs": small.outputs, "size": small.columns}
assert small.rows == 32 and "wgmma.mma_async" in build(multiply_experts_kernel, few, kinds, num_warps=4).asm["ptx"]
"""
NARROW_HEADS = """
from archerfish.kernels.triton.attention import decode_kernel, shared_kernel
from archerfish.kernels.triton.prefill import prefill_kernel
from archerfish.kernels.triton.tiles import dot_block

heads = {"block_size": 16, "head_dim": 8, "width": dot_block(8), "has_cap": False, "step": 16}
extra = {"mask_size": 0, "mask_span": 0, "has_window": False}
numbers = ("table", "tables", "tile_sequences", "tile_firsts", "context_lens", "query_starts", "query_lens", "key_starts")
types = dict.fromkeys((*numbers, "shared_len"), "i32")
types |= dict.fromkeys(("partials", "levels", "shared_partials", "shared_levels"), "fp32")
prefill = {"num_kv_heads": 2, "group": 2, "rows": 32, "is_gathered": False}
flags = ("is_shared", "is_new", "is_rotated", "has_q_norm", "has_k_norm", "is_paired")
decode = {"group": 2, "rows": 16, "shared_step": 16, "parts_at_once": 4, "is_early": True} | dict.fromkeys(flags, False)
for half in ("bf16", "fp32"):
    build(prefill_kernel, {**heads, **extra, **prefill}, types, half, 4)
    for is_split in (False, True):
        build(decode_kernel, {**heads, **extra, **decode, "is_split": is_split}, types | {"cos_sin": "fp32"}, half, 4)
    build(shared_kernel, {**heads, "group": 2, "rows": 16, "is_early": True}, types, half, 4)
"""
ADAPTERS = """
from archerfish.kernels.triton.adapters import expand_kernel, shrink_kernel

kinds = {name: "i64" for name in ("order", "chunk_slots", "chunk_firsts", "chunk_counts")} | {"ranks": "i32", "inner": "fp32"}
for rank in (16, 256):
    both = {"max_rank": rank, "num_inner": 3 * rank, "rows": 64, "is_early": True}
    down = build(shrink_kernel, {**both, "width": 4096, "split": 1024, "block": 64, "columns": 128}, kinds)
    up = {"outputs": 6144, "num_splits": 4, "block": rank, "tile": 128}
    stacked = {**both, **up, "gate": "none", "end0": 4096, "end1": 5120, "end2": 6144}
    gated = {**both, **up, "gate": "silu", "end0": 3072, "end1": 6144, "end2": 6144, "num_inner": 2 * rank}
    stages = 3 if rank < 256 else 1
    for each in (down, *(build(expand_kernel, every, kinds, num_stages=stages) for every in (stacked, gated))):
        assert each.metadata.shared < 200_000 and ".b16" not in "".join(
            line for line in each.asm["ptx"].splitlines() if "ld.global" in line or "st.global" in line
        )
"""
FP8_KEYS = (
    NARROW_HEADS.split("for half in")[0]
    + """
from archerfish.kernels.triton.norm import store_kv_kernel
from archerfish.kernels.triton.prefill import gather_kernel

types |= {"keys": "fp8e4nv", "values": "fp8e4nv", "kv_scales": "fp32", "cos_sin": "fp32", "slots": "i64", "positions": "i64"}
heads = {**heads, "head_dim": 64, "width": 64}
build(prefill_kernel, {**heads, **extra, **prefill}, types, "bf16", 4)
build(shared_kernel, {**heads, "group": 2, "rows": 16, "is_early": True}, types, "bf16", 4)
types["sinks"] = "fp32"
build(prefill_kernel, {**heads, **extra, **prefill}, types, "bf16", 4)
new = {**heads, **extra, **decode, "is_split": True, "is_new": True, "is_rotated": True}
for is_paired in (False, True):
    built = build(decode_kernel, {**new, "is_paired": is_paired}, types, "bf16", 4)
    assert ("cvt.bf16.f16" in built.asm["ptx"]) != is_paired  # what is loaded need not become bfloat16
stored = {"block_size": 16, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "half": 32, "q_rows": 4, "kv_rows": 2}
stored |= {"half_block": 32, "rest_block": 0, "is_rotated": True, "q_norm_dim": 0, "k_norm_dim": 0, "is_interleaved": False}
stored["is_early"] = True
build(store_kv_kernel, stored, types, "bf16")
build(gather_kernel, {"block_size": 16, "row_width": 128, "width": 128, "many": 4}, types, "bf16", 4)
"""
)
SUMS = """
from archerfish.kernels.triton.mixes import mix_rows_kernel, norm_shift_kernel
from archerfish.kernels.triton.norm import lookup_kernel, rms_norm_kernel
from archerfish.kernels.triton.products import multiply_rows_kernel, multiply_tiles_kernel, stream_kernel

plain = {"width": 576, "activation": "none", "has_bias": False, "is_early": True}
after = {**plain, "has_residual": True, "is_gated": False}
row = {"width": 576, "block": 1024, "is_early": True}
ranks = {name: 16 for name in ("decay_rank", "rate_rank", "gate_rank", "value_rank")}
for half in ("bf16", "fp16"):
    for is_gated in (False, True):
        before = {**plain, "has_residual": False, "is_normed": True, "is_gated": is_gated}
        built = []
        for kind in (half, "fp32"):
            rows = {"rows": 2, "outputs": 4, "columns": 1024, "num_pieces": 1}
            built.append(build(multiply_rows_kernel, {**before, **rows}, {"x": kind}, half, 4))
            build(multiply_rows_kernel, {**before, **rows, "columns": 256, "num_pieces": 3}, {"x": kind}, half)
            build(stream_kernel, {**before, "outputs": 2, "columns": 1024, "num_pieces": 2}, {"x": kind}, half, 4)
        moves = [each.asm["ttgir"].count("ttg.convert_layout") for each in built]
        assert moves[0] == moves[1], moves
    few = {"rows": 2, "outputs": 4, "columns": 1024, "num_pieces": 1, "is_normed": True, "is_gated": True}
    build(multiply_rows_kernel, {**after, **few}, {"x": "fp32", "weight": "i8", "scales": "fp32"}, half, 4)
    sums = {"residual": "fp32", "out": "fp32"}
    rows = {"rows": 2, "outputs": 4, "columns": 256, "num_pieces": 1, "is_normed": False}
    build(multiply_rows_kernel, {**after, **rows}, sums, half)
    stream = {"outputs": 2, "columns": 1024, "num_pieces": 2, "is_normed": False}
    build(stream_kernel, {**after, **stream}, sums, half, 4)
    build(multiply_tiles_kernel, {**after, "rows": 8, "outputs": 16, "columns": 256, "parts": 4}, sums, half, 4)
    build(lookup_kernel, row, {"out": "fp32"}, half)
    build(rms_norm_kernel, {**row, "has_residual": False}, {"x": "fp32", "weight": "fp32", "total": "fp32"}, half)
    build(rms_norm_kernel, {**row, "has_residual": True}, {"residual": "fp32", "weight": "fp32", "total": "fp32"}, half)
    for is_time in (False, True):
        mix = {"columns": 1024, "rows": 2, "outputs": 4, "num_outputs": 576, "is_time": is_time, **ranks}
        build(mix_rows_kernel, {"width": 576, "is_early": True, **mix}, {"x": "fp32"}, half, 4)
    shift = {"width": 576, "columns": 1024, "num_factors": 6, "is_early": True}
    build(norm_shift_kernel, shift, {"x": "fp32"}, half)
"""


@pytest.mark.parametrize(
    "script",
    [
        # In float32, weights and sums have one type: tuples of them must not be taken for one another. Heads may be
        # narrower than what a product of tiles takes. Products of many rows run on the tensor cores that all warps
        # share.
        pytest.param(PRODUCTS + NARROW_HEADS + MANY_ROWS, id="products and attention"),
        # Beside weights of half the size, rows in float32 are spread as others are.
        pytest.param(SUMS, id="sums in float32", marks=pytest.mark.slow),
        pytest.param(EXPERTS + ADAPTERS, id="experts and adapters", marks=pytest.mark.slow),
        pytest.param(GROUPS + FP8_KEYS, id="weights in groups, keys in FP8", marks=pytest.mark.slow),
    ],
)
def test_kernels_compile_for_a_hopper(script: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILE + script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
