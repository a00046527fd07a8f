"""Tools and formats: errors name the part of a schema, and tools work with templates that do not support them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from archerfish.errors import InvalidInputError
from archerfish.serve.client import RemoteError
from archerfish.serve.formats import TYPES, ToolUse, check_schema, response_grammar
from archerfish.text.tool_calls import tool_prompt
from tests.text.test_tool_prompts import SMOLLM2, WEATHER, WRITTEN

from .client import host_with, serving
from .fake_backend import TEMPLATE, FakeBackend, error_of, ids, post, save_model
from .hosting import add_llm

CHAT, HI = "/v1/chat/completions", [{"role": "user", "content": "Hi"}]
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
        ({"type": "json_schema", "json_schema": {"schema": {}}, "regex": "a"}, "of type json_schema has no member 'regex'."),
        ({"type": "json_schema", "json_schema": {"schema": {}, "scheme": 1}}, "Did you mean 'schema'?"),
        ({"type": "json_schema", "schema": {"type": "objct"}}, "response_format.schema.type must be one of string, number"),
        ({"type": "regexp", "regexp": "a"}, "grammar, not 'regexp'. Did you mean 'regex'?"),
        ({"type": "yaml"}, "grammar, not 'yaml'."),
        ({"type": ["regex"]}, "object whose type is one of text,"), ("regex", "must be an object whose type is one of text,"),
    ],
)  # fmt: skip
def test_misplaced_format_member(stated: Any, said: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        response_grammar(stated, "response_format")
    assert said in str(caught.value) and "Known: grammar" not in str(caught.value)  # names are listed once
    if isinstance(stated, dict):
        assert error_of(post(FakeBackend(), CHAT, {"messages": HI, "response_format": stated}))["param"] == "response_format"


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
        ({"properties": {"city": "string"}}, "properties.city must be a JSON schema, which is an object, not a string."),
        ({"properties": ["city"]}, "properties must be an object of schemas by name, not an array."),
        ({"required": True}, "required must be a list of names of properties, not a boolean."),
        ({"required": ["a", 1]}, "required must be a list of names"), ({"enum": "a"}, "enum must be a list of values"),
        ({"items": {"anyOf": []}}, "items.anyOf must be a list of schemas that is not empty, not an array."),
        ({"anyOf": [{}, {"items": [{}, 4]}]}, "anyOf[1].items[1] must be a JSON schema, which is an object, not a number."),
        ({"$defs": {"x": {"pattern": 3}}}, "$defs.x.pattern must be a string, not 3."),
        ({"maxLength": -1}, "maxLength must be a whole number of at least 0, not -1."),
        ({"minimum": "1"}, "minimum must be a number, not '1'."), ({"additionalProperties": 0}, "additionalProperties must be"),
    ],
)  # fmt: skip
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
        tools = [{"type": "function", "function": {"name": n, "parameters": s}} for n, s in zip("fg", schemas, strict=False)]
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
)  # fmt: skip
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
    return st.recursive(leaves, lambda inner: st.fixed_dictionaries({}, optional={
        "type": st.lists(st.sampled_from(TYPES), min_size=1), "properties": st.dictionaries(st.text(), inner), "items": inner,
        "anyOf": st.lists(inner, min_size=1), "required": st.lists(st.text()), "enum": st.lists(st.integers()), "not": inner,
    }))  # fmt: skip


@settings(max_examples=30, deadline=None)
@given(schemas())
def test_valid_schemas_have_no_problem(schema: Any) -> None:
    check_schema(schema, "here")


def test_deeply_nested_schema_is_checked() -> None:
    schema: dict[str, Any] = {"type": "zzz"}
    for _ in range(5_000):
        schema = {"items": schema}
    with pytest.raises(InvalidInputError, match="not 'zzz'"):
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
            {"role": "assistant", "tool_calls": [
                {"id": CALL_ID, "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}},
            ]},
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
            {"role": "assistant", "content": [
                {"type": "tool_use", "id": CALL_ID, "name": "weather", "input": {"city": "Rome"}},
            ]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": CALL_ID, "content": "22 degrees"}]},
        ],
        "tools": [{
            "name": "weather", "description": FUNCTION["description"], "input_schema": FUNCTION["parameters"],
        }],
    },
}  # fmt: skip
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


def test_unknown_template_name_is_refused(backend: FakeBackend) -> None:
    for name in ("other", ["default"], {"a": 1}):
        body = {**WITH_TOOLS["/v1/chat/completions"], "chat_template_kwargs": {"template_name": name}}
        assert post(backend, "/v1/chat/completions", body).status_code == 400
