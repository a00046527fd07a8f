"""/v1/chat/completions and /v1/completions, in OpenAI's form."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from msgspec import UNSET
from starlette.requests import Request
from starlette.types import ASGIApp

from archerfish.config import ServeConfig
from archerfish.errors import InputTooLargeError
from archerfish.serve import answers
from archerfish.serve.bodies import ChatBody, CompletionBody
from archerfish.serve.catalog import ModelText
from archerfish.serve.errors import data_event, failure_body, json_response, naming
from archerfish.serve.generation import (
    LEAST_LOGPROB,
    Choice,
    ChoiceDelta,
    EventStream,
    Generation,
    Logprob,
    TextService,
    checked_params,
    new_id,
    usage_of,
)
from archerfish.serve.http import BodyRoute
from archerfish.text.tool_calls import ToolPiece

YIELD_PROMPTS = 32  # prompts of a request that are tokenised before other requests run
DONE = b"data: [DONE]\n\n"


class OpenAIRoutes:
    """Chat and completions."""

    def __init__(self, service: TextService, config: ServeConfig) -> None:
        self.service, self.config = service, config
        self.routes = [
            BodyRoute("/v1/chat/completions", self.chat, ChatBody),
            BodyRoute("/v1/completions", self.completions, CompletionBody),
        ]

    async def chat(self, request: Request, body: ChatBody) -> ASGIApp:
        """The next message of a conversation."""
        generation = await self.service.prepare_chat(request, body, body.messages, template_values=body.chat_template_kwargs)
        head: dict[str, Any] = {"id": new_id("chatcmpl", "-"), "created": int(time.time()), "model": generation.request.model}
        if body.stream:
            has_usage = body.stream_options is not None and body.stream_options.include_usage
            return EventStream(self.service, request, [generation], ChatEvents(generation, head, has_usage))
        await self.service.complete(request, generation)
        choices = [chat_choice(generation, choice) for choice in generation.choices]
        answer = answers.ChatCompletion(**head, choices=choices, usage=usage_of([generation]))
        if generation.prompt_logprobs is not None:
            answer.prompt_logprobs = prompt_logprobs(generation)
        return json_response(answer)

    async def completions(self, request: Request, body: CompletionBody) -> ASGIApp:
        """Texts that continue prompts."""
        text = await self.service.catalog.find_text(body.model, "generation")
        num_choices, most = len(body.prompt) * (body.n or 1), self.config.max_texts_per_request
        if num_choices > most:
            raise InputTooLargeError(f"The prompts make {num_choices:,} choices; a request takes at most {most:,}.")
        values, names = body.sampling()
        params = checked_params(values, text.card, names)
        generations: list[Generation] = []
        for place, prompt in enumerate(body.prompt):
            if place % YIELD_PROMPTS == YIELD_PROMPTS - 1:
                await asyncio.sleep(0)
            if isinstance(prompt, str):
                token_ids = await text.encode(prompt, "prompt", add_special_tokens=body.add_special_tokens, is_answered=True)
            else:
                token_ids = prompt
                with naming("prompt"):
                    text.check_ids(token_ids)
                    text.check_length(token_ids)
            generations.append(self.service.prepare(request, body, text, token_ids, params, names["grammar"]))
        echoes = [echo_text(text, prompt) if body.echo else "" for prompt in body.prompt]
        head: dict[str, Any] = {"id": new_id("cmpl", "-"), "created": int(time.time()), "model": text.card.id}
        if body.stream:
            return EventStream(self.service, request, generations, CompletionEvents(generations, head, body, echoes))
        await self.service.complete(request, *generations)
        choices: list[answers.CompletionChoice] = []
        for generation, echo in zip(generations, echoes, strict=True):
            choices += [completion_choice(generation, choice, echo, body, len(choices)) for choice in generation.choices]
        usage = usage_of(generations, is_output_hidden=body.max_tokens == 0)
        return json_response(answers.Completion(**head, choices=choices, usage=usage))


def ending(choice: Choice) -> tuple[answers.OpenAIFinish, answers.StopReason]:
    """Why a choice ended: finish_reason, in which OpenAI has no word for a deadline, and stop_reason."""
    if choice.finish_reason == "stop":
        return "tool_calls" if choice.calls else "stop", choice.stop_reason
    return "length", "deadline" if choice.finish_reason == "deadline" else choice.stop_reason


# Chat


def chat_choice(generation: Generation, choice: Choice) -> answers.ChatChoice:
    message = answers.ChatMessage(content=choice.text)
    if choice.calls:
        message.content = choice.text or None
        message.tool_calls = [
            answers.ToolCall(
                id=call.id, type="function", function=answers.FunctionCall(name=call.name, arguments=call.arguments)
            )
            for call in choice.calls
        ]
    logprobs = chat_logprobs(generation, choice.logprobs)
    return answers.ChatChoice(choice.index, message, logprobs, *ending(choice))


def chat_logprobs(generation: Generation, logprobs: Sequence[Logprob]) -> answers.ChatLogprobs | None:
    return None if generation.params.logprobs is None else answers.ChatLogprobs(content=generation.chosen_logprobs(logprobs))


def prompt_logprobs(generation: Generation) -> answers.PromptLogprobs:
    """Logprobs of each token of the prompt, in vLLM's form: null for the first."""

    def entry(token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": max(logprob, LEAST_LOGPROB), "rank": rank, "decoded_token": generation.text.token(token_id)[0]}

    shown: answers.PromptLogprobs = [None]
    for token_id, logprob, rank, top in generation.prompt_logprobs or ():
        entries = {str(likely): entry(likely, value, place) for place, (likely, value) in enumerate(top, 1)}
        shown.append({**entries, str(token_id): entry(token_id, logprob, rank)})
    return shown


class ChatEvents:
    """The next message of a conversation in chunks. head: the members of every chunk."""

    def __init__(self, generation: Generation, head: dict[str, Any], has_usage: bool) -> None:
        self._generation, self._has_usage = generation, has_usage
        self._chunk = answers.ChatChunk(**head, choices=[], usage=None if has_usage else UNSET)

    def start(self) -> bytes:
        first = answers.ChatDelta(role="assistant", content="")
        return self._events([answers.ChatChunkChoice(choice.index, first) for choice in self._generation.choices])

    def _events(self, choices: list[answers.ChatChunkChoice]) -> bytes:
        """An event for each of these choices."""
        written = b""
        for choice in choices:
            self._chunk.choices = [choice]
            written += data_event(self._chunk)
        return written

    def delta(self, number: int, delta: ChoiceDelta) -> bytes:
        choice, shown = delta.choice, []
        if delta.parts is not None:
            shown = [answers.ChatChunkChoice(choice.index, self._part(choice, part)) for part in delta.parts]
        elif delta.text:
            shown = [answers.ChatChunkChoice(choice.index, answers.ChatDelta(content=delta.text))]
        if delta.logprobs:
            shown = shown or [answers.ChatChunkChoice(choice.index, answers.ChatDelta(content=""))]
            shown[0].logprobs = chat_logprobs(self._generation, delta.logprobs)
        if delta.is_last:
            shown.append(answers.ChatChunkChoice(choice.index, answers.ChatDelta(), None, *ending(choice)))
        return self._events(shown)

    def _part(self, choice: Choice, part: ToolPiece) -> answers.ChatDelta:
        """A part of an answer that may call tools: text, the name of a call, or more of its arguments."""
        if part.kind == "text":
            return answers.ChatDelta(content=part.text)
        call = answers.ToolCall(index=part.index, function=answers.FunctionCall(arguments=part.text))
        if part.kind == "name":
            call.id, call.type = choice.calls[part.index].id, "function"
            call.function = answers.FunctionCall(name=part.text, arguments="")
        return answers.ChatDelta(tool_calls=[call])

    def end(self) -> bytes:
        if not self._has_usage:
            return DONE
        self._chunk.choices, self._chunk.usage = [], usage_of([self._generation])
        return data_event(self._chunk) + DONE

    def error(self, error: Exception) -> bytes:
        return data_event(failure_body(error))


# Completions


def echo_text(text: ModelText, prompt: str | list[int]) -> str:
    if isinstance(prompt, str):
        return prompt
    return "" if text.tokenizer is None else text.tokenizer.decode(prompt, skip_special_tokens=False)


def completion_choice(
    generation: Generation, choice: Choice, echo: str, body: CompletionBody, num_before: int
) -> answers.CompletionChoice:
    is_hidden = body.max_tokens == 0
    text = echo + ("" if is_hidden else choice.text)
    shown = answers.CompletionChoice(num_before + choice.index, text, None, *ending(choice))
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


def added_token(generation: Generation, echo: str) -> str:
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
        likely = {text.token(i)[0]: max(value, LEAST_LOGPROB) for i, value in top}
        shown.tokens.append(token)
        shown.token_logprobs.append(None if logprob is None else max(logprob, LEAST_LOGPROB))
        shown.top_logprobs.append(None if logprob is None else likely)
        shown.text_offset.append(max(offset, 0))
        offset += len(token)
    return shown


class CompletionEvents:
    """Texts that continue prompts, in chunks; the choices of prompt i are those from n * i on."""

    def __init__(
        self, generations: Sequence[Generation], head: dict[str, Any], body: CompletionBody, echoes: Sequence[str]
    ) -> None:
        self._generations, self._body, self._echoes = generations, body, echoes
        self._num_each = generations[0].params.n
        self._has_usage = body.stream_options is not None and body.stream_options.include_usage
        self._chunk = answers.Completion(**head, choices=[], usage=None if self._has_usage else UNSET)
        self._offsets = [0] * (len(generations) * self._num_each)

    def _event(self, choice: answers.CompletionChoice) -> bytes:
        self._chunk.choices = [choice]
        return data_event(self._chunk)

    def start(self) -> bytes:
        echoes = [echo for echo in self._echoes for _ in range(self._num_each)]
        shown = [answers.CompletionChoice(index=index, text=echo) for index, echo in enumerate(echoes) if echo]
        return b"".join(map(self._event, shown))

    def delta(self, number: int, delta: ChoiceDelta) -> bytes:
        index = number * self._num_each + delta.choice.index
        is_hidden = self._body.max_tokens == 0
        shown = answers.CompletionChoice(index=index, text="" if is_hidden else delta.text)
        if delta.logprobs and not is_hidden:
            shown.logprobs = listed_logprobs(self._generations[number].text, delta.logprobs, self._offsets[index])
            self._offsets[index] += sum(map(len, shown.logprobs.tokens))
        if delta.is_last:
            shown.finish_reason, shown.stop_reason = ending(delta.choice)
        if self._body.return_token_ids:
            shown.token_ids = [] if is_hidden else delta.token_ids
        elif not delta.is_last and not shown.text and not delta.logprobs:
            return b""
        return self._event(shown)

    def end(self) -> bytes:
        if not self._has_usage:
            return DONE
        self._chunk.choices = []
        self._chunk.usage = usage_of(self._generations, is_output_hidden=self._body.max_tokens == 0)
        return data_event(self._chunk) + DONE

    def error(self, error: Exception) -> bytes:
        return data_event(failure_body(error))
