"""/v1/messages, as Anthropic has it, its errors included."""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter
from pydantic import Field, PlainValidator, WithJsonSchema, model_validator
from starlette.requests import Request
from starlette.responses import Response

from archerfish.serve.charges import charge, set_right
from archerfish.serve.errors import ANTHROPIC_PATH, failure_body, json_response, kind_of
from archerfish.serve.generation import Answer, Choice, Piece, TextService, checked_params
from archerfish.serve.openai_routes import chat_order
from archerfish.serve.openai_schemas import (
    CONTENT,
    ToolBody,
    check_members,
    format_grammar,
    function_call,
    function_tool,
    lines_of,
    parts_of,
)
from archerfish.serve.schemas import STRING, UNUSED, BodyRoute, text_at, wrong
from archerfish.serve.served_texts import chat_size
from archerfish.serve.sse import dumped, quoted

TOOL_KEYS = ("type", "name", "description", "input_schema", "cache_control", "strict", "eager_input_streaming")


def anthropic_messages(value: Any) -> list[dict[str, Any]]:
    """A conversation as chat templates expect it: results of tools are messages of their own."""
    if not isinstance(value, list) or not value:
        raise wrong("messages must be a list of messages that is not empty.")
    messages: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    for index, message in enumerate(value):
        where = f"messages[{index}]"
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ("user", "assistant"):
            raise wrong(f"{where}.role must be user or assistant; a system prompt goes into system.")
        if role == "user":
            messages += user_messages(message.get("content"), f"{where}.content", names)
        else:
            messages.append(assistant_message(message.get("content"), f"{where}.content", names))
    return messages


def user_messages(content: Any, where: str, names: dict[str, str]) -> list[dict[str, Any]]:
    blocks = parts_of(content, where, "tool_result")
    found: list[dict[str, Any]] = []
    for index, block in enumerate(blocks):
        if block["type"] == "tool_result":
            inside = f"{where}[{index}]"
            call_id = text_at(block.get("tool_use_id"), f"{inside}.tool_use_id")
            result = lines_of(parts_of(block.get("content") or "", f"{inside}.content"))
            found.append({"role": "tool", "content": result, "tool_call_id": call_id, "name": names.get(call_id, "")})
    if len(found) < len(blocks) or not blocks:
        found.append({"role": "user", "content": lines_of(blocks)})
    return found


def assistant_message(content: Any, where: str, names: dict[str, str]) -> dict[str, Any]:
    blocks = parts_of(content, where, "tool_use")
    message: dict[str, Any] = {"role": "assistant", "content": lines_of(blocks)}
    for index, block in enumerate(blocks):
        if block["type"] == "tool_use":
            inside = f"{where}[{index}]"
            call_id, name = text_at(block.get("id"), f"{inside}.id"), text_at(block.get("name"), f"{inside}.name")
            if not isinstance(block.get("input"), dict):
                raise wrong(f"{inside}.input must be an object, not {kind_of(block.get('input'))}.")
            names[call_id] = name
            message.setdefault("tool_calls", []).append(function_call(call_id, name, block["input"]))
    return message


def anthropic_tools(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise wrong(f"tools must be a list, not {kind_of(value)}.")
    tools: list[dict[str, Any]] = []
    for index, tool in enumerate(value):
        if not isinstance(tool, dict):
            raise wrong(f"tools[{index}] must be an object, not {kind_of(tool)}.")
        if tool.get("type") not in (None, "custom"):
            raise wrong(f"tools[{index}] is of type {tool['type']!r}, which is not supported: only tools of the caller are.")
        check_members(tool, TOOL_KEYS, f"tools[{index}]")
        values = (tool.get("name"), tool.get("description"), tool.get("input_schema"))
        tools.append(function_tool(*values, f"tools[{index}]", "input_schema"))
    return tools


def anthropic_choice(value: Any) -> str:
    """tool_choice in the words of ToolBody."""
    kind = value.get("type") if isinstance(value, dict) else None
    if kind in ("auto", "none", "any"):
        return "required" if kind == "any" else str(kind)
    if kind == "tool" and isinstance(value.get("name"), str):
        return f"={value['name']}"
    raise wrong("tool_choice must be an object whose type is auto, any, none, or tool with a name.")


def system_text(value: Any) -> str:
    return lines_of(parts_of(value, "system"))


def sequences_of(value: Any) -> list[str]:
    if not isinstance(value, list):
        raise wrong(f"stop_sequences must be a list of strings, not {kind_of(value)}.")
    return [text_at(item, f"stop_sequences[{index}]") for index, item in enumerate(value)]


ROLE = {"enum": ["user", "assistant"]}
OBJECTS = {"type": "array", "items": {"type": "object"}}


class CountBody(ToolBody):
    """POST /v1/messages/count_tokens."""

    format_name: ClassVar[str] = "output_config"

    messages: Annotated[
        list[dict[str, Any]], PlainValidator(anthropic_messages),
        WithJsonSchema({
            "type": "array", "minItems": 1,
            "items": {"type": "object", "properties": {"role": ROLE, "content": CONTENT}, "required": ["role", "content"]},
        }),
    ]
    system: Annotated[str, PlainValidator(system_text), WithJsonSchema(CONTENT)] = ""
    tools: Annotated[list[dict[str, Any]], PlainValidator(anthropic_tools), WithJsonSchema(OBJECTS)] = Field([])
    tool_choice: Annotated[str, PlainValidator(anthropic_choice), WithJsonSchema({"type": "object"})] = ""

    @model_validator(mode="before")
    @classmethod
    def _read_parallel(cls, data: Any) -> Any:
        choice = data.get("tool_choice") if isinstance(data, dict) else None
        is_single = isinstance(choice, dict) and choice.get("disable_parallel_tool_use") is True
        return {**data, "parallel_tool_calls": False} if is_single else data

    output_config: dict[str, Any] | None = Field(None, description="format: a json_schema.")
    cache_control: dict[str, Any] | None = Field(None, description="Accepted and not used: every prefix is cached.")

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "compaction": (), "container": (), "context_management": (), "diagnostics": (), "fallback_credit_token": (),
        "fallbacks": ([],), "inference_geo": (), "mcp_servers": ([],), "service_tier": ("auto", "standard_only"),
        "speed": ("standard",), "thinking": ({"type": "disabled"},), "thread": (), "user_profile_id": (), "workspace_id": (),
    }  # fmt: skip

    def stated_format(self) -> dict[str, Any] | None:
        return format_grammar(self.output_config, self.format_name)


class MessagesBody(CountBody):
    """POST /v1/messages."""

    max_tokens: int = Field(json_schema_extra={"minimum": 1})
    stop_sequences: Annotated[
        list[str], PlainValidator(sequences_of), WithJsonSchema({"type": "array", "items": STRING})
    ] = Field([])
    metadata: dict[str, Any] | None = Field(None, description=UNUSED)

    def sampling(self) -> dict[str, Any]:
        return {**super().sampling(), "max_tokens": self.max_tokens, "stop": self.stop_sequences}


class MessagesRoutes:
    """The messages routes."""

    def __init__(self, service: TextService) -> None:
        self.service = service
        self.router = APIRouter(route_class=BodyRoute)
        self.router.post("/v1/messages", response_model=None)(self.messages)
        self.router.post("/v1/messages/count_tokens", response_model=None)(self.count_tokens)

    async def messages(self, request: Request, body: MessagesBody) -> Response:
        """The next message of a conversation; if its last one is the assistant's, what comes after it."""
        messages, opening = conversation(body)
        order = await chat_order(self.service, body, messages, names={"stop": "stop_sequences"}, opening=opening)
        blank: dict[str, Any] = {
            "id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant", "model": order.model_id,
            "content": [], "stop_reason": None, "stop_sequence": None,
        }
        if body.stream:
            return await self.service.stream(request, [order], MessageEvents(blank))
        [(answer, [choice])] = await self.service.complete(request, [order])
        shown = {**blank, "content": content_blocks(choice), **stop_of(choice, bool(choice.calls)), "usage": usage_of(answer)}
        return json_response(shown)

    async def count_tokens(self, request: Request, body: CountBody) -> Response:
        """How many tokens a conversation has."""
        text = await self.service.model(body.model)
        checked_params(body.sampling(), text.card)
        messages, opening = conversation(body)
        options = {"tools": body.tools} if body.check_tools() != "none" else {}
        taken = await charge(self.service.catalog, request, chat_size(messages, options))
        token_ids = await text.encode_chat(messages, "messages", options)
        await set_right(self.service.catalog, request, taken, len(token_ids))
        num_opening = len(await text.encode(opening, "messages", False, plain=True)) if opening else 0
        return json_response({"input_tokens": len(token_ids) + num_opening})


def conversation(body: CountBody) -> tuple[list[dict[str, Any]], str]:
    """The messages that go into the template, and the text with which the answer begins already."""
    messages, opening = body.messages, ""
    if len(messages) > 1 and messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]:
        messages, opening = messages[:-1], messages[-1]["content"]
    return ([{"role": "system", "content": body.system}] if body.system else []) + messages, opening


def content_blocks(choice: Choice) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if choice.text or not choice.calls:
        blocks.append({"type": "text", "text": choice.text})
    for call in choice.calls:
        arguments: Any = None  # cut off, or no JSON
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(call.arguments or "{}")
        given = arguments if isinstance(arguments, dict) else {}
        blocks.append({"type": "tool_use", "id": new_use_id(), "name": call.name, "input": given})
    return blocks


def new_use_id() -> str:
    return f"toolu_{secrets.token_hex(12)}"


def stop_of(ended: Choice | Piece, has_calls: bool) -> dict[str, Any]:
    """Why a message ended, in Anthropic's words."""
    if ended.finish_reason != "stop":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if isinstance(ended.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": ended.stop_reason}
    return {"stop_reason": "tool_use" if has_calls else "end_turn", "stop_sequence": None}


def usage_of(answer: Answer) -> dict[str, int]:
    """Tokens; those out of the cache are counted apart from input_tokens."""
    return {
        "input_tokens": answer.num_prompt - answer.num_cached, "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": answer.num_cached, "output_tokens": answer.num_output,
    }


class MessageEvents:
    """A message in its events: blocks of text and of calls, one after the other."""

    def __init__(self, blank: dict[str, Any]) -> None:
        self._blank = blank
        self._num_blocks = 0
        self._open = ""  # the type of the block that is open
        self._has_calls = False
        self._delta = b""  # how events of the open block begin
        self._ended: Piece | None = None

    def begin(self, answers: Sequence[Answer]) -> bytes:
        usage = {**usage_of(answers[0]), "output_tokens": 0}
        return event("message_start", message={**self._blank, "usage": usage})

    def piece(self, number: int, piece: Piece) -> bytes:
        if piece.finish_reason is not None:
            self._ended = piece
        if piece.parts is None:
            return self._write_text(piece.text) if piece.text else b""
        written = b""
        for part in piece.parts:
            if part.kind == "text":
                written += self._write_text(part.text)
            elif part.kind == "name":
                self._has_calls = True
                block = {"type": "tool_use", "id": new_use_id(), "name": part.text, "input": {}}
                written += self._start(block, b"input_json_delta", b"partial_json")
            else:
                written += self._delta + quoted(part.text) + b"}}\n\n"
        return written

    def _write_text(self, text: str) -> bytes:
        opening = b"" if self._open == "text" else self._start({"type": "text", "text": ""}, b"text_delta", b"text")
        return opening + self._delta + quoted(text) + b"}}\n\n"

    def _start(self, block: dict[str, Any], delta: bytes, member: bytes) -> bytes:
        written = self._stop()
        place = self._num_blocks
        self._num_blocks += 1
        self._open = block["type"]
        head = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":"%s","%s":'
        self._delta = head % (place, delta, member)
        return written + event("content_block_start", index=place, content_block=block)

    def _stop(self) -> bytes:
        was_open, self._open = self._open, ""
        return event("content_block_stop", index=self._num_blocks - 1) if was_open else b""

    def end(self, answers: Sequence[Answer]) -> bytes:
        opening = b"" if self._num_blocks else self._start({"type": "text", "text": ""}, b"text_delta", b"text")
        delta = stop_of(self._ended or Choice(0), self._has_calls)
        return opening + self._stop() + event("message_delta", delta=delta, usage=usage_of(answers[0])) + event("message_stop")

    def error(self, error: Exception) -> bytes:
        return event("error", error=failure_body(error, ANTHROPIC_PATH)["error"])


def event(kind: str, **values: Any) -> bytes:
    return f"event: {kind}\ndata: ".encode() + dumped({"type": kind, **values}) + b"\n\n"
