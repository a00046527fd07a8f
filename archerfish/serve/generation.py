"""From a body to the text of an answer: what all routes that generate have in common."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar

import msgspec
from starlette.requests import Request

from archerfish.config import ServeConfig
from archerfish.engine.request_maker import check_vocabulary
from archerfish.errors import ArcherfishError, InvalidInputError, StoppedError
from archerfish.params import SamplingParams, with_defaults
from archerfish.serve.answers import CachedTokens, ChosenLogprob, StopReason, TokenLogprob, Usage
from archerfish.serve.bodies import GenerationBody, ToolBody, described_tools
from archerfish.serve.catalog import Catalog, ModelCard, ModelText, in_thread
from archerfish.serve.client import RemoteError
from archerfish.serve.errors import InvalidParameterError, naming
from archerfish.serve.formats import ToolUse
from archerfish.serve.logs import EngineTimes
from archerfish.serve.result_cache import ResultCache
from archerfish.serve.wire import Chunk, Generated, GenerationRequest, Logprob, WireOutput
from archerfish.text.json_schema import prepare_schema
from archerfish.text.output_text import OutputText
from archerfish.text.reasoning import CHANNEL, CLOSE, FINAL, TAIL_TOKENS, AnswerParser, ends_inside, parser_for
from archerfish.text.tokenizer import Tokenizer
from archerfish.text.tool_calls import ToolCallParser, ToolPiece

T = TypeVar("T")
logger = logging.getLogger("archerfish.serve")
DEFAULTS = {name: getattr(SamplingParams(), name) for name in SamplingParams.__dataclass_fields__ if name != "stop"}
MAX_TRIES = 3  # of a request whose replica ends under it
LEAST_LOGPROB = -9999.0  # JSON has no infinity; OpenAI writes this for a token that cannot come


def new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"


def answer_head(prefix: str, model: str) -> dict[str, Any]:
    """The first members of an answer in OpenAI's form, and of all its chunks."""
    return {"id": f"{prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}


@dataclass(slots=True)
class PendingCall:
    """A call of a tool whose arguments may still grow."""

    name: str
    id: str = field(default_factory=partial(new_id, "call"))
    parts: list[str] = field(default_factory=list)

    @property
    def arguments(self) -> str:
        return "".join(self.parts)

    def read_arguments(self) -> dict[str, Any]:
        """The arguments as an object; empty if the call was cut off or is not JSON."""
        with suppress(ValueError, RecursionError):
            arguments = json.loads(self.arguments or "{}")
            return arguments if isinstance(arguments, dict) else {}
        return {}


@dataclass(slots=True)
class ChoiceDelta:
    """What a message of the engine adds to a choice."""

    choice: Choice
    text: str
    token_ids: list[int]
    logprobs: list[Logprob] | None
    is_last: bool
    parts: list[ToolPiece]  # the text again, in parts: reasoning, text, names of calls and arguments


@dataclass(slots=True)
class Choice:
    """One of the n sequences of an answer: all that has come of it."""

    index: int  # among the choices of its generation
    place: int  # among the choices of the whole answer
    output_text: OutputText
    parser: ToolCallParser | None  # where tools may be called
    has_one_call: bool  # drop later ones
    thinking: AnswerParser | None = None  # where there may be reasoning
    reasonings: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    calls: list[PendingCall] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: StopReason = None
    was_cut: bool = False  # by a stop string, of which the engine does not know

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def reasoning(self) -> str:
        return "".join(self.reasonings)

    def add(self, gain: Chunk | WireOutput) -> ChoiceDelta:
        output_text, num_before = self.output_text, self.output_text.num_tokens
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
        is_last = self.finish_reason is not None
        if self.parser is not None or self.thinking is not None:
            parts = self._parse(text, is_last)
        else:  # logprobs of tokens whose text is held back are sent at once
            parts = [ToolPiece("text", -1, text)] if text or logprobs else []
            self.texts.append(text)
        return ChoiceDelta(self, text, token_ids, logprobs, is_last, parts)

    def _parse(self, text: str, is_last: bool) -> list[ToolPiece]:
        parts: list[ToolPiece] = []
        if self.thinking is not None:
            reasoning, text = self.thinking.feed(text, is_last)
            self.reasonings.append(reasoning)
            parts += [ToolPiece("reasoning", -1, reasoning)] if reasoning else []
        if self.parser is None:
            parts += [ToolPiece("text", -1, text)] if text else []
        else:
            parts += self.parser.feed(text) if text else []
            parts += self.parser.finish() if is_last else []
        if self.has_one_call:
            parts = [part for part in parts if part.index <= 0]
        for part in parts:
            if part.kind == "text":
                self.texts.append(part.text)
            elif part.kind == "name":
                self.calls.append(PendingCall(part.text))
            elif part.kind == "arguments":
                self.calls[part.index].parts.append(part.text)
        return parts


@dataclass(slots=True)
class Generation:
    """One request to the engine, and its answer as far as it has come."""

    text: ModelText
    request: GenerationRequest
    params: SamplingParams
    prompt_ids: list[int]
    new_choices: Callable[[], list[Choice]]
    format_param: str | None  # the parameter that states the format of the answer
    tool_use: ToolUse | None
    num_cached: int = 0
    prompt_logprobs: list[Logprob] | None = None
    metrics: dict[str, float] = field(default_factory=dict)  # of the engine, when all has come
    times: EngineTimes = field(default_factory=EngineTimes)
    choices: list[Choice] = field(init=False)

    def __post_init__(self) -> None:
        self.start_over()

    def start_over(self) -> None:
        """Forget what has come."""
        self.choices = self.new_choices()
        self.num_cached = 0
        self.prompt_logprobs = None
        self.times = EngineTimes(time.monotonic())

    @property
    def num_output(self) -> int:
        return sum(len(choice.token_ids) for choice in self.choices)

    @property
    def num_reasoning(self) -> int:
        """About how many tokens of the output are reasoning."""
        tokenizer = self.text.tokenizer
        return (
            0 if tokenizer is None else sum(len(tokenizer.encode(choice.reasoning, False)) for choice in self.choices)
        )

    def add(self, message: Chunk | Generated) -> list[ChoiceDelta]:
        """Add a message of the backend. What comes for a choice after its end is ignored."""
        self.num_cached = message.num_cached_tokens or self.num_cached
        gains: Sequence[Chunk | WireOutput] = (message,) if isinstance(message, Chunk) else message.outputs
        if isinstance(message, Generated):
            self.prompt_logprobs, self.metrics = message.prompt_logprobs, message.metrics
        deltas: list[ChoiceDelta] = []
        for gain in gains:
            choice = self.choices[gain.index]
            if choice.finish_reason is not None:
                continue
            if gain.finish_reason == "error":
                raise ArcherfishError("The engine failed on this request; its log says why.", hint="")
            if gain.finish_reason == "abort":
                raise StoppedError(
                    "The engine gave this request up before its answer was complete.", hint="Send it again."
                )
            if gain.finish_reason == "deadline" and not choice.token_ids and not gain.token_ids:
                raise RemoteError(
                    "The deadline of this request passed before its first token.",
                    code="deadline_exceeded",
                    status=504,
                    hint="Give it more time (deadline_s), or try when less is waiting.",
                    retry_after_s=message.retry_after_s,
                )
            deltas.append(choice.add(gain))
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


def usage_of(generations: Sequence[Generation], *, is_output_hidden: bool = False) -> Usage:
    num_prompt = sum(len(generation.prompt_ids) for generation in generations)
    num_output = 0 if is_output_hidden else sum(generation.num_output for generation in generations)
    cached = CachedTokens(cached_tokens=sum(generation.num_cached for generation in generations))
    return Usage(num_prompt, num_output, total_tokens=num_prompt + num_output, prompt_tokens_details=cached)


def effort_values(effort: str) -> dict[str, Any]:
    """The values by which chat templates of several families are told how much to reason."""
    is_on = effort != "none"
    return {"reasoning_effort": effort, "enable_thinking": is_on, "thinking": is_on}


class TextService:
    """Makes requests to the engine out of bodies, and runs them."""

    def __init__(self, catalog: Catalog, results: ResultCache, config: ServeConfig) -> None:
        self.catalog = catalog
        self.results = results
        self.config = config

    def prepare(
        self,
        request: Request,
        body: GenerationBody,
        text: ModelText,
        prompt_ids: list[int],
        params: SamplingParams,
        format_param: str | None = None,
        tool_use: ToolUse | None = None,
        first_place: int = 0,
        is_thinking: bool | None = None,
    ) -> Generation:
        """A request to the engine. Stop strings are found here, so that they need a streamed answer.

        is_thinking: whether the answer begins inside of reasoning; None: it has none.
        """
        if params.stop and text.tokenizer is None:
            text.need_tokenizer("stop")
        most = params.max_tokens
        own = self.config.max_output_tokens // params.n
        num_prompt = len(prompt_ids)
        room = max(1, (text.card.max_sequence or text.card.max_length) - num_prompt)
        limit = min(own or room, room)
        if most is not None and most > limit:
            why = "the limit of this server" if limit < room else f"as many as fit after the prompt of {num_prompt:,}"
            early = sum(
                stage.num_tokens for stage in params.stages[:-1]
            )  # which the client's max_tokens does not count
            told = f"max_tokens was lowered from {most - early:,} to {max(1, limit - early):,}"
            request.state.remarks.append(f"{told}, {why}")
        if own if most is None else most > limit:
            params = params.lowered_to(limit)
        stated = {name: value for name, default in DEFAULTS.items() if (value := getattr(params, name)) != default}
        sent = GenerationRequest(
            token_ids=prompt_ids,
            params=stated,
            stream=bool(body.stream or params.stop),
            wants_ids=True,
            priority=body.priority,
            deadline_s=body.deadline_s,
            **self.catalog.address(request, text.card),
        )

        def new_choice(index: int) -> Choice:
            output_text = OutputText(text.tokenizer, prompt_ids, params)
            parser = None if tool_use is None else ToolCallParser(tool_use.style, tool_use.tools)
            has_one_call = tool_use is not None and tool_use.has_one_call
            thinking = None
            if is_thinking is not None and text.tokenizer is not None:
                thinking = parser_for(text.tokenizer, is_thinking)
            return Choice(index, first_place + index, output_text, parser, has_one_call, thinking)

        return Generation(
            text,
            sent,
            params,
            prompt_ids,
            lambda: [new_choice(index) for index in range(params.n)],
            format_param,
            tool_use,
        )

    async def prepare_chat(
        self,
        request: Request,
        body: ToolBody,
        messages: Sequence[dict[str, Any]],
        param: str = "messages",
        template_values: dict[str, Any] | None = None,
        answer_start: str = "",
        *,
        add_special_tokens: bool | None = None,
    ) -> Generation:
        """A request for the next message of a conversation, which the parameter `param` holds."""
        text = await self.catalog.find_text(body.model, "generation", request=request)
        choice = body.check_tool_choice()
        values, names = body.sampling()
        await follow_schema(request, values, names["grammar"])
        effort_param, effort = body.effort()
        options = {**(effort_values(effort) if effort else {}), **(template_values or {})}
        tool_use, schema = None, None
        if choice != "none":
            schema = answer_schema(values.pop("grammar", None))
            if schema is None:
                names["grammar"] = "tools"
            options["tools"] = described_tools(body.tools)
        prompt_ids = await text.encode(
            messages,
            param,
            options,
            answer_start,
            add_special_tokens=add_special_tokens,
            is_answered=True,
            num_kept=body.num_kept(text.card.max_length, values.get("max_tokens")),
        )
        template = text.template.get()
        if choice != "none":
            style = template.call_style(options.get("template_name"))
            given = (style, body.tools, choice, body.parallel_tool_calls, text.tokenizer, schema)
            tool_use = await asyncio.to_thread(ToolUse.choose, *given)
            request.state.remarks.extend(tool_use.remarks)
            if tool_use.grammar is not None:
                values["grammar"] = tool_use.grammar
        params = checked_params(values, text.card, names)
        if template.stops:
            params = template.stopping(params)
        if effort not in ("", "none") and not template.reads(effort_values(effort)):
            request.state.remarks.append(
                f"{effort_param} has no effect: the chat template of {text.card.id} does not read it"
            )
        is_thinking = None
        if text.has_reasoning and text.tokenizer is not None:
            calls = tool_use is not None and tool_use.grammar is not None
            form: Literal["", "calls", "answer"] = "" if "grammar" not in values else "calls" if calls else "answer"
            is_thinking = self._begin_thinking(request, text.tokenizer, prompt_ids, answer_start, form)
        return self.prepare(
            request, body, text, prompt_ids, params, names["grammar"], tool_use, is_thinking=is_thinking
        )

    def _begin_thinking(
        self,
        request: Request,
        tokenizer: Tokenizer,
        prompt_ids: list[int],
        answer_start: str,
        form: Literal["", "calls", "answer"],
    ) -> bool | None:
        """Whether the answer begins inside of reasoning; None: it has none.

        form: what a grammar gives the form of, which it does from the first token. Then reasoning that the template has
        opened is closed first, and the channel of answers is entered, where there are channels.
        """
        is_open = ends_inside(tokenizer.decode(prompt_ids[-TAIL_TOKENS:], skip_special_tokens=False), answer_start)
        enters_channel = form == "answer" and tokenizer.token_to_id(CHANNEL) is not None
        if (is_open and form) or enters_channel:
            prompt_ids += tokenizer.encode(FINAL if enters_channel else f"\n{CLOSE}\n\n", False)
            request.state.remarks.append("the answer has no reasoning, because its form is given")
        return None if form or self.config.reasoning != "auto" or (answer_start and not is_open) else is_open

    async def complete(self, request: Request, *generations: Generation) -> None:
        async for _ in self.run(request, *generations):
            pass

    async def run(
        self, request: Request, *generations: Generation, is_shown: Callable[[], bool] = lambda: False
    ) -> AsyncGenerator[list[ChoiceDelta], None]:
        """Send requests to the engine, and yield what comes.

        If their replica ends under them, they start over, unless the client was shown a part of what came.
        """
        for num_left in reversed(range(MAX_TRIES)):
            try:
                async with aclosing(self._run(request, *generations)) as runs:
                    async for deltas in runs:
                        yield deltas
                return
            except RemoteError as error:
                has_come = any(
                    generation.num_output for generation in generations
                )  # otherwise the backend has tried again
                if not (error.is_lost and has_come and num_left) or is_shown():
                    raise
                for generation in generations:
                    generation.start_over()

    async def _run(self, request: Request, *generations: Generation) -> AsyncGenerator[list[ChoiceDelta], None]:
        if len(generations) > 1:
            async with aclosing(merge([self._run(request, generation) for generation in generations])) as merged:
                async for deltas in merged:
                    yield deltas
            return
        [generation] = generations
        backend, choices = self.catalog.backend, generation.choices
        is_cached = self.results.max_bytes > 0
        if is_cached:
            control = request.headers.get("cache-control")
            messages = self.results.generate(backend.generate, generation.request, control)
        else:
            messages = backend.generate(generation.request)
        generation.times.sent_at = time.monotonic()
        try:
            async with aclosing(messages):
                async for message in messages:
                    generation.times.received(message.metrics)
                    if isinstance(message, Chunk):
                        deltas = generation.add(message)
                    else:
                        self.catalog.compare_content(generation.request.adapter_digest, message.adapter_digest)
                        num_tokens = sum(len(output.token_ids) for output in message.outputs)
                        deltas = await in_thread(partial(generation.add, message), num_tokens)
                    for delta in deltas:
                        if delta.choice.was_cut and not is_cached:  # the cache needs all sequences whole
                            backend.end_sequence(generation.request.request_id, delta.choice.index)
                    yield deltas
                    is_ended = deltas and all(choice.finish_reason for choice in choices)
                    if is_ended and any(choice.was_cut for choice in choices):
                        break
        except RemoteError as error:
            if generation.tool_use is not None and generation.tool_use.grammar is not None:
                error = generation.tool_use.explain(error)
            if error.code == InvalidInputError.code and re.search("grammar|schema", error.message, re.IGNORECASE):
                error.param = error.param or generation.format_param
            raise error from None
        finally:
            self._note(request, generation)

    def _note(self, request: Request, generation: Generation) -> None:
        """Put what came of a request into its line in the log."""
        log, choices = request.state.log, generation.choices
        log.update(
            prompt_tokens=len(generation.prompt_ids),
            output_tokens=generation.num_output,
            cached_tokens=generation.num_cached,
        )
        request.state.engine_times.append(generation.times)
        reasons = [log["finish_reason"]] if log["finish_reason"] else []
        if reasons := [*reasons, *(choice.finish_reason for choice in choices if choice.finish_reason)]:
            log["finish_reason"] = ",".join(dict.fromkeys(reasons))
        if self.config.log_prompts and generation.text.tokenizer is not None:
            tokenizer = generation.text.tokenizer
            log.setdefault("prompts", []).append(tokenizer.decode(generation.prompt_ids, skip_special_tokens=False))
            log.setdefault("outputs", []).extend(choice.text for choice in choices)


async def merge(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """The items of several generators as they come. If one fails, the others are closed."""
    items: asyncio.Queue[T | None] = asyncio.Queue()

    async def read(source: AsyncGenerator[T, None]) -> None:
        async for item in source:
            items.put_nowait(item)

    tasks = [asyncio.create_task(read(source)) for source in sources]
    reading = asyncio.gather(*tasks)
    reading.add_done_callback(lambda _: items.put_nowait(None))
    try:
        while (item := await items.get()) is not None:
            yield item
        await reading
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def named_in(message: str, values: dict[str, Any]) -> str:
    """The first of these names in an error message, or \"\"."""
    return next((word for word in re.findall(r"\w+", message) if word in values), "")


async def follow_schema(request: Request, values: dict[str, Any], param: str) -> None:
    """Refuse the schema of a format that cannot be followed, and say what of it is not."""
    grammar = values.get("grammar")
    if grammar is not None and isinstance(grammar["value"], dict):
        with naming(param):
            _, remarks = await asyncio.to_thread(prepare_schema, grammar["value"])
        request.state.remarks.extend(remarks)


def answer_schema(grammar: dict[str, Any] | None) -> dict[str, Any] | None:
    """The schema of a format that tools stand beside."""
    if grammar is None:
        return None
    schema = {"type": "object"} if grammar["kind"] == "json" else grammar["value"]
    if not isinstance(schema, dict):
        message = "Tools go together with a format of type json_schema or json_object only; set tool_choice to none."
        raise InvalidParameterError(message, "tools")
    return schema


def checked_params(values: dict[str, Any], card: ModelCard, names: dict[str, str]) -> SamplingParams:
    """SamplingParams for a model, over its defaults. names: the route's names of them, where they differ; errors use
    them."""
    try:
        params = SamplingParams.of(with_defaults(values, card.default_sampling))
        if card.vocab_size:
            check_vocabulary(params, card.vocab_size)
    except InvalidInputError as error:
        stated = named_in(error.message, values)
        in_messages = {**names, "grammar": "grammar"}  # which is a plain word there
        error.message = re.sub(r"\w+", lambda word: in_messages.get(word[0], word[0]), error.message)
        error.param = names.get(stated, stated)
        raise
    for name, value in values.items():
        if name == "max_tokens":  # lowered to what fits before it is sent
            continue
        try:
            msgspec.msgpack.encode(value)
        except OverflowError as error:
            shown = names.get(name, name)
            raise InvalidParameterError(f"{shown} cannot be sent to the engine: {error}.", shown) from None
    return params
