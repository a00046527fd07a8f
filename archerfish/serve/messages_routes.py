"""/v1/messages, in Anthropic's form, its errors included."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from msgspec.structs import asdict
from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.types import ASGIApp

from archerfish.errors import InvalidInputError
from archerfish.serve import answers, bodies
from archerfish.serve import generation as gen
from archerfish.serve.errors import (
    ANTHROPIC_PATH,
    AnthropicError,
    check_members,
    failure_body,
    json_response,
    named_event,
)
from archerfish.serve.http import BodyRoute, EventStream, EventWriter

EVENTS = (*answers.MESSAGE_EVENTS, AnthropicError)
Block = answers.TextBlock | answers.ThinkingBlock | answers.ToolUseBlock
Delta = answers.BlockText | answers.BlockThinking | answers.BlockInput
TOOL_MEMBERS = ("type", "name", "description", "input_schema", "cache_control", "strict", "eager_input_streaming")


def read_anthropic_messages(value: Any, where: str) -> list[dict[str, Any]]:
    """A conversation as chat templates expect it: results of tools are messages of their own."""
    messages: list[dict[str, Any]] = []
    names: dict[str, str] = {}  # names of tools by the ids of their calls
    for index, message in enumerate(bodies.check_items(value, where, "messages")):
        place = f"{where}[{index}]"
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ("user", "assistant"):
            raise InvalidInputError(f"{place}.role must be user or assistant; a system prompt goes into system.")
        if role == "user":
            messages += read_user_message(message.get("content"), f"{place}.content", names)
        else:
            messages.append(read_assistant_message(message.get("content"), f"{place}.content", names))
    return messages


def read_user_message(content: Any, where: str, names: dict[str, str]) -> list[dict[str, Any]]:
    blocks = bodies.read_parts(content, where, "tool_result")
    found: list[dict[str, Any]] = []
    for index, block in enumerate(blocks):
        if block["type"] == "tool_result":
            place = f"{where}[{index}]"
            call_id = bodies.check_text(block.get("tool_use_id"), f"{place}.tool_use_id")
            result = bodies.join_texts(bodies.read_parts(block.get("content") or "", f"{place}.content"))
            found.append({"role": "tool", "content": result, "tool_call_id": call_id, "name": names.get(call_id, "")})
    if len(found) < len(blocks) or not blocks:
        found.append({"role": "user", "content": bodies.join_texts(blocks)})
    return found


def read_assistant_message(content: Any, where: str, names: dict[str, str]) -> dict[str, Any]:
    blocks = bodies.read_parts(content, where, "tool_use", "thinking", "redacted_thinking")
    message: dict[str, Any] = {"role": "assistant", "content": bodies.join_texts(blocks)}
    thoughts = [block["thinking"] for block in blocks if isinstance(block.get("thinking"), str)]
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    for index, block in enumerate(blocks):
        if block["type"] == "tool_use":
            place = f"{where}[{index}]"
            call_id = bodies.check_text(block.get("id"), f"{place}.id")
            name = bodies.check_text(block.get("name"), f"{place}.name")
            arguments = bodies.check_type(block.get("input"), dict, f"{place}.input", "an object")
            names[call_id] = name
            message.setdefault("tool_calls", []).append(bodies.template_call(call_id, name, arguments))
    return message


def read_anthropic_tools(value: Any, where: str) -> list[dict[str, Any]]:
    tools: list[dict[str, Any]] = []
    for index, tool in enumerate(bodies.check_type(value, list, where, "a list")):
        place = f"{where}[{index}]"
        if bodies.check_type(tool, dict, place, "an object").get("type") not in (None, "custom"):
            kind = tool["type"]
            raise InvalidInputError(
                f"{place} is of type {kind!r}, which is not supported: only tools of the caller are."
            )
        check_members(tool, TOOL_MEMBERS, place)
        tools.append(bodies.template_tool(tool, "input_schema", place))
    return tools


def read_anthropic_choice(value: Any, where: str) -> str:
    """tool_choice in the words of bodies.ToolBody."""
    kind = value.get("type") if isinstance(value, dict) else None
    if kind in ("auto", "none", "any"):
        return "required" if kind == "any" else str(kind)
    if kind == "tool" and isinstance(value.get("name"), str):
        return f"={value['name']}"
    raise InvalidInputError(f"{where} must be an object whose type is auto, any, none, or tool with a name.")


def read_system(value: Any, where: str) -> str:
    return bodies.join_texts(bodies.read_parts(value, where))


class CountBody(bodies.ToolBody):
    """POST /v1/messages/count_tokens."""

    format_param: ClassVar[str] = "output_config"
    unsupported: ClassVar[bodies.Values] = {"container": (), "mcp_servers": ([],), "thread": ()}
    ignored: ClassVar[bodies.Values] = {
        **bodies.IGNORED,
        "compaction": (),
        "context_management": (),
        "diagnostics": (),
        "fallback_credit_token": (),
        "fallbacks": ([],),
        "inference_geo": (),
        "service_tier": ("auto", "standard_only"),
        "speed": ("standard",),
        "user_profile_id": (),
        "workspace_id": (),
    }

    messages: Annotated[
        list[dict[str, Any]],
        bodies.checked(read_anthropic_messages, bodies.messages_schema(("user", "assistant"), "role", "content")),
    ]
    system: Annotated[str, bodies.checked(read_system, bodies.CONTENT)] = ""
    tools: Annotated[list[dict[str, Any]], bodies.checked(read_anthropic_tools, bodies.OBJECTS)] = Field([])
    tool_choice: Annotated[str, bodies.checked(read_anthropic_choice, bodies.OBJECT)] = ""
    output_config: dict[str, Any] | None = Field(None, description="format: a json_schema. effort: of reasoning.")
    thinking: dict[str, Any] | None = Field(
        None, description="Its type turns reasoning on or off, where a template can."
    )
    cache_control: dict[str, Any] | None = Field(None, description="Accepted and not used: every prefix is cached.")

    @model_validator(mode="before")
    @classmethod
    def _read_parallel(cls, data: Any) -> Any:
        choice = data.get("tool_choice") if isinstance(data, dict) else None
        is_single = isinstance(choice, dict) and choice.get("disable_parallel_tool_use") is True
        return {**data, "parallel_tool_calls": False} if is_single else data

    def effort(self) -> tuple[str, str]:
        kind, effort = (self.thinking or {}).get("type"), (self.output_config or {}).get("effort")
        if kind == "disabled":
            return "thinking", "none"
        if effort is not None:
            return "output_config.effort", bodies.check_text(effort, "output_config.effort")
        return "thinking", "high" if kind in ("enabled", "adaptive") else ""

    def conversation(self) -> tuple[list[dict[str, Any]], str]:
        """The messages for the template, and the text with which the answer begins already."""
        messages, start = self.messages, ""
        if len(messages) > 1 and messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]:
            messages, start = messages[:-1], messages[-1]["content"]
        return ([{"role": "system", "content": self.system}] if self.system else []) + messages, start


class MessagesBody(CountBody):
    """POST /v1/messages."""

    max_tokens: int = Field(json_schema_extra={"minimum": 1})
    stop_sequences: bodies.StringList = Field([])

    def sampling(self) -> tuple[dict[str, Any], dict[str, str]]:
        values, names = super().sampling()
        own = {"max_tokens": self.max_tokens, "stop": self.stop_sequences}
        return {**values, **own}, {**names, "stop": "stop_sequences"}


class MessagesRoutes:
    """The messages routes."""

    def __init__(self, service: gen.TextService) -> None:
        self.service = service
        self.routes = [
            BodyRoute("/v1/messages", self.messages, MessagesBody, answers.MessageObject, EVENTS),
            BodyRoute("/v1/messages/count_tokens", self.count_tokens, CountBody, answers.TokenCount),
        ]

    async def messages(self, request: Request, body: MessagesBody) -> ASGIApp:
        """The next message of a conversation; if its last one is the assistant's, the continuation of that."""
        if (body.thinking or {}).get("budget_tokens") is not None:
            request.state.remarks.append(bodies.without_effect("thinking.budget_tokens"))
        messages, start = body.conversation()
        generation = await self.service.prepare_chat(request, body, messages, answer_start=start)
        if body.stream:
            return EventStream(self.service, request, [generation], MessageEvents(generation))
        await self.service.complete(request, generation)
        [choice] = generation.choices
        end, usage = message_end(choice), message_usage(generation)
        head: dict[str, Any] = {"id": gen.new_id("msg"), "model": generation.text.card.id}
        return json_response(answers.MessageObject(**head, content=content_blocks(choice), usage=usage, **asdict(end)))

    async def count_tokens(self, request: Request, body: CountBody) -> ASGIApp:
        """The number of tokens of a conversation."""
        catalog = self.service.catalog
        text = await catalog.find_text(body.model, "generation", request=request)
        values, names = body.sampling()
        gen.checked_params(values, text.card, names)
        messages, start = body.conversation()
        options = {"tools": bodies.described_tools(body.tools)} if body.check_tool_choice() != "none" else {}
        token_ids = await catalog.encode_charged(request, text, messages, "messages", options, start)
        return json_response(answers.TokenCount(input_tokens=len(token_ids)))


def content_blocks(choice: gen.Choice) -> list[Block]:
    blocks: list[Block] = [answers.ThinkingBlock(thinking=choice.reasoning)] if choice.reasoning else []
    if choice.text or not choice.calls:
        blocks.append(answers.TextBlock(text=choice.text))
    uses = [answers.ToolUseBlock(gen.new_id("toolu"), call.name, call.read_arguments()) for call in choice.calls]
    return blocks + uses


def message_end(choice: gen.Choice) -> answers.MessageEnd:
    """Why a message ended, in Anthropic's words."""
    if choice.finish_reason != "stop":
        return answers.MessageEnd(stop_reason="max_tokens")
    if isinstance(choice.stop_reason, str):
        return answers.MessageEnd(stop_reason="stop_sequence", stop_sequence=choice.stop_reason)
    return answers.MessageEnd(stop_reason="tool_use" if choice.calls else "end_turn")


def message_usage(generation: gen.Generation) -> answers.MessageUsage:
    num_cached, num_output = generation.num_cached, generation.num_output
    num_input = len(generation.prompt_ids) - num_cached
    return answers.MessageUsage(input_tokens=num_input, cache_read_input_tokens=num_cached, output_tokens=num_output)


class MessageEvents(EventWriter):
    """A message in its events: blocks of text and of calls, one after the other."""

    def __init__(self, generation: gen.Generation) -> None:
        self._generation = generation
        self._num_blocks = 0
        self._open: type[Block] | None = None  # the type of the open block

    def start(self) -> bytes:
        usage = message_usage(self._generation)
        usage.output_tokens = 0
        message = answers.MessageObject(id=gen.new_id("msg"), model=self._generation.text.card.id, usage=usage)
        return named_event(answers.MessageStart(message=message))

    def delta(self, delta: gen.ChoiceDelta) -> bytes:
        written = b""
        for part in delta.parts:
            if part.kind == "text":
                written += self._write_in(answers.TextBlock, answers.BlockText(text=part.text))
            elif part.kind == "reasoning":
                written += self._write_in(answers.ThinkingBlock, answers.BlockThinking(thinking=part.text))
            elif part.kind == "name":
                written += self._start_block(answers.ToolUseBlock(id=gen.new_id("toolu"), name=part.text))
            else:
                written += self._write(answers.BlockInput(partial_json=part.text))
        return written

    def _write_in(self, block: type[answers.TextBlock] | type[answers.ThinkingBlock], delta: Delta) -> bytes:
        """A delta of a block of this type, which is started if another one is open."""
        started = b"" if self._open is block else self._start_block(block())
        return started + self._write(delta)

    def _write(self, delta: Delta) -> bytes:
        return named_event(answers.ContentBlockDelta(index=self._num_blocks - 1, delta=delta))

    def _start_block(self, block: Block) -> bytes:
        written, index = self._stop_block(), self._num_blocks
        self._num_blocks += 1
        self._open = type(block)
        return written + named_event(answers.ContentBlockStart(index=index, content_block=block))

    def _stop_block(self) -> bytes:
        was_open, self._open = self._open, None
        return named_event(answers.ContentBlockStop(index=self._num_blocks - 1)) if was_open else b""

    def end(self) -> bytes:
        written = b"" if self._num_blocks else self._start_block(answers.TextBlock())
        end = answers.MessageDelta(
            delta=message_end(self._generation.choices[0]), usage=message_usage(self._generation)
        )
        return written + self._stop_block() + named_event(end) + named_event(answers.MessageStop())

    def error(self, error: Exception) -> bytes:
        return named_event(failure_body(error, ANTHROPIC_PATH))
