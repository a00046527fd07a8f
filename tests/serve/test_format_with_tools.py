"""A format together with tools: the model calls a tool or answers in the form, and tool_choice decides which is allowed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.types import ASGIApp, Receive, Scope, Send

from archerfish.params import SamplingParams
from archerfish.serve.client import RemoteError
from archerfish.serve.wire import GenerationRequest
from archerfish.text.grammar import CompiledGrammar
from archerfish.text.tool_calls import STYLES, grammar_for_tools
from scripts.check_json_schemas import byte_vocabulary, takes

from .fake_backend import FakeBackend, error_of, fake_app, post

CHAT, HI = "/v1/chat/completions", [{"role": "user", "content": "Hi"}]
SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "weather", "parameters": CITY}
CLOCK = {"name": "clock", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": WEATHER}, {"type": "function", "function": CLOCK}]
FORMAT: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "p", "schema": SCHEMA}}
FORM = '{"age": 3}'
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
CALLS = f'{CALL}\n<tool_call>\n{{"name": "clock", "arguments": {{}}}}\n</tool_call>'
NAMED = {"type": "function", "function": {"name": "clock"}}
VOCABULARY = byte_vocabulary()


def texts_allowed(params: dict[str, Any], *texts: str) -> list[bool]:
    """Which of these texts the grammar of a request allows."""
    read = SamplingParams(grammar=params["grammar"]).grammar
    assert read is not None
    grammar = CompiledGrammar(VOCABULARY, read["kind"], read["value"])
    return [takes(grammar, text) for text in texts]


@pytest.mark.parametrize(("options", "allowed"), [
    ({}, [True, True, True, False]),
    ({"tool_choice": "auto", "parallel_tool_calls": False}, [True, True, False, False]),
    ({"tool_choice": "none"}, [True, False, False, False]),
    ({"tool_choice": "required"}, [False, True, False, False]),
    ({"tool_choice": "required", "parallel_tool_calls": True}, [False, True, True, False]),
    ({"tool_choice": NAMED}, [False, False, False, False]),
])  # fmt: skip
@pytest.mark.parametrize("route", [CHAT, "/v1/responses"])
def test_tool_choice_decides_what_is_allowed(route: str, options: dict[str, Any], allowed: list[bool]) -> None:
    backend = FakeBackend(FORM)
    if route == CHAT:
        body: dict[str, Any] = {"messages": HI, "tools": TOOLS, "response_format": FORMAT}
    else:
        flat = {"type": "json_schema", "name": "p", "schema": SCHEMA}
        tools = [{"type": "function", **WEATHER}, {"type": "function", **CLOCK}]
        body = {"input": "Hi", "tools": tools, "text": {"format": flat}}
        if options.get("tool_choice") == NAMED:
            options = {"tool_choice": {"type": "function", "name": "clock"}}
    answer = post(backend, route, {**body, **options})
    assert answer.status_code == 200, answer.text
    assert texts_allowed(backend.params(), FORM, CALL, CALLS, "Hello") == allowed
    if options.get("tool_choice") not in (None, "auto", "none", "required"):
        assert texts_allowed(backend.params(), '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>') == [True]


@pytest.mark.parametrize("style", STYLES)
def test_every_style_allows_a_call_or_the_form(style: str) -> None:
    grammar = grammar_for_tools(style, TOOLS, "auto", is_parallel=True, answer=SCHEMA)
    call = '{"name": "weather", "arguments": {"city": "Rome"}}'
    written = {"hermes": CALL, "llama3": call.replace("arguments", "parameters"), "mistral": f"[{call}]"}[style]
    assert grammar is not None
    assert texts_allowed({"grammar": grammar}, FORM, written, "{}", "Hello") == [True, True, False, False]


def test_json_object_goes_together_with_tools() -> None:
    backend = FakeBackend('{"anything": [1]}')
    answer = post(backend, CHAT, {"messages": HI, "tools": TOOLS, "response_format": {"type": "json_object"}}).json()
    assert answer["choices"][0]["message"]["content"] == '{"anything": [1]}'
    assert texts_allowed(backend.params(), '{"a": {}}', CALL, "[]") == [True, True, False]


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("reply", [FORM, CALLS])
def test_an_answer_is_the_form_or_calls(reply: str, is_stream: bool) -> None:
    body = {"messages": HI, "tools": TOOLS, "response_format": FORMAT, "stream": is_stream}
    answer = post(FakeBackend(reply), CHAT, body)
    content, names, reasons = "", [], []
    if is_stream:
        lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
        messages = [(choice["delta"], choice) for line in lines for choice in json.loads(line)["choices"]]
    else:
        messages = [(choice["message"], choice) for choice in answer.json()["choices"]]
    for message, choice in messages:
        content += message.get("content") or ""
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        names += [call["name"] for call in calls if call.get("name")]
        reasons += [choice["finish_reason"]] if choice.get("finish_reason") else []
    expected = (FORM, [], ["stop"]) if reply == FORM else ("", ["weather", "clock"], ["tool_calls"])
    assert (content, names, reasons) == expected


# Schemas that cannot be followed


def with_schema(schema: dict[str, Any], **members: Any) -> dict[str, Any]:
    stated = {"type": "json_schema", "json_schema": {"name": "p", "schema": schema, **members}}
    return {"messages": HI, "response_format": stated}


UNIQUE = {"type": "object", "properties": {"tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True}}}


def test_a_schema_that_cannot_be_followed_is_refused_by_name() -> None:
    for members in ({}, {"strict": True}):
        error = error_of(post(FakeBackend(), CHAT, with_schema(UNIQUE, **members)))
        assert error["param"] == "response_format"
        assert "uniqueItems at schema.properties.tags" in error["message"]


class Remarks:
    """Middleware that keeps the remarks on requests."""

    def __init__(self, app: ASGIApp, kept: list[str]) -> None:
        self.app, self.kept = app, kept

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("state", {}).setdefault("remarks", [])
        await self.app(scope, receive, send)
        self.kept += scope["state"]["remarks"]


def remarks_on(backend: FakeBackend, route: str, body: dict[str, Any]) -> list[str]:
    kept: list[str] = []

    def with_remarks(backend: FakeBackend) -> Starlette:
        app = fake_app(backend)
        app.add_middleware(Remarks, kept=kept)
        return app

    answer = post(backend, route, body, app=with_remarks)
    assert answer.status_code == 200, answer.text
    return kept


def test_a_format_that_is_not_strict_leaves_out_what_cannot_be_followed() -> None:
    backend = FakeBackend('{"tags": ["a", "a"]}')
    assert remarks_on(backend, CHAT, with_schema(UNIQUE, strict=False)) == ["uniqueItems at schema.properties.tags is ignored"]
    assert texts_allowed(backend.params(), '{"tags": ["a", "a"]}', '{"tag": []}') == [True, False]
    flat = {"type": "json_schema", "name": "p", "schema": UNIQUE, "strict": False}
    assert remarks_on(backend, "/v1/responses", {"input": "Hi", "text": {"format": flat}}) != []


def test_remarks_say_what_is_not_followed_exactly() -> None:
    overlapping = {"oneOf": [{"type": "string", "pattern": "a"}, {"type": "string", "pattern": "b"}]}
    [remark] = remarks_on(FakeBackend('"ab"'), CHAT, with_schema(overlapping))
    assert remark == "oneOf at schema is followed as anyOf: its alternatives overlap"
    tool = {"type": "function", "function": {"name": "label", "parameters": UNIQUE}}
    forced = {"messages": HI, "tools": [tool], "tool_choice": "required"}
    [remark] = remarks_on(FakeBackend(CALL), CHAT, forced)
    assert remark == "the tool 'label': uniqueItems at schema.properties.tags is ignored"


def test_errors_of_the_engine_about_the_form_name_the_format() -> None:
    def refuse(request: GenerationRequest) -> str:
        lines = str(request.params["grammar"]["value"]).splitlines()
        line = 1 + next(place for place, text in enumerate(lines) if text.startswith("answer: "))
        raise RemoteError(f"The grammar of kind lark is not valid: at {line}(1): no.", code="invalid_input", status=400)

    body = {**with_schema(SCHEMA), "tools": TOOLS}
    error = error_of(post(FakeBackend(refuse), CHAT, body))
    assert (error["param"], error["message"][:40]) == ("response_format", "The schema of the format cannot be follo")
