"""Beam search: the likeliest continuations of a prompt, found by an engine's generate, one token at a time.

Every step asks for the likeliest next tokens of all beams at once; the prefix cache has what was computed before.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from archerfish.engine.llm_engine import LLMEngine
from archerfish.engine.outputs import CompletionOutput
from archerfish.errors import InvalidInputError
from archerfish.params import MAX_LOGPROBS, SamplingParams, check_whole, is_number
from archerfish.step import TokenLogprobs

MAX_BEAM_WIDTH = MAX_LOGPROBS // 2


@dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """beam_width continuations of up to max_tokens tokens.

    A sequence's score is its log-probability divided by its length, prompt included, to the power of length_penalty.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        check_whole("beam_width", self.beam_width, 1, MAX_BEAM_WIDTH)
        check_whole("max_tokens", self.max_tokens, 1)
        if self.temperature != 0:
            raise InvalidInputError(f"temperature must be 0, not {self.temperature!r}: beam search draws nothing.")
        if not is_number(self.length_penalty):
            raise InvalidInputError(f"length_penalty must be a number, not {self.length_penalty!r}.")


@dataclass(slots=True)
class BeamSearchSequence:
    """One continuation. tokens: prompt and output, the end token included."""

    tokens: list[int]
    cum_logprob: float = 0.0
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # of the output
    text: str | None = None  # of the output
    finish_reason: str | None = None
    stop_reason: int | None = None  # the end token


@dataclass(slots=True)
class BeamSearchOutput:
    """The best continuations of a prompt, best first."""

    sequences: list[BeamSearchSequence]


def beam_search(
    engine: LLMEngine, prompts: Sequence[Sequence[int]], params: BeamSearchParams, adapter: Any = None
) -> list[BeamSearchOutput]:
    """The best continuations of each prompt, with an adapter if one is named. A beam that ends makes room for another
    one."""
    facts, width = engine.facts, params.beam_width
    stops = engine.tokenizer.eos_token_ids if engine.tokenizer else facts.end_token_ids
    ends = frozenset() if params.ignore_eos else frozenset(stops)
    num_top = min(2 * width, facts.vocab_size)
    one_token = SamplingParams(max_tokens=1, temperature=0.0, logprobs=num_top, ignore_eos=True, detokenize=False)
    beams = [[BeamSearchSequence(list(prompt))] for prompt in prompts]
    ended: list[list[BeamSearchSequence]] = [[] for _ in prompts]
    for _ in range(params.max_tokens):
        running = [place for place, some in enumerate(beams) if some and len(some[0].tokens) < facts.max_len]
        if not running:
            break
        tokens = [beam.tokens for place in running for beam in beams[place]]
        answers = iter(LLMEngine.generate(engine, tokens, one_token, lora_request=adapter))
        for place in running:
            grown = [one for beam in beams[place] for one in grow(beam, next(answers).outputs[0], ends)]
            ended[place] += [beam for beam in grown if beam.finish_reason]
            left = [beam for beam in grown if not beam.finish_reason]
            beams[place] = sorted(left, key=lambda beam: -beam.cum_logprob)[:width]
    return [
        BeamSearchOutput(best_of(engine, [*done, *some], len(prompt), params))
        for prompt, done, some in zip(prompts, ended, beams, strict=True)
    ]


def grow(beam: BeamSearchSequence, answer: CompletionOutput, ends: Collection[int]) -> list[BeamSearchSequence]:
    """A beam followed by each of the likeliest tokens of an answer."""
    if answer.error is not None:
        raise answer.error
    assert answer.logprobs is not None
    top = answer.logprobs[0].top
    return [
        BeamSearchSequence(
            [*beam.tokens, token_id],
            beam.cum_logprob + logprob,
            [*beam.logprobs, TokenLogprobs(token_id, logprob, rank, top)],
            finish_reason="stop" if token_id in ends else None,
            stop_reason=token_id if token_id in ends else None,
        )
        for rank, (token_id, logprob) in enumerate(top, 1)
    ]


def best_of(
    engine: LLMEngine, found: list[BeamSearchSequence], num_prompt: int, params: BeamSearchParams
) -> list[BeamSearchSequence]:
    """The best sequences, best first, with their texts."""

    def score(beam: BeamSearchSequence) -> float:
        num_tokens = len(beam.tokens) - (beam.stop_reason is not None)
        return beam.cum_logprob / float(num_tokens**params.length_penalty)

    best = sorted(found, key=score, reverse=True)[: params.beam_width]
    for beam in best:
        beam.finish_reason = beam.finish_reason or "length"
        is_cut = beam.stop_reason is not None and not params.include_stop_str_in_output
        output = beam.tokens[num_prompt : -1 if is_cut else None]
        if engine.tokenizer is not None:
            beam.text = engine.tokenizer.decode(output, skip_special_tokens=not params.include_stop_str_in_output)
    return best
