"""Quantised checkpoints of a small Llama, packed by the rules of each format, and what their matrices mean."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file

Floats = npt.NDArray[np.float32]
Packed = tuple[dict[str, torch.Tensor], Floats]  # the tensors of a matrix, and what they mean
Packer = Callable[[Floats], Packed]
WIDTH = 128
INNER = 256
VOCAB = 96
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "vocab_size": VOCAB,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "eos_token_id": 2,
}
MATRICES = {
    "self_attn.q_proj": (WIDTH, WIDTH),
    "self_attn.k_proj": (WIDTH, WIDTH),
    "self_attn.v_proj": (WIDTH, WIDTH),
    "self_attn.o_proj": (WIDTH, WIDTH),
    "mlp.gate_proj": (INNER, WIDTH),
    "mlp.up_proj": (INNER, WIDTH),
    "mlp.down_proj": (WIDTH, INNER),
}
AWQ_OUTPUTS = (0, 2, 4, 6, 1, 3, 5, 7)  # of the nibbles of a word, the lowest first


def write_quantised(folder: Path, packer: Packer, settings: dict[str, Any]) -> dict[str, Floats]:
    """A checkpoint of random weights; gives what its quantised matrices mean, by name."""
    draw = np.random.default_rng(3)
    tensors, meant = plain_tensors(draw), {}
    for layer in range(2):
        for name, shape in MATRICES.items():
            packed, matrix = packer(draw.normal(0, 0.08, shape).astype(np.float32))
            module = f"model.layers.{layer}.{name}"
            tensors |= {f"{module}.{part}": tensor for part, tensor in packed.items()}
            meant[f"{module}.weight"] = matrix
    write(folder, tensors, {"quantization_config": settings})
    return meant


def write_plain(folder: Path, meant: dict[str, Floats]) -> None:
    """The same model with the numbers that its quantised matrices mean."""
    write(
        folder,
        plain_tensors(np.random.default_rng(3)) | {name: torch.from_numpy(each) for name, each in meant.items()},
        {},
    )


def plain_tensors(draw: np.random.Generator) -> dict[str, torch.Tensor]:
    """All but the matrices of layers."""
    made = {name: draw.normal(0, 0.5, (VOCAB, WIDTH)) for name in ("model.embed_tokens", "lm_head")}
    norms = [f"model.layers.{i}.{name}" for i in range(2) for name in ("input_layernorm", "post_attention_layernorm")]
    made |= {name: np.ones(WIDTH) for name in [*norms, "model.norm"]}
    return {f"{name}.weight": torch.from_numpy(each.astype(np.float32)) for name, each in made.items()}


def write(folder: Path, tensors: dict[str, torch.Tensor], changes: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    save_file(
        {name: each.contiguous() for name, each in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )


def quantise(
    matrix: Floats, bits: int, group_size: int, *, is_symmetric: bool, order: npt.NDArray[np.int64] | None = None
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float16], npt.NDArray[np.int64], Floats]:
    """Codes, scales and zeros of groups of inputs, and the numbers that they mean. order: the group of each input."""
    num_outputs, num_inputs = matrix.shape
    groups = np.arange(num_inputs) // (num_inputs if group_size == -1 else group_size) if order is None else order
    codes, meant = np.zeros(matrix.shape, np.int64), np.zeros(matrix.shape, np.float32)
    num_groups, top = int(groups.max()) + 1, 2**bits - 1
    scales, zeros = np.zeros((num_outputs, num_groups), np.float16), np.zeros((num_outputs, num_groups), np.int64)
    for group in range(num_groups):
        part = matrix[:, groups == group]
        low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
        if is_symmetric:
            scale, zero = (2 * np.abs(part).max(1) / top).astype(np.float16), np.full(num_outputs, 2 ** (bits - 1))
        else:
            scale = ((high - low) / top).astype(np.float16)
            zero = np.clip(np.rint(-low / scale), 0, top).astype(np.int64)
        wide = scale.astype(np.float32)[:, None]
        found = np.clip(np.rint(part / wide) + zero[:, None], 0, top).astype(np.int64)
        codes[:, groups == group], meant[:, groups == group] = found, (found - zero[:, None]) * wide
        scales[:, group], zeros[:, group] = scale, zero
    return codes, scales, zeros, meant


def pack_words(codes: npt.NDArray[np.int64], bits: int) -> torch.Tensor:
    """Along the last axis, the lowest bits first."""
    per_word = 32 // bits
    parts = codes.reshape(*codes.shape[:-1], -1, per_word)
    words = sum(parts[..., place] << (bits * place) for place in range(per_word))
    return torch.from_numpy(np.asarray(words).astype(np.uint32).view(np.int32))


def gptq(
    bits: int = 4, group_size: int = 128, *, is_symmetric: bool = True, has_order: bool = False, version: int = 1
) -> Packer:
    def pack(matrix: Floats) -> Packed:
        num_inputs = matrix.shape[1]
        groups = np.arange(num_inputs) // (num_inputs if group_size == -1 else group_size)
        if has_order:
            groups = np.random.default_rng(8).permutation(groups)
        codes, scales, zeros, meant = quantise(matrix, bits, group_size, is_symmetric=is_symmetric, order=groups)
        stored = (zeros - (1 if version == 1 else 0)) % 2**bits
        return {
            "qweight": pack_words(codes, bits).t(),
            "qzeros": pack_words(stored.T.copy(), bits),
            "scales": torch.from_numpy(scales).t(),
            "g_idx": torch.from_numpy(groups.astype(np.int32)),
        }, meant

    return pack


def awq(group_size: int = 64, *, is_symmetric: bool = False) -> Packer:
    def pack(matrix: Floats) -> Packed:
        codes, scales, zeros, meant = quantise(matrix, 4, group_size, is_symmetric=is_symmetric)
        given = {"scales": torch.from_numpy(scales).t()}
        for name, numbers in (("qweight", codes), ("qzeros", zeros)):
            mixed = numbers.T.reshape(numbers.shape[1], -1, 8)[:, :, AWQ_OUTPUTS]
            given[name] = pack_words(mixed.reshape(numbers.shape[1], -1), 4)
        return given, meant

    return pack


def fp8(kind: str, name: str = "weight_scale", dtype: torch.dtype = torch.float32) -> Packer:
    """kind: tensor, channel or block."""

    def pack(matrix: Floats) -> Packed:
        values = torch.from_numpy(matrix)
        rows, columns = values.shape
        sides = {"tensor": (rows, columns), "channel": (1, columns), "block": (128, 128)}[kind]
        tops = values.abs().reshape(rows // sides[0], sides[0], columns // sides[1], sides[1]).amax((1, 3))
        scales = (tops / 448).to(dtype)
        spread = scales.float().repeat_interleave(sides[0], 0)[:rows].repeat_interleave(sides[1], 1)[:, :columns]
        codes = (values / spread).to(torch.float8_e4m3fn)
        given = scales.reshape(()) if kind == "tensor" else scales
        return {"weight": codes, name: given, "input_scale": torch.ones(())}, (codes.float() * spread).numpy()

    return pack


def compressed(form: str, **arguments: Any) -> tuple[Packer, dict[str, Any]]:
    """What the package compressed-tensors makes of a matrix, and the settings of such a checkpoint."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    args = QuantizationArgs(**arguments)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    compressor = BaseCompressor.load_from_registry(form)

    def pack(matrix: Floats) -> Packed:
        weight = torch.from_numpy(matrix)
        rows, columns = weight.shape
        high, wide = args.block_structure or (1, args.group_size or columns)
        blocks = weight.reshape(rows // high, high, columns // wide, wide)
        low, top = blocks.amin((1, 3)), blocks.amax((1, 3))
        scale, zero = calculate_qparams(low, top, args)
        state = {"weight": weight, "weight_scale": scale.float(), "weight_zero_point": zero}
        if args.symmetric:
            state.pop("weight_zero_point")
        packed = compressor.compress(state, scheme)
        return packed, compressor.decompress(packed, scheme)["weight"].float().numpy()

    int8 = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True} if form == "int-quantized" else None
    group = {"targets": ["Linear"], "weights": args.model_dump(mode="json"), "input_activations": int8, "format": form}
    return pack, {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}
