"""Tool calls: found in any chunking, never an exception, and forced by grammars that the engine keeps to."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from archerfish.engine.llm_engine import LLMEngine
from archerfish.errors import InvalidInputError
from archerfish.params import SamplingParams
from archerfish.text import tool_calls
from archerfish.text.chat_template import ChatTemplate
from archerfish.text.tool_calls import STYLES, ToolCallParser, ToolPiece, grammar_for_tools, style_of, tool_schemas
from tests.text.tiny_tokenizers import byte_level

WEATHER = {
    "type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"$ref": "#/$defs/count"}},
    "required": ["city", "days"], "additionalProperties": False,
    "$defs": {"count": {"type": "integer", "minimum": 0, "maximum": 9}},
}  # fmt: skip
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": WEATHER}},
    {"name": "time", "input_schema": {"type": "object", "properties": {}, "additionalProperties": False}},
    {"type": "function", "function": {"name": "say \"it\"", "parameters": None}},
]
CALL = '{"name": "weather", "arguments": {"city": "Rome", "days": 3}}'
ARGUMENTS = '{"city": "Rome", "days": 3}'
Joined = list[tuple[str, int, str]]


def joined(pieces: list[ToolPiece]) -> Joined:
    grouped = itertools.groupby(pieces, key=lambda piece: (piece.kind, piece.index))
    return [(kind, index, "".join(piece.text for piece in some)) for (kind, index), some in grouped]


def parse(style: str, text: str, *, tools: Any = TOOLS, cuts: list[int] | None = None) -> Joined:
    parser = ToolCallParser(style, tools)
    edges = [0, *sorted(cuts or []), len(text)]
    pieces = [piece for start, end in itertools.pairwise(edges) for piece in parser.feed(text[start:end])]
    return joined(pieces + parser.finish())


def call(name: str, arguments: str, index: int = 0) -> Joined:
    return [("name", index, name), ("arguments", index, arguments)]


@pytest.mark.parametrize(("style", "text", "expected"), [
    ("hermes", f"<tool_call>\n{CALL}\n</tool_call>", call("weather", ARGUMENTS)),
    ("hermes", f"Well.\n<tool_call>{CALL}</tool_call>", [("text", -1, "Well.\n"), *call("weather", ARGUMENTS)]),
    ("hermes", f"<tool_call>{CALL}</tool_call>\n<tool_call>\n{CALL}</tool_call>\n",
     call("weather", ARGUMENTS) + call("weather", ARGUMENTS, 1)),
    ("hermes", f"<tool_call>[{CALL}, {CALL}]</tool_call>", call("weather", ARGUMENTS) + call("weather", ARGUMENTS, 1)),
    ("hermes", f"<tool_call>{CALL}\n</tool_", call("weather", ARGUMENTS)),  # cut off by max_tokens
    ("hermes", f"<tool_call>{CALL}</tool_call> done", [*call("weather", ARGUMENTS), ("text", -1, " done")]),
    ("hermes", '<tool_call>{"arguments": {"a": "}"}, "id": [1, {"x": null}], "name": "time"}</tool_call>',
     call("time", '{"a": "}"}')),
    ("hermes", '<tool_call>{"name": "time"}</tool_call>', call("time", "{}")),
    ("hermes", '<tool_call>{"name": "time", "arguments": null}', call("time", "{}")),
    ("hermes", '<tool_call>{"name": "time", "arguments": "{\\"a\\": 1}"}', call("time", '{"a": 1}')),
    ("hermes", f"<tool_call>{CALL[:-1]}</tool_call>", call("weather", ARGUMENTS)),
    ("hermes", f"<tool_call>{CALL[:-5]}", call("weather", ARGUMENTS[:-4])),
    ("hermes", f"  {CALL}", call("weather", ARGUMENTS)),
    ("hermes", '<tool_call>{"name": "say \\"it\\"", "arguments": {}}', call('say "it"', "{}")),
    ("llama3", '{"name": "weather", "parameters": {"city": "Rome"}}', call("weather", '{"city": "Rome"}')),
    ("llama3", '<|python_tag|>{"type": "function", "name": "time", "parameters": {}}', call("time", "{}")),
    ("llama3", '{"name": "time", "parameters": {}}; {"name": "time", "parameters": {"a": 1}}',
     call("time", "{}") + call("time", '{"a": 1}', 1)),
    ("mistral", f"[TOOL_CALLS] [{CALL}]", call("weather", ARGUMENTS)),
    ("mistral", f"Hm[TOOL_CALLS][{CALL},{CALL}]",
     [("text", -1, "Hm"), *call("weather", ARGUMENTS), *call("weather", ARGUMENTS, 1)]),
    ("mistral", f"[{CALL}]", call("weather", ARGUMENTS)),
])  # fmt: skip
def test_calls(style: str, text: str, expected: Joined) -> None:
    assert parse(style, text) == expected
    assert parse(style, text, cuts=list(range(1, len(text)))) == expected


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("text", [
    "", "Hello.", "  \n", " a < b ", '{"answer": 3}', '{"name": "nobody", "parameters": {}}', "[1, 2]", "[link](x)", "[", "{",
    '{"name": 3}', '{"name": "weather", "arguments": 5}', '{"name": "weather" "arguments": {}}', "{}", '{"name"',
    '["weather"]', '{"name": "\\ud800', '{"name": "weather",}', '{"name": "weather", "arguments": [1]}',
])  # fmt: skip
def test_invalid_calls_are_text(style: str, text: str) -> None:
    written = STYLES[style]
    for whole in (text, written.mark + text, f"Well {written.mark}{text}", f"{written.mark[:-1]}{text}"):
        assert parse(style, whole) == ([("text", -1, whole)] if whole else [])


def test_text_continues_after_an_invalid_call() -> None:
    bad = '<tool_call>{"name": "weather", "arguments": <'
    assert parse("hermes", f"{bad}tool_call>{CALL}") == [("text", -1, bad[:-1]), *call("weather", ARGUMENTS)]
    broken = '<tool_call>{"name": "weather", "arguments": {"a": ]}}</tool_call> so'
    assert parse("hermes", broken) == [*call("weather", '{"a": '), ("text", -1, "]}}</tool_call> so")]
    listed = f'<tool_call>[{CALL}, {{"name": "nobody"}}]</tool_call>'
    assert parse("hermes", listed) == [*call("weather", ARGUMENTS), ("text", -1, ', {"name": "nobody"}]</tool_call>')]


def test_arguments_are_streamed() -> None:
    parser = ToolCallParser("hermes", TOOLS)
    assert parser.feed('Yes. <tool_call>{"name": "wea') == [ToolPiece("text", -1, "Yes. ")]
    assert parser.feed('ther", "arguments": ') == []
    assert parser.feed('{"ci') == [ToolPiece("name", 0, "weather"), ToolPiece("arguments", 0, '{"ci')]
    assert parser.feed('ty": "R') == [ToolPiece("arguments", 0, 'ty": "R')]
    assert parser.feed('ome"}}</tool') == [ToolPiece("arguments", 0, 'ome"}')]
    assert parser.feed("_call>\n") == [] and parser.finish() == [] and parser.num_calls == 1


def test_json_that_is_an_answer_is_not_held_back() -> None:
    parser = ToolCallParser("llama3", TOOLS)
    assert parser.feed('{"answer') == [] and joined(parser.feed('": [')) == [("text", -1, '{"answer": [')]


def test_without_tools_every_name_is_valid() -> None:
    assert parse("hermes", '<tool_call>{"name": "x"}', tools=()) == call("x", "{}")
    assert parse("llama3", '{"name": "Ann"}', tools=()) == [("text", -1, '{"name": "Ann"}')]
    assert parse("llama3", '{"name": "x", "parameters": {}}', tools=()) == call("x", "{}")


def test_an_endless_call_becomes_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool_calls, "MAX_HELD", 2000)
    text = '<tool_call>{"name": "' + "x" * 5000
    assert parse("hermes", text) == [("text", -1, text)]


FRAGMENTS = st.sampled_from([
    *(mark for style in STYLES.values() for mark in (style.mark, style.end, style.mark[:5], style.separator)), CALL, CALL[:-1],
    '{"name": "time", "parameters": {}}', "[", "]", "{", "}", '"', ",", ":", "\\", " ", "\n", '"name"', '"arguments"', '"time"',
    "text", "é", "null", "-1.5", '{"a": [true, "x\\""]}',
])  # fmt: skip
TEXTS = st.lists(FRAGMENTS | st.text(max_size=3), max_size=14).map("".join)


@pytest.mark.no_cover
@given(style=st.sampled_from(sorted(STYLES)), text=TEXTS, data=st.data())
def test_pieces_do_not_change_the_result(style: str, text: str, data: st.DataObject) -> None:
    whole = parse(style, text)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=20))
    assert parse(style, text, cuts=cuts) == whole
    assert parse(style, text, cuts=list(range(len(text)))) == whole
    names = [index for kind, index, _ in whole if kind == "name"]
    assert names == list(range(len(names)))
    if not names:
        assert "".join(piece for _, _, piece in whole) == text


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=8,
)  # fmt: skip
OBJECTS = st.dictionaries(st.text(), VALUES, max_size=4)


@pytest.mark.no_cover
@given(
    style=st.sampled_from(sorted(STYLES)), every=st.lists(st.tuples(st.text(min_size=1), OBJECTS), min_size=1, max_size=3),
    before=st.text(alphabet="ab <[{\n", max_size=6), ascii_only=st.booleans(), indent=st.sampled_from([None, 2]),
)
def test_random_calls_are_found(
    style: str, every: list[tuple[str, Any]], before: str, ascii_only: bool, indent: int | None
) -> None:
    written = STYLES[style]
    bodies = [json.dumps(arguments, ensure_ascii=ascii_only, indent=indent) for _, arguments in every]
    calls = [
        f'{{"name": {json.dumps(name)}, "{written.arguments}": {body}}}'
        for (name, _), body in zip(every, bodies, strict=True)
    ]  # fmt: skip
    listed = f"[{', '.join(calls)}]"
    text = f"{written.mark}{listed}" if written.is_list else "\n".join(f"{written.mark}{one}{written.end}" for one in calls)
    expected = [piece for index, (name, _) in enumerate(every) for piece in call(name, bodies[index], index)]
    found = parse(style, f"x{before}{text}\n", tools=())
    assert found[0] == ("text", -1, f"x{before}") and found[1:] == expected


@pytest.mark.parametrize(("template", "expected"), [
    ("... '<tool_call>\\n' ...", "hermes"), ("", "hermes"), ("{{ '[TOOL_CALLS] [' }}", "mistral"),
    ("{{- '<|python_tag|>' }}", "llama3"), ("Environment: ipython", "llama3"), ("<|im_start|>", "hermes"),
])  # fmt: skip
def test_styles_are_guessed(template: str, expected: str) -> None:
    assert style_of(template) == expected


@pytest.mark.no_cover
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("is_parallel", [False, True])
def test_forced_calls_are_valid(engine: LLMEngine, style: str, is_parallel: bool) -> None:
    forced = grammar_for_tools(style, TOOLS[:2], "required", is_parallel=is_parallel, tokenizer=engine.tokenizer)
    params = SamplingParams(grammar=forced, max_tokens=220, logit_bias={1: 5.0})
    results = engine.generate([[3 + seed] for seed in range(12)], [params.replace(seed=seed) for seed in range(12)])
    names = set()
    for result in results:
        assert result.finish_reason in (("stop", "length") if is_parallel else ("stop",)), result.outputs[0].error
        if result.finish_reason == "length":
            continue
        found = parse(style, result.text, tools=TOOLS[:2])
        assert len(found) >= 2 and len(found) % 2 == 0 and (is_parallel or len(found) == 2)
        for name, arguments in zip(found[::2], found[1::2], strict=True):
            names.add(name[2])
            value = json.loads(arguments[2])
            assert value == {} if name[2] == "time" else value["city"] in ("Rome", "Oslo") and value["days"] in range(10)
    assert names == {"weather", "time"}


@pytest.mark.parametrize("style", STYLES)
def test_a_named_function_is_called(engine: LLMEngine, style: str) -> None:
    forced = grammar_for_tools(style, TOOLS, {"name": 'say "it"'})
    output = engine.generate([[9]], SamplingParams(grammar=forced, max_tokens=60, seed=1))[0]
    assert parse(style, output.text)[0] == ("name", 0, 'say "it"')


def test_a_mark_that_is_a_special_token(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path)
    tokenizer.special_tokens[300] = "[TOOL_CALLS]"
    forced = grammar_for_tools("mistral", TOOLS, "required", tokenizer=tokenizer)
    assert forced is not None and forced["value"].startswith('start: calls\ncalls: <[300]> "["')


@pytest.mark.parametrize(("tools", "choice", "why"), [
    ([], "required", "there are no tools"), (TOOLS, {"name": "wether"}, "weather"),
    ([{"type": "function"}], "required", "has no name"), ([TOOLS[0], TOOLS[0]], "required", "Two tools"),
    ([{"name": "a", "parameters": 3}], "required", "must be a JSON schema"),
])  # fmt: skip
def test_wrong_choices_are_refused(tools: Any, choice: Any, why: str) -> None:
    with pytest.raises(InvalidInputError, match=why):
        grammar_for_tools("hermes", tools, choice)


def test_choices_without_a_grammar() -> None:
    assert grammar_for_tools("hermes", TOOLS, "auto") is None and grammar_for_tools("hermes", TOOLS, "none") is None
    assert list(tool_schemas(TOOLS)) == ["weather", "time", 'say "it"']


@pytest.mark.parametrize(("arguments", "expected"), [
    ('{"city": "Rome"}', '{"city": "Rome"}'),
    ({"city": "Rome"}, '{"city": "Rome"}'), ("not JSON", '"not JSON"'), ("[1]", '"[1]"'),
])  # fmt: skip
def test_templates_see_arguments_of_earlier_calls_as_objects(arguments: Any, expected: str) -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.tool_calls[0].function.arguments | tojson }}{% endfor %}")
    message = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": arguments}}]}
    assert template.render([message]) == expected
    assert message["tool_calls"][0]["function"]["arguments"] == arguments  # type: ignore[index]
