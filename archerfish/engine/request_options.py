"""Options of a request other than its prompt and its SamplingParams, checked before anything runs."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np

from archerfish.cache.eviction import eviction_policy
from archerfish.config import EngineConfig
from archerfish.errors import InputTooLargeError, InvalidInputError, InvalidOptionError, UnknownOptionError, did_you_mean
from archerfish.params import SamplingParams, is_number
from archerfish.sequence import Namespace

MAX_DEADLINE_S = 1e9  # thirty years
REQUEST_OPTIONS = ("request_id", "priority", "deadline_s", "namespace", "wants_logits")
RUNNING_OPTIONS = (  # those of a model that can be changed while it serves
    "enable_prefix_caching", "eviction_policy", "logits_cache_mib", "logits_cache_ttl_s", "max_num_batched_tokens",
    "max_prompt_bytes", "max_queue_size", "pipeline_depth",
)  # fmt: skip


def check_request_options(given: Mapping[str, Any]) -> None:
    """Refuse an unknown keyword; the error for an option of SamplingParams says where it belongs."""
    for name in given:
        if name not in REQUEST_OPTIONS:
            is_sampling = name in SamplingParams.__dataclass_fields__
            hint = "Put it into SamplingParams." if is_sampling else did_you_mean(name, REQUEST_OPTIONS)
            raise UnknownOptionError(f"A request has no option {name!r}.", hint=hint)


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


def check_option_values(
    request_id: object, priority: object, deadline_s: Any, namespace: object, wants_logits: object = False
) -> None:
    if not isinstance(wants_logits, bool):
        raise InvalidInputError(f"wants_logits must be true or false, not {wants_logits!r}.")
    if request_id is not None and not isinstance(request_id, str):
        raise InvalidInputError(f"request_id must be a string, not {request_id!r}.")
    if type(priority) is not int:
        raise InvalidInputError(f"priority must be a whole number, not {priority!r}.", hint="Higher runs first; 0 is usual.")
    if deadline_s is not None and (not is_number(deadline_s) or not 0 <= deadline_s <= MAX_DEADLINE_S):
        raise InvalidInputError(
            f"deadline_s must be a number of seconds from 0 to {MAX_DEADLINE_S:,.0f}, not {deadline_s!r}.",
            hint="None stands for no deadline.",
        )
    if not isinstance(namespace, str | Namespace):
        raise InvalidInputError(f"namespace must be a string or a Namespace, not {type(namespace).__name__}.")


def check_vocabulary(params: SamplingParams, vocab_size: int) -> None:
    """Tokens that a request names must be ones that the model has."""
    for name, token_ids in (("logit_bias", params.logit_bias or ()), ("stop_token_ids", params.stop_token_ids)):
        outside = next((i for i in token_ids if not 0 <= i < vocab_size), None)
        if outside is not None:
            raise InvalidInputError(f"{name} names token {outside}, which is outside of the vocabulary of {vocab_size:,}.")
    for place, stage in enumerate(params.stages):
        highest = stage.end - 1 + max(0, stage.offset)
        if highest >= vocab_size:
            raise InvalidInputError(f"stages[{place}] reaches to token {highest}, outside of the vocabulary of {vocab_size:,}.")


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
    """A prompt's ids, if the model has them all. Prompts may be long: no loop of ours looks at every id unless one is wrong."""
    try:
        packed = array("I", prompt)
        is_right = not packed or int(np.frombuffer(packed, dtype=np.uintc).max()) < vocab_size
    except TypeError:
        place, wrong = next((i, one) for i, one in enumerate(prompt) if not isinstance(one, int))
        raise InvalidInputError(
            f"A prompt must be a string or a list of token ids, but {wrong!r} stands at place {place} of this list.",
            hint="Several prompts are a list of strings or of lists.",
        ) from None
    except OverflowError:
        is_right = False
    if not is_right:
        outside = next(i for i in prompt if not 0 <= i < vocab_size)
        raise InvalidInputError(f"Token id {outside} is outside of the vocabulary of {vocab_size}.")
    return packed
