"""/v1/responses, in OpenAI's form. Responses are not stored: every request brings its whole conversation."""

from __future__ import annotations

import time
from typing import Annotated, Any, ClassVar

import msgspec
from pydantic import Field
from starlette.requests import Request
from starlette.types import ASGIApp

from archerfish.errors import InvalidInputError
from archerfish.serve import answers, bodies
from archerfish.serve import generation as gen
from archerfish.serve.bodies import UNUSED, bounded, check_text, checked
from archerfish.serve.errors import (
    Error,
    UnsupportedParameterError,
    failure_body,
    json_response,
    json_type,
    named_event,
)
from archerfish.serve.http import BodyRoute, EventStream, EventWriter
from archerfish.serve.wire import Logprob

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"
STATELESS = "This server keeps no responses: send the whole conversation in input"
Item = answers.MessageItem | answers.FunctionCallItem | answers.ReasoningItem


def read_input(value: Any, where: str) -> list[dict[str, Any]]:
    """Items of input as a conversation; calls in a row become one message of the assistant."""
    if isinstance(value, str):
        return [{"role": "user", "content": check_text(value, where)}]
    messages: list[dict[str, Any]] = []
    names: dict[str, str] = {}  # names of functions by the ids of their calls
    thoughts = ""  # of the message that follows
    for index, item in enumerate(bodies.check_items(value, where, "items")):
        place = f"{where}[{index}]"
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind == "message":
            known = {key: item[key] for key in item if key not in ("type", "id", "status", "phase")}
            messages.append(bodies.read_message(known, place, names))
        elif kind == "reasoning":
            parts = bodies.check_type(item.get("content") or [], list, f"{place}.content", "a list of parts")
            thoughts = "\n".join(
                part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)
            )
            continue
        elif kind == "function_call":
            call_id, name = (
                check_text(item.get("call_id"), f"{place}.call_id"),
                check_text(item.get("name"), f"{place}.name"),
            )
            names[call_id] = name
            call = bodies.template_call(call_id, name, check_text(item.get("arguments"), f"{place}.arguments"))
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            result = {"role": "tool", "content": item.get("output"), "tool_call_id": item.get("call_id")}
            messages.append(bodies.read_message(result, place, names))
        else:
            found = f"of type {kind!r}" if isinstance(kind, str) else json_type(item)
            known_items = "messages, reasoning, function_call and function_call_output are"
            raise InvalidInputError(f"{place} is {found}, which is not supported: {known_items}.")
        if thoughts and messages[-1]["role"] == "assistant":
            messages[-1]["reasoning_content"], thoughts = thoughts, ""
    return messages


class ResponseStreamOptions(bodies.Body):
    """stream_options."""

    include_obfuscation: bool = Field(False, description=UNUSED)


class ResponsesBody(bodies.ConversationBody):
    """POST /v1/responses."""

    format_param: ClassVar[str] = "text"
    unsupported: ClassVar[bodies.Values] = {"background": (False,), "conversation": (), "image": (), "prompt": ()}
    ignored: ClassVar[bodies.Values] = {
        **bodies.IGNORED,
        "access_programs": (),
        "context_management": (),
        "max_tool_calls": (),
        "truncation": ("disabled",),
    }

    input: Annotated[
        list[dict[str, Any]], checked(read_input, {"anyOf": [bodies.STRING, {**bodies.OBJECTS, "minItems": 1}]})
    ]
    instructions: str | None = None
    max_output_tokens: int | None = bounded(minimum=1)
    stop: bodies.Stop = None
    text: dict[str, Any] | None = Field(None, description="format: text, json_object or json_schema.")
    include: bodies.StringList | None = Field(None, description=f"{LOGPROBS}; {ENCRYPTED} has no effect.")
    metadata: dict[str, Any] | None = Field(None, description="Has no effect; the answer repeats it.")
    reasoning: dict[str, Any] | None = Field(None, description="effort: for chat templates that read it.")
    previous_response_id: str | None = None
    stream_options: ResponseStreamOptions | None = Field(None, description=UNUSED)

    def effort(self) -> tuple[str, str]:
        stated = (self.reasoning or {}).get("effort")
        return "reasoning", "" if stated is None else check_text(stated, "reasoning.effort")

    def sampling(self) -> tuple[dict[str, Any], dict[str, str]]:
        if self.previous_response_id is not None:
            raise UnsupportedParameterError(f"{STATELESS}, instead of previous_response_id.", "previous_response_id")
        values, names = super().sampling()
        values["max_tokens"] = self.max_output_tokens
        if LOGPROBS in (self.include or ()) or self.top_logprobs:
            values["logprobs"] = self.top_logprobs or 0
        return values, {**names, "max_tokens": "max_output_tokens", "logprobs": "top_logprobs"}


class ResponsesRoutes:
    """The responses route."""

    def __init__(self, service: gen.TextService) -> None:
        self.service = service
        events = answers.RESPONSE_EVENTS
        self.routes = [BodyRoute("/v1/responses", self.responses, ResponsesBody, answers.ResponseObject, events)]

    async def responses(self, request: Request, body: ResponsesBody) -> ASGIApp:
        """The answer to a conversation, as items."""
        unused = [f"include of {name!r}" for name in body.include or () if name not in (LOGPROBS, ENCRYPTED)]
        if (body.text or {}).get("verbosity") not in (None, "medium"):
            unused.append("text.verbosity")
        if unused:
            request.state.remarks.append(bodies.without_effect(*unused))
        system = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
        generation = await self.service.prepare_chat(request, body, [*system, *body.input], "input")
        response = empty_response(body, generation)
        if body.stream:
            return EventStream(self.service, request, [generation], ResponseEvents(generation, response))
        await self.service.complete(request, generation)
        [choice] = generation.choices
        output: list[Item] = [call_item(call) for call in choice.calls]
        if choice.text or not choice.calls:
            part = answers.OutputTextPart(text=choice.text, logprobs=generation.chosen_logprobs(choice.logprobs))
            output.insert(0, answers.MessageItem(id=gen.new_id("msg"), status="completed", content=[part]))
        if choice.reasoning:
            thoughts = [answers.ReasoningText(text=choice.reasoning)]
            output.insert(0, answers.ReasoningItem(id=gen.new_id("rs"), status="completed", content=thoughts))
        output[-1].status = status_of(choice)
        return json_response(ended(response, generation, output))


def empty_response(body: ResponsesBody, generation: gen.Generation) -> answers.ResponseObject:
    """The response before anything is generated."""
    choice = body.tool_choice or "auto"
    return answers.ResponseObject(
        id=gen.new_id("resp"),
        created_at=int(time.time()),
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        model=generation.text.card.id,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        temperature=generation.params.temperature,
        text=body.text or {"format": {"type": "text"}},
        top_p=generation.params.top_p,
        tool_choice={"type": "function", "name": choice[1:]} if choice[0] == "=" else choice,
        tools=[{"type": "function", "strict": False, **tool["function"]} for tool in body.tools],
        metadata=body.metadata or {},
    )


def ended(response: answers.ResponseObject, generation: gen.Generation, output: list[Item]) -> answers.ResponseObject:
    """The whole response."""
    num_input, num_output = len(generation.prompt_ids), generation.num_output
    usage = answers.ResponseUsage(
        input_tokens=num_input,
        input_tokens_details=answers.InputTokensDetails(cached_tokens=generation.num_cached),
        output_tokens=num_output,
        output_tokens_details=answers.OutputTokensDetails(generation.num_reasoning),
        total_tokens=num_input + num_output,
    )
    status = status_of(generation.choices[0])
    details = None if status == "completed" else answers.IncompleteDetails()
    return msgspec.structs.replace(response, status=status, incomplete_details=details, output=output, usage=usage)


def status_of(choice: gen.Choice) -> answers.ItemStatus:
    """The status of a response, and of its last item."""
    return "completed" if choice.finish_reason in (None, "stop") else "incomplete"


def call_item(call: gen.PendingCall) -> answers.FunctionCallItem:
    item_id = gen.new_id("fc")
    name = call.name
    arguments = call.arguments
    return answers.FunctionCallItem(id=item_id, call_id=call.id, name=name, arguments=arguments, status="completed")


class ResponseEvents(EventWriter):
    """A response in its events: items are added, grow and are done, one after the other."""

    def __init__(self, generation: gen.Generation, response: answers.ResponseObject) -> None:
        self._generation, self._response = generation, response
        self._number = 0
        self._output: list[Item] = []
        self._item: Item | None = None  # the open one, which is the last of the output
        self._texts: list[str] = []  # of the open message or reasoning
        self._logprobs: list[Logprob] = []
        self._call: gen.PendingCall | None = None  # of the open item, if that is a call

    def start(self) -> bytes:
        return self._status("response.created", self._response) + self._status("response.in_progress", self._response)

    def delta(self, delta: gen.ChoiceDelta) -> bytes:
        logprobs, written = delta.logprobs, b""
        for part in delta.parts:
            if part.kind == "text":
                written += self._write_text(part.text, logprobs)
                logprobs = None
            elif part.kind == "reasoning":
                written += self._write_reasoning(part.text)
            elif part.kind == "name":
                self._call = delta.choice.calls[part.index]
                item = call_item(self._call)
                item.arguments, item.status = "", "in_progress"
                written += self._open(item)
            else:
                written += self._member("function_call_arguments.delta", delta=part.text)
        return written

    def _write_text(self, text: str, logprobs: list[Logprob] | None) -> bytes:
        written = b"" if isinstance(self._item, answers.MessageItem) else self._open_message()
        self._texts.append(text)
        self._logprobs += logprobs or ()
        shown = self._generation.chosen_logprobs(logprobs)
        return written + self._member("output_text.delta", content_index=0, delta=text, logprobs=shown)

    def _write_reasoning(self, text: str) -> bytes:
        written = b""
        if not isinstance(self._item, answers.ReasoningItem):
            written = self._open(answers.ReasoningItem(id=gen.new_id("rs"), status="in_progress"))
            written += self._member("content_part.added", content_index=0, part=answers.ReasoningText())
        self._texts.append(text)
        return written + self._member("reasoning_text.delta", content_index=0, delta=text)

    def _open(self, item: Item) -> bytes:
        written = self._close()
        self._item = item
        self._texts = []
        self._logprobs = []
        self._output.append(item)
        return written + self._item_event("added")

    def _open_message(self) -> bytes:
        written = self._open(answers.MessageItem(id=gen.new_id("msg"), status="in_progress"))
        return written + self._member("content_part.added", content_index=0, part=answers.OutputTextPart())

    def _close(self, status: answers.ItemStatus = "completed") -> bytes:
        """The events at the end of the open item."""
        item, self._item = self._item, None
        if item is None:
            return b""
        item.status = status
        if isinstance(item, answers.MessageItem):
            part = answers.OutputTextPart(
                text="".join(self._texts), logprobs=self._generation.chosen_logprobs(self._logprobs)
            )
            item.content = [part]
            written = self._member("output_text.done", content_index=0, text=part.text, logprobs=part.logprobs)
            written += self._member("content_part.done", content_index=0, part=part)
        elif isinstance(item, answers.ReasoningItem):
            thoughts = answers.ReasoningText(text="".join(self._texts))
            item.content = [thoughts]
            written = self._member("reasoning_text.done", content_index=0, text=thoughts.text)
            written += self._member("content_part.done", content_index=0, part=thoughts)
        else:
            item.arguments = "" if self._call is None else self._call.arguments
            written = self._member("function_call_arguments.done", arguments=item.arguments, name=item.name)
        return written + self._item_event("done")

    def end(self) -> bytes:
        written = b"" if self._output else self._open_message()
        written += self._close(status_of(self._generation.choices[0]))
        whole = ended(self._response, self._generation, self._output)
        return written + self._status(f"response.{whole.status}", whole)

    def error(self, error: Exception) -> bytes:
        body = failure_body(error)
        assert isinstance(body, Error)
        code, message = body.error.code, body.error.message
        failure = answers.ResponseFailure(code=code, message=message)
        failed = msgspec.structs.replace(self._response, status="failed", error=failure)
        event = answers.ResponseErrorEvent("error", self._number, code=code, message=message, param=body.error.param)
        return self._event(event) + self._status("response.failed", failed)

    def _status(self, kind: str, response: answers.ResponseObject) -> bytes:
        return self._event(answers.ResponseStatusEvent(kind, self._number, response=response))

    def _item_event(self, change: str) -> bytes:
        place = len(self._output) - 1
        return self._event(
            answers.OutputItemEvent(f"response.output_item.{change}", self._number, place, self._output[-1])
        )

    def _member(self, change: str, **members: Any) -> bytes:
        item_id, place = self._output[-1].id, len(self._output) - 1
        return self._event(answers.ItemMemberEvent(f"response.{change}", self._number, item_id, place, **members))

    def _event(self, event: answers.ResponseEvent) -> bytes:
        self._number += 1
        return named_event(event)
