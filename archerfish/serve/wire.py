"""The messages between an engine process and its clients: msgpack maps with a `type` and the version of the protocol.

A DEALER client sends and receives `[empty, payload]`; the ROUTER of the engine process sees `[identity, empty,
payload]`. Readers ignore unknown fields, and missing fields have defaults, so that either side may be the newer one. An
incompatible change raises VERSION, and a message of another version is answered with an error. `docs/wire.md` describes
the protocol.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, Literal, TypeVar

import msgspec

from archerfish.errors import ArcherfishError, InvalidInputError, ModelNotFoundError, did_you_mean, nearest
from archerfish.observe.metrics import Sample
from archerfish.store.names import find_builtin

VERSION = 1
Kind = Literal["generation", "embedding", "cross-encoder"]
Logprob = tuple[int, float, int, list[tuple[int, float]]]  # token, logprob, rank, most likely tokens with logprobs


class Message(msgspec.Struct, kw_only=True, omit_defaults=True, tag_field="type"):
    """Base of all messages."""

    v: int = 0  # `encode` writes VERSION
    request_id: str  # the client chooses it; the answers repeat it


# Requests


class ModelRequest(Message, kw_only=True, omit_defaults=True):
    """Base of all requests to a model."""

    model: str = ""  # "": the first model of the right kind
    deadline_s: float | None = None  # from the arrival of the request
    credentials: str = ""  # an API key, or the pass of a front end
    tenant: str = ""  # only a front end may name it


class GenerationRequest(ModelRequest, tag="generate", kw_only=True, omit_defaults=True):
    """Generate tokens after a prompt. One of prompt, token_ids and messages is given."""

    prompt: str | None = None
    token_ids: list[int] | None = None
    messages: list[dict[str, Any]] | None = None  # a conversation; the model's chat template makes a prompt of it
    template_options: dict[str, Any] = {}  # options of the chat template, as tools
    params: dict[str, Any] = {}  # fields of SamplingParams
    stream: bool = False  # True: Chunks as tokens come, then a Generated without texts; False: one Generated
    wants_ids: bool = False  # True: the answers have token ids and no text
    takes_bundles: bool = False  # True: answers of several requests may come as one Bundle
    priority: int = 0
    adapter: str = ""  # the name of a LoRA adapter of the model
    adapter_digest: str = ""  # of its content, as the model's card has it: routers and caches of answers go by it


class EmbedRequest(ModelRequest, tag="embed", kw_only=True, omit_defaults=True):
    """Compute the vectors of texts."""

    texts: list[str | list[int]]
    normalize: bool | None = None  # None: as the model's files say
    truncate: bool = True  # cut texts that are longer than the model takes; false: refuse them
    prompt_name: str | None = (
        None  # a prompt of the model, which is put before every text; None: the model's default, if any
    )
    output: str = "dense"  # or sparse: rows of a token id and its weight; or multi_vector: a row for each token


class ClassifyRequest(ModelRequest, tag="classify", kw_only=True, omit_defaults=True):
    """Compute the scores of a cross-encoder's labels, a row for each text or pair of texts."""

    texts: list[str | tuple[str, str]]
    truncate: bool = True
    as_probabilities: bool = False  # a softmax over several labels, unless the model has a sigmoid for each
    is_raw: bool = False  # without the sigmoid, too


class ExplainRequest(ModelRequest, tag="explain", kw_only=True, omit_defaults=True):
    """Report what the prefix cache holds of a prompt, for the tenant of this request."""

    prompt: str | None = None
    token_ids: list[int] | None = None
    adapter: str = ""  # as in GenerationRequest
    adapter_digest: str = ""


class Configure(Message, tag="configure", kw_only=True, omit_defaults=True):
    """Change options of a running engine; the answer is a Report of the options in force. For front ends and
    operators."""

    model: str = ""
    options: dict[str, Any] = {}
    credentials: str = ""


class ChangeAdapter(Message, tag="adapter", kw_only=True, omit_defaults=True):
    """Load or unload a LoRA adapter of a model, or find one by name in lora_dir; the answer is a Report. For front ends
    and operators."""

    model: str = ""
    name: str = ""
    action: Literal["load", "unload", "find"] = "find"
    path: str = ""  # within lora_dir
    in_place: bool = False  # in place of another of this name
    credentials: str = ""


class Charge(Message, tag="charge", kw_only=True, omit_defaults=True):
    """Count a request that needed no model against the limits of a tenant; the answer is a Report. For front ends."""

    num_tokens: int = 0
    num_requests: int = 0  # with is_spent
    is_spent: bool = False  # True: only count what was used already, or give it back if negative; never refuse
    credentials: str = ""
    tenant: str = ""


class Cancel(Message, tag="cancel", kw_only=True, omit_defaults=True):
    """Cancel an earlier request of this client, the one with this request_id. There is no answer and no error."""

    index: int | None = None  # cancel only this sequence of the request


class MetricValues(msgspec.Struct, kw_only=True):
    """One metric."""

    kind: str
    description: str = ""
    label_names: tuple[str, ...] = ()
    samples: list[Sample] = []


class FrontEndState(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What a front end shares with the others: its metrics, and the newest options it knows."""

    metrics: dict[str, MetricValues] = {}
    version: int = 0  # of the options
    options: dict[str, Any] = {}


class Query(Message, tag="query", kw_only=True, omit_defaults=True):
    """Ask for a Report about "models", "stats", "metrics", "options" (that front ends share), "load" (for routers) or
    "view" (what a tenant may see of a model and its cache).
    """

    about: str = "stats"
    model: str = ""  # of a view
    tenant: str = ""  # of a view; only a front end may name it
    since: int = 0  # the version of the prefix digest that a router has; -1: it wants no digest
    credentials: str = ""
    source: str = ""  # a unique name of the front end that asks
    values: FrontEndState = msgspec.field(default_factory=FrontEndState)


class Ping(Message, tag="ping", kw_only=True, omit_defaults=True):
    """Ask for a Pong: at once, or with `probe` after a real step of a model."""

    probe: str | None = None  # a model; "" for every loaded one


# Answers


class Chunk(Message, tag="chunk", kw_only=True, omit_defaults=True):
    """New tokens of one of the n sequences of a request."""

    index: int = 0
    text: str = ""
    token_ids: list[int] = []
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: list[Logprob] | None = None
    num_cached_tokens: int = 0  # tokens of the prompt, in the first chunk of a request
    metrics: dict[str, float] = {}  # in the first chunk of a request: queue_ms and prefill_ms
    retry_after_s: float | None = None  # if the deadline came before the first token


class WireOutput(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One of the n sequences of a result."""

    index: int = 0
    text: str = ""
    token_ids: list[int] = []
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    cumulative_logprob: float | None = None
    logprobs: list[Logprob] | None = None


class Generated(Message, tag="generated", kw_only=True, omit_defaults=True):
    """The last answer to a GenerationRequest: the whole result, or after Chunks, what they did not contain."""

    model: str = ""
    outputs: list[WireOutput] = []
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    prompt_token_ids: list[int] | None = None  # if the client did not send them
    prompt_logprobs: list[Logprob] | None = None
    retry_after_s: float | None = None  # if the deadline came before the first token
    remarks: list[str] = []  # what was done otherwise than the client asked
    metrics: dict[str, float] = {}  # those of METRICS in `hosted_llm.py`
    adapter_digest: str = ""  # of the adapter that made it


class Bundle(Message, tag="bundle", kw_only=True, omit_defaults=True):
    """Answers to several requests of a client, all from one step. request_id is ""."""

    answers: list[Chunk | Generated | Failed] = []


class Vectors(Message, tag="vectors", kw_only=True, omit_defaults=True):
    """Rows of little-endian float32: the answer to an EmbedRequest or a ClassifyRequest."""

    model: str = ""
    num_rows: int = 0
    num_columns: int = 1
    data: bytes = b""
    num_tokens: int = 0
    row_counts: list[int] = []  # rows of each text, where these are not one
    truncated: list[int] = []  # places of texts that were cut


class Report(Message, tag="report", kw_only=True, omit_defaults=True):
    """The answer to a Query, an ExplainRequest, a Configure, a ChangeAdapter or a Charge."""

    values: dict[str, Any] = {}


class Pong(Message, tag="pong", kw_only=True, omit_defaults=True):
    """The answer to a Ping. seconds: the duration of the probe. failing: replicas that made no step, with the
    reasons."""

    seconds: float = 0.0
    failing: dict[str, str] = {}


class Failed(Message, tag="failed", kw_only=True, omit_defaults=True):
    """The last answer to a request that failed. request_id is "" if it could not be read."""

    code: str
    message: str
    status: int = 500  # HTTP status
    hint: str = ""
    param: str | None = None
    retry_after_s: float | None = None

    @classmethod
    def of(cls, request_id: str, error: BaseException, retry_after_s: float | None = None) -> Failed:
        """The answer for an error. Errors of other libraries stay hidden: they may contain private details."""
        if not isinstance(error, ArcherfishError):
            message = "The engine failed on this request; its log says why."
            return cls(request_id=request_id, code=ArcherfishError.code, message=message)
        shown = {name: getattr(error, name) for name in ("code", "message", "status", "param")}
        return cls(request_id=request_id, hint=error.hint or "", retry_after_s=retry_after_s, **shown)


ForVectors = EmbedRequest | ClassifyRequest
FromClient = (
    GenerationRequest | ForVectors | ExplainRequest | Configure | ChangeAdapter | Charge | Cancel | Query | Ping
)
FromEngine = Chunk | Generated | Bundle | Vectors | Report | Pong | Failed
M = TypeVar("M", FromClient, FromEngine)


class WireError(InvalidInputError):
    """Bytes that are no message of this protocol."""

    code = "undecodable_message"


class _Header(msgspec.Struct):
    request_id: str = ""


_encoder = msgspec.msgpack.Encoder()
_header: msgspec.msgpack.Decoder[_Header] = msgspec.msgpack.Decoder(_Header)
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def encode(message: Message) -> bytes:
    message.v = VERSION
    return _encoder.encode(message)


def _decode(decoder: msgspec.msgpack.Decoder[M], payload: bytes) -> M:
    try:
        message = decoder.decode(payload)
    except UNREADABLE as error:
        raise WireError(f"This is no message of the protocol, version {VERSION}: {error}.") from None
    if message.v != VERSION:
        raise WireError(f"The message is of version {message.v} of the protocol; this side speaks version {VERSION}.")
    return message


_from_client: msgspec.msgpack.Decoder[FromClient] = msgspec.msgpack.Decoder(FromClient)
_from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
decode_request = partial(_decode, _from_client)
decode_answer = partial(_decode, _from_engine)


def request_id_of(payload: bytes) -> str:
    """The request_id of a message that cannot be decoded, or ""."""
    try:
        return _header.decode(payload).request_id
    except UNREADABLE:
        return ""


# Names of models


def names_of(name: str, aliases: Iterable[str]) -> list[str]:
    """All names by which a request may ask for a model: its own name, its aliases, and the last part of each.

    A built-in model has two names: ours, and its Hugging Face id.
    """
    found, builtin = [name, *aliases], find_builtin(name)
    found += [builtin.name, *filter(None, [builtin.hub_id])] if builtin else []
    return [*found, *(one.rstrip("/").rsplit("/", 1)[-1] for one in found)]


class UnservedModelError(ModelNotFoundError):
    """A request asks for a model that is not served."""

    param = "model"


def unserved_model(name: str, listed: list[str]) -> UnservedModelError:
    """The error for an unknown name. Its hint has listed names only: aliases may be paths of this machine."""
    by_last_part = {one.rsplit("/", 1)[-1]: one for one in listed}
    close = nearest(name, [*listed, *by_last_part])
    hint = did_you_mean(by_last_part.get(close[0], close[0]) if close else name, listed)
    return UnservedModelError(f"The model {name!r} is not served here.", hint=hint)
