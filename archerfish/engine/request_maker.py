"""From what a caller gives, a prompt and options, to a Request that the scheduler takes."""

from __future__ import annotations

import itertools
import random
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np

from archerfish.cache.eviction import eviction_policy
from archerfish.config import EngineConfig
from archerfish.engine.adapters import NOT_ENABLED, AdapterLibrary, LoadedAdapter, with_adapter
from archerfish.engine.outputs import Listener, OutputCollector
from archerfish.errors import (
    InputTooLargeError,
    InvalidInputError,
    InvalidOptionError,
    UnknownOptionError,
    refuse_unknown,
)
from archerfish.params import SamplingParams, is_number
from archerfish.remarks import remark
from archerfish.sequence import Namespace, Request, TokenGrammar, as_namespace
from archerfish.text.grammar import GrammarCompiler, TokenLimits, word_tokens
from archerfish.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from archerfish.engine.llm_loading import ModelFacts

Prompt = str | Sequence[int]
MAX_DEADLINE_S = 1e9  # thirty years
REQUEST_OPTIONS = {"request_id", "priority", "deadline_s", "namespace", "wants_logits", "adapter", "lora_request"}
SAMPLING_HINTS = dict.fromkeys(SamplingParams.__dataclass_fields__, "Put it into SamplingParams.")
RUNNING_OPTIONS = (  # those of a model that can be changed while it serves
    "enable_prefix_caching",
    "eviction_policy",
    "logits_cache_mib",
    "logits_cache_ttl_s",
    "max_num_batched_tokens",
    "max_prompt_bytes",
    "max_queue_size",
    "pipeline_depth",
)


class RequestMaker:
    """Tokenises and checks requests for one model, in any thread. clock: the scheduler's."""

    def __init__(
        self,
        facts: ModelFacts,
        config: EngineConfig,
        tokenizer: Tokenizer | None,
        grammars: GrammarCompiler,
        clock: Callable[[], float],
        adapters: AdapterLibrary | None = None,
    ) -> None:
        self.adapters = adapters
        self.facts = facts
        self.tokenizer = tokenizer
        self.grammars = grammars
        self.max_prompt_bytes = config.max_prompt_bytes
        self.default_params = SamplingParams(**facts.default_sampling)
        self._longest, memory = facts.longest, facts.memory
        self._longest_unstated = min(
            facts.max_len, memory.num_tokens - memory.block_size
        )  # for requests without max_tokens
        self._clock = clock
        self._seeds = random.Random(config.seed or None)
        self._ids = itertools.count()

    def make(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        *,
        listener: Listener | None = None,
        wants_text: bool = True,
        is_kept: bool = False,
        **options: Any,
    ) -> Request:
        """A checked request for `LLMEngine.submit`. options: REQUEST_OPTIONS. is_kept: `get_output` has its result.

        wants_text: false spares making text, unless there are stop strings.
        """
        if params is None:
            params = self.default_params
        elif not isinstance(params, SamplingParams):
            raise InvalidInputError(f"sampling_params must be a SamplingParams, not {type(params).__name__}.")
        check_options(options)
        facts = self.facts
        check_vocabulary(params, facts.vocab_size)
        token_ids = self.tokenize(prompt)
        if len(token_ids) >= facts.max_len:
            message = (
                f"The prompt has {len(token_ids):,} tokens; {facts.name} takes {facts.max_len:,}, output included."
            )
            raise InputTooLargeError(message, hint="Shorten it.")
        max_tokens, num_prompt = params.max_tokens, len(token_ids)
        room = max(1, (self._longest_unstated if max_tokens is None else self._longest) - num_prompt)
        if max_tokens is not None and max_tokens > room:
            fits = f"{facts.name} and its memory hold {self._longest:,}"
            remark(
                "max_tokens", f"max_tokens is {max_tokens:,}; {room:,} fit after a prompt of {num_prompt:,} ({fits})."
            )
        stops = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stops |= frozenset(self.tokenizer.eos_token_ids if self.tokenizer else facts.end_token_ids)
        has_limits = params.grammar is not None or params.bad_words or params.allowed_token_ids is not None
        grammar = self._grammar(params) if has_limits else None
        deadline_s = options.get("deadline_s")
        request = Request(
            request_id=options.get("request_id") or f"request-{next(self._ids)}",
            prompt_token_ids=token_ids,
            params=params,
            max_tokens=room if max_tokens is None else min(max_tokens, room),
            stop_token_ids=stops,
            namespace=as_namespace(options.get("namespace", "")),
            priority=options.get("priority", 0),
            deadline=None if deadline_s is None else self._clock() + deadline_s,
            seed=self._seeds.getrandbits(63) if params.seed is None else params.seed,
            needs_host_token=grammar is not None or bool(params.logits_processors),
            grammar=grammar,
            wants_logits=options.get("wants_logits", False),
        )
        wanted = options.get("adapter") or options.get("lora_request")
        if wanted:
            adapter = self.adapter(wanted)
            request.adapter, request.namespace = adapter.number, with_adapter(request.namespace, adapter)
        text = prompt if isinstance(prompt, str) else None
        tokenizer = self.tokenizer if params.detokenize and (wants_text or params.stop) else None
        request.collector = OutputCollector(request, text, tokenizer, listener, is_kept=is_kept)
        return request

    def make_many(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        **options: Any,
    ) -> list[Request]:
        """Requests of one prompt or of several, with the same parameters and options; parameters and adapters may be
        lists."""
        if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
            raise InvalidInputError(f"Expected a prompt or a list of prompts, not {type(prompts).__name__}.")
        many: list[Any] = [prompts] if isinstance(prompts, str) or is_token_ids(prompts) else list(prompts)
        each: list[Any] = list(params) if isinstance(params, Sequence) else [params] * len(many)
        if len(each) != len(many):
            raise InvalidInputError(f"There are {len(many)} prompts, but {len(each)} sampling parameters.")
        if len(many) > 1 and options.get("request_id") is not None:
            raise InvalidInputError(
                f"request_id names one request, but there are {len(many)} prompts.", hint="Leave it out."
            )
        given = options.pop("lora_request", None)
        adapters: list[Any] = list(given) if isinstance(given, list | tuple) else [given] * len(many)
        if len(adapters) != len(many):
            raise InvalidInputError(f"There are {len(many)} prompts, but {len(adapters)} adapters (lora_request).")
        return [
            self.make(prompt, one, lora_request=adapter, **options)
            for prompt, one, adapter in zip(many, each, adapters, strict=True)
        ]

    def adapter(self, wanted: Any) -> LoadedAdapter:
        """The adapter that a request names."""
        if self.adapters is None:
            raise InvalidInputError(f"{self.facts.name} was started without adapters.", hint=NOT_ENABLED)
        return self.adapters.for_request(wanted)

    def _grammar(self, params: SamplingParams) -> TokenGrammar | None:
        """What rules tokens out: the grammar of a request, and its other limits."""
        grammar = None if params.grammar is None else self.grammars.compile(params.grammar)
        if not params.bad_words and params.allowed_token_ids is None:
            return grammar
        if params.bad_words and self.tokenizer is None:
            raise InvalidInputError(
                f"{self.facts.name} has no tokenizer, which bad_words need.", hint="Use logit_bias."
            )
        banned = word_tokens(self.tokenizer, params.bad_words) if self.tokenizer else []
        return TokenLimits(grammar, self.facts.vocab_size, params.allowed_token_ids, banned)

    def tokenize(self, prompt: Prompt) -> Sequence[int]:
        """The token ids of a prompt, which may be such ids already."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise InvalidInputError(
                    f"{self.facts.name} has no tokenizer.", hint="Give the prompt as a list of token ids."
                )
            check_prompt_bytes([prompt], self.max_prompt_bytes)
            token_ids: Sequence[int] = self.tokenizer.encode(prompt)
        elif isinstance(prompt, Sequence) and not isinstance(prompt, str | bytes):
            token_ids = read_token_ids(prompt, self.facts.vocab_size)
        else:
            raise InvalidInputError(f"A prompt must be a string or a list of token ids, not {type(prompt).__name__}.")
        if not token_ids:
            raise InvalidInputError("The prompt is empty.", hint="Give at least one token.")
        return token_ids


def check_options(given: Mapping[str, Any]) -> None:
    """Refuse unknown options of a request and wrong values; the error for a sampling parameter says where it
    belongs."""
    if not given.keys() <= REQUEST_OPTIONS:
        refuse_unknown(given, REQUEST_OPTIONS, "option of a request", SAMPLING_HINTS)
    request_id = given.get("request_id")
    priority = given.get("priority", 0)
    deadline_s = given.get("deadline_s")
    if not isinstance(given.get("wants_logits", False), bool):
        raise InvalidInputError(f"wants_logits must be true or false, not {given['wants_logits']!r}.")
    if request_id is not None and not isinstance(request_id, str):
        raise InvalidInputError(f"request_id must be a string, not {request_id!r}.")
    if type(priority) is not int:
        raise InvalidInputError(
            f"priority must be a whole number, not {priority!r}.", hint="Higher runs first; 0 is usual."
        )
    if deadline_s is not None and (not is_number(deadline_s) or not 0 <= deadline_s <= MAX_DEADLINE_S):
        message = f"deadline_s must be a number of seconds from 0 to {MAX_DEADLINE_S:,.0f}, not {deadline_s!r}."
        raise InvalidInputError(message, hint="None stands for no deadline.")
    if not isinstance(given.get("namespace", ""), str | Namespace):
        raise InvalidInputError(f"namespace must be a string or a Namespace, not {type(given['namespace']).__name__}.")


def change_running_options(config: EngineConfig, changes: Mapping[str, Any]) -> EngineConfig:
    """Options with some changed, all checked: nothing is refused later, when a part of a change is done."""
    for name in changes:
        if name not in RUNNING_OPTIONS:
            what = "cannot be changed while the engine runs" if name in EngineConfig.names() else "is no option"
            raise UnknownOptionError(f"{name} {what}.", hint=f"These can be changed: {', '.join(RUNNING_OPTIONS)}.")
    changed = config.replace(**changes)
    eviction_policy(changed.eviction_policy)
    if not changed.logits_cache_ttl_s > 0:
        raise InvalidOptionError("logits_cache_ttl_s must be above 0.", hint="logits_cache_mib=0 turns the cache off.")
    return changed


def check_vocabulary(params: SamplingParams, vocab_size: int) -> None:
    """Tokens that a request names must be ones that the model has."""
    for name, token_ids in (
        ("logit_bias", params.logit_bias or ()),
        ("stop_token_ids", params.stop_token_ids),
        ("allowed_token_ids", params.allowed_token_ids or ()),
    ):
        outside = next((i for i in token_ids if not 0 <= i < vocab_size), None)
        if outside is not None:
            raise InvalidInputError(
                f"{name} names token {outside}, which is outside of the vocabulary of {vocab_size:,}."
            )
    for place, stage in enumerate(params.stages):
        highest = stage.end - 1 + max(0, stage.offset)
        if highest >= vocab_size:
            raise InvalidInputError(
                f"stages[{place}] reaches to token {highest}, outside of the vocabulary of {vocab_size:,}."
            )


def check_prompt_bytes(texts: Iterable[str], max_bytes: int) -> None:
    """Refuse what is too long to be tokenised. texts: those of a prompt, together."""
    num_bytes = sum(len(text) if text.isascii() else len(text.encode(errors="surrogatepass")) for text in texts)
    if num_bytes > max_bytes:
        raise InputTooLargeError(f"The prompt has {num_bytes:,} bytes; the limit is {max_bytes:,}.")


def is_token_ids(prompt: object) -> TypeGuard[Sequence[int]]:
    """Whether a prompt is a list of token ids, by its first."""
    if not isinstance(prompt, Sequence) or isinstance(prompt, str | bytes):
        return False
    return len(prompt) > 0 and type(prompt[0]) is int


def read_token_ids(prompt: Sequence[int], vocab_size: int) -> array[int]:
    """A prompt's ids, if the model has them all. Prompts may be long: no loop of ours looks at every id unless one is
    wrong."""
    try:
        packed = array("I", prompt)
        is_right = not packed or int(np.frombuffer(packed, dtype=np.uintc).max()) < vocab_size
    except TypeError:
        place, wrong = next((i, one) for i, one in enumerate(prompt) if not isinstance(one, int))
        message = (
            f"A prompt must be a string or a list of token ids, but {wrong!r} stands at place {place} of this list."
        )
        raise InvalidInputError(message, hint="Several prompts are a list of strings or of lists.") from None
    except OverflowError:
        is_right = False
    if not is_right:
        outside = next(i for i in prompt if not 0 <= i < vocab_size)
        raise InvalidInputError(f"Token id {outside} is outside of the vocabulary of {vocab_size}.")
    return packed
