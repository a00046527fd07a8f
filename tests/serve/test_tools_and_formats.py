"""Tools and formats of answers: what of them is refused, and tools together with a format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.types import ASGIApp, Receive, Scope, Send

from archerfish.errors import InvalidInputError
from archerfish.params import SamplingParams
from archerfish.serve.client import RemoteError
from archerfish.serve.formats import TYPES, ToolUse, check_schema, response_grammar
from archerfish.serve.wire import GenerationRequest
from archerfish.text.grammar import CompiledGrammar
from archerfish.text.tool_calls import STYLES, grammar_for_tools, tool_prompt
from scripts.check_json_schemas import byte_vocabulary, takes
from tests.text.test_tool_calls import SMOLLM2, WRITTEN
from tests.text.test_tool_calls import WEATHER_TOOL as WEATHER

from .client import host_with, serving
from .fake_backend import CHAT, HI, TEMPLATE, FakeBackend, error_of, fake_app, ids, post, save_model
from .hosting import add_llm

REGEX = '{"type": "regex", "regex": "[0-9]+"}'


@pytest.mark.parametrize(
    ("stated", "said"),
    [
        ({"regex": "a+"}, 'regex, grammar. An example: {"type": "json_schema"'),
        ({"type": "regex", "pattern": "a+"}, f"must have a string in its member 'regex': {REGEX}."),
        ({"type": "regex", "regex": {"pattern": "a+"}}, f"must have a string in its member 'regex': {REGEX}."),
        ({"type": "regex", "regex": "a", "schema": {"type": "object"}}, "of type regex has no member 'schema'."),
        ({"type": "text", "regex": "a+"}, f"of type text has no member 'regex'. For a regex: {REGEX}."),
        ({"type": "json_object", "regex": "a+"}, f"of type json_object has no member 'regex'. For a regex: {REGEX}."),
        ({"type": "json_schema", "json_schema": {"regex": "a+"}}, 'must hold a schema, which is an object: {"type"'),
        (
            {"type": "json_schema", "json_schema": {"schema": {}, "regex": "a+"}},
            f"response_format.json_schema has no member 'regex'. For a regex: {REGEX}.",
        ),
        (
            {"type": "json_schema", "json_schema": {"schema": {}}, "regex": "a"},
            "of type json_schema has no member 'regex'.",
        ),
        ({"type": "json_schema", "json_schema": {"schema": {}, "scheme": 1}}, "Did you mean 'schema'?"),
        (
            {"type": "json_schema", "schema": {"type": "objct"}},
            "response_format.schema.type must be one of string, number",
        ),
        ({"type": "regexp", "regexp": "a"}, "grammar, not 'regexp'. Did you mean 'regex'?"),
        ({"type": "yaml"}, "grammar, not 'yaml'."),
        ({"type": ["regex"]}, "object whose type is one of text,"),
        ("regex", "must be an object whose type is one of text,"),
    ],
)
def test_misplaced_format_member(stated: Any, said: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        response_grammar(stated, "response_format")
    assert said in str(caught.value) and "Known: grammar" not in str(caught.value)  # names are listed once
    if isinstance(stated, dict):
        assert (
            error_of(post(FakeBackend(), CHAT, {"messages": HI, "response_format": stated}))["param"]
            == "response_format"
        )


def test_empty_members_of_a_format_are_ignored() -> None:
    assert response_grammar({"type": "text", "regex": None, "schema": {}}, "text") is None
    flat = {"type": "json_schema", "json_schema": None, "schema": {"type": "object"}, "name": "x", "strict": True}
    assert response_grammar(flat, "text") == {"kind": "json_schema", "value": {"type": "object"}}


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"properties": {"city": {"type": "strin"}}}, "properties.city.type must be one of string, number, integer"),
        ({"properties": {"city": {"type": "strin"}}}, "not 'strin'. Did you mean 'string'?"),
        ({"properties": {"type": {"type": ["string", 3]}}}, "properties.type.type must be one of"),
        (
            {"properties": {"city": "string"}},
            "properties.city must be a JSON schema, which is an object, not a string.",
        ),
        ({"properties": ["city"]}, "properties must be an object of schemas by name, not an array."),
        ({"required": True}, "required must be a list of names of properties, not a boolean."),
        ({"required": ["a", 1]}, "required must be a list of names"),
        ({"enum": "a"}, "enum must be a list of values"),
        ({"items": {"anyOf": []}}, "items.anyOf must be a list of schemas that is not empty, not an array."),
        (
            {"anyOf": [{}, {"items": [{}, 4]}]},
            "anyOf[1].items[1] must be a JSON schema, which is an object, not a number.",
        ),
        ({"$defs": {"x": {"pattern": 3}}}, "$defs.x.pattern must be a string, not 3."),
        ({"maxLength": -1}, "maxLength must be a whole number of at least 0, not -1."),
        ({"minimum": "1"}, "minimum must be a number, not '1'."),
        ({"additionalProperties": 0}, "additionalProperties must be"),
    ],
)
@pytest.mark.parametrize(
    ("route", "place"),
    [(CHAT, "[1].function.parameters"), ("/v1/responses", "[1].parameters"), ("/v1/messages", "[1].input_schema")],
)
def test_wrong_tool_schema_error_names_the_keyword(route: str, place: str, schema: dict[str, Any], said: str) -> None:
    answer = post(FakeBackend(), route, with_tools(route, {}, schema))
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert message.startswith(f"The tool 'g': tools{place}.")
    assert said in message


def with_tools(route: str, *schemas: dict[str, Any]) -> dict[str, Any]:
    """A request of a route with tools f, g and so on."""
    tools: list[dict[str, Any]]
    if route == CHAT:
        tools = [
            {"type": "function", "function": {"name": n, "parameters": s}} for n, s in zip("fg", schemas, strict=False)
        ]
        return {"messages": HI, "tools": tools}
    if route == "/v1/responses":
        tools = [{"type": "function", "name": n, "parameters": s} for n, s in zip("fg", schemas, strict=False)]
        return {"input": "Hi", "tools": tools}
    tools = [{"name": n, "input_schema": s} for n, s in zip("fg", schemas, strict=False)]
    return {"messages": HI, "tools": tools, **({"max_tokens": 5} if route == "/v1/messages" else {})}


def function(**members: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **members}}


@pytest.mark.parametrize(
    ("tool", "said"),
    [
        ({"name": "f", "input_schema": {}}, 'must be an object of type function: {"type": "function", "function"'),
        ({"type": "function", "function": "f"}, "tools[0].function must be an object, as in {"),
        (function(input_schema={"type": "object"}), "has no member 'input_schema'"),
        (function(parameters={"type": "string"}), "must be a schema of type \"object\", not type 'string'"),
        (function(parameters=True), 'must be a schema of type "object", not a boolean'),
        (function(parameters=[1]), "must be a JSON schema, which is an object, not an array"),
    ],
)
def test_wrong_tool_error_shows_an_example(tool: Any, said: str) -> None:
    error = error_of(post(FakeBackend(), CHAT, {"messages": HI, "tools": [tool]}))
    assert error["param"] == "tools"
    assert said in error["message"]


KEYWORDS = st.sampled_from(["type", "properties", "items", "anyOf", "required", "enum", "$defs", "maxLength", "x"])
JSONS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYWORDS, inner, max_size=4),
)


@given(JSONS)
def test_any_json_can_be_checked_as_a_schema(schema: Any) -> None:
    try:
        check_schema(schema, "here")
    except InvalidInputError as error:
        assert error.message.startswith("here") and not isinstance(schema, bool)


def schemas() -> st.SearchStrategy[Any]:
    leaves = st.booleans() | st.fixed_dictionaries({"type": st.sampled_from(TYPES)})
    return st.recursive(
        leaves,
        lambda inner: st.fixed_dictionaries(
            {},
            optional={
                "type": st.lists(st.sampled_from(TYPES), min_size=1),
                "properties": st.dictionaries(st.text(), inner),
                "items": inner,
                "anyOf": st.lists(inner, min_size=1),
                "required": st.lists(st.text()),
                "enum": st.lists(st.integers()),
                "not": inner,
            },
        ),
    )


@settings(max_examples=30, deadline=None)
@given(schemas())
def test_valid_schemas_have_no_problem(schema: Any) -> None:
    check_schema(schema, "here")


def test_deeply_nested_schema_is_checked() -> None:
    for levels, said in ((100, "not 'zzz'"), (5_000, "nested too deeply")):
        schema: dict[str, Any] = {"type": "zzz"}
        for _ in range(levels):
            schema = {"items": schema}
        with pytest.raises(InvalidInputError, match=said):
            check_schema(schema, "here")


# Schemas that are well formed, but cannot be forced


def tool(name: str, **properties: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


def test_errors_not_about_grammars_are_unchanged() -> None:
    error = RemoteError("The engine process died.", code="unavailable", status=503)
    assert ToolUse.choose("hermes", [tool("f")], "required", None, None).explain(error) is error


FORCED: list[tuple[Any, Any, str]] = [
    ({"type": "number", "multipleOf": 1234567.1234567}, "required", "of the tool 'g' cannot be followed: Value for"),
    ({"$ref": "#/$defs/x"}, "required", "of the tool 'g' cannot be followed: $ref names '#/$defs/x', which is not"),
    ({"pattern": "(?=a)"}, {"type": "function", "function": {"name": "g"}}, "The schema of the tool 'g' cannot"),
    ({"pattern": "(?=a)"}, "required", "The schema of a tool cannot be followed: look-around"),
]


@pytest.mark.anyio
async def test_error_of_a_forced_schema_names_its_tool(tmp_path: Path) -> None:
    host = host_with(tmp_path)
    engine = add_llm(host, tmp_path, has_text=True, max_len=2048)
    (Path(engine.facts.directory) / "chat_template.jinja").write_text(TEMPLATE)

    async with serving(host) as client:
        for wrong, choice, said in FORCED:
            body = {"messages": HI, "max_tokens": 5, "tools": [tool("f"), tool("g", a=wrong)], "tool_choice": choice}
            for stream in (False, True):
                answer = await client.post(CHAT, json={**body, "stream": stream})
                error = error_of(answer)
                assert (answer.status_code, error["param"]) == (400, "tools"), answer.text
                assert said in error["message"]
                assert 'tool_choice "auto"' in error["message"]


# Tools with a chat template that does not support them


FUNCTION = WEATHER["function"]
CALL_ID = "call_1"
WITH_TOOLS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [
            {"role": "user", "content": "Hi"},
            {
                "role": "assistant",
                "tool_calls": [
                    {
                        "id": CALL_ID,
                        "type": "function",
                        "function": {"name": "weather", "arguments": '{"city": "Rome"}'},
                    },
                ],
            },
            {"role": "tool", "content": "22 degrees", "tool_call_id": CALL_ID},
        ],
        "tools": [WEATHER],
    },
    "/v1/responses": {
        "input": [
            {"role": "user", "content": "Hi"},
            {"type": "function_call", "call_id": CALL_ID, "name": "weather", "arguments": '{"city": "Rome"}'},
            {"type": "function_call_output", "call_id": CALL_ID, "output": "22 degrees"},
        ],
        "tools": [{"type": "function", **FUNCTION}],
    },
    "/v1/messages": {
        "max_tokens": 200,
        "messages": [
            {"role": "user", "content": "Hi"},
            {
                "role": "assistant",
                "content": [
                    {"type": "tool_use", "id": CALL_ID, "name": "weather", "input": {"city": "Rome"}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": CALL_ID, "content": "22 degrees"}]},
        ],
        "tools": [
            {
                "name": "weather",
                "description": FUNCTION["description"],
                "input_schema": FUNCTION["parameters"],
            }
        ],
    },
}
HISTORY = (
    f"<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n{WRITTEN}<|im_end|>\n"
    "<|im_start|>user\n<tool_response>\n22 degrees\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
)


@pytest.fixture
def backend(tmp_path: Path) -> FakeBackend:
    made = FakeBackend(f"I ask.\n{WRITTEN}", max_length=4000)
    made.directory = save_model(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(SMOLLM2)
    return made


def text_prompt_of(backend: FakeBackend) -> str:
    return bytes(backend.requests[-1].token_ids or []).decode()


@pytest.mark.parametrize("route", WITH_TOOLS)
def test_tools_are_described_and_calls_found(backend: FakeBackend, route: str) -> None:
    answer = post(backend, route, WITH_TOOLS[route])
    assert answer.status_code == 200, answer.text
    assert '"weather"' in answer.text
    assert "<tool_call>" not in answer.text
    assert text_prompt_of(backend) == f"<|im_start|>system\n{tool_prompt([WEATHER])}<|im_end|>\n{HISTORY}"


@pytest.mark.parametrize("route", WITH_TOOLS)
def test_tool_choice_none_leaves_out_the_description(backend: FakeBackend, route: str) -> None:
    choice: Any = {"type": "none"} if route == "/v1/messages" else "none"
    answer = post(backend, route, {**WITH_TOOLS[route], "tool_choice": choice})
    assert "<tool_call>" in answer.text
    assert "# Tools" not in text_prompt_of(backend)
    assert text_prompt_of(backend).endswith(HISTORY)


def test_count_tokens_includes_the_description(backend: FakeBackend) -> None:
    body = {key: value for key, value in WITH_TOOLS["/v1/messages"].items() if key != "max_tokens"}
    count = post(backend, "/v1/messages/count_tokens", body).json()["input_tokens"]
    post(backend, "/v1/messages", WITH_TOOLS["/v1/messages"])
    assert count == len(backend.requests[-1].token_ids or []) > len(ids(tool_prompt([WEATHER])))


def test_strict_tools_do_not_change_the_prompt(backend: FakeBackend) -> None:
    tool = {"type": "function", "function": {**FUNCTION, "strict": True}}
    body = {**WITH_TOOLS[CHAT], "tools": [tool]}
    assert post(backend, CHAT, body).status_code == 200
    assert text_prompt_of(backend) == f"<|im_start|>system\n{tool_prompt([WEATHER])}<|im_end|>\n{HISTORY}"
    answer = post(backend, "/v1/cache/explain", {"messages": body["messages"], "tools": [tool]})
    assert answer.status_code == 200, answer.text


def test_unknown_template_name_is_refused(backend: FakeBackend) -> None:
    for name in ("other", ["default"], {"a": 1}):
        body = {**WITH_TOOLS["/v1/chat/completions"], "chat_template_kwargs": {"template_name": name}}
        assert post(backend, "/v1/chat/completions", body).status_code == 400


# A format together with tools: the model calls a tool or answers in the form, and tool_choice decides which is allowed


SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CITY_WEATHER = {"name": "weather", "parameters": CITY}
CLOCK = {"name": "clock", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": CITY_WEATHER}, {"type": "function", "function": CLOCK}]
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


@pytest.mark.parametrize(
    ("options", "allowed"),
    [
        ({}, [True, True, True, False]),
        ({"tool_choice": "auto", "parallel_tool_calls": False}, [True, True, False, False]),
        ({"tool_choice": "none"}, [True, False, False, False]),
        ({"tool_choice": "required"}, [False, True, False, False]),
        ({"tool_choice": "required", "parallel_tool_calls": True}, [False, True, True, False]),
        ({"tool_choice": NAMED}, [False, False, False, False]),
    ],
)
@pytest.mark.parametrize("route", [CHAT, "/v1/responses"])
def test_tool_choice_decides_what_is_allowed(route: str, options: dict[str, Any], allowed: list[bool]) -> None:
    backend = FakeBackend(FORM)
    if route == CHAT:
        body: dict[str, Any] = {"messages": HI, "tools": TOOLS, "response_format": FORMAT}
    else:
        flat = {"type": "json_schema", "name": "p", "schema": SCHEMA}
        tools = [{"type": "function", **CITY_WEATHER}, {"type": "function", **CLOCK}]
        body = {"input": "Hi", "tools": tools, "text": {"format": flat}}
        if options.get("tool_choice") == NAMED:
            options = {"tool_choice": {"type": "function", "name": "clock"}}
    answer = post(backend, route, {**body, **options})
    assert answer.status_code == 200, answer.text
    assert texts_allowed(backend.params(), FORM, CALL, CALLS, "Hello") == allowed
    if options.get("tool_choice") not in (None, "auto", "none", "required"):
        assert texts_allowed(backend.params(), '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>') == [
            True
        ]


@pytest.mark.parametrize("style", STYLES)
def test_every_style_allows_a_call_or_the_form(style: str) -> None:
    grammar = grammar_for_tools(style, TOOLS, "auto", is_parallel=True, answer=SCHEMA)
    call = '{"name": "weather", "arguments": {"city": "Rome"}}'
    parameters = call.replace("arguments", "parameters")
    apart = {
        "hermes": CALL,
        "llama3": parameters,
        "cohere": f"[{parameters.replace('name', 'tool_name')}]",
        "harmony": 'commentary to=functions.weather json{"city": "Rome"}',
    }
    written = apart.get(style, f"[{call}]")
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
    content = ""
    names = []
    reasons = []
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
    strict = {"name": "label", "parameters": UNIQUE, "strict": True}
    forced = {"tools": [{"type": "function", "function": strict}], "tool_choice": "required"}
    for param, body in (
        ("response_format", with_schema(UNIQUE, strict=True)),
        ("guided_json", {"messages": HI, "guided_json": UNIQUE}),
        ("structured_outputs", {"messages": HI, "structured_outputs": {"json": UNIQUE}}),
        ("tools", {"messages": HI, **forced}),
    ):
        error = error_of(post(FakeBackend(), CHAT, body))
        assert error["param"] == param
        assert "uniqueItems at schema.properties.tags" in error["message"]
    form = {"max_tokens": 5, "output_config": {"format": {"type": "json_schema", "schema": UNIQUE}}}
    for route, members in (("/api/chat", {"format": UNIQUE}), ("/v1/messages", form)):  # which have no "strict"
        answer = post(FakeBackend(), route, {"messages": HI, **members})
        assert answer.status_code == 400 and "uniqueItems at schema.properties.tags" in answer.text


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
    for members in ({}, {"strict": False}, {"strict": None}):
        said = remarks_on(backend, CHAT, with_schema(UNIQUE, **members))
        assert said == ["uniqueItems at schema.properties.tags is ignored"]
    assert texts_allowed(backend.params(), '{"tags": ["a", "a"]}', '{"tag": []}') == [True, False]
    flat = {"type": "json_schema", "name": "p", "schema": UNIQUE, "strict": False}
    assert remarks_on(backend, "/v1/responses", {"input": "Hi", "text": {"format": flat}}) != []


def test_remarks_say_what_is_not_followed_exactly() -> None:
    overlapping = {"oneOf": [{"type": "string", "pattern": "a"}, {"type": "string", "pattern": "b"}]}
    [remark] = remarks_on(FakeBackend('"ab"'), CHAT, with_schema(overlapping))
    assert remark == "oneOf at schema is followed as anyOf: its alternatives may overlap"
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
