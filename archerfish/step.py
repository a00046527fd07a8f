"""One step as plain data: what a scheduler asks of a runner, and what comes back. All of it can be sent to another
process."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from archerfish.params import SamplingParams

Ids = npt.NDArray[np.int64]
PENDING = -1  # in place of a token: the one that the runner sampled last for this row
NO_IDS: Ids = np.zeros(0, dtype=np.int64)
MOST_PENALISED_DRAFTS = 32  # proposed tokens of sequences with penalties, in one step


@dataclass(slots=True, frozen=True)
class RowEntry:
    """What a runner must know of the sequence that takes a row. It comes once, with the sequence's first step in that
    row."""

    row: int
    request_id: str  # for error messages
    params: SamplingParams
    num_prompt: int
    seed: int = 0
    index: int = 0  # which of the n sequences of its request
    stop_token_ids: tuple[int, ...] = ()  # that min_tokens bans at first; empty without min_tokens
    tokens: array[int] = field(default_factory=partial(array, "I"))  # prompt and output; empty unless they are needed
    has_grammar: bool = False


@dataclass(slots=True)
class StepInput:
    """What one step computes: for sequence i, `counts[i]` tokens from position `starts[i]` on.

    Sequences with one new token stand first, then those with more, then those with none, which are sampled from kept
    logits. A row's blocks stay known from step to step: a step brings the new ones only.
    """

    step: int
    rows: Ids  # the place of each sequence in the runner's tables
    starts: Ids
    counts: Ids
    samples: Ids  # how many tokens each sequence gets, sampled behind its last new tokens
    adapters: Ids  # the slot of the LoRA adapter of each sequence; 0: none
    tokens: (
        Ids  # the new tokens of all sequences, one sequence after the other; PENDING where the step before samples it
    )
    num_decodes: int  # leading sequences with one new token
    block_rows: Ids = field(default_factory=NO_IDS.view)  # new blocks: block_ids[j] is block block_places[j] of a row
    block_places: Ids = field(default_factory=NO_IDS.view)
    block_ids: Ids = field(default_factory=NO_IDS.view)
    copies: list[tuple[int, int]] = field(default_factory=list)  # blocks to copy, (from, to), before anything else
    entries: list[RowEntry] = field(default_factory=list)  # rows that change hands
    masked: list[int] = field(default_factory=list)  # sequences whose grammar rules tokens out
    mask_bits: Ids | None = (
        None  # (samples of those masked, words): a bit for every token, 64 to a word, the lowest first; 0:
    )
    # ruled out
    states: list[tuple[int, list[int]]] = field(
        default_factory=list
    )  # (sequence, blocks): those of a recurrent model for the
    # states behind each of its new tokens, in place of the row's
    scored: dict[int, tuple[int, array[int]]] = field(
        default_factory=dict
    )  # prompt logprobs of a sequence: of how many of the
    # likeliest tokens, and the prompt tokens that follow its first new ones
    kept: list[tuple[int, int]] = field(default_factory=list)  # (sequence, handle): keep its logits under this handle
    reused: list[tuple[int, int]] = field(
        default_factory=list
    )  # (sequence, handle): sample it from the logits kept there
    dropped: list[int] = field(default_factory=list)  # handles that no later step names
    returned: list[int] = field(default_factory=list)  # sequences whose logits the result holds

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickle: all arrays in one piece, which takes a fifth of the time; it is sent to other ranks before every
        step."""
        arrays = [getattr(self, name) for name in ARRAYS]
        every = ((name, getattr(self, name)) for name in OTHERS)
        others = {name: value for name, value in every if isinstance(value, np.ndarray) or value}
        return unpack_step, ([len(array) for array in arrays], b"".join(array.tobytes() for array in arrays), others)

    @property
    def is_decode_only(self) -> bool:
        """Whether each sequence has one new token and gets one, and the step asks for nothing else."""
        asks_more = self.kept or self.returned or self.scored
        return self.num_decodes == len(self.rows) and not asks_more and bool((self.samples == 1).all())


ARRAYS = tuple(each.name for each in fields(StepInput) if each.type == "Ids")
OTHERS = tuple(each.name for each in fields(StepInput) if each.type != "Ids")


def unpack_step(lengths: list[int], data: bytes, others: dict[str, Any]) -> StepInput:
    """What `StepInput.__reduce__` has packed; the arrays can be written to."""
    parts = np.split(np.frombuffer(bytearray(data), dtype=np.int64), list(accumulate(lengths))[:-1])
    values: dict[str, Any] = {"step": 0, "num_decodes": 0, **others, **dict(zip(ARRAYS, parts, strict=True))}
    return StepInput(**values)


@dataclass(slots=True)
class TokenLogprobs:
    """Log-probability of one token, its rank from 1, and the likeliest tokens, likeliest first."""

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]


@dataclass(slots=True)
class StepResult:
    """What a step gave. Sequences are named by their index in the StepInput."""

    tokens: Ids  # (sequences, most samples): the first `samples[i]` of row i are real
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)  # of the sampled tokens
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)  # of the tokens in `scored`
    logits: dict[int, Any] = field(
        default_factory=dict
    )  # of the sequences in `returned`: a (1, vocabulary) row of the device
    errors: dict[int, BaseException] = field(default_factory=dict)  # of sequences that failed alone
