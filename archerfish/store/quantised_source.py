"""Reader of quantised checkpoints: GPTQ, AWQ, compressed-tensors and FP8.

Each has several tensors for a matrix. They become one tensor with the matrix's own name, whose codes, scales and minima
lie as `store/format.py` says, so that nothing else needs to know how a checkpoint packs them. A few ways to quantise
have no such form; their matrices are widened, and nothing is lost but memory.

Everything about a matrix but its numbers is checked before any is read.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from archerfish.errors import CorruptFileError, UnsupportedModelError, ValidationError
from archerfish.kernels.stored import FP8_VALUES, Floats, widened
from archerfish.store.format import GROUP_SIZE, Quantization, Row, TensorInfo, dequantize, make_quantization
from archerfish.store.source import SourceTensor

Codes = npt.NDArray[np.uint8]
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # place of each output in a word
BLOCK_SIDES = 128, 128  # outputs and inputs of FP8's blocks, where nothing else is said
LARGEST_HALF = 65504.0
HINT = 'Take the original model (weights="int8" halves its memory), a GGUF file of it, or one in GPTQ, AWQ or FP8.'
# Tensors beside quantised matrices that are not used: activations are not quantised by fixed scales.
UNUSED = re.compile(r"\.(input_scale|input_zero_point|output_scale|[kv]_scale|input_global_scale|weight_shape)$")
COMPRESSED = {
    "None",
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "dense",
    "mixed-precision",
}
NO_SPARSITY = (None, "dense")


class Matrix(NamedTuple):
    """What a matrix means: codes in [outputs, inputs], and in [outputs, groups] what turns them into numbers."""

    codes: Codes  # integers, or bytes of FP8
    scales: Floats
    zeros: Floats | None = None  # codes that stand for 0; None: the middle of all codes


@dataclass(frozen=True)
class Layout:
    """What is known of a quantised matrix before its numbers are read."""

    shape: tuple[int, int]
    group_size: int
    bits: int
    read: Callable[[], Matrix]
    is_symmetric: bool = True
    order: npt.NDArray[np.int64] | None = None  # the group of each input, where groups do not follow one another
    is_float: bool = False

    @property
    def quant_type(self) -> str:
        """How the matrix is stored; empty: widened."""
        sizes = self.shape[1], self.group_size, self.bits
        return (
            ""
            if self.order is not None
            else stored_type(*sizes, is_symmetric=self.is_symmetric, is_float=self.is_float)
        )


def stored_type(num_inputs: int, group_size: int, bits: int, *, is_symmetric: bool, is_float: bool = False) -> str:
    """The type of `store/format.py` for a matrix; empty: there is none."""
    if num_inputs % GROUP_SIZE or group_size % GROUP_SIZE or num_inputs % group_size:
        return ""
    if bits == 4:
        return "Q4_0" if is_symmetric else "Q4_1"
    return "FP8" if is_float else "INT8" if is_symmetric else ""


Given = Mapping[str, SourceTensor]  # tensors of one matrix, by the last part of their names
Reader = Callable[[str, Given, Mapping[str, Any]], Layout | None]  # gives None for a matrix that is not quantised


def read_settings(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """What config.json says of quantised weights; nothing where they are plain. Formats that are not read are
    refused."""
    settings = config.get("quantization_config") or config.get("compression_config") or {}
    if not isinstance(settings, dict):
        raise CorruptFileError(f"{path}: quantization_config is not an object.")
    if settings.get("quant_method") == "mxfp4" and config.get("model_type") == "gpt_oss":
        return {}  # `text_parts.py` reads its experts
    if settings:
        choose_reader(path, settings)
    return settings


def read_quantised(path: Path, settings: Mapping[str, Any], tensors: Iterable[SourceTensor]) -> list[SourceTensor]:
    """The tensors of a model, with one for each quantised matrix. settings: from `read_settings`."""
    found = join_tensors(path, settings, tensors) if settings else list(tensors)
    for tensor in found:
        if tensor.info.dtype == "float8_e4m3fn":
            raise UnsupportedModelError(f"{path}: {tensor.info.name!r} has FP8 numbers without a scale.", hint=HINT)
    return found


def join_tensors(path: Path, settings: Mapping[str, Any], tensors: Iterable[SourceTensor]) -> list[SourceTensor]:
    """One tensor for each quantised matrix, and the others."""
    read, marks = choose_reader(path, settings)
    modules: dict[str, dict[str, SourceTensor]] = defaultdict(dict)
    for tensor in tensors:
        module, _, name = tensor.info.name.rpartition(".")
        modules[module][name] = tensor
    found: list[SourceTensor] = []
    for module, given in modules.items():
        if not any(mark in given for mark in marks):
            found += given.values()
            continue
        try:
            layout = read(module, given, settings)
        except CorruptFileError as error:
            error.message = f"{path}: {module!r}: {error.message}"
            raise
        if layout is None:
            found += given.values()
        else:
            found += [given["bias"]] if "bias" in given else []
            found.append(source_tensor(f"{module}.weight", layout))
    return [tensor for tensor in found if not UNUSED.search(f".{tensor.info.name}")]


def choose_reader(path: Path, settings: Mapping[str, Any]) -> tuple[Reader, tuple[str, ...]]:
    """What reads a matrix, and the tensors that tell which modules have one. Other kinds are refused by name."""
    method, kind = str(settings.get("quant_method") or ""), ""
    if method in ("gptq", "awq"):
        bits, known = settings.get("bits", settings.get("w_bit", 4)), (4, 8) if method == "gptq" else (4,)
        version = str(settings.get("checkpoint_format", settings.get("format", "gptq"))) if method == "gptq" else ""
        if bits not in known:
            kind = f"{method.upper()} weights of {bits} bits"
        elif version not in ("", "gptq", "gptq_v2"):
            kind = f"GPTQ weights packed for {version}"
        elif method == "awq" and str(settings.get("version", "gemm")).lower() != "gemm":
            kind = f"AWQ weights packed for {settings['version']}"
        else:
            return (read_gptq, ("qweight",)) if method == "gptq" else (read_awq, ("qweight",))
    elif method == "compressed-tensors":
        kinds = {str(settings.get("format")), *(str(each.get("format")) for each in groups_of(settings))}
        refused = kinds - COMPRESSED
        sparsity = (settings.get("sparsity_config") or {}).get("format")
        if refused or sparsity not in NO_SPARSITY:
            kind = f"compressed-tensors of the format {sorted(refused)[0] if refused else sparsity}"
        else:
            return read_compressed, ("weight_packed", "weight_scale")
    elif method == "fp8" or (method == "modelopt" and settings.get("quant_algo") == "FP8"):
        return read_fp8_matrix, ("weight_scale_inv", "weight_scale")
    named = kind or f"weights in {method or 'an unnamed format'}"
    raise UnsupportedModelError(
        f"{path} has {named} (quantization_config of its config.json), which archerfish does not read.", hint=HINT
    )


def groups_of(settings: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    groups = settings.get("config_groups")
    return [each for each in groups.values() if isinstance(each, dict)] if isinstance(groups, dict) else []


def stated_quantization(settings: Mapping[str, Any], name: str, shape: Sequence[int]) -> Quantization | None:
    """How a matrix would be stored that settings describe; None: plain. For weights that are made up."""
    num_inputs, axis = shape[-1], len(shape) - 1
    if settings.get("quant_method") == "mxfp4":
        return make_quantization("MXFP4", axis) if ".experts." in name else None
    method, weights = settings.get("quant_method"), next(iter(groups_of(settings)), {}).get("weights") or {}
    is_float = method in ("fp8", "modelopt") or weights.get("type") == "float"
    bits = 8 if is_float else int(weights.get("num_bits", settings.get("bits", settings.get("w_bit", 4))))
    blocks = settings.get("weight_block_size") or weights.get("block_structure")
    size = blocks[1] if blocks else weights.get("group_size", settings.get("group_size", settings.get("q_group_size")))
    stated = settings.get("sym", True) if method == "gptq" else not settings.get("zero_point", method == "awq")
    group_size = num_inputs if size in (None, -1) or size > num_inputs else int(size)
    is_symmetric = bool(is_float or weights.get("symmetric", stated))
    found = stored_type(num_inputs, group_size, bits, is_symmetric=is_symmetric, is_float=is_float)
    return Quantization(found, axis, group_size) if found else None


def states_int8_activations(config: Mapping[str, Any]) -> bool:
    """Whether a checkpoint is made for activations that are int8, too."""
    kinds = [group.get("input_activations") or {} for group in groups_of(config.get("quantization_config") or {})]
    return bool(kinds) and all(kind.get("num_bits") == 8 and kind.get("type", "int") == "int" for kind in kinds)


def source_tensor(name: str, layout: Layout) -> SourceTensor:
    info = TensorInfo(name, "float32", layout.shape)
    if not layout.quant_type:
        return SourceTensor(info, partial(widen, name, layout))
    kept = info._replace(quantization=Quantization(layout.quant_type, 1, layout.group_size))
    return SourceTensor(kept, lambda: dequantize(make_row(kept, layout)), partial(make_row, kept, layout))


def read_checked(name: str, layout: Layout) -> Matrix:
    matrix = layout.read()
    if not np.isfinite(matrix.scales).all():
        raise ValidationError(f"The tensor {name!r} of the source has a scale that is not finite.")
    return matrix


def widen(name: str, layout: Layout) -> Floats:
    """The numbers of a matrix."""
    codes, scales, zeros = read_checked(name, layout)
    values = FP8_VALUES[codes] if layout.is_float else codes.astype(np.float32)
    groups = np.arange(layout.shape[1]) // layout.group_size if layout.order is None else layout.order
    if not layout.is_float:
        values -= np.float32(1 << (layout.bits - 1)) if zeros is None else zeros[:, groups]
    values *= scales[:, groups]
    return values


def make_row(info: TensorInfo, layout: Layout) -> Row:
    """A matrix as it is stored."""
    codes, scales, zeros = read_checked(info.name, layout)
    if layout.bits == 8:
        integers = codes if layout.is_float else codes ^ np.uint8(128)  # two's complement
        return Row(info, np.ascontiguousarray(integers).reshape(scales.size, -1), scales.astype(np.float32).reshape(-1))
    blocks, halves = codes.reshape(-1, 2, GROUP_SIZE // 2), [half_of(info.name, scales)]
    if zeros is not None:
        halves.append(half_of(info.name, -zeros.reshape(-1) * halves[0].astype(np.float32)))
    return Row(info, np.ascontiguousarray(blocks[:, 0] | blocks[:, 1] << 4), *halves)


def half_of(name: str, values: Floats) -> npt.NDArray[np.float16]:
    if np.abs(values).max(initial=0) > LARGEST_HALF:
        raise ValidationError(f"The tensor {name!r} of the source has a scale that float16 cannot hold.")
    return np.ascontiguousarray(values.astype(np.float16).reshape(-1))


def load(given: Given, name: str) -> npt.NDArray[Any]:
    return given[name].load()


def floats(given: Given, name: str) -> Floats:
    """Scales, which may be bfloat16, as float32."""
    return widened(load(given, name)).astype(np.float32)


def need(given: Given, name: str, *shape: int | None) -> tuple[int, ...]:
    """The shape of a tensor, which must be there and have the given sizes."""
    if name not in given:
        raise CorruptFileError(f"the tensor {name!r} is missing.")
    found = given[name].info.shape
    if len(found) != len(shape) or any(size not in (None, own) for size, own in zip(shape, found, strict=True)):
        wanted = " x ".join("any" if size is None else str(size) for size in shape)
        raise CorruptFileError(
            f"the tensor {name!r} has the shape {' x '.join(map(str, found))}, where {wanted} was expected."
        )
    return found


def unpack(words: npt.NDArray[np.int32], bits: int, axis: int) -> Codes:
    """Codes of 4 or 8 bits, the lowest first, along an axis."""
    parts = words.view(np.uint32)[..., None] >> np.arange(0, 32, bits, dtype=np.uint32) & np.uint32((1 << bits) - 1)
    parts = np.moveaxis(parts.astype(np.uint8), -1, axis + 1)
    shape = list(words.shape)
    shape[axis] *= 32 // bits
    return parts.reshape(shape)


def read_gptq(module: str, given: Given, settings: Mapping[str, Any]) -> Layout:
    """qweight: packed along inputs; qzeros: along outputs, 1 less than they mean in the first version of the format."""
    own = gptq_settings(module, settings)
    bits = int(own.get("bits", 4))
    num_words, num_outputs = need(given, "qweight", None, None)
    num_inputs = num_words * 32 // bits
    num_groups, _ = need(given, "scales", None, num_outputs)
    group_size = check_groups(own.get("group_size", -1), num_inputs, num_groups)
    is_symmetric, order = bool(own.get("sym", True)), None
    if not is_symmetric:
        need(given, "qzeros", num_groups, num_outputs * bits // 32)
    if "g_idx" in given:
        need(given, "g_idx", num_inputs)
        order = load(given, "g_idx").astype(np.int64)
        if order.min(initial=0) < 0 or order.max(initial=0) >= num_groups:
            raise CorruptFileError(f"g_idx names a group outside of the {num_groups} groups.")
        if np.array_equal(order, np.arange(num_inputs) // group_size) or num_groups == 1:
            order = None

    def read() -> Matrix:
        zeros = None
        if not is_symmetric:
            is_first = str(settings.get("checkpoint_format", settings.get("format", "gptq"))) == "gptq"
            stored = unpack(load(given, "qzeros"), bits, 1)
            zeros = (stored + np.uint8(is_first) & np.uint8((1 << bits) - 1)).T.astype(np.float32)
        codes = np.ascontiguousarray(unpack(load(given, "qweight"), bits, 0).T)
        return Matrix(codes, np.ascontiguousarray(floats(given, "scales").T), zeros)

    return Layout((num_outputs, num_inputs), group_size, bits, read, is_symmetric, order)


def gptq_settings(module: str, settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of a module, which those of the first pattern under `dynamic` that matches its name override."""
    for pattern, override in (settings.get("dynamic") or {}).items():
        if not pattern.startswith("-:") and re.match(pattern.removeprefix("+:"), module):
            return {**settings, **override}
    return settings


def check_groups(group_size: Any, num_inputs: int, num_groups: int) -> int:
    """The inputs of a group, of which there must be so many; -1: all."""
    if group_size in (-1, None):
        group_size = num_inputs
    if not isinstance(group_size, int) or group_size < 1 or -(-num_inputs // group_size) != num_groups:
        raise CorruptFileError(f"group_size is {group_size}, but {num_inputs} inputs have {num_groups} scales.")
    return group_size


def read_awq(module: str, given: Given, settings: Mapping[str, Any]) -> Layout:
    """qweight and qzeros: packed along outputs, eight in an order of their own."""
    num_inputs, num_words = need(given, "qweight", None, None)
    num_outputs = 8 * num_words
    num_groups, _ = need(given, "scales", None, num_outputs)
    group_size = check_groups(settings.get("group_size", settings.get("q_group_size", 128)), num_inputs, num_groups)
    is_symmetric = not settings.get("zero_point", True)
    if not is_symmetric:
        need(given, "qzeros", num_groups, num_words)

    def codes_of(name: str) -> Codes:
        packed = unpack(load(given, name), 4, 1)
        return np.ascontiguousarray(packed.reshape(len(packed), -1, 8)[:, :, AWQ_ORDER].reshape(len(packed), -1).T)

    def read() -> Matrix:
        zeros = None if is_symmetric else codes_of("qzeros").astype(np.float32)
        return Matrix(codes_of("qweight"), np.ascontiguousarray(floats(given, "scales").T), zeros)

    return Layout((num_outputs, num_inputs), group_size, 4, read, is_symmetric)


def read_compressed(module: str, given: Given, settings: Mapping[str, Any]) -> Layout | None:
    """Packed integers, bytes of integers, or FP8, as the tensors tell."""
    if "weight_packed" not in given:
        stated = ((each.get("weights") or {}).get("block_structure") for each in groups_of(settings))
        return read_bytes(given, "weight_scale", next(filter(None, stated), BLOCK_SIDES))
    need(given, "weight_shape", 2)
    num_outputs, num_inputs = (int(size) for size in load(given, "weight_shape"))
    _, num_words = need(given, "weight_packed", num_outputs, None)
    bits = next((bits for bits in (4, 8) if -(-num_inputs * bits // 32) == num_words), 0)
    if not bits:
        raise CorruptFileError(
            f"weight_packed has {num_words} words for {num_inputs} inputs: neither 4 nor 8 bits each."
        )
    _, num_groups = need(given, "weight_scale", num_outputs, None)
    if num_inputs % num_groups:
        raise CorruptFileError(f"{num_inputs} inputs have {num_groups} scales.")
    group_size = num_inputs // num_groups
    order = None
    is_symmetric = "weight_zero_point" not in given
    if not is_symmetric:
        need(given, "weight_zero_point", -(-num_outputs * bits // 32), num_groups)
    if "weight_g_idx" in given:
        order = load(given, "weight_g_idx").astype(np.int64)
        if len(order) != num_inputs or order.min(initial=0) < 0 or order.max(initial=0) >= num_groups:
            raise CorruptFileError(f"weight_g_idx names a group outside of the {num_groups} groups.")

    def read() -> Matrix:
        codes = np.ascontiguousarray(unpack(load(given, "weight_packed"), bits, 1)[:, :num_inputs])
        zeros = None
        if not is_symmetric:
            zeros = unpack(load(given, "weight_zero_point"), bits, 0)[:num_outputs].astype(np.float32)
        return Matrix(codes, floats(given, "weight_scale"), zeros)

    return Layout((num_outputs, num_inputs), group_size, bits, read, is_symmetric, order)


def read_fp8_matrix(module: str, given: Given, settings: Mapping[str, Any]) -> Layout | None:
    scale = "weight_scale_inv" if "weight_scale_inv" in given else "weight_scale"
    return read_bytes(given, scale, settings.get("weight_block_size") or BLOCK_SIDES)


def read_bytes(given: Given, scale: str, sides: Sequence[int]) -> Layout | None:
    """int8 or FP8 with one scale, one for each output, or one for each block with these sides; None for other types."""
    shape = num_outputs, num_inputs = need(given, "weight", None, None)
    dtype, is_float = given["weight"].info.dtype, given["weight"].info.dtype == "float8_e4m3fn"
    if dtype not in ("int8", "float8_e4m3fn"):
        return None
    if "weight_zero_point" in given:
        raise UnsupportedModelError("Weights of 8 bits with zero points are not read.", hint=HINT)
    found, blocks = given[scale].info.shape, tuple(-(-size // side) for size, side in zip(shape, sides, strict=True))
    is_blocked = found == blocks and math.prod(found) > 1 and found != (num_outputs, 1)
    if not is_blocked and math.prod(found) not in (1, num_outputs):
        raise CorruptFileError(f"the tensor {scale!r} has the shape {found} for a matrix of {shape}.")
    group_size = math.gcd(num_inputs, sides[1]) if is_blocked else num_inputs

    def read() -> Matrix:
        scales = floats(given, scale)
        if is_blocked:
            columns = np.arange(0, num_inputs, group_size) // sides[1]
            scales = scales[np.arange(num_outputs) // sides[0]][:, columns]
        else:
            scales = np.broadcast_to(scales.reshape(-1, 1), (num_outputs, 1))
        codes: Codes = load(given, "weight").view(np.uint8)
        return Matrix(codes if is_float else codes ^ np.uint8(128), np.ascontiguousarray(scales))

    return Layout((num_outputs, num_inputs), group_size, 8, read, is_float=is_float)
