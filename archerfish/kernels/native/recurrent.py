"""RWKV-7 in the native backend: the operations of `recurrent.py` on tapes (csrc/wkv.cpp).

Matrices of states lie with keys down and values across, and all of a state is float32.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from archerfish.kernels.native._native import mix_heads, shift
from archerfish.kernels.native.recorder import Handle, Recorder, set_batch
from archerfish.kernels.recurrent import (
    HeadInputs,
    HeadWeights,
    RecurrentBatch,
    RecurrentOps,
)

if TYPE_CHECKING:
    from archerfish.kernels.native.ops import NativeOps

LINE_BYTES = 64  # of a cache


class NativeRecurrentOps(RecurrentOps[Handle]):
    """Operations on states, recorded or computed at once as those of `NativeOps` are."""

    def __init__(self, ops: NativeOps) -> None:
        self.ops, self.runner = ops, ops.runner

    def empty(self, shape: tuple[int, ...], *, is_input: bool) -> npt.NDArray[np.float32]:
        """It begins with a cache line."""
        num_bytes = 4 * math.prod(shape)
        memory = np.empty(num_bytes + LINE_BYTES, dtype=np.uint8)  # pages come when they are written
        first = -memory.ctypes.data % LINE_BYTES
        return memory[first : first + num_bytes].view(np.float32).reshape(shape)

    def shift(self, x: Handle, inputs: Handle, batch: RecurrentBatch[Handle], factors: Handle) -> tuple[Handle, ...]:
        recorder, width = self._recorder(batch), x.shape[1]
        outs = tuple(recorder.like(x, width) for _ in range(factors.size // width))
        shift(recorder.tape, recorder(x), inputs, factors, [recorder(out) for out in outs])
        self.runner.finish(recorder)
        return outs

    def mix_heads(
        self, inputs: HeadInputs[Handle], weights: HeadWeights[Handle], states: Handle, batch: RecurrentBatch[Handle]
    ) -> Handle:
        recorder = self._recorder(batch)
        out = recorder.like(inputs.value, inputs.value.shape[1])
        is_mixed = inputs.first_value is not None and inputs.value_mix is not None
        rows = [inputs.receptance, inputs.decay, inputs.key, inputs.value, inputs.rate, inputs.gate]
        rows += [inputs.first_value, inputs.value_mix] if is_mixed else []
        vectors = [weights.removal, weights.replacement, weights.bonus, weights.norm, weights.norm_bias]
        mix_heads(recorder.tape, [recorder(each) for each in rows], vectors, weights.eps, states, recorder(out))
        self.runner.finish(recorder)
        return out

    def _recorder(self, batch: RecurrentBatch[Handle]) -> Recorder:
        recorder = self.runner.current()
        if recorder.is_eager:
            set_batch(recorder.step, batch)
        return recorder
