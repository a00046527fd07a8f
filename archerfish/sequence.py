"""Requests, the sequences of tokens that they become, and what each step adds to them. Ids and counts, no tensors."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from archerfish.errors import InvalidInputError
from archerfish.params import SamplingParams
from archerfish.step import TokenLogprobs

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

FinishReason = Literal["stop", "length", "abort", "deadline", "error"]


def pack_tokens(tokens: Iterable[int]) -> array[int]:
    """Token ids side by side in memory, where they are copied, compared and hashed without a loop over them."""
    try:
        return array("I", tokens)
    except (TypeError, OverflowError) as error:
        raise InvalidInputError(f"Tokens must be whole numbers from 0 to 2^32 - 1: {error}.") from None


class Namespace(NamedTuple):
    """What separates cached contexts: equal tokens in two namespaces share nothing."""

    tenant: str = ""
    adapter: str = ""  # anything else that changes the KV, such as a LoRA adapter


NO_NAMESPACE = Namespace()
OPEN_OUTPUT_TOKENS = 512  # output that is expected of a request without max_tokens, before shorter answers were seen


def as_namespace(namespace: str | Namespace) -> Namespace:
    """A string is a tenant, without an adapter."""
    return Namespace(namespace) if isinstance(namespace, str) else namespace


@dataclass(slots=True, init=False, unsafe_hash=True)
class RadixKey:
    """A sequence's tokens and the namespace in which they are looked for; a snapshot of what it is given."""

    tokens: array[int] = field(compare=False)
    data: bytes = field(repr=False)  # the tokens packed: compared at the speed of memcmp
    namespace: Namespace

    def __init__(self, tokens: Iterable[int], namespace: Namespace = NO_NAMESPACE) -> None:
        self.tokens = pack_tokens(tokens)
        self.data = self.tokens.tobytes()
        self.namespace = namespace

    @classmethod
    def with_namespace(cls, tokens: Iterable[int], namespace: str | Namespace) -> RadixKey:
        """Equal tokens in two namespaces share nothing. A string is a tenant."""
        return cls(tokens, as_namespace(namespace))


class TokenMatcher(Protocol):
    """How far one sequence has come in a grammar."""

    def fill(self, output: SequenceOf[int], bits: npt.NDArray[np.int32]) -> None:
        """Set the bits of the tokens that may follow the output so far, which grew since the last call, and clear the
        others.

        Where none may, or the output has left the grammar: an InvalidInputError, which ends this sequence.
        """

    def copy(self) -> TokenMatcher:
        """One that goes ahead over tokens of which it is not sure that they come."""

    def forced(self) -> list[int]:
        """Tokens that must follow what `fill` saw last, where each is the only one allowed."""


class TokenMask(Protocol):
    """The tokens that a grammar allows next; a thread computes them."""

    bits: npt.NDArray[
        np.int64
    ]  # a bit for every token of the vocabulary, 64 to a word, the lowest first; a row for what may
    # follow now, and one for what may follow behind each proposed token
    proposed: list[int]  # tokens that the grammar allows, of those that were to be proposed
    is_forced: bool  # it allows no others
    num_output: int  # tokens of output that it follows
    error: BaseException | None  # why the sequence cannot go on

    def done(self) -> bool: ...


class TokenGrammar(Protocol):
    """What the output of a request must be, compiled for a vocabulary."""

    def start(self) -> TokenMatcher:
        """A matcher of a sequence without output."""


@dataclass(slots=True, eq=False)
class Request:
    """What a caller sends, after tokenising."""

    request_id: str
    prompt_token_ids: SequenceOf[int]
    params: SamplingParams
    max_tokens: int  # params.max_tokens, or what model and memory leave room for
    stop_token_ids: frozenset[int] = frozenset()  # end tokens of the caller, and of the model unless they are ignored
    namespace: Namespace = field(default_factory=Namespace)
    priority: int = 0  # higher runs first
    deadline: float | None = None  # on the scheduler's clock
    arrival: float = 0.0  # set by the scheduler
    seed: int = 0
    needs_host_token: bool = False  # the next token must be known on the host before the following step (grammars)
    grammar: TokenGrammar | None = None  # of params.grammar; asks for needs_host_token
    wants_logits: bool = False  # the first delta of the first sequence brings those of the token after the prompt
    adapter: int = 0  # number of the LoRA adapter, whose content the namespace names; 0: none
    collector: Any = None  # the engine's OutputCollector of its text and tokens

    @property
    def most_output(self) -> int:
        """Tokens of each answer that are reckoned with."""
        return min(self.max_tokens, OPEN_OUTPUT_TOKENS) if self.params.max_tokens is None else self.max_tokens


class DraftJob(Protocol):
    """Proposals that a draft model computes for some sequences."""

    def done(self) -> bool: ...

    def tokens(self, seq: Sequence) -> list[int]:
        """Those of a sequence; waits for them. An empty list if the draft model failed."""


@dataclass(slots=True)
class Draft:
    """Tokens that are proposed for a sequence, and how proposals went so far."""

    accepted: float  # lately
    rejected: float
    count: int  # how many tokens to propose next, at most
    tokens: list[int] = field(default_factory=list)  # that the next step verifies, or the one in flight
    job: DraftJob | None = None  # that computes them
    is_forced: bool = False  # a grammar allows no others
    states: list[int] = field(
        default_factory=list
    )  # of a recurrent model: blocks for the state behind the last known token,
    # and behind each proposed one, while a step verifies them
    pause_until: int = 0  # so many tokens are known: before, nothing is proposed
    num_misses: int = 0  # drafts of which nothing was accepted, since the last one of which something was
    num_proposed: int = 0
    num_accepted: int = 0


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """One stream of tokens. It is caught up when all known and pending tokens but the last are computed: a step on it
    gives the next token."""

    __slots__ = (
        "adapter_slot",
        "blocks",
        "draft",
        "error",
        "finish_reason",
        "hit",
        "index",
        "leader",
        "logits_handle",
        "mask",
        "matcher",
        "node",
        "num_cached",
        "num_computed",
        "num_emitted",
        "num_in_flight",
        "num_new",
        "num_pending",
        "num_preemptions",
        "num_prompt",
        "num_reported",
        "num_sent",
        "num_waits",
        "pending_limit",
        "request",
        "row",
        "status",
        "times",
        "tokens",
    )

    def __init__(self, request: Request, index: int = 0) -> None:
        self.request = request
        self.index = index  # which of the request's n
        self.tokens = pack_tokens(request.prompt_token_ids)  # prompt and output, as far as the host knows it
        self.num_prompt = len(self.tokens)
        self.num_computed = 0  # tokens whose KV is in the blocks, counting steps in flight
        self.num_pending = 0  # tokens sampled by steps in flight
        # With so many tokens computed, no step is planned while its last token is pending: that may be the last of all,
        # or a grammar must see it.
        self.pending_limit = 0 if request.needs_host_token else self.num_prompt + request.max_tokens - 1
        self.num_in_flight = 0  # steps in flight that read or write its blocks
        self.num_emitted = 0  # output tokens that were handed out in deltas
        self.num_reported = 0  # prompt logprobs that were handed out
        self.num_cached = 0  # prompt tokens that the cache gave at first admission
        self.num_new = self.num_prompt  # prompt tokens that the cache did not have when the request arrived
        self.num_preemptions = 0
        self.leader: Sequence | None = None  # while it waits: the one that computes what they have in common
        self.num_waits = 0  # how often it has waited for a leader
        self.blocks: list[int] = []  # physical block of each logical one
        self.num_sent = 0  # how many of them the runner knows
        self.row = -1  # its place in the runner's buffers while running
        self.adapter_slot = 0  # that of its request's adapter while it has a row; 0: none
        self.node: Any = None  # the cache node that it locks
        self.hit: Any = None  # the HitRecord of its first admission
        self.logits_handle = 0  # under which the runner keeps the logits of its last token; 0: they must be computed
        self.matcher: TokenMatcher | None = None  # of its request's grammar
        self.mask: TokenMask | None = None  # which tokens the grammar allows next
        self.draft: Draft | None = None  # None: no tokens are proposed for it
        self.status = Status.WAITING
        self.finish_reason: FinishReason | None = None
        self.error: BaseException | None = None
        self.times = SequenceTimes()

    @property
    def key(self) -> tuple[str, int]:
        return self.request.request_id, self.index


@dataclass(slots=True)
class SequenceTimes:
    """Moments on the scheduler's clock; 0: not yet."""

    arrived: float = 0.0
    admitted: float = 0.0  # first time
    first_token: float = 0.0
    finished: float = 0.0


@dataclass(slots=True)
class Delta:
    """What a step adds to a sequence. Exactly one delta of every accepted sequence has a finish_reason."""

    sequence: Sequence
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    logits: Any = None  # of a request that wants them: an opaque row
    finish_reason: FinishReason | None = None
    error: BaseException | None = None
