"""From a body to the text of an answer: what all routes that generate have in common."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.requests import Request

from archerfish.engine.request_maker import check_options, check_vocabulary
from archerfish.errors import ArcherfishError, InvalidInputError, ServiceError, StoppedError
from archerfish.params import SamplingParams
from archerfish.serve.answers import CachedTokens, ChosenLogprob, OpenAIFinish, StopReason, TokenLogprob, Usage
from archerfish.serve.bodies import GenerationBody
from archerfish.serve.catalog import Catalog, ModelCard, ModelText, in_thread
from archerfish.serve.chat_bodies import ToolBody
from archerfish.serve.client import RemoteError
from archerfish.serve.errors import InvalidParameterError, with_param
from archerfish.serve.formats import ToolUse
from archerfish.serve.result_cache import ResultCache, generate_cached, parse_cache_control
from archerfish.serve.sse import EventStream, Outbox, unless_gone
from archerfish.serve.wire import Chunk, Generated, GenerationRequest, Output
from archerfish.text.output_text import OutputText
from archerfish.text.tool_calls import ToolPiece

T = TypeVar("T")
Logprob = tuple[int, float, int, list[tuple[int, float]]]  # token, logprob, rank, likeliest tokens
UNSENDABLE = (OverflowError, UnicodeEncodeError, RecursionError, TypeError)  # what msgpack raises
DEFAULTS = {name: getattr(SamplingParams(), name) for name in SamplingParams.__dataclass_fields__ if name != "stop"}
RESERVED = ("self", "tokenizer", "messages", "tools")  # names that chat_template_kwargs cannot have
LEAST_LOGPROB = -9999.0  # JSON has no infinity; OpenAI writes this for a token that cannot come


class DeadlineError(ServiceError):
    """The deadline of a request passed before its first token."""

    status, code = 504, "deadline_exceeded"
    default_hint = "Give it more time (deadline_s), or try when less is waiting."

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class PendingCall:
    """A call of a tool whose arguments may still grow."""

    def __init__(self, name: str) -> None:
        self.id = new_id("call")
        self.name = name
        self.parts: list[str] = []

    @property
    def arguments(self) -> str:
        return "".join(self.parts)


@dataclass(slots=True)
class ChoiceDelta:
    """What a message of the engine adds to a choice."""

    choice: Choice
    text: str
    token_ids: list[int]
    logprobs: list[Logprob] | None
    parts: list[ToolPiece] | None  # the text again, where tools may be called: text, names of calls and arguments


class Choice:
    """One of the n sequences of an answer: all that has come of it."""

    def __init__(self, index: int, output_text: OutputText, tool_use: ToolUse | None) -> None:
        self.index = index
        self._output_text = output_text
        self._parser = None if tool_use is None else tool_use.parser()
        self._has_one_call = tool_use is not None and tool_use.has_one_call
        self._texts: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[Logprob] = []
        self.calls: list[PendingCall] = []
        self.finish_reason: str | None = None
        self.stop_reason: StopReason = None
        self.was_cut = False  # by a stop string, of which the engine does not know

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def add(self, gain: Chunk | Output) -> ChoiceDelta:
        output_text, num_before = self._output_text, self._output_text.num_tokens
        text, stop = output_text.feed(gain.token_ids, gain.finish_reason, (gain.stop_reason,))
        token_ids, logprobs = gain.token_ids, gain.logprobs
        self.finish_reason, self.stop_reason = gain.finish_reason, gain.stop_reason
        if stop is not None:
            self.was_cut = gain.finish_reason is None
            self.finish_reason, self.stop_reason = "stop", stop
            token_ids = token_ids[: output_text.num_tokens - num_before]
        if logprobs is not None:
            logprobs = logprobs[: output_text.num_shown - num_before]
            self.logprobs += logprobs
        self.token_ids += token_ids
        parts: list[ToolPiece] | None = None
        if self._parser is None:
            self._texts.append(text)
        else:
            parts = self._parse(text)
        return ChoiceDelta(self, text, token_ids, logprobs, parts)

    def _parse(self, text: str) -> list[ToolPiece]:
        assert self._parser is not None
        parts = list(self._parser.feed(text)) if text else []
        if self.finish_reason is not None:
            parts += self._parser.finish()
        if self._has_one_call:
            parts = [part for part in parts if part.index <= 0]
        for part in parts:
            if part.kind == "text":
                self._texts.append(part.text)
            elif part.kind == "name":
                self.calls.append(PendingCall(part.text))
            else:
                self.calls[part.index].parts.append(part.text)
        return parts

    @property
    def openai_reason(self) -> OpenAIFinish:
        """Why the choice ended, in OpenAI's words, which have none for a deadline."""
        if self.finish_reason == "stop":
            return "tool_calls" if self.calls else "stop"
        return "length"

    @property
    def shown_stop_reason(self) -> StopReason:
        return "deadline" if self.finish_reason == "deadline" else self.stop_reason


@dataclass(slots=True)
class Generation:
    """One request to the engine, and its answer as far as it has come."""

    text: ModelText
    request: GenerationRequest
    params: SamplingParams
    format_param: str | None = None  # the parameter that states the format of the answer
    tool_use: ToolUse | None = None
    choices: list[Choice] = field(init=False)
    num_cached: int = 0
    prompt_logprobs: list[Logprob] | None = None
    is_cut: bool = False  # all choices have ended, and the engine does not know it of at least one

    def __post_init__(self) -> None:
        tokenizer, params = self.text.tokenizer, self.params
        self.choices = [
            Choice(index, OutputText(tokenizer, self.prompt_ids, params), self.tool_use) for index in range(params.n)
        ]

    @property
    def model(self) -> str:
        return self.text.card.id

    @property
    def prompt_ids(self) -> list[int]:
        return self.request.token_ids or []

    @property
    def num_output(self) -> int:
        return sum(len(choice.token_ids) for choice in self.choices)

    def add(self, message: Chunk | Generated, end_sequence: Callable[[int], None] | None) -> list[ChoiceDelta]:
        """Add a message of the backend. `end_sequence` is called for a choice that a stop string has ended."""
        self.num_cached = message.num_cached_tokens or self.num_cached
        gains: Sequence[Chunk | Output]
        if isinstance(message, Chunk):
            gains = (message,)
        else:
            gains, self.prompt_logprobs = message.outputs, message.prompt_logprobs
        deltas: list[ChoiceDelta] = []
        for gain in gains:
            choice = self.choices[gain.index]
            if choice.finish_reason is not None:
                continue
            if gain.finish_reason is not None:
                check_ending(gain.finish_reason, len(choice.token_ids) + len(gain.token_ids), message.retry_after_s)
            deltas.append(choice.add(gain))
            if choice.was_cut and end_sequence is not None:
                end_sequence(gain.index)
            if gain.finish_reason is not None or choice.was_cut:
                self.is_cut = any(each.was_cut for each in self.choices) and all(each.finish_reason for each in self.choices)
        return deltas

    def chosen_logprobs(self, logprobs: Sequence[Logprob] | None) -> list[ChosenLogprob]:
        return [
            ChosenLogprob(
                **self._token_logprob(token_id, logprob),
                top_logprobs=[TokenLogprob(**self._token_logprob(*likely)) for likely in top],
            )
            for token_id, logprob, _, top in logprobs or ()
        ]

    def _token_logprob(self, token_id: int, logprob: float) -> dict[str, Any]:
        token, raw = self.text.token(token_id)
        return {"token": token, "logprob": max(logprob, LEAST_LOGPROB), "bytes": raw}


def check_ending(finish_reason: str, num_tokens: int, retry_after_s: float | None) -> None:
    """Raise an error for a sequence that did not end as it should."""
    if finish_reason == "error":
        raise ArcherfishError("The engine failed on this request; its log says why.", hint="")
    if finish_reason == "abort":
        raise StoppedError("The engine gave this request up before its answer was complete.", hint="Send it again.")
    if finish_reason == "deadline" and num_tokens == 0:
        raise DeadlineError("The deadline of this request passed before its first token.", retry_after_s)


def new_id(prefix: str, separator: str = "_") -> str:
    return f"{prefix}{separator}{secrets.token_hex(12)}"


def usage_of(generations: Sequence[Generation], *, is_output_hidden: bool = False) -> Usage:
    num_prompt = sum(len(generation.prompt_ids) for generation in generations)
    num_output = 0 if is_output_hidden else sum(generation.num_output for generation in generations)
    return Usage(
        prompt_tokens=num_prompt, completion_tokens=num_output, total_tokens=num_prompt + num_output,
        prompt_tokens_details=CachedTokens(cached_tokens=sum(generation.num_cached for generation in generations)),
    )


class EventWriter(Protocol):
    """How a route writes an answer as events."""

    def start(self) -> bytes:
        """The events before the first delta, when it has come."""

    def delta(self, number: int, delta: ChoiceDelta) -> bytes:
        """The events of a delta of generation `number`; may be none."""

    def end(self) -> bytes: ...
    def error(self, error: Exception) -> bytes: ...


class TextService:
    """Makes requests to the engine out of bodies, and runs them."""

    def __init__(self, catalog: Catalog, results: ResultCache | None = None, *, keep_alive_s: float = 0.0) -> None:
        self.catalog, self.keep_alive_s = catalog, keep_alive_s
        self.results = results or ResultCache()  # disabled

    async def find_text(self, name: str | None) -> ModelText:
        """The generation model of a name, or the first one."""
        return await self.catalog.text_of(await self.catalog.find(name, "generation"))

    def prepare(
        self, request: Request, body: GenerationBody, text: ModelText, prompt_ids: list[int], params: SamplingParams,
        format_param: str | None = None, tool_use: ToolUse | None = None,
    ) -> Generation:
        """A request to the engine. Stop strings are found here, so that they need a streamed answer."""
        if params.stop:
            text.need_tokenizer("stop")
        try:
            check_options({"deadline_s": body.deadline_s})
        except InvalidInputError as error:
            raise with_param(error, "deadline_s") from None
        if not -(2**31) <= body.priority < 2**31:
            raise InvalidParameterError("priority is out of range.", "priority")
        stated = {name: value for name, default in DEFAULTS.items() if (value := getattr(params, name)) != default}
        generate = GenerationRequest(
            token_ids=prompt_ids, params=stated, stream=bool(body.stream or params.stop), wants_ids=True,
            priority=body.priority, deadline_s=body.deadline_s, **self.catalog.address(request, text.card),
        )
        return Generation(text, generate, params, format_param, tool_use)

    async def prepare_chat(
        self, request: Request, body: ToolBody, messages: Sequence[dict[str, Any]], *, param: str = "messages",
        names: dict[str, str] | None = None, template_values: dict[str, Any] | None = None, answer_start: str = "",
    ) -> Generation:
        """A request for the next message of a conversation.

        param: the parameter that holds the conversation. names: the route's names of SamplingParams, where they differ.
        """
        text = await self.find_text(body.model)
        choice, values = body.check_tool_choice(), body.sampling()
        options = dict(template_values or {})
        reserved = [name for name in RESERVED if name in options]
        if reserved:
            raise InvalidParameterError(f"chat_template_kwargs cannot hold {reserved[0]!r}.", "chat_template_kwargs")
        tool_use, format_param = None, body.grammar_param
        if choice != "none":
            if "grammar" in values:
                raise InvalidParameterError("A format and tools exclude each other; set tool_choice to none.", "tools")
            options["tools"], format_param = body.tools, "tools"
            style = text.call_style(options)
            tool_use = ToolUse.choose(style, body.tools, choice, body.parallel_tool_calls, text.tokenizer)
            if tool_use.grammar is not None:
                values["grammar"] = tool_use.grammar
        params = checked_params(values, text.card, {"grammar": format_param, **(names or {})})
        text.check_size(sum(len(message["content"]) for message in messages), param)
        prompt_ids = await text.encode_chat(messages, param, options)
        if answer_start:
            prompt_ids = prompt_ids + await text.encode(answer_start, param, False, plain=True)
        text.check_length(prompt_ids, param)
        return self.prepare(request, body, text, prompt_ids, text.add_stops(params), format_param, tool_use)

    async def complete(self, request: Request, *generations: Generation) -> None:
        """Run generations to their end, unless the client goes away before."""

        async def run(generation: Generation) -> None:
            messages, end_sequence = self._send(request, generation)
            async with closing(messages, generation):
                async for message in messages:
                    num_tokens = sum(len(output.token_ids) for output in getattr(message, "outputs", ()))
                    await in_thread(partial(generation.add, message, end_sequence), num_tokens)
                    if generation.is_cut:
                        break

        await unless_gone(request, run_all([run(generation) for generation in generations]))

    async def stream(self, request: Request, generations: Sequence[Generation], writer: EventWriter) -> EventStream:
        """Events as the tokens come."""
        sent = [self._send(request, generation) for generation in generations]

        async def produce(outbox: Outbox) -> None:
            has_started = False

            async def run(number: int, generation: Generation) -> None:
                nonlocal has_started
                messages, end_sequence = sent[number]
                async with closing(messages, generation):
                    async for message in messages:
                        for delta in generation.add(message, end_sequence):
                            if not has_started:
                                has_started = True
                                outbox.put(writer.start())
                            data = writer.delta(number, delta)
                            if data:
                                outbox.put(data)
                        if generation.is_cut:
                            break
                        if outbox.is_full:
                            await outbox.wait_for_room()

            await run_all([run(number, generation) for number, generation in enumerate(generations)])
            outbox.put(writer.end())

        return await EventStream(produce, writer.error, keep_alive_s=self.keep_alive_s).start(request)

    def _send(
        self, request: Request, generation: Generation
    ) -> tuple[AsyncIterator[Chunk | Generated], Callable[[int], None] | None]:
        """The backend's messages, and the function that ends one of several sequences."""
        backend, generate = self.catalog.backend, generation.request
        if self.results.is_enabled:  # the cache needs all sequences whole
            control = parse_cache_control(request.headers.get("cache-control"))
            return generate_cached(
                self.results, backend.generate, generate, model=generation.model, namespace=generate.tenant, control=control
            ), None
        return backend.generate(generate), partial(backend.end_sequence, generate.request_id)


@asynccontextmanager
async def closing(messages: AsyncIterator[Chunk | Generated], generation: Generation) -> AsyncIterator[None]:
    """Cancel what is still to come, and make errors about grammars name the parameter that stated them."""
    try:
        yield
    except RemoteError as error:
        if generation.tool_use is not None and generation.tool_use.grammar is not None:
            raise generation.tool_use.explain(error) from None
        if error.code == InvalidInputError.code and "grammar" in error.message.lower():
            error.param = error.param or generation.format_param
        raise
    finally:
        close: Callable[[], Awaitable[None]] | None = getattr(messages, "aclose", None)
        if close is not None:
            await close()


async def run_all(works: Sequence[Coroutine[Any, Any, T]]) -> None:
    """Run all; if one fails, the others are cancelled."""
    if len(works) == 1:
        await works[0]
        return
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def checked_params(values: dict[str, Any], card: ModelCard, names: dict[str, str] | None = None) -> SamplingParams:
    """SamplingParams for a model.

    names: the route's names of SamplingParams, where they differ; errors use them. max_tokens may be more than the prompt
    leaves room for, and not more than the model takes of prompt and answer together.
    """
    named = names or {}
    in_messages = {ours: name for ours, name in named.items() if ours != "grammar"}  # "grammar" is a plain word there
    try:
        params = SamplingParams.of(values)
        if card.vocab_size:
            check_vocabulary(params, card.vocab_size)
    except InvalidInputError as error:
        stated = next((word for word in re.findall(r"\w+", error.message) if word in values), None)
        error.message = re.sub(r"\w+", lambda word: in_messages.get(word[0], word[0]), error.message)
        raise with_param(error, named.get(stated, stated)) if stated else error from None
    if params.max_tokens is not None and params.max_tokens > card.max_length:
        shown = named.get("max_tokens", "max_tokens")
        limit = f"this model takes {card.max_length:,} tokens, prompt and answer together"
        raise InvalidParameterError(f"{shown} is {params.max_tokens:,}; {limit}.", shown)
    check_can_be_sent(values, named)
    return params


def check_can_be_sent(values: dict[str, Any], names: dict[str, str]) -> None:
    """Refuse values that msgpack cannot encode."""
    for name, value in values.items():
        try:
            msgspec.msgpack.encode(value)
        except UNSENDABLE as error:
            shown = names.get(name, name)
            raise InvalidParameterError(f"{shown} cannot be sent to the engine: {error}.", shown) from None
