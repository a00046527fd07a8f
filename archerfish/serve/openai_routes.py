"""/v1/chat/completions and /v1/completions, in OpenAI's form."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from msgspec import UNSET
from pydantic import Field
from starlette.requests import Request
from starlette.types import ASGIApp

from archerfish.errors import InputTooLargeError
from archerfish.params import MAX_LOGPROBS, MAX_N
from archerfish.serve import answers
from archerfish.serve import generation as gen
from archerfish.serve.bodies import (
    IGNORED,
    UNUSED,
    Body,
    ConversationBody,
    Messages,
    Prompts,
    Stop,
    TextBody,
    Values,
    bounded,
)
from archerfish.serve.catalog import ModelText
from archerfish.serve.errors import InvalidParameterError, UnsupportedParameterError, data_event, json_response, naming
from archerfish.serve.http import BodyRoute, EventStream, EventWriter
from archerfish.serve.wire import Logprob
from archerfish.text.tool_calls import ToolPiece

YIELD_PROMPTS = 32  # prompts of a request that are tokenised before other requests run
DONE = b"data: [DONE]\n\n"
RESERVED = ("self", "tokenizer", "messages", "tools")  # names that chat_template_kwargs cannot have


# Bodies


class StreamOptions(Body):
    """stream_options."""

    include_usage: bool = False
    continuous_usage_stats: bool = Field(
        False, description="With include_usage: usage so far in every event, as in vLLM."
    )
    include_obfuscation: bool = Field(False, description=UNUSED)


class ChoicesBody(TextBody):
    """What chat and completions have in common."""

    n: int | None = bounded(description="So many answers.", minimum=1, maximum=MAX_N)
    stop: Stop = Field(None, description="Strings that end the answer.")
    prompt_logprobs: int | None = bounded(minimum=0, maximum=MAX_LOGPROBS)
    response_format: dict[str, Any] | None = None
    stream_options: StreamOptions | None = None
    echo: bool | None = Field(
        None, description="Begin with the prompt; in a chat, with a last message of the assistant."
    )
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, description="Keep only so many tokens of the prompt, the last; -1: as many as fit."
    )

    def sampling(self) -> tuple[dict[str, Any], dict[str, str]]:
        if self.stream and self.prompt_logprobs is not None:
            raise UnsupportedParameterError("Logprobs of a prompt are not streamed; leave out stream.", "stream")
        if self.stream_options is not None and not self.stream:
            raise InvalidParameterError("stream_options is for streams; set stream to true.", "stream_options")
        if self.truncate_prompt_tokens == 0:
            raise InvalidParameterError("truncate_prompt_tokens must be at least 1, or -1.", "truncate_prompt_tokens")
        return super().sampling()

    def num_kept(self, max_length: int, max_tokens: int | None) -> int | None:
        most = max(1, max_length - (max_tokens or 1))
        return most if self.truncate_prompt_tokens == -1 else self.truncate_prompt_tokens


class TemplateBody(Body):
    """How a chat template is applied, in vLLM's form."""

    add_generation_prompt: bool | None = Field(None, description="false: do not begin a message of the assistant.")
    continue_final_message: bool = Field(False, description="Go on with the last message, which is the assistant's.")
    add_special_tokens: bool | None = Field(None, description="Put special tokens, such as the beginning's, before it.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Values for the chat template.")

    def conversation(self, messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, Any], str]:
        """Messages and values for the template, and the text with which the answer begins already."""
        values = dict(self.chat_template_kwargs or {})
        reserved = [name for name in RESERVED if name in values]
        if reserved:
            raise InvalidParameterError(f"chat_template_kwargs cannot hold {reserved[0]!r}.", "chat_template_kwargs")
        if not self.continue_final_message:
            stated = self.add_generation_prompt
            return messages, values if stated is None else {**values, "add_generation_prompt": stated}, ""
        last = messages[-1]
        if self.add_generation_prompt:
            message = "continue_final_message and add_generation_prompt exclude each other; set one to false."
            raise InvalidParameterError(message, "continue_final_message")
        if last["role"] != "assistant" or "tool_calls" in last or len(messages) < 2:
            message = "continue_final_message needs a conversation whose last message is a text of the assistant."
            raise InvalidParameterError(message, "continue_final_message")
        return messages[:-1], values, last["content"]


class ChatBody(TemplateBody, ConversationBody, ChoicesBody):
    """POST /v1/chat/completions, in OpenAI's form."""

    unsupported: ClassVar[Values] = {
        "audio": (),
        "function_call": (),
        "functions": (),
        "modalities": (["text"],),
        "web_search_options": (),
        "best_of": (1,),
        "chat_template": (),
        "use_beam_search": (False,),
    }

    ignored: ClassVar[Values] = {**IGNORED, "reasoning": ()}

    messages: Messages
    max_tokens: int | None = bounded(description="At most so many tokens; left out: as many as fit.", minimum=1)
    max_completion_tokens: int | None = bounded(description="OpenAI's newer name of max_tokens.", minimum=1)
    logprobs: bool | None = None
    reasoning_effort: str | None = Field(None, description="For chat templates that read it; none: without reasoning.")
    include_reasoning: bool = Field(True, description="false: leave reasoning_content out of the answer.")

    def effort(self) -> tuple[str, str]:
        return "reasoning_effort", self.reasoning_effort or ""

    def sampling(self) -> tuple[dict[str, Any], dict[str, str]]:
        values, names = super().sampling()
        limits = {limit for limit in (self.max_tokens, self.max_completion_tokens) if limit is not None}
        if len(limits) > 1:
            raise InvalidParameterError("max_tokens and max_completion_tokens differ.", "max_completion_tokens")
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidParameterError("top_logprobs needs logprobs to be true.", "top_logprobs")
        values["max_tokens"], names["logprobs"] = next(iter(limits), None), "top_logprobs"
        if self.max_tokens is None:
            names["max_tokens"] = "max_completion_tokens"
        if self.logprobs:
            values["logprobs"] = self.top_logprobs or 0
        return values, names


class CompletionBody(ChoicesBody):
    """POST /v1/completions, in OpenAI's form."""

    unsupported: ClassVar[Values] = {"best_of": (1,), "suffix": ("",), "use_beam_search": (False,)}

    prompt: Prompts
    max_tokens: int | None = bounded(16, "0, with echo, gives the prompt alone.", minimum=0)
    logprobs: int | None = bounded(minimum=0, maximum=MAX_LOGPROBS)
    return_token_ids: bool = Field(False, description="Give token ids beside the text.")
    add_special_tokens: bool = Field(
        True, description="Put special tokens, such as the one for the beginning, before a text."
    )

    def sampling(self) -> tuple[dict[str, Any], dict[str, str]]:
        values, names = super().sampling()
        values["max_tokens"] = self.max_tokens
        if self.max_tokens == 0:
            if not self.echo:
                raise InvalidParameterError("max_tokens is 0, which is only allowed with echo.", "max_tokens")
            values["max_tokens"] = 1  # the least that the engine generates; it is not shown
        if self.logprobs is not None:
            values["logprobs"] = self.logprobs
            if self.echo and self.stream:
                raise UnsupportedParameterError("Logprobs of a prompt are not streamed; leave out stream.", "stream")
            if self.echo:
                values.setdefault("prompt_logprobs", self.logprobs)
        return values, names


# Routes


class OpenAIRoutes:
    """Chat and completions."""

    def __init__(self, service: gen.TextService) -> None:
        self.service = service
        self.routes = [
            BodyRoute("/v1/chat/completions", self.chat, ChatBody, answers.ChatCompletion, [answers.ChatChunk]),
            BodyRoute("/v1/completions", self.completions, CompletionBody, answers.Completion, [answers.Completion]),
        ]

    async def chat(self, request: Request, body: ChatBody) -> ASGIApp:
        """The next message of a conversation."""
        messages, values, start = body.conversation(body.messages)
        generation = await self.service.prepare_chat(
            request,
            body,
            messages,
            template_values=values,
            answer_start=start,
            add_special_tokens=body.add_special_tokens,
        )
        last = body.messages[-1]
        echo = last["content"] if body.echo and last["role"] == "assistant" else ""
        head = gen.answer_head("chatcmpl", generation.text.card.id)
        if body.stream:
            writer = ChatEvents(answers.ChatChunk(**head, choices=[]), [generation], body, [echo])
            return EventStream(self.service, request, [generation], writer)
        await self.service.complete(request, generation)
        choices = [chat_choice(generation, choice, echo, body.include_reasoning) for choice in generation.choices]
        answer = answers.ChatCompletion(**head, choices=choices, usage=gen.usage_of([generation]))
        if generation.prompt_logprobs is not None:
            answer.prompt_logprobs = prompt_logprobs(generation)
        return json_response(answer)

    async def completions(self, request: Request, body: CompletionBody) -> ASGIApp:
        """Texts that continue prompts."""
        text = await self.service.catalog.find_text(body.model, "generation", request=request)
        num_choices, most = len(body.prompt) * (body.n or 1), self.service.config.max_texts_per_request
        if num_choices > most:
            raise InputTooLargeError(f"The prompts make {num_choices:,} choices; a request takes at most {most:,}.")
        values, names = body.sampling()
        await gen.follow_schema(request, values, names["grammar"])
        params = gen.checked_params(values, text.card, names)
        generations: list[gen.Generation] = []
        for place, prompt in enumerate(body.prompt):
            if place % YIELD_PROMPTS == YIELD_PROMPTS - 1:
                await asyncio.sleep(0)
            num_kept = body.num_kept(text.card.max_length, params.max_tokens)
            if isinstance(prompt, str):
                token_ids = await text.encode(
                    prompt, "prompt", add_special_tokens=body.add_special_tokens, num_kept=num_kept, is_answered=True
                )
            else:
                token_ids = prompt if num_kept is None else prompt[-num_kept:]
                with naming("prompt"):
                    text.check_ids(token_ids)
                    text.check_length(token_ids)
            format_param, first = names["grammar"], place * params.n
            generations.append(
                self.service.prepare(request, body, text, token_ids, params, format_param, first_place=first)
            )
        echoes = [echo_text(text, prompt) if body.echo else "" for prompt in body.prompt]
        head = gen.answer_head("cmpl", text.card.id)
        if body.stream:
            writer = CompletionEvents(answers.Completion(**head, choices=[]), generations, body, echoes)
            return EventStream(self.service, request, generations, writer)
        await self.service.complete(request, *generations)
        echoed = zip(generations, echoes, strict=True)
        choices = [completion_choice(one, choice, echo, body) for one, echo in echoed for choice in one.choices]
        usage = gen.usage_of(generations, is_output_hidden=body.max_tokens == 0)
        return json_response(answers.Completion(**head, choices=choices, usage=usage))


def ending(choice: gen.Choice) -> tuple[answers.OpenAIFinish, answers.StopReason]:
    """Why a choice ended: finish_reason, in which OpenAI has no word for a deadline, and stop_reason."""
    if choice.finish_reason == "stop":
        return "tool_calls" if choice.calls else "stop", choice.stop_reason
    return "length", "deadline" if choice.finish_reason == "deadline" else choice.stop_reason


# Chat


def chat_choice(generation: gen.Generation, choice: gen.Choice, echo: str, has_reasoning: bool) -> answers.ChatChoice:
    message = answers.ChatMessage(content=echo + choice.text)
    if has_reasoning and choice.reasoning:
        message.reasoning_content = choice.reasoning
    if choice.calls:
        message.content = message.content or None
        functions = [answers.FunctionCall(name=call.name, arguments=call.arguments) for call in choice.calls]
        calls = zip(choice.calls, functions, strict=True)
        message.tool_calls = [
            answers.ToolCall(id=call.id, type="function", function=function) for call, function in calls
        ]
    logprobs = chat_logprobs(generation, choice.logprobs)
    return answers.ChatChoice(choice.index, message, logprobs, *ending(choice))


def chat_logprobs(generation: gen.Generation, logprobs: Sequence[Logprob]) -> answers.ChatLogprobs | None:
    return (
        None
        if generation.params.logprobs is None
        else answers.ChatLogprobs(content=generation.chosen_logprobs(logprobs))
    )


def prompt_logprobs(generation: gen.Generation) -> answers.PromptLogprobs:
    """Logprobs of each token of the prompt, in vLLM's form: null for the first."""

    def entry(token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        return {
            "logprob": max(logprob, gen.LEAST_LOGPROB),
            "rank": rank,
            "decoded_token": generation.text.token(token_id)[0],
        }

    shown: answers.PromptLogprobs = [None]
    for token_id, logprob, rank, top in generation.prompt_logprobs or ():
        entries = {str(likely): entry(likely, value, place) for place, (likely, value) in enumerate(top, 1)}
        shown.append({**entries, str(token_id): entry(token_id, logprob, rank)})
    return shown


@dataclass
class ChunkEvents(EventWriter):
    """An answer in chunks of one choice each; the last one has no choice, and usage if the client asked for it."""

    _chunk: answers.ChatChunk | answers.Completion
    _generations: Sequence[gen.Generation]
    _body: Any
    _echoes: Sequence[str]  # the beginnings of the answers of each generation
    _offsets: Counter[int] = field(default_factory=Counter)  # where the next token of a choice begins in its text

    def __post_init__(self) -> None:
        options, self._is_hidden = self._body.stream_options, self._body.max_tokens == 0
        if options is not None and options.include_usage:
            self._chunk.usage = None
        self._is_counting = options is not None and options.include_usage and options.continuous_usage_stats

    def write(self, *choices: Any) -> bytes:
        """An event for each of these choices."""
        written = b""
        for choice in choices:
            self._chunk.choices = [choice]
            if self._is_counting:
                self._chunk.usage = self._usage()
            written += data_event(self._chunk)
        return written

    def end(self) -> bytes:
        if self._chunk.usage is UNSET:
            return DONE
        self._chunk.choices = []
        self._chunk.usage = self._usage()
        return data_event(self._chunk) + DONE

    def _usage(self) -> answers.Usage:
        return gen.usage_of(self._generations, is_output_hidden=self._is_hidden)


class ChatEvents(ChunkEvents):
    """The next message of a conversation in chunks."""

    def start(self) -> bytes:
        first = answers.ChatDelta(role="assistant", content=self._echoes[0])
        return self.write(*(answers.ChatChunkChoice(choice.index, first) for choice in self._generations[0].choices))

    def delta(self, delta: gen.ChoiceDelta) -> bytes:
        choice = delta.choice
        parts = [part for part in delta.parts if self._body.include_reasoning or part.kind != "reasoning"]
        shown = [answers.ChatChunkChoice(choice.index, self._part(choice, part)) for part in parts]
        if delta.logprobs:
            shown = shown or [answers.ChatChunkChoice(choice.index, answers.ChatDelta(content=""))]
            shown[0].logprobs = chat_logprobs(self._generations[0], delta.logprobs)
        if delta.is_last:
            shown.append(answers.ChatChunkChoice(choice.index, answers.ChatDelta(), None, *ending(choice)))
        return self.write(*shown)

    def _part(self, choice: gen.Choice, part: ToolPiece) -> answers.ChatDelta:
        """A part of an answer: text, reasoning, the name of a call, or more of its arguments."""
        if part.kind == "text":
            return answers.ChatDelta(content=part.text)
        if part.kind == "reasoning":
            return answers.ChatDelta(reasoning_content=part.text)
        call = answers.ToolCall(index=part.index, function=answers.FunctionCall(arguments=part.text))
        if part.kind == "name":
            call.id, call.type = choice.calls[part.index].id, "function"
            call.function = answers.FunctionCall(name=part.text, arguments="")
        return answers.ChatDelta(tool_calls=[call])


# Completions


def echo_text(text: ModelText, prompt: str | list[int]) -> str:
    if isinstance(prompt, str):
        return prompt
    return "" if text.tokenizer is None else text.tokenizer.decode(prompt, skip_special_tokens=False)


def completion_choice(
    generation: gen.Generation, choice: gen.Choice, echo: str, body: CompletionBody
) -> answers.CompletionChoice:
    is_hidden = body.max_tokens == 0
    text = echo + ("" if is_hidden else choice.text)
    shown = answers.CompletionChoice(choice.place, text, None, *ending(choice))
    if body.logprobs is not None:
        first: tuple[Any, ...] = (generation.prompt_ids[0], None, 0, [])
        prompt = [first, *(generation.prompt_logprobs or ())] if body.echo else []
        offset = -len(added_token(generation, echo)) if body.echo else 0
        shown.logprobs = listed_logprobs(generation.text, [*prompt, *([] if is_hidden else choice.logprobs)], offset)
    if body.prompt_logprobs is not None:
        shown.prompt_logprobs = prompt_logprobs(generation)
    if body.return_token_ids:
        shown.prompt_token_ids, shown.token_ids = generation.prompt_ids, [] if is_hidden else choice.token_ids
    return shown


def added_token(generation: gen.Generation, echo: str) -> str:
    """The special token that the tokenizer has put before a text; the text itself does not have it."""
    first, tokenizer = generation.prompt_ids[0], generation.text.tokenizer
    name = generation.text.token(first)[0]
    is_added = tokenizer is not None and first in tokenizer.special_tokens and not echo.startswith(name)
    return name if is_added else ""


def listed_logprobs(text: ModelText, logprobs: Sequence[tuple[Any, ...]], offset: int = 0) -> answers.ListedLogprobs:
    """Logprobs in four lists; the first token of a prompt has none."""
    shown = answers.ListedLogprobs([], [], [], [])
    for token_id, logprob, _, top in logprobs:
        token = text.token(token_id)[0]
        likely = {text.token(i)[0]: max(value, gen.LEAST_LOGPROB) for i, value in top}
        shown.tokens.append(token)
        shown.token_logprobs.append(None if logprob is None else max(logprob, gen.LEAST_LOGPROB))
        shown.top_logprobs.append(None if logprob is None else likely)
        shown.text_offset.append(max(offset, 0))
        offset += len(token)
    return shown


class CompletionEvents(ChunkEvents):
    """Texts that continue prompts, in chunks."""

    def start(self) -> bytes:
        choices = zip(self._generations, self._echoes, strict=True)
        echoes = [(choice.place, echo) for generation, echo in choices for choice in generation.choices]
        return self.write(*(answers.CompletionChoice(place, echo) for place, echo in echoes if echo))

    def delta(self, delta: gen.ChoiceDelta) -> bytes:
        choice = delta.choice
        shown = answers.CompletionChoice(choice.place, "" if self._is_hidden else delta.text)
        if delta.logprobs and not self._is_hidden:
            shown.logprobs = listed_logprobs(self._generations[0].text, delta.logprobs, self._offsets[choice.place])
            self._offsets[choice.place] += sum(map(len, shown.logprobs.tokens))
        if delta.is_last:
            shown.finish_reason, shown.stop_reason = ending(choice)
        if self._body.return_token_ids:
            shown.token_ids = [] if self._is_hidden else delta.token_ids
        elif not delta.is_last and not shown.text and not delta.logprobs:
            return b""
        return self.write(shown)
