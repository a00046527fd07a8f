"""What passes between an engine process and its clients: msgpack maps with a `type` and the version of the protocol.

A DEALER client sends and receives `[empty, payload]`; the ROUTER of the engine process sees `[identity, empty, payload]`.
Fields that a reader does not know are ignored and fields that a writer leaves out have defaults, so that either side may be
the newer one; a change that breaks this raises VERSION, and a message of another version is answered with an error.

Prompts are text, token ids or chat messages, and answers are text or ids, as the client wishes.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from archerfish.errors import ArcherfishError, InvalidInputError

VERSION = 1


class Message(msgspec.Struct, kw_only=True, omit_defaults=True, tag_field="type"):
    """Base of all messages."""

    v: int = 0  # `encode` writes VERSION
    request_id: str  # chosen by the client, among its own; answers repeat it


# From clients


class GenerationRequest(Message, tag="generate", kw_only=True, omit_defaults=True):
    """Tokens after a prompt. One of prompt, token_ids and messages is given."""

    model: str = ""  # "": the one there is
    prompt: str | None = None
    token_ids: list[int] | None = None
    messages: list[dict[str, Any]] | None = None  # a conversation, which the model's chat template turns into a prompt
    template_options: dict[str, Any] = {}  # for the template: tools and the like
    params: dict[str, Any] = {}  # of SamplingParams
    stream: bool = False  # chunks as tokens come, then a Generated without texts; else one Generated
    wants_ids: bool = False  # ids alone: the client makes the text
    takes_bundles: bool = False  # whether answers of several requests may come as one Bundle
    priority: int = 0
    deadline_s: float | None = None
    credentials: str = ""  # an API key, or the pass of a front end
    tenant: str = ""  # only a front end may name it


class EmbedRequest(Message, tag="embed", kw_only=True, omit_defaults=True):
    """Vectors of texts."""

    model: str = ""
    texts: list[str | list[int]]
    normalize: bool | None = None  # None: as the model says
    deadline_s: float | None = None
    credentials: str = ""
    tenant: str = ""


class ScoreRequest(Message, tag="score", kw_only=True, omit_defaults=True):
    """How well documents answer a query."""

    model: str = ""
    query: str
    documents: list[str]
    deadline_s: float | None = None
    credentials: str = ""
    tenant: str = ""


class ExplainRequest(Message, tag="explain", kw_only=True, omit_defaults=True):
    """What the prefix cache has for a prompt of a tenant."""

    model: str = ""
    prompt: str | None = None
    token_ids: list[int] | None = None
    credentials: str = ""
    tenant: str = ""


class Configure(Message, tag="configure", kw_only=True, omit_defaults=True):
    """Change options of a running engine; answered with a Report of those in force. Front ends and operators only."""

    model: str = ""
    options: dict[str, Any] = {}
    credentials: str = ""


class Charge(Message, tag="charge", kw_only=True, omit_defaults=True):
    """Take a request and tokens, of what needs no model, from a tenant's limits; answered with a Report. Front ends only."""

    num_tokens: int = 0
    is_spent: bool = False  # no request, and tokens that were used already, or are given back below 0: nothing is refused
    credentials: str = ""
    tenant: str = ""


class Cancel(Message, tag="cancel", kw_only=True, omit_defaults=True):
    """Give up an earlier request of this client, the one with this request_id. Unknown ones are no error; no answer."""

    index: int | None = None  # of a sequence that is complete for the client; the others go on


class Query(Message, tag="query", kw_only=True, omit_defaults=True):
    """Ask for a Report: "models", "stats", "metrics" or "options", the last of which front ends share."""

    about: str = "stats"
    credentials: str = ""
    source: str = ""  # a front end, among all that there ever were
    values: dict[str, Any] = {}  # and what it tells the others: metrics, options and their version


class Ping(Message, tag="ping", kw_only=True, omit_defaults=True):
    """Answered with a Pong by the socket; with probe, after a real step of a model."""

    probe: str | None = None  # a model, "" for every one


# From the engine process


class Chunk(Message, tag="chunk", kw_only=True, omit_defaults=True):
    """What one of a request's n sequences gained."""

    index: int = 0
    text: str = ""
    token_ids: list[int] = []
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: list[tuple[int, float, int, list[tuple[int, float]]]] | None = None  # token, logprob, rank, likeliest
    num_cached_tokens: int = 0  # of the prompt; with the first chunk of a request, for who leaves before its Generated
    retry_after_s: float | None = None  # of a request whose deadline came before its first token


class Output(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One of the n sequences of a result."""

    index: int = 0
    text: str = ""
    token_ids: list[int] = []
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    cumulative_logprob: float | None = None
    logprobs: list[tuple[int, float, int, list[tuple[int, float]]]] | None = None


class Generated(Message, tag="generated", kw_only=True, omit_defaults=True):
    """The end of a request: all of it, or after chunks, what they did not say."""

    model: str = ""
    outputs: list[Output] = []
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    prompt_token_ids: list[int] | None = None  # where the client did not send them
    prompt_logprobs: list[tuple[int, float, int, list[tuple[int, float]]]] | None = None
    retry_after_s: float | None = None  # of a request whose deadline came before its first token
    metrics: dict[str, float] = {}  # queue_ms, prefill_ms, decode_ms, ttft_ms, tokens_per_second, num_preemptions


class Bundle(Message, tag="bundle", kw_only=True, omit_defaults=True):
    """What one step brought to several requests of a client. request_id is ""."""

    answers: list[Chunk | Generated | Failed] = []


class Vectors(Message, tag="vectors", kw_only=True, omit_defaults=True):
    """Rows of little-endian float32, of an EmbedRequest or a ScoreRequest."""

    model: str = ""
    num_rows: int = 0
    num_columns: int = 1
    data: bytes = b""
    num_tokens: int = 0


class Report(Message, tag="report", kw_only=True, omit_defaults=True):
    """The answer to a Query, an ExplainRequest or a Configure."""

    values: dict[str, Any] = {}


class Pong(Message, tag="pong", kw_only=True, omit_defaults=True):
    """The engine process is there; seconds: what a probe took. One with request_id "" asks nothing and may come at any time."""

    seconds: float = 0.0


class Failed(Message, tag="failed", kw_only=True, omit_defaults=True):
    """The end of a request that went wrong. request_id is "" where it could not be read."""

    code: str
    message: str
    status: int = 500  # of HTTP, which says whose fault it was
    hint: str = ""
    param: str | None = None
    retry_after_s: float | None = None
    blocked_s: float | None = None  # until this tenant's limits allow anything at all
    needs_s: tuple[float, float] | None = None  # the deadline that would have done, and what a character of text makes of it

    @classmethod
    def of(cls, request_id: str, error: BaseException, retry_after_s: float | None = None) -> Failed:
        """An error as it is told: what is not ours says nothing about itself."""
        if isinstance(error, ArcherfishError):
            hint = error.hint or ""
            return cls(
                request_id=request_id, code=error.code, message=error.message, status=error.status, hint=hint,
                param=getattr(error, "param", None), retry_after_s=retry_after_s, blocked_s=getattr(error, "blocked_s", None),
                needs_s=getattr(error, "needs_s", None),
            )
        message = "The engine failed on this request; its log says why."
        return cls(request_id=request_id, code=ArcherfishError.code, message=message)


FromClient = GenerationRequest | EmbedRequest | ScoreRequest | ExplainRequest | Configure | Charge | Cancel | Query | Ping
FromEngine = Chunk | Generated | Bundle | Vectors | Report | Pong | Failed
M = TypeVar("M")
_encoder = msgspec.msgpack.Encoder()
_from_client: msgspec.msgpack.Decoder[FromClient] = msgspec.msgpack.Decoder(FromClient)
_from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)


class WireError(InvalidInputError):
    """Bytes that are no message of this protocol."""

    code = "undecodable_message"


def encode(message: Message) -> bytes:
    message.v = VERSION
    return _encoder.encode(message)


def decode_request(payload: bytes) -> FromClient:
    return _decode(_from_client, payload)


def decode_answer(payload: bytes) -> FromEngine:
    return _decode(_from_engine, payload)


class _Header(msgspec.Struct):
    request_id: str = ""


_header: msgspec.msgpack.Decoder[_Header] = msgspec.msgpack.Decoder(_Header)


def request_id_of(payload: bytes) -> str:
    """The request_id of a message that cannot be decoded; "" where there is none to be read."""
    try:
        return _header.decode(payload).request_id
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""


def _decode(decoder: msgspec.msgpack.Decoder[M], payload: bytes) -> M:
    try:
        message: Any = decoder.decode(payload)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"This is no message of the protocol, version {VERSION}: {error}.") from None
    if message.v != VERSION:
        raise WireError(f"The message is of version {message.v} of the protocol; this side speaks version {VERSION}.")
    decoded: M = message
    return decoded
