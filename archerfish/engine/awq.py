"""AWQ: inputs that are large in real text are made smaller, and their weights larger, before matrices are rounded.

What gives a product its inputs is divided by what its weights are multiplied with: the norm in front of it, or the
outputs of the matrix in front of it. So the model stays the same; but a weight that meets large inputs loses less to
rounding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

from archerfish.engine.gptq import row_path, save_arrays
from archerfish.engine.streamed_model import StreamedModel, Unread
from archerfish.errors import UnsupportedModelError
from archerfish.kernels.batches import Ids
from archerfish.kernels.stored import Floats
from archerfish.kernels.torch.reference import Tensor
from archerfish.models.llama import LlamaModel
from archerfish.store.format import Quantization, Row, TensorInfo
from archerfish.store.quantiser import find_grid, make_row, read_floats
from archerfish.store.source import ModelSource, SourceTensor
from archerfish.types import Progress

EXPONENTS = np.linspace(0, 1, 11)  # of an input's mean size, tried as its factor
ERROR_ROWS = 256  # tokens from all over the texts that errors are measured on
SMALLEST = 1e-4  # size of an input
# What gives a product its inputs, by the name of its first matrix in a layer.
PRODUCERS = {
    "self_attn.q_proj.weight": "input_layernorm.weight",
    "self_attn.qkv_proj.weight": "input_layernorm.weight",
    "mlp.gate_proj.weight": "post_attention_layernorm.weight",
    "mlp.gate_up_proj.weight": "post_attention_layernorm.weight",
    "self_attn.o_proj.weight": "self_attn.v_proj.weight",
    "mlp.down_proj.weight": "mlp.up_proj.weight",
}


def scale_source(
    source: ModelSource,
    model: StreamedModel,
    texts: Sequence[Ids],
    wanted: Mapping[str, Quantization],
    work: Path,
    progress: Progress,
) -> tuple[ModelSource, dict[str, Floats]]:
    """The same model with other weights, which can be rounded with less harm; and how much errors of each input weigh.

    What was found for a product is kept in the work directory, for a conversion that goes on.
    """
    sizes = {tensor.info.name: tensor.info.shape[0] for tensor in source.tensors}
    factors: dict[str, Floats] = {}  # of the inputs of matrices
    divisors: dict[str, Floats] = {}  # of the outputs of matrices, and of vectors
    importances: dict[str, Floats] = {}

    def on_product(parts: Sequence[Unread], x: Tensor, matrix: Tensor) -> Tensor:
        name = parts[0].name
        if any(part.name not in wanted for part in parts):
            return matrix
        progress(len(importances), len(wanted), f"looking at the inputs of {name}")
        before = producer(name)
        can_scale = sizes.get(before) == matrix.shape[1]  # not where several heads share an output of the one in front
        if not (path := row_path(work, name)).is_file():
            found = find_factors(matrix, x, wanted[name]) if can_scale else np.ones(matrix.shape[1], np.float32)
            importance = (x.square().mean(0).cpu().numpy() / np.square(found)).astype(np.float32)
            save_arrays(path, {"factors": found, "importance": importance})
        with np.load(path, allow_pickle=False) as kept:
            importances.update((part.name, kept["importance"]) for part in parts)
            if can_scale:
                factors.update((part.name, kept["factors"]) for part in parts)
                divisors[before] = divisors[f"{before.removesuffix('weight')}bias"] = kept["factors"]
        return matrix

    is_known = getattr(model.model, "norm_plus", 0.0) == 0.0
    is_known &= (
        getattr(model.model, "norm_names", LlamaModel.norm_names)[:2] == LlamaModel.norm_names
    )  # each for one product
    if not is_known or not any(producer(name) in sizes for name in wanted):
        message = f"[convert] method awq does not know what to scale in {model.config.model_type}."
        raise UnsupportedModelError(message, hint="Take --method gptq.")
    model.hidden(texts, on_product)
    tensors = []
    for tensor in source.tensors:
        name, info = tensor.info.name, tensor.info._replace(dtype="float32", quantization=None)
        if name in factors or name in divisors:
            tensor = SourceTensor(info, partial(scaled, tensor, factors.get(name), divisors.get(name)))
        tensors.append(tensor)
    return source._replace(tensors=tuple(tensors)), importances


def producer(name: str) -> str:
    """The name of the tensor whose outputs are the inputs of a matrix; empty where it is not known."""
    end = next((end for end in PRODUCERS if name.endswith(f".{end}")), "")
    return name.removesuffix(end) + PRODUCERS[end] if end else ""


def find_factors(matrix: Tensor, x: Tensor, kind: Quantization) -> Floats:
    """Factors of inputs with which a product changes least when the matrix is rounded."""
    sizes = x.abs().mean(0).clamp_min(SMALLEST)
    x = x[:: -(-len(x) // ERROR_ROWS)]
    right = x @ matrix.T
    best = torch.ones_like(sizes)
    least = float("inf")
    for exponent in EXPONENTS:
        factors = sizes ** float(exponent)
        factors = factors / (factors.max() * factors.min()).sqrt()
        error = float((x @ (rounded(matrix * factors, kind) / factors).T - right).square().sum())
        if error < least:
            best, least = factors, error
    return np.asarray(best.cpu(), np.float32)


def rounded(matrix: Tensor, kind: Quantization) -> Tensor:
    """A matrix of 4 bits, on grids from the least to the largest number of each group."""
    groups = matrix.view(len(matrix), -1, kind.group_size)
    if kind.quant_type == "Q4_0":
        scales = groups.abs().amax(2, keepdim=True) / 7.5
        mins = torch.zeros_like(scales)
        codes = (groups / scales).round().clamp(-8, 7)
    else:
        mins = groups.amin(2, keepdim=True)
        scales = (groups.amax(2, keepdim=True) - mins) / 15
        codes = ((groups - mins) / scales).round()
    return (codes * scales + mins).nan_to_num().view(matrix.shape)


def scaled(tensor: SourceTensor, factors: Floats | None, divisors: Floats | None) -> Floats:
    numbers = read_floats(tensor)
    if factors is not None:
        numbers = numbers * factors
    if divisors is not None:
        numbers = numbers / (divisors if numbers.ndim == 1 else divisors[:, None])
    return numbers


def weighed_row(importances: Mapping[str, Floats], tensor: SourceTensor, info: TensorInfo) -> Row:
    """A matrix rounded to the grid that suits it best where its inputs weigh most."""
    assert info.quantization is not None
    matrix = read_floats(tensor)
    return make_row(info, matrix, find_grid(matrix, info.quantization, importances.get(info.name)))
