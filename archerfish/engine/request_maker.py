"""From what a caller gives, a prompt and options, to a Request that the scheduler takes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

from archerfish.config import EngineConfig
from archerfish.engine.llm_loading import ModelFacts
from archerfish.engine.outputs import Listener, OutputCollector
from archerfish.engine.request_options import (
    check_option_values,
    check_prompt_bytes,
    check_vocabulary,
    is_token_ids,
    read_token_ids,
)
from archerfish.errors import InputTooLargeError, InvalidInputError
from archerfish.params import SamplingParams
from archerfish.sequence import Namespace, Request, as_namespace
from archerfish.text.grammar import GrammarCompiler
from archerfish.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]


class RequestMaker:
    """Tokenises and checks requests for one model, in any thread. clock: the scheduler's."""

    def __init__(
        self, facts: ModelFacts, config: EngineConfig, tokenizer: Tokenizer | None, grammars: GrammarCompiler,
        clock: Callable[[], float],
    ) -> None:
        self.facts, self.tokenizer, self.grammars = facts, tokenizer, grammars
        self.max_prompt_bytes = config.max_prompt_bytes
        self._clock = clock
        self._seeds = random.Random(config.seed or None)
        self._ids = itertools.count()

    def make(
        self, prompt: Prompt, params: SamplingParams, *, listener: Listener | None = None, wants_text: bool = True,
        is_kept: bool = True, request_id: str | None = None, priority: int = 0, deadline_s: float | None = None,
        namespace: Namespace | str = "", wants_logits: bool = False,
    ) -> Request:
        """A checked request. wants_text: false spares making text, unless stop strings are looked for in it."""
        if not isinstance(params, SamplingParams):
            raise InvalidInputError(f"sampling_params must be a SamplingParams, not {type(params).__name__}.")
        check_option_values(request_id, priority, deadline_s, namespace, wants_logits)
        facts = self.facts
        check_vocabulary(params, facts.vocab_size)
        token_ids = self.tokenize(prompt)
        room = facts.max_len - len(token_ids)
        if room < 1:
            raise InputTooLargeError(
                f"The prompt has {len(token_ids):,} tokens; {facts.name} takes {facts.max_len:,}, output included.",
                hint="Shorten it.",
            )
        if params.max_tokens is None:
            room = min(room, max(1, facts.memory.num_tokens - len(token_ids) - facts.memory.block_size))
        stops = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stops |= frozenset(self.tokenizer.eos_token_ids if self.tokenizer else facts.end_token_ids)
        grammar = None if params.grammar is None else self.grammars.compile(params.grammar)
        request = Request(
            request_id=request_id or f"request-{next(self._ids)}", prompt_token_ids=token_ids, params=params,
            max_tokens=min(params.max_tokens or room, room), stop_token_ids=stops,
            namespace=as_namespace(namespace), priority=priority,
            deadline=None if deadline_s is None else self._clock() + deadline_s,
            seed=self._seeds.getrandbits(63) if params.seed is None else params.seed,
            needs_host_token=grammar is not None, grammar=grammar, wants_logits=wants_logits,
        )
        text = prompt if isinstance(prompt, str) else None
        tokenizer = self.tokenizer if wants_text or params.stop else None
        request.collector = OutputCollector(request, text, tokenizer, listener, is_kept=is_kept)
        return request

    def tokenize(self, prompt: Prompt) -> Sequence[int]:
        """The token ids of a prompt, which may be such ids already."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise InvalidInputError(f"{self.facts.name} has no tokenizer.", hint="Give the prompt as a list of token ids.")
            check_prompt_bytes([prompt], self.max_prompt_bytes)
            token_ids: Sequence[int] = self.tokenizer.encode(prompt)
        elif is_token_ids(prompt) or (isinstance(prompt, list | tuple) and not prompt):
            token_ids = read_token_ids(prompt, self.facts.vocab_size)
        else:
            what = f"a list that begins with {prompt[0]!r}" if isinstance(prompt, list) else type(prompt).__name__
            raise InvalidInputError(f"A prompt must be a string or a list of token ids, not {what}.")
        if not token_ids:
            raise InvalidInputError("The prompt is empty.", hint="Give at least one token.")
        return token_ids
