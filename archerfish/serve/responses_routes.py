"""/v1/responses, as OpenAI has it, without a memory: every request brings its whole conversation."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter
from pydantic import Field, PlainValidator, WithJsonSchema
from starlette.requests import Request
from starlette.responses import Response

from archerfish.params import MAX_LOGPROBS
from archerfish.serve.errors import UnsupportedParameterError, failure_body, json_response, kind_of
from archerfish.serve.generation import Answer, Call, Logprob, Order, Piece, TextService
from archerfish.serve.openai_routes import chat_order, chosen_logprobs, new_call_id
from archerfish.serve.openai_schemas import (
    Stops,
    ToolBody,
    chat_message,
    format_grammar,
    function_call,
    stated,
)
from archerfish.serve.schemas import STRING, UNUSED, Body, BodyRoute, text_at, wrong
from archerfish.serve.sse import dumped, quoted

LOGPROBS = "message.output_text.logprobs"
STATEFUL = "This server keeps no responses: send the whole conversation in input"


def input_messages(value: Any) -> list[dict[str, Any]]:
    """Items of input as a conversation; calls that follow each other become one message of the assistant."""
    if isinstance(value, str):
        return [{"role": "user", "content": text_at(value, "input")}]
    if not isinstance(value, list) or not value:
        raise wrong("input must be a string or a list of items that is not empty.")
    messages: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    for index, item in enumerate(value):
        where = f"input[{index}]"
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind == "message":
            known = {key: item[key] for key in item if key not in ("type", "id", "status", "phase")}
            messages.append(chat_message(known, where, names))
        elif kind == "function_call":
            call_id, name = text_at(item.get("call_id"), f"{where}.call_id"), text_at(item.get("name"), f"{where}.name")
            names[call_id] = name
            call = function_call(call_id, name, text_at(item.get("arguments"), f"{where}.arguments"))
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            result = {"role": "tool", "content": item.get("output"), "tool_call_id": item.get("call_id")}
            messages.append(chat_message(result, where, names))
        else:
            what = f"of type {kind!r}" if isinstance(kind, str) else kind_of(item)
            raise wrong(f"{where} is {what}, which is not supported: messages, function_call and function_call_output are.")
    return messages


Input = Annotated[
    list[dict[str, Any]], PlainValidator(input_messages),
    WithJsonSchema({"anyOf": [STRING, {"type": "array", "items": {"type": "object"}, "minItems": 1}]}),
]


class ResponseStreamOptions(Body):
    """stream_options."""

    include_obfuscation: bool = Field(False, description=UNUSED)


class ResponsesBody(ToolBody):
    """POST /v1/responses."""

    format_name: ClassVar[str] = "text"
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "access_programs": (), "background": (False,), "context_management": (), "conversation": (), "image": (),
        "max_tool_calls": (), "moderation": (), "prompt": (), "prompt_cache_options": (), "reasoning": ({}, {"effort": "none"}),
        "service_tier": ("auto", "default"), "truncation": ("disabled",),
    }  # fmt: skip

    input: Input
    instructions: str | None = None
    max_output_tokens: int | None = stated(minimum=1)
    stop: Stops = Field([])
    text: dict[str, Any] | None = Field(None, description="format: text, json_object or json_schema.")
    include: list[str] | None = Field(None, description=f"{LOGPROBS}, or what there is nothing of here.")
    top_logprobs: int | None = stated(minimum=0, maximum=MAX_LOGPROBS)
    store: bool | None = None
    previous_response_id: str | None = None
    stream_options: ResponseStreamOptions | None = Field(None, description=UNUSED)
    metadata: dict[str, Any] | None = None
    user: str | None = Field(None, description=UNUSED)
    safety_identifier: str | None = Field(None, description=UNUSED)
    prompt_cache_key: str | None = Field(None, description=UNUSED)
    prompt_cache_retention: str | None = Field(None, description=UNUSED)

    def stated_format(self) -> dict[str, Any] | None:
        return format_grammar(self.text, self.format_name)

    def check_stateless(self) -> None:
        if self.store:
            raise UnsupportedParameterError(f"{STATEFUL}, and leave out store or set it to false.", "store")
        if self.previous_response_id is not None:
            raise UnsupportedParameterError(f"{STATEFUL}, instead of previous_response_id.", "previous_response_id")

    def sampling(self) -> dict[str, Any]:
        include = self.include or ()
        unknown = [name for name in include if name not in (LOGPROBS, "reasoning.encrypted_content")]
        if unknown:
            raise UnsupportedParameterError(f"include of {unknown[0]!r} is not supported.", "include")
        found = {**super().sampling(), "max_tokens": self.max_output_tokens}
        return {**found, "logprobs": self.top_logprobs or 0} if LOGPROBS in include or self.top_logprobs else found


class ResponsesRoutes:
    """The responses route."""

    def __init__(self, service: TextService) -> None:
        self.service = service
        self.router = APIRouter(route_class=BodyRoute)
        self.router.post("/v1/responses", response_model=None)(self.responses)

    async def responses(self, request: Request, body: ResponsesBody) -> Response:
        """The answer to a conversation, as items."""
        body.check_stateless()
        opening = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
        names = {"max_tokens": "max_output_tokens", "logprobs": "top_logprobs"}
        order = await chat_order(self.service, body, [*opening, *body.input], param="input", names=names)
        blank = blank_response(body, order)
        if body.stream:
            return await self.service.stream(request, [order], ResponseEvents(order, blank))
        [(answer, [choice])] = await self.service.complete(request, [order])
        has_message = choice.text or not choice.calls
        output = [message_item(new_id("msg"), order, choice.text, choice.logprobs)] if has_message else []
        output += [call_item(new_id("fc"), new_call_id(), call.name, call.arguments) for call in choice.calls]
        output[-1]["status"] = status_of(choice.finish_reason)
        return json_response(ended(blank, answer, choice.finish_reason, output))


def new_id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(16)}"


def blank_response(body: ResponsesBody, order: Order) -> dict[str, Any]:
    """The response before anything is written."""
    tools = [{"type": "function", "strict": False, **tool["function"]} for tool in body.tools]
    choice = body.tool_choice or "auto"
    return {
        "id": new_id("resp"), "object": "response", "created_at": int(time.time()), "status": "in_progress", "error": None,
        "incomplete_details": None, "instructions": body.instructions, "max_output_tokens": body.max_output_tokens,
        "model": order.model_id, "output": [], "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None, "store": False, "temperature": order.params.temperature,
        "text": body.text or {"format": {"type": "text"}}, "top_p": order.params.top_p, "truncation": "disabled",
        "tool_choice": {"type": "function", "name": choice[1:]} if choice[0] == "=" else choice, "tools": tools,
        "metadata": body.metadata or {}, "usage": None,
    }


def ended(blank: dict[str, Any], answer: Answer, finish_reason: str, output: list[dict[str, Any]]) -> dict[str, Any]:
    """The whole response."""
    status = status_of(finish_reason)
    usage = {
        "input_tokens": answer.num_prompt,
        "input_tokens_details": {"cached_tokens": answer.num_cached, "cache_write_tokens": 0},
        "output_tokens": answer.num_output, "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answer.num_prompt + answer.num_output,
    }
    details = None if status == "completed" else {"reason": "max_output_tokens"}
    return {**blank, "status": status, "incomplete_details": details, "output": output, "usage": usage}


def status_of(finish_reason: str) -> str:
    """Of a response, and of its last item."""
    return "completed" if finish_reason == "stop" else "incomplete"


def text_part(order: Order, text: str, logprobs: Sequence[Logprob]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": chosen_logprobs(order, logprobs)}


def message_item(
    item_id: str, order: Order, text: str, logprobs: Sequence[Logprob], status: str = "completed"
) -> dict[str, Any]:
    content = [text_part(order, text, logprobs)]
    return {"type": "message", "id": item_id, "status": status, "role": "assistant", "content": content}


def call_item(item_id: str, call_id: str, name: str, arguments: str, status: str = "completed") -> dict[str, Any]:
    return {"type": "function_call", "id": item_id, "call_id": call_id, "name": name, "arguments": arguments, "status": status}


class ResponseEvents:
    """A response in its events: items are added, grow and are done, one after the other."""

    def __init__(self, order: Order, blank: dict[str, Any]) -> None:
        self._order, self._blank = order, blank
        self._number = 0
        self._output: list[dict[str, Any]] = []  # items that are done
        self._text: list[str] | None = None  # of the message that is open
        self._logprobs: list[Logprob] = []
        self._call: Call | None = None  # that is open
        self._arguments: list[str] = []
        self._item_id = self._call_id = ""
        self._delta = b""  # how events of the open item begin
        self._finish_reason = "stop"

    def begin(self, answers: Sequence[Answer]) -> bytes:
        return self._event("response.created", response=self._blank) + self._event("response.in_progress", response=self._blank)

    def piece(self, number: int, piece: Piece) -> bytes:
        written = b""
        logprobs = piece.logprobs
        if piece.parts is None and (piece.text or logprobs):
            written = self._write_text(piece.text, logprobs)
        for part in piece.parts or ():
            if part.kind == "text":
                written += self._write_text(part.text, logprobs)
                logprobs = None
            elif part.kind == "name":
                written += self._close() + self._open_call(part.text)
            else:
                self._arguments.append(part.text)
                written += self._delta % (self._next(), quoted(part.text))
        self._finish_reason = piece.finish_reason or "stop"  # what ends before is whole
        return written

    def _write_text(self, text: str, logprobs: list[Logprob] | None) -> bytes:
        opening = b"" if self._text is not None else self._close() + self._open_message()
        assert self._text is not None
        self._text.append(text)
        self._logprobs += logprobs or ()
        shown = quoted(chosen_logprobs(self._order, logprobs)) if logprobs else b"[]"
        return opening + self._delta % (self._next(), shown, quoted(text))

    def _open_message(self) -> bytes:
        self._item_id, self._text = new_id("msg"), []
        place = len(self._output)
        kind = b"response.output_text.delta"
        head = b'event: %s\ndata: {"type":"%s","content_index":0,"output_index":%d' % (kind, kind, place)
        head += b',"item_id":"%s"' % self._item_id.encode()
        self._delta = head + b',"sequence_number":%d,"logprobs":%s,"delta":%s}\n\n'
        item = {**message_item(self._item_id, self._order, "", (), "in_progress"), "content": []}
        part = text_part(self._order, "", ())
        added = self._event("response.output_item.added", output_index=place, item=item)
        return added + self._event(
            "response.content_part.added", item_id=self._item_id, output_index=place, content_index=0, part=part
        )

    def _open_call(self, name: str) -> bytes:
        self._item_id, self._call_id = new_id("fc"), new_call_id()
        self._call, self._arguments = Call(name), []
        place = len(self._output)
        kind = b"response.function_call_arguments.delta"
        head = b'event: %s\ndata: {"type":"%s","output_index":%d,"item_id":"%s"' % (kind, kind, place, self._item_id.encode())
        self._delta = head + b',"sequence_number":%d,"delta":%s}\n\n'
        item = call_item(self._item_id, self._call_id, name, "", "in_progress")
        return self._event("response.output_item.added", output_index=place, item=item)

    def _close(self) -> bytes:
        """Events for the end of the item that is open."""
        place = len(self._output)
        where = {"item_id": self._item_id, "output_index": place}
        status = status_of(self._finish_reason)
        if self._text is not None:
            item = message_item(self._item_id, self._order, "".join(self._text), self._logprobs, status)
            part = item["content"][0]
            done = {"text": part["text"], "logprobs": part["logprobs"]}
            written = self._event("response.output_text.done", **where, content_index=0, **done)
            written += self._event("response.content_part.done", **where, content_index=0, part=part)
            self._text, self._logprobs = None, []
        elif self._call is not None:
            item = call_item(self._item_id, self._call_id, self._call.name, "".join(self._arguments), status)
            done = {"arguments": item["arguments"], "name": self._call.name}
            written = self._event("response.function_call_arguments.done", **where, **done)
            self._call = None
        else:
            return b""
        self._output.append(item)
        return written + self._event("response.output_item.done", output_index=place, item=item)

    def end(self, answers: Sequence[Answer]) -> bytes:
        written = self._close()
        if not self._output:
            written += self._open_message() + self._close()
        whole = ended(self._blank, answers[0], self._finish_reason, self._output)
        return written + self._event(f"response.{whole['status']}", response=whole)

    def error(self, error: Exception) -> bytes:
        body = failure_body(error)["error"]
        failed = {**self._blank, "status": "failed", "error": {"code": body["code"], "message": body["message"]}}
        written = self._event("error", code=body["code"], message=body["message"], param=body["param"])
        return written + self._event("response.failed", response=failed)

    def _event(self, kind: str, **values: Any) -> bytes:
        return f"event: {kind}\ndata: ".encode() + dumped({"type": kind, "sequence_number": self._next(), **values}) + b"\n\n"

    def _next(self) -> int:
        self._number += 1
        return self._number - 1
