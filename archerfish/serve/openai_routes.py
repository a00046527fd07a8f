"""/v1/chat/completions and /v1/completions, as OpenAI has them."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from archerfish.config import ServeConfig
from archerfish.errors import InputTooLargeError
from archerfish.serve.errors import InvalidParameterError, failure_body, json_response
from archerfish.serve.generation import (
    Answer,
    Choice,
    Logprob,
    Order,
    Piece,
    TextService,
    checked_order,
    checked_params,
    openai_reason,
)
from archerfish.serve.openai_schemas import ChatBody, CompletionBody, ToolBody
from archerfish.serve.schemas import BodyRoute
from archerfish.serve.served_texts import ServedText
from archerfish.serve.sse import dumped, quoted
from archerfish.serve.tool_choice import choose_tools

DONE = b"data: [DONE]\n\n"
END = b"}\n\n"
YIELD_PROMPTS = 32  # prompts of a request that are tokenized before other requests get a turn
RESERVED = ("self", "tokenizer", "messages", "tools")  # no values for a template


class OpenAIRoutes:
    """Chat and completions."""

    def __init__(self, service: TextService, config: ServeConfig) -> None:
        self.service, self.config = service, config
        self.router = APIRouter(route_class=BodyRoute)
        self.router.post("/v1/chat/completions", response_model=None)(self.chat)
        self.router.post("/v1/completions", response_model=None)(self.completions)

    async def chat(self, request: Request, body: ChatBody) -> Response:
        """The next message of a conversation."""
        names = {"logprobs": "top_logprobs"} | ({"max_tokens": "max_completion_tokens"} if body.max_tokens is None else {})
        order = await chat_order(self.service, body, body.messages, body.chat_template_kwargs, names=names)
        head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "object": "", "created": int(time.time()), "model": order.model_id}
        if body.stream:
            return await self.service.stream(request, [order], ChatEvents(order, head, body.include_usage))
        [(answer, choices)] = await self.service.complete(request, [order])
        shown = {
            **head, "object": "chat.completion", "choices": [chat_choice(order, choice) for choice in choices],
            "usage": usage_of([answer]),
        }
        if answer.prompt_logprobs is not None:
            shown["prompt_logprobs"] = prompt_logprobs(order, answer)
        return json_response(shown)

    async def completions(self, request: Request, body: CompletionBody) -> Response:
        """What comes after a text."""
        text = await self.service.model(body.model)
        num_choices, most = len(body.prompt) * (body.n or 1), self.config.max_texts_per_request
        if num_choices > most:
            raise InputTooLargeError(f"The prompts make {num_choices:,} choices; a request takes at most {most:,}.")
        params = checked_params(body.sampling(), text.card, {"grammar": body.grammar_name})
        orders: list[Order] = []
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
            order = Order(
                text, token_ids, params, None, body.priority, body.deadline_s, bool(body.stream), form=body.grammar_name
            )
            orders.append(checked_order(order))
        echoes = [echo_text(text, prompt) for prompt in body.prompt] if body.echo else [""] * len(orders)
        head = {"id": f"cmpl-{secrets.token_hex(12)}", "object": "text_completion", "created": int(time.time())}
        head["model"] = text.card.id
        if body.stream:
            return await self.service.stream(request, orders, CompletionEvents(orders, head, body, echoes))
        answers = await self.service.complete(request, orders)
        shown: list[dict[str, Any]] = []
        for (answer, choices), echo in zip(answers, echoes, strict=True):
            shown += [completion_choice(answer, choice, echo, body, len(shown) + choice.index) for choice in choices]
        usage = usage_of([answer for answer, _ in answers], body.max_tokens == 0)
        return json_response({**head, "choices": shown, "usage": usage})


async def chat_order(
    service: TextService, body: ToolBody, messages: Sequence[dict[str, Any]], template_values: dict[str, Any] | None = None,
    *, param: str = "messages", names: dict[str, str] | None = None, opening: str = "",
) -> Order:
    """The order for an answer to a conversation; `opening` is how the answer begins."""
    text = await service.model(body.model)
    choice = body.check_tools()
    values = body.sampling()
    options = template_options(template_values or {})
    parser = None
    if choice != "none":
        options["tools"] = body.tools
        values, parser = choose_tools(text, values, options, choice, body.parallel_tool_calls)
    form = body.grammar_name if parser is None else "tools"
    params = checked_params(values, text.card, {"grammar": form, **(names or {})})
    text.check_size(sum(len(message["content"]) for message in messages), param)
    prompt_ids = await text.encode_chat(messages, param, options)
    params = text.stopping(params)
    if opening:
        prompt_ids = prompt_ids + await text.encode(opening, param, False, plain=True)
    text.check_length(prompt_ids, param)
    tools = options.get("tools", ())
    order = Order(text, prompt_ids, params, parser, body.priority, body.deadline_s, bool(body.stream), tools, form)
    return checked_order(order)


def template_options(values: dict[str, Any]) -> dict[str, Any]:
    """Values for the template that do not stand in the way of its own."""
    reserved = [name for name in RESERVED if name in values]
    if reserved:
        raise InvalidParameterError(f"chat_template_kwargs cannot hold {reserved[0]!r}.", "chat_template_kwargs")
    return dict(values)


def usage_of(answers: Sequence[Answer], is_hidden: bool = False) -> dict[str, Any]:
    num_prompt = sum(answer.num_prompt for answer in answers)
    num_output = 0 if is_hidden else sum(answer.num_output for answer in answers)
    return {
        "prompt_tokens": num_prompt, "completion_tokens": num_output, "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": sum(answer.num_cached for answer in answers)},
    }


# Chat


def chat_choice(order: Order, choice: Choice) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
    if choice.calls:
        message["content"] = choice.text or None
        message["tool_calls"] = [
            {"id": new_call_id(), "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in choice.calls
        ]
    return {
        "index": choice.index, "message": message, "logprobs": chat_logprobs(order, choice.logprobs),
        "finish_reason": openai_reason(choice.finish_reason, bool(choice.calls)), "stop_reason": shown_stop(choice),
    }


def shown_stop(ended: Choice | Piece) -> str | int | None:
    """The stop string or token that ended an answer; or the deadline, for which OpenAI has no word."""
    return "deadline" if ended.finish_reason == "deadline" else ended.stop_reason


def chat_logprobs(order: Order, logprobs: Sequence[Logprob] | None) -> dict[str, Any] | None:
    return None if order.params.logprobs is None else {"content": chosen_logprobs(order, logprobs), "refusal": None}


def chosen_logprobs(order: Order, logprobs: Sequence[Logprob] | None) -> list[dict[str, Any]]:
    return [
        {**token_logprob(order.text, token_id, logprob), "top_logprobs": [token_logprob(order.text, *likely) for likely in top]}
        for token_id, logprob, _, top in logprobs or ()
    ]


def token_logprob(text: ServedText, token_id: int, logprob: float) -> dict[str, Any]:
    token, raw = text.token(token_id)
    return {"token": token, "logprob": finite(logprob), "bytes": raw}


def finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI writes this for a token that cannot come."""
    return max(logprob, -9999.0)


def prompt_logprobs(order: Order, answer: Answer) -> list[dict[str, Any] | None]:
    """Of each token of the prompt, as vLLM has it: nothing for the first."""
    shown: list[dict[str, Any] | None] = [None]
    for token_id, logprob, rank, top in answer.prompt_logprobs or ():
        entries = {str(i): {"logprob": finite(value), "rank": place, "decoded_token": order.text.token(i)[0]}
                   for place, (i, value) in enumerate(top, 1)}
        own = {"logprob": finite(logprob), "rank": rank, "decoded_token": order.text.token(token_id)[0]}
        shown.append({**entries, str(token_id): own})
    return shown


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


class ChunkEvents:
    """What the two kinds of chunks have in common; head: what stands in each of them."""

    def __init__(self, head: dict[str, Any], include_usage: bool) -> None:
        self._include_usage = include_usage
        self._head = b"data: " + dumped(head)[:-1] + b',"choices":['
        self._tail = (b'],"usage":null' if include_usage else b"]") + END

    def end(self, answers: Sequence[Answer]) -> bytes:
        usage = self._head + b'],"usage":' + quoted(self.usage(answers)) + END if self._include_usage else b""
        return usage + DONE

    def usage(self, answers: Sequence[Answer]) -> dict[str, Any]:
        return usage_of(answers)

    def error(self, error: Exception) -> bytes:
        return b"data: " + dumped(failure_body(error)) + b"\n\n"


class ChatEvents(ChunkEvents):
    """A conversation's next message in chunks."""

    def __init__(self, order: Order, head: dict[str, Any], include_usage: bool) -> None:
        super().__init__({**head, "object": "chat.completion.chunk"}, include_usage)
        self._order = order
        self._choices = [b'%s{"index":%d,"delta":{' % (self._head, index) for index in range(order.params.n)]
        self._texts = [start + b'"content":' for start in self._choices]
        self._plain_end = b'},"logprobs":null,"finish_reason":null}' + self._tail
        self._num_calls = [0] * order.params.n

    def begin(self, answers: Sequence[Answer]) -> bytes:
        return b"".join(start + b'"role":"assistant","content":""' + self._plain_end for start in self._choices)

    def piece(self, number: int, piece: Piece) -> bytes:
        if piece.finish_reason is None and piece.parts is None and not piece.logprobs:
            # The way of nearly all chunks.
            return self._texts[piece.index] + quoted(piece.text) + self._plain_end if piece.text else b""
        logprobs = self._logprobs(piece)
        written = [
            self._choices[piece.index] + delta + b'},"logprobs":%s,"finish_reason":null}' % (logprobs if not place else b"null")
            + self._tail
            for place, delta in enumerate(self._deltas(piece))
        ]
        if not written and piece.logprobs:
            silent = b'"content":""},"logprobs":%s,"finish_reason":null}' % logprobs
            written.append(self._choices[piece.index] + silent + self._tail)
        if piece.finish_reason is not None:
            reason = openai_reason(piece.finish_reason, self._num_calls[piece.index] > 0)
            ended = quoted(reason) + b',"stop_reason":' + quoted(shown_stop(piece))
            written.append(self._choices[piece.index] + b'},"logprobs":null,"finish_reason":' + ended + b"}" + self._tail)
        return b"".join(written)

    def _logprobs(self, piece: Piece) -> bytes:
        return quoted(chat_logprobs(self._order, piece.logprobs)) if piece.logprobs else b"null"

    def _deltas(self, piece: Piece) -> list[bytes]:
        if piece.parts is None:
            return [b'"content":' + quoted(piece.text)] if piece.text else []
        deltas: list[bytes] = []
        for part in piece.parts:
            if part.kind == "text":
                deltas.append(b'"content":' + quoted(part.text))
            elif part.kind == "name":
                self._num_calls[piece.index] += 1
                function = quoted({"name": part.text, "arguments": ""})
                called = b'"tool_calls":[{"index":%d,"id":%s,"type":"function","function":%s}]'
                deltas.append(called % (part.index, quoted(new_call_id()), function))
            else:
                deltas.append(b'"tool_calls":[{"index":%d,"function":{"arguments":%s}}]' % (part.index, quoted(part.text)))
        return deltas


# Completions


def echo_text(text: ServedText, prompt: str | list[int]) -> str:
    if isinstance(prompt, str):
        return prompt
    tokenizer = text.tokenizer
    return "" if tokenizer is None else tokenizer.decode(prompt, skip_special_tokens=False)


def completion_choice(answer: Answer, choice: Choice, echo: str, body: CompletionBody, index: int) -> dict[str, Any]:
    order = answer.order
    is_hidden = body.max_tokens == 0
    logprobs = None
    if body.logprobs is not None:
        prompt = [(order.prompt_ids[0], None, 0, []), *(answer.prompt_logprobs or ())] if body.echo else []
        offset = -num_unseen(order, echo) if body.echo else 0
        logprobs = listed_logprobs(order.text, [*prompt, *([] if is_hidden else choice.logprobs)], offset)
    shown = {
        "index": index, "text": echo + ("" if is_hidden else choice.text), "logprobs": logprobs,
        "finish_reason": openai_reason(choice.finish_reason, False), "stop_reason": shown_stop(choice),
    }
    if body.prompt_logprobs is not None:
        shown["prompt_logprobs"] = prompt_logprobs(order, answer)
    if body.return_token_ids:
        shown |= {"prompt_token_ids": order.prompt_ids, "token_ids": [] if is_hidden else choice.token_ids}
    return shown


def num_unseen(order: Order, echo: str) -> int:
    """Characters of a token that the tokenizer puts before a text, which the text itself does not have."""
    first, tokenizer = order.prompt_ids[0], order.text.tokenizer
    name = order.text.token(first)[0]
    is_added = tokenizer is not None and first in tokenizer.special_tokens and not echo.startswith(name)
    return len(name) if is_added else 0


def listed_logprobs(text: ServedText, logprobs: Sequence[tuple[Any, ...]], offset: int = 0) -> dict[str, Any]:
    """Logprobs in four lists, as completions have them; a first token of a prompt has none."""
    tokens = [text.token(entry[0])[0] for entry in logprobs]
    offsets: list[int] = []
    for token in tokens:
        offsets.append(max(offset, 0))
        offset += len(token)
    top = [None if entry[1] is None else {text.token(i)[0]: finite(value) for i, value in entry[3]} for entry in logprobs]
    values = [None if entry[1] is None else finite(entry[1]) for entry in logprobs]
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": top, "text_offset": offsets}


class CompletionEvents(ChunkEvents):
    """Texts after prompts in chunks; the choices of prompt i are n * i and on."""

    def __init__(self, orders: Sequence[Order], head: dict[str, Any], body: CompletionBody, echoes: Sequence[str]) -> None:
        super().__init__(head, body.include_usage)
        self._orders, self._echoes, self._body = orders, echoes, body
        self._num_each = orders[0].params.n
        self._choices = [b'%s{"index":%d,"text":' % (self._head, place) for place in range(len(orders) * self._num_each)]
        self._plain_end = b',"logprobs":null,"finish_reason":null}' + self._tail
        self._offsets = [0] * len(self._choices)

    def begin(self, answers: Sequence[Answer]) -> bytes:
        shown = [(place, self._echoes[place // self._num_each]) for place in range(len(self._choices))]
        return b"".join(self._choices[place] + quoted(echo) + self._plain_end for place, echo in shown if echo)

    def piece(self, number: int, piece: Piece) -> bytes:
        place = number * self._num_each + piece.index
        is_hidden = self._body.max_tokens == 0
        text = "" if is_hidden else piece.text
        if piece.finish_reason is None and not piece.logprobs and not self._body.return_token_ids:
            return self._choices[place] + quoted(text) + self._plain_end if text else b""
        logprobs: dict[str, Any] | None = None
        if piece.logprobs and not is_hidden:
            logprobs = listed_logprobs(self._orders[number].text, piece.logprobs, self._offsets[place])
            self._offsets[place] += sum(map(len, logprobs["tokens"]))
        rest: dict[str, Any] = {"logprobs": logprobs, "finish_reason": None}
        if piece.finish_reason is not None:
            rest |= {"finish_reason": openai_reason(piece.finish_reason, False), "stop_reason": shown_stop(piece)}
        if self._body.return_token_ids:
            rest["token_ids"] = [] if is_hidden else piece.token_ids
        return self._choices[place] + quoted(text) + b"," + quoted(rest)[1:] + self._tail

    def usage(self, answers: Sequence[Answer]) -> dict[str, Any]:
        return usage_of(answers, self._body.max_tokens == 0)
