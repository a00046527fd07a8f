"""/v1/chat/completions and /v1/completions, in OpenAI's form."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from archerfish.config import ServeConfig
from archerfish.errors import InputTooLargeError
from archerfish.serve import answers
from archerfish.serve.bodies import BodyRoute
from archerfish.serve.catalog import ModelText
from archerfish.serve.chat_bodies import ChatBody, CompletionBody
from archerfish.serve.errors import failure_body, json_response
from archerfish.serve.generation import (
    LEAST_LOGPROB,
    Choice,
    ChoiceDelta,
    Generation,
    Logprob,
    PendingCall,
    TextService,
    checked_params,
    new_id,
    usage_of,
)
from archerfish.serve.sse import DONE, MARK, TextEvent, data_event

YIELD_PROMPTS = 32  # prompts of a request that are tokenised before other requests run


class OpenAIRoutes:
    """Chat and completions."""

    def __init__(self, service: TextService, config: ServeConfig) -> None:
        self.service, self.config = service, config
        self.routes = [
            BodyRoute("/v1/chat/completions", self.chat, ChatBody),
            BodyRoute("/v1/completions", self.completions, CompletionBody),
        ]

    async def chat(self, request: Request, body: ChatBody) -> Response:
        """The next message of a conversation."""
        names = {"logprobs": "top_logprobs"} | ({"max_tokens": "max_completion_tokens"} if body.max_tokens is None else {})
        generation = await self.service.prepare_chat(
            request, body, body.messages, names=names, template_values=body.chat_template_kwargs
        )
        head: dict[str, Any] = {"id": new_id("chatcmpl", "-"), "created": int(time.time()), "model": generation.model}
        if body.stream:
            return await self.service.stream(request, [generation], ChatEvents(generation, head, body.include_usage))
        await self.service.complete(request, generation)
        choices = [chat_choice(generation, choice) for choice in generation.choices]
        answer = answers.ChatCompletion(**head, choices=choices, usage=usage_of([generation]))
        if generation.prompt_logprobs is not None:
            answer.prompt_logprobs = prompt_logprobs(generation)
        return json_response(answer)

    async def completions(self, request: Request, body: CompletionBody) -> Response:
        """Texts that continue prompts."""
        text = await self.service.find_text(body.model)
        num_choices, most = len(body.prompt) * (body.n or 1), self.config.max_texts_per_request
        if num_choices > most:
            raise InputTooLargeError(f"The prompts make {num_choices:,} choices; a request takes at most {most:,}.")
        params = checked_params(body.sampling(), text.card, {"grammar": body.grammar_param})
        generations: list[Generation] = []
        for place, prompt in enumerate(body.prompt):
            if place % YIELD_PROMPTS == YIELD_PROMPTS - 1:
                await asyncio.sleep(0)
            if isinstance(prompt, str):
                text.check_size(len(prompt), "prompt")
                token_ids = await text.encode(prompt, "prompt", body.add_special_tokens)
            else:
                token_ids = prompt
                text.check_ids(token_ids, "prompt")
            text.check_length(token_ids, "prompt")
            generations.append(self.service.prepare(request, body, text, token_ids, params, body.grammar_param))
        echoes = [echo_text(text, prompt) if body.echo else "" for prompt in body.prompt]
        head: dict[str, Any] = {"id": new_id("cmpl", "-"), "created": int(time.time()), "model": text.card.id}
        if body.stream:
            return await self.service.stream(request, generations, CompletionEvents(generations, head, body, echoes))
        await self.service.complete(request, *generations)
        choices: list[answers.CompletionChoice] = []
        for generation, echo in zip(generations, echoes, strict=True):
            choices += [completion_choice(generation, choice, echo, body, len(choices)) for choice in generation.choices]
        usage = usage_of(generations, is_output_hidden=body.max_tokens == 0)
        return json_response(answers.Completion(**head, choices=choices, usage=usage))


# Chat


def chat_choice(generation: Generation, choice: Choice) -> answers.ChatChoice:
    message = answers.ChatMessage(content=choice.text)
    if choice.calls:
        message.content = choice.text or None
        functions = [answers.FunctionCall(name=call.name, arguments=call.arguments) for call in choice.calls]
        message.tool_calls = [
            answers.ToolCall(id=call.id, type="function", function=function)
            for call, function in zip(choice.calls, functions, strict=True)
        ]
    return answers.ChatChoice(
        index=choice.index, message=message, logprobs=chat_logprobs(generation, choice.logprobs),
        finish_reason=choice.openai_reason, stop_reason=choice.shown_stop_reason,
    )


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

    def __init__(self, generation: Generation, head: dict[str, Any], include_usage: bool) -> None:
        self._generation, self._head, self._include_usage = generation, head, include_usage
        self._text_events = [TextEvent(self._event(choice, answers.ChatDelta(content=MARK))) for choice in generation.choices]

    def _event(self, choice: Choice, delta: answers.ChatDelta, logprobs: answers.ChatLogprobs | None = None) -> bytes:
        return self._chunk([answers.ChatChunkChoice(index=choice.index, delta=delta, logprobs=logprobs)])

    def _chunk(self, choices: list[answers.ChatChunkChoice]) -> bytes:
        return data_event(answers.ChatChunk(**self._head, choices=choices, usage=None if self._include_usage else UNSET))

    def start(self) -> bytes:
        first = answers.ChatDelta(role="assistant", content="")
        return b"".join(self._event(choice, first) for choice in self._generation.choices)

    def delta(self, number: int, delta: ChoiceDelta) -> bytes:
        choice = delta.choice
        if choice.finish_reason is None and delta.parts is None and not delta.logprobs:
            return self._text_events[choice.index].write(delta.text) if delta.text else b""
        deltas = self._deltas(delta)
        logprobs = chat_logprobs(self._generation, delta.logprobs) if delta.logprobs else None
        if logprobs is not None and not deltas:
            deltas = [answers.ChatDelta(content="")]
        events = [self._event(choice, each, logprobs if each is deltas[0] else None) for each in deltas]
        if choice.finish_reason is not None:
            last = answers.ChatChunkChoice(index=choice.index, delta=answers.ChatDelta())
            last.finish_reason, last.stop_reason = choice.openai_reason, choice.shown_stop_reason
            events.append(self._chunk([last]))
        return b"".join(events)

    def _deltas(self, delta: ChoiceDelta) -> list[answers.ChatDelta]:
        if delta.parts is None:
            return [answers.ChatDelta(content=delta.text)] if delta.text else []
        deltas: list[answers.ChatDelta] = []
        for part in delta.parts:
            if part.kind == "text":
                deltas.append(answers.ChatDelta(content=part.text))
                continue
            call = answers.ToolCall(index=part.index, function=answers.FunctionCall(arguments=part.text))
            if part.kind == "name":
                pending: PendingCall = delta.choice.calls[part.index]
                call.id, call.type, call.function = pending.id, "function", answers.FunctionCall(name=part.text, arguments="")
            deltas.append(answers.ChatDelta(tool_calls=[call]))
        return deltas

    def end(self) -> bytes:
        if not self._include_usage:
            return DONE
        return data_event(answers.ChatChunk(**self._head, choices=[], usage=usage_of([self._generation]))) + DONE

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
    shown = answers.CompletionChoice(
        index=num_before + choice.index, text=echo + ("" if is_hidden else choice.text), finish_reason=choice.openai_reason,
        stop_reason=choice.shown_stop_reason,
    )
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
    tokens = [text.token(entry[0])[0] for entry in logprobs]
    offsets: list[int] = []
    for token in tokens:
        offsets.append(max(offset, 0))
        offset += len(token)
    top = [
        None if entry[1] is None else {text.token(i)[0]: max(value, LEAST_LOGPROB) for i, value in entry[3]}
        for entry in logprobs
    ]
    values = [None if entry[1] is None else max(entry[1], LEAST_LOGPROB) for entry in logprobs]
    return answers.ListedLogprobs(tokens=tokens, token_logprobs=values, top_logprobs=top, text_offset=offsets)


class CompletionEvents:
    """Texts that continue prompts, in chunks; the choices of prompt i are those from n * i on."""

    def __init__(
        self, generations: Sequence[Generation], head: dict[str, Any], body: CompletionBody, echoes: Sequence[str]
    ) -> None:
        self._generations, self._head, self._body, self._echoes = generations, head, body, echoes
        self._num_each = generations[0].params.n
        num_choices = len(generations) * self._num_each
        self._text_events = [TextEvent(self._event(answers.CompletionChoice(index=i, text=MARK))) for i in range(num_choices)]
        self._offsets = [0] * num_choices

    def _event(self, choice: answers.CompletionChoice) -> bytes:
        return data_event(answers.Completion(**self._head, choices=[choice], usage=None if self._body.include_usage else UNSET))

    def start(self) -> bytes:
        echoes = [self._echoes[index // self._num_each] for index in range(len(self._text_events))]
        return b"".join(event.write(echo) for event, echo in zip(self._text_events, echoes, strict=True) if echo)

    def delta(self, number: int, delta: ChoiceDelta) -> bytes:
        choice, index = delta.choice, number * self._num_each + delta.choice.index
        is_hidden = self._body.max_tokens == 0
        text = "" if is_hidden else delta.text
        if choice.finish_reason is None and not delta.logprobs and not self._body.return_token_ids:
            return self._text_events[index].write(text) if text else b""
        shown = answers.CompletionChoice(index=index, text=text)
        if delta.logprobs and not is_hidden:
            shown.logprobs = listed_logprobs(self._generations[number].text, delta.logprobs, self._offsets[index])
            self._offsets[index] += sum(map(len, shown.logprobs.tokens))
        if choice.finish_reason is not None:
            shown.finish_reason, shown.stop_reason = choice.openai_reason, choice.shown_stop_reason
        if self._body.return_token_ids:
            shown.token_ids = [] if is_hidden else delta.token_ids
        return self._event(shown)

    def end(self) -> bytes:
        if not self._body.include_usage:
            return DONE
        usage = usage_of(self._generations, is_output_hidden=self._body.max_tokens == 0)
        return data_event(answers.Completion(**self._head, choices=[], usage=usage)) + DONE

    def error(self, error: Exception) -> bytes:
        return data_event(failure_body(error))
