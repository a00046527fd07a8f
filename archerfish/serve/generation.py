"""From a prompt in tokens to pieces of text: what the routes for text have in common."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.requests import Request

from archerfish.engine.request_options import check_option_values, check_vocabulary
from archerfish.errors import ArcherfishError, InvalidInputError, ServiceError, StoppedError
from archerfish.params import SamplingParams
from archerfish.sequence import FinishReason
from archerfish.sequence import Request as TokenRequest
from archerfish.serve.catalog import Catalog, ModelCard
from archerfish.serve.client import RemoteError
from archerfish.serve.errors import InvalidParameterError
from archerfish.serve.presence import unless_gone
from archerfish.serve.result_cache import ResultCache, generate_cached, parse_cache_control
from archerfish.serve.served_texts import ServedText, ServedTexts, aside, blamed
from archerfish.serve.sse import EventStream, Outbox
from archerfish.serve.tool_choice import CallParser, explained
from archerfish.serve.wire import Chunk, Generated, GenerationRequest
from archerfish.text.output_text import OutputText
from archerfish.text.tool_calls import ToolPiece

T = TypeVar("T")
Logprob = tuple[int, float, int, list[tuple[int, float]]]  # token, logprob, rank, likeliest
UNSENDABLE = (OverflowError, UnicodeEncodeError, RecursionError, TypeError)  # what msgpack raises
USUAL = {name: getattr(SamplingParams(), name) for name in SamplingParams.__dataclass_fields__ if name != "stop"}


class DeadlineError(ServiceError):
    """A request whose time was up before its first token."""

    status, code = 504, "deadline_exceeded"
    default_hint = "Give it more time (deadline_s), or try when less is waiting."

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


@dataclass(slots=True)
class Order:
    """What a route wants generated."""

    text: ServedText
    prompt_ids: list[int]
    params: SamplingParams
    call_parser: Callable[[], CallParser] | None = None  # where the answer may call tools
    priority: int = 0
    deadline_s: float | None = None
    is_streamed: bool = False
    tools: Sequence[dict[str, Any]] = ()
    form: str | None = None  # the parameter that says what the answer must be

    @property
    def model_id(self) -> str:
        return self.text.card.id

    def message(self, address: dict[str, Any]) -> GenerationRequest:
        """As it is sent. Stop strings are found here, so they make chunks necessary."""
        params = {name: value for name, usual in USUAL.items() if (value := getattr(self.params, name)) != usual}
        return GenerationRequest(
            token_ids=self.prompt_ids, params=params, stream=self.is_streamed or bool(self.params.stop), wants_ids=True,
            priority=self.priority, deadline_s=self.deadline_s, **address,
        )


@dataclass(slots=True)
class Piece:
    """What one sequence of an answer gained."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[Logprob] | None = None
    parts: list[ToolPiece] | None = None  # the text again, where tools may be called
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class Writing:
    """One sequence of an answer while it comes."""

    def __init__(self, order: Order) -> None:
        tokenizer = None if order.params.stages else order.text.tokenizer  # their tokens stand for no text
        # The engine says which token ended a sequence, so that end tokens need not be known here.
        request = TokenRequest("", order.prompt_ids, order.params, max_tokens=0)
        self._text = None if tokenizer is None else OutputText(tokenizer, request)
        self._shows_end = order.params.include_stop_str_in_output
        self._parser = None if order.call_parser is None else order.call_parser()
        self.num_tokens = 0
        self.is_open = True
        self.was_cut = False  # by a stop string: the engine does not know of it
        self.has_calls = False

    def take(self, index: int, gained: Any) -> Piece:
        """Add what a Chunk or an Output tells."""
        token_ids, stop_reason = gained.token_ids, gained.stop_reason
        reason: FinishReason | None = gained.finish_reason
        shown_ids = token_ids
        is_end = reason == "stop" and token_ids and token_ids[-1] == stop_reason
        if is_end and not self._shows_end:
            shown_ids = token_ids[:-1]
        text: str = gained.text
        if self._text is not None:
            text, stop = self._text.feed(shown_ids, reason)
            if stop is not None:
                shown_ids = shown_ids[: self._text.num_tokens - self.num_tokens]
                self.was_cut = reason is None
                token_ids, reason, stop_reason = shown_ids, "stop", stop
        self.num_tokens += len(token_ids)
        self.is_open = reason is None
        parts: list[ToolPiece] | None = None
        if self._parser is not None:
            parts = list(self._parser.feed(text)) if text else []
            if reason is not None:
                parts += self._parser.finish()
            self.has_calls = self.has_calls or any(part.kind == "name" for part in parts)
        logprobs = None if gained.logprobs is None else gained.logprobs[: len(shown_ids)]
        return Piece(index, text, token_ids, logprobs, parts, reason, stop_reason)


class Answer:
    """What has come of an order: messages of the backend in, pieces out."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.writings = [Writing(order) for _ in range(order.params.n)]
        self.end_sequence: Callable[[int], None] | None = None  # tells the engine which has come to its end
        self.num_cached = 0
        self.prompt_logprobs: list[Logprob] | None = None

    def take(self, message: Chunk | Generated) -> list[Piece]:
        if isinstance(message, Chunk):
            if message.num_cached_tokens:
                self.num_cached = message.num_cached_tokens
            return self._pieces((message,), message.retry_after_s)
        self.num_cached = message.num_cached_tokens
        self.prompt_logprobs = message.prompt_logprobs
        return self._pieces(message.outputs, message.retry_after_s)

    def _pieces(self, gains: Sequence[Any], retry_after_s: float | None) -> list[Piece]:
        pieces: list[Piece] = []
        for gained in gains:
            writing = self.writings[gained.index]
            if writing.is_open:
                if gained.finish_reason is not None:
                    self._check(gained.finish_reason, writing.num_tokens + len(gained.token_ids), retry_after_s)
                pieces.append(writing.take(gained.index, gained))
                if writing.was_cut and self.end_sequence is not None:
                    self.end_sequence(gained.index)
        return pieces

    def _check(self, finish_reason: str, num_tokens: int, retry_after_s: float | None) -> None:
        if finish_reason == "error":
            raise ArcherfishError("The engine failed on this request; its log says why.", hint="")
        if finish_reason == "abort":
            raise StoppedError("The engine gave this request up before its answer was complete.", hint="Send it again.")
        if finish_reason == "deadline" and num_tokens == 0:
            raise DeadlineError("The deadline of this request passed before its first token.", retry_after_s)

    @property
    def is_cut(self) -> bool:
        """Whether nothing more of what the engine may send is wanted."""
        return any(writing.was_cut for writing in self.writings) and not any(writing.is_open for writing in self.writings)

    @property
    def num_prompt(self) -> int:
        return len(self.order.prompt_ids)

    @property
    def num_output(self) -> int:
        return sum(writing.num_tokens for writing in self.writings)


@dataclass(slots=True)
class Choice:
    """One whole sequence."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    finish_reason: str = "stop"
    stop_reason: str | int | None = None


@dataclass(slots=True)
class Call:
    """A call of a tool."""

    name: str
    arguments: str = ""


def joined(index: int, pieces: Sequence[Piece]) -> Choice:
    """The pieces of one sequence together."""
    choice = Choice(index)
    texts: list[str] = []
    arguments: list[list[str]] = []
    for piece in pieces:
        choice.token_ids += piece.token_ids
        choice.logprobs += piece.logprobs or ()
        if piece.finish_reason is not None:
            choice.finish_reason, choice.stop_reason = piece.finish_reason, piece.stop_reason
        if piece.parts is None:
            texts.append(piece.text)
        for part in piece.parts or ():
            if part.kind == "text":
                texts.append(part.text)
            elif part.kind == "name":
                choice.calls.append(Call(part.text))
                arguments.append([])
            else:
                arguments[part.index].append(part.text)
    choice.text = "".join(texts)
    for call, collected in zip(choice.calls, arguments, strict=True):
        call.arguments = "".join(collected)
    return choice


def openai_reason(finish_reason: str, has_calls: bool) -> str:
    """Why an answer ended, in the words that OpenAI has: a deadline is a limit like another."""
    if finish_reason == "stop":
        return "tool_calls" if has_calls else "stop"
    return "length"


@dataclass(slots=True)
class Asked:
    """What the backend will say to an order."""

    messages: AsyncIterator[Chunk | Generated]
    end_sequence: Callable[[int], None] | None  # tells the engine which has come to its end


class EventWriter(Protocol):
    """How a route writes an answer as events."""

    def begin(self, answers: Sequence[Answer]) -> bytes: ...
    def piece(self, number: int, piece: Piece) -> bytes: ...
    def end(self, answers: Sequence[Answer]) -> bytes: ...
    def error(self, error: Exception) -> bytes: ...


class TextService:
    """What the routes for text share: the models, their tokenizers, and how orders are carried out."""

    def __init__(self, catalog: Catalog, results: ResultCache | None = None, *, keep_alive_s: float = 0.0) -> None:
        self.catalog, self.keep_alive_s = catalog, keep_alive_s
        self.texts = ServedTexts()
        self.results = results or ResultCache()  # which is off

    async def model(self, name: str | None) -> ServedText:
        """The model that writes for a request."""
        return await self.texts.of(await self.catalog.find(name, "generation"))

    async def complete(self, request: Request, orders: Sequence[Order]) -> list[tuple[Answer, list[Choice]]]:
        """Whole answers, unless the client goes away before."""
        return await unless_gone(request, all_of([self._complete(request, order) for order in orders]))

    async def _complete(self, request: Request, order: Order) -> tuple[Answer, list[Choice]]:
        asked = self._ask(request, order)
        answer = Answer(order)
        pieces: list[list[Piece]] = [[] for _ in answer.writings]
        async with self._reading(asked, answer) as messages:
            async for message in messages:
                for piece in await aside(partial(answer.take, message), size_of(message)):
                    pieces[piece.index].append(piece)
                if answer.is_cut:
                    break
        return answer, [joined(index, own) for index, own in enumerate(pieces)]

    async def stream(self, request: Request, orders: Sequence[Order], writer: EventWriter) -> EventStream:
        """Events as the answers come."""
        asked = [self._ask(request, order) for order in orders]  # first of all: the rest is made while they are computed

        async def produce(outbox: Outbox) -> None:
            answers = [Answer(order) for order in orders]
            is_begun = False

            async def pump(number: int) -> None:
                nonlocal is_begun
                answer = answers[number]
                async with self._reading(asked[number], answer) as messages:
                    async for message in messages:
                        has_ended = False
                        for piece in answer.take(message):
                            if not is_begun:
                                is_begun = True
                                outbox.put(writer.begin(answers))
                            data = writer.piece(number, piece)
                            if data:
                                outbox.put(data)
                            has_ended = has_ended or piece.finish_reason is not None
                        if has_ended and answer.is_cut:
                            break
                        if outbox.is_full:
                            await outbox.room()

            await all_of([pump(number) for number in range(len(orders))])
            outbox.put(writer.end(answers))

        return await EventStream(produce, writer.error, keep_alive_s=self.keep_alive_s).start(request)

    def _ask(self, request: Request, order: Order) -> Asked:
        """The backend's messages to an order."""
        backend, message = self.catalog.backend, order.message(self.catalog.address(request, order.text.card))
        if self.results.is_enabled:
            control = parse_cache_control(request.headers.get("cache-control"))
            return Asked(generate_cached(
                self.results, backend.generate, message, model=order.model_id, namespace=message.tenant, control=control
            ), None)  # a cache wants all sequences whole
        return Asked(backend.generate(message), partial(backend.end_sequence, message.request_id))

    @asynccontextmanager
    async def _reading(self, asked: Asked, answer: Answer) -> AsyncIterator[AsyncIterator[Chunk | Generated]]:
        """Messages to an order; leaving them cancels what is still to come."""
        order, messages = answer.order, asked.messages
        answer.end_sequence = asked.end_sequence
        try:
            yield messages
        except RemoteError as error:
            if order.tools and order.params.grammar is not None:
                raise explained(error, str(order.params.grammar["value"]), order.tools) from None
            if error.code == InvalidInputError.code and "grammar" in error.message.lower():
                error.param = error.param or order.form
            raise
        finally:
            close: Callable[[], Awaitable[None]] | None = getattr(messages, "aclose", None)
            if close is not None:
                await close()


async def all_of(works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Results of all; if one fails, the others are cancelled."""
    if len(works) == 1:
        return [await works[0]]
    tasks = [asyncio.create_task(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def size_of(message: Chunk | Generated) -> int:
    return 0 if isinstance(message, Chunk) else sum(len(output.token_ids) for output in message.outputs)


def checked_params(values: dict[str, Any], card: ModelCard, names: dict[str, str] | None = None) -> SamplingParams:
    """SamplingParams of what a body states (None: left out) for a model.

    An error names the body's parameter, by `names` if it differs. max_tokens may be more than a prompt leaves room for, where
    the answer ends with the context; it may not be more than the model takes of prompt and answer together.
    """
    named = names or {}
    names_here = {ours: name for ours, name in named.items() if ours != "grammar"}  # which is a word of messages too
    try:
        params = SamplingParams.of(values)
        if card.vocab_size:
            check_vocabulary(params, card.vocab_size)
    except InvalidInputError as error:
        stated = next((word for word in re.findall(r"\w+", error.message) if word in values), None)
        error.message = re.sub(r"\w+", lambda word: names_here.get(word[0], word[0]), error.message)
        raise blamed(error, named.get(stated, stated)) if stated else error from None
    if params.max_tokens is not None and params.max_tokens > card.max_length:
        shown = named.get("max_tokens", "max_tokens")
        limit = f"this model takes {card.max_length:,} tokens, prompt and answer together"
        raise InvalidParameterError(f"{shown} is {params.max_tokens:,}; {limit}.", shown)
    check_can_be_sent(values, named)
    return params


def check_can_be_sent(values: dict[str, Any], names: dict[str, str]) -> None:
    """Numbers and texts may be ones that the engine process cannot be told."""
    try:
        msgspec.msgpack.encode(values)
    except UNSENDABLE as error:
        if len(values) > 1:
            for name, value in values.items():
                check_can_be_sent({name: value}, names)
        shown = names.get(next(iter(values)), next(iter(values)))
        raise InvalidParameterError(f"{shown} cannot be passed on: {error}.", shown) from None


def checked_order(order: Order) -> Order:
    """An order whose other options are right too."""
    if order.params.stop:
        order.text.need_tokenizer("stop")
    try:
        check_option_values(None, 0, order.deadline_s, "")
    except InvalidInputError as error:
        raise blamed(error, "deadline_s") from None
    if not -(2**31) <= order.priority < 2**31:
        raise InvalidParameterError("priority is out of range.", "priority")
    return order
