"""ChatTemplate: renders a conversation by the model's chat template, in a sandbox."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError, TemplateSyntaxError
from jinja2.meta import find_undeclared_variables

from archerfish.errors import ArcherfishError, CorruptFileError, InvalidInputError, UnsupportedModelError, did_you_mean
from archerfish.params import SamplingParams
from archerfish.store.source import token_name
from archerfish.text.template_sandbox import ChatEnvironment, LimitError, RaisedError
from archerfish.text.tokenizer import Tokenizer, read_settings
from archerfish.text.tool_calls import PROMPTED_STYLE, style_of, tool_prompt, written_calls
from archerfish.text.world_tokenizer import END_NAME, WorldTokenizer

Message = Mapping[str, Any]
MAX_SOURCE_LENGTH = 1_000_000
MAX_MESSAGES = 100_000
ROLES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
# For RWKV's World models. Empty lines separate turns, so empty lines inside of messages are removed.
PLAIN_TEMPLATE = """\
{%- for message in messages -%}
{{ message.role.capitalize() }}: {{ message.content.strip().split("\\n") | map("trim") | select | join("\\n") }}

{% endfor -%}
{%- if add_generation_prompt -%}
Assistant:
{%- endif -%}
"""
PLAIN_STOPS = ("\n\nUser:", "\n\nSystem:")
ENVIRONMENT = ChatEnvironment()  # one: a template counts against the budget of the environment that compiled it
# Noncharacters of Unicode, which are reserved for use inside of a program.
MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]


@dataclass(frozen=True)
class CompiledTemplate:
    template: Template
    style: str  # of tool calls in answers
    variables: frozenset[str]  # that it reads
    reads_calls: bool  # earlier calls, in messages
    reads_tools: bool


class ChatTemplate:
    """The chat templates of a model by name. "tool_use" is chosen if tools are given, else "default".

    If a template does not read tools, they are described in a message, and earlier calls and results become text.
    """

    def __init__(
        self,
        source: str | Mapping[str, str],
        *,
        special_tokens: Mapping[str, str] | None = None,
        model_name: str = "this model",
        stops: Sequence[str] = (),
    ) -> None:
        """special_tokens: by role. stops: texts that begin the next turn, for models without an end token of a turn."""
        self.stops = tuple(stops)
        self.sources: dict[str, str] = {"default": source} if isinstance(source, str) else dict(source)
        self.special_tokens = dict(special_tokens or {})
        self.model_name = model_name
        self._compiled: dict[str, CompiledTemplate] = {}

    @classmethod
    def find(cls, directory: str | Path, model_name: str = "", tokenizer: Tokenizer | None = None) -> ChatTemplate:
        """The template of a model directory; models with the World tokenizer have a built-in one."""
        root = Path(directory)
        folder = root / "tokenizer" if (root / "tokenizer").is_dir() else root
        settings = read_settings(folder / "tokenizer_config.json")
        sources = read_sources(folder, settings)
        name = model_name or root.name
        if not sources and isinstance(tokenizer, WorldTokenizer):
            return cls(PLAIN_TEMPLATE, special_tokens={"eos_token": END_NAME}, model_name=name, stops=PLAIN_STOPS)
        if not sources:
            message = f"{name} has no chat template: it completes texts and was not made for conversations."
            hint = f"Use generate() with a prompt of your own, or put a chat_template.jinja into {folder}."
            raise UnsupportedModelError(message, hint=hint)
        names = read_settings(folder / "special_tokens_map.json")
        found = {role: text for role in ROLES if (text := token_name(role, settings, names)) is not None}
        return cls(sources, special_tokens=found, model_name=name)

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        template_name: str | None = None,
        **values: Any,
    ) -> str:
        """The text of a conversation, by default up to the beginning of the answer. Other keywords reach the
        template."""
        values = plain({**values, "add_generation_prompt": add_generation_prompt}, "A value for the template")
        return self._render(template_name, {**values, **check_conversation(messages, tools)})

    def encode(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        template_name: str | None = None,
        **values: Any,
    ) -> list[int]:
        """Token ids of the text of `render`, with names of special tokens inside of messages encoded as plain text.

        So the text of a message can neither end its turn nor begin another one.
        """
        values = plain({**values, "add_generation_prompt": add_generation_prompt}, "A value for the template")
        data = check_conversation(messages, tools)
        texts = texts_in(data)
        found = [name for name in tokenizer.special_tokens.values() if any(name in text for text in texts)]
        if not found:
            return tokenizer.encode(self._render(template_name, {**values, **data}), add_special_tokens=False)
        mark = next((mark for mark in MARKS if not any(mark in text for text in texts)), None)
        if mark is None:
            raise InvalidInputError("The messages hold every noncharacter of Unicode.", hint="Remove U+FDD0 to U+FDEF.")
        names = re.compile("|".join(re.escape(name) for name in sorted(found, key=len, reverse=True)))
        text = self._render(template_name, {**values, **marked_copy(data, names, mark)})
        ids: list[int] = []
        for place, piece in enumerate(re.split(f"{mark}({names.pattern}){mark}", text)):
            ids += tokenizer.encode(piece.replace(mark, ""), add_special_tokens=False, plain=place % 2 == 1)
        return ids

    def stopping(self, params: SamplingParams) -> SamplingParams:
        """The parameters with the stop strings of the template added."""
        missing = [text for text in self.stops if text not in params.stop]
        return replace(params, stop=[*params.stop, *missing]) if missing else params

    def call_style(self, template_name: str | None = None) -> str:
        """The style of tool calls in answers: the template's, or the style that the tool prompt asks for."""
        found = self._find(template_name, has_tools=True)
        return found.style if found.reads_tools else PROMPTED_STYLE

    def reads(self, names: Iterable[str], template_name: str | None = None) -> bool:
        """Whether the template reads a value of one of these names."""
        return not self._find(template_name, has_tools=False).variables.isdisjoint(names)

    def _render(self, template_name: str | None, values: dict[str, Any]) -> str:
        tools = values["tools"]
        found = self._find(template_name, bool(tools))
        if found.reads_tools or (found.reads_calls and not tools):
            return self._fill(found, values)
        messages = calls_in_words(values["messages"])
        if not tools:
            return self._fill(found, {**values, "messages": messages})
        prompt, refusal = tool_prompt(tools), None
        for role in ("system", "user"):  # some templates refuse system messages, some leave them out
            try:
                text = self._fill(found, {**values, "tools": None, "messages": with_prompt(messages, prompt, role)})
            except InvalidInputError as error:
                refusal = refusal or error
                continue
            if all(line in text for line in prompt.splitlines()):
                return text
        raise refusal or InvalidInputError(
            f"The chat template of {self.model_name} leaves out the description of the tools."
        )

    def _fill(self, found: CompiledTemplate, values: dict[str, Any]) -> str:
        try:
            ENVIRONMENT.budget.start()
            return ENVIRONMENT.concat(found.template.generate(**{**self.special_tokens, **values}))
        except Exception as error:  # a template may fail in any way on data that it does not expect
            raise self._explained(error) from error

    def _find(self, template_name: str | None, has_tools: bool) -> CompiledTemplate:
        if template_name is not None and not isinstance(template_name, str):
            raise InvalidInputError(f"template_name must be a string, not {type(template_name).__name__}.")
        name = template_name or ("tool_use" if has_tools and "tool_use" in self.sources else "default")
        if name in self._compiled:
            return self._compiled[name]
        source = self.sources.get(name)
        if source is None:
            hint = did_you_mean(name, self.sources)
            raise InvalidInputError(f"{self.model_name} has no chat template {name!r}.", hint=hint)
        if len(source) > MAX_SOURCE_LENGTH:
            raise UnsupportedModelError(f"The chat template of {self.model_name} has {len(source):,} characters.")
        try:
            ENVIRONMENT.budget.start()  # constants are folded when a template is compiled
            template, tree = ENVIRONMENT.from_string(source), ENVIRONMENT.parse(source)
            fields = {node.attr for node in tree.find_all(nodes.Getattr)} | {
                node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)
            }
            variables = frozenset(find_undeclared_variables(tree))
        except Exception as error:
            raise self._explained(error) from error
        reads = "tool_calls" in fields, "tools" in variables
        self._compiled[name] = CompiledTemplate(template, style_of(source), variables, *reads)
        return self._compiled[name]

    def _explained(self, error: Exception) -> ArcherfishError:
        """An error of a template as ours: a fault of the model or of the caller."""
        what = f"The chat template of {self.model_name}"
        if isinstance(error, TemplateSyntaxError):
            return UnsupportedModelError(f"{what} is not valid jinja, in line {error.lineno}: {error.message}.")
        if isinstance(error, RaisedError):
            return InvalidInputError(f"{what} refuses these messages: {error.message}")
        if isinstance(error, LimitError):
            return UnsupportedModelError(f"{what} was stopped: {error.message}.")
        if isinstance(error, SecurityError | RecursionError | OverflowError | MemoryError):
            return UnsupportedModelError(f"{what} does something that is not allowed: {error}.")
        return InvalidInputError(f"{what} cannot be applied to these messages: {error}.")


def read_sources(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name. Files take precedence over tokenizer_config.json, as in transformers."""
    stated = settings.get("chat_template") or read_settings(folder / "chat_template.json").get("chat_template")
    sources: dict[str, str] = {}
    if isinstance(stated, str):
        sources["default"] = stated
    elif isinstance(stated, list):
        entries = [entry for entry in stated if isinstance(entry, dict)]
        sources |= {str(entry.get("name")): str(entry.get("template")) for entry in entries}
    files = {"default": folder / "chat_template.jinja"}
    files |= {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    for name, path in files.items():
        if path.is_file():
            try:
                sources[name] = path.read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                raise CorruptFileError(f"{path} is not UTF-8 text.") from error
    return sources


def check_conversation(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> dict[str, Any]:
    """A copy of messages and tools in plain types. Text parts of a message are joined by line breaks."""
    hint = 'Give a list of {"role": ..., "content": ...}.'
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise InvalidInputError(f"messages must be a list of messages, not {type(messages).__name__}.", hint=hint)
    if not messages:
        raise InvalidInputError("messages is empty.", hint=hint)
    if len(messages) > MAX_MESSAGES:
        raise InvalidInputError(f"There are {len(messages):,} messages; the limit is {MAX_MESSAGES:,}.")
    copies: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise InvalidInputError(f"{where} must be a dict, not {type(message).__name__}.", hint=hint)
        role, calls = message.get("role"), message.get("tool_calls")
        if not isinstance(role, str) or not role:
            raise InvalidInputError(f'{where} has no "role", such as "user", "assistant" or "system".', hint=hint)
        if message.get("content") is None and not calls:
            raise InvalidInputError(f'{where} has no "content".', hint=hint)
        copy = plain(dict(message), where)
        content = copy.get("content")
        if calls:
            read_arguments(copy["tool_calls"])
        if isinstance(content, list):
            copy["content"] = "\n".join(
                part_text(part, f'{where}["content"][{place}]') for place, part in enumerate(content)
            )
        elif content is not None and not isinstance(content, str):
            kind = type(content).__name__
            raise InvalidInputError(
                f'{where}["content"] must be a string or a list of text parts, not {kind}.', hint=hint
            )
        copies.append(copy)
    given = tools or ()
    if (
        isinstance(given, str | Mapping)
        or not isinstance(given, Sequence)
        or not all(isinstance(t, Mapping) for t in given)
    ):
        raise InvalidInputError("tools must be a list of JSON schemas.")
    return {"messages": copies, "tools": [plain(dict(tool), f"tools[{i}]") for i, tool in enumerate(given)] or None}


def read_arguments(tool_calls: object) -> None:
    """Parse the arguments of earlier calls: OpenAI's clients send a string, templates expect an object."""
    for call in tool_calls if isinstance(tool_calls, list) else ():
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
            continue
        try:
            read = json.loads(function["arguments"])
        except (ValueError, RecursionError):
            continue
        if isinstance(read, dict):
            function["arguments"] = plain(read, "arguments")


def part_text(part: object, where: str) -> str:
    if isinstance(part, str):
        return part
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
    if not isinstance(text, str):
        kind = f"of type {part.get('type')!r}" if isinstance(part, dict) else type(part).__name__
        hint = 'Give {"type": "text", "text": ...}.'
        raise InvalidInputError(f"{where} is {kind}; only text parts are supported.", hint=hint)
    return text


def calls_in_words(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A conversation without tool messages: calls become text of the assistant, results become text of the user."""
    found: list[dict[str, Any]] = []
    is_result = False  # whether the last message holds only results
    for place, message in enumerate(messages):
        said = {key: value for key, value in message.items() if key not in ("tool_calls", "tool_call_id")}
        content = message.get("content") or ""
        if message.get("tool_calls"):
            calls = written_calls(message["tool_calls"], f'messages[{place}]["tool_calls"]')
            said["content"] = "\n".join([content, *calls] if content else calls)
        is_tool = message["role"] == "tool"
        if is_tool:
            said = {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
        if is_result and said["role"] == "user":  # one message, because many templates want turns to alternate
            found[-1] = {**said, "content": f"{found[-1]['content']}\n{said['content']}"}
        else:
            found.append(said)
        is_result = is_tool
    return found


def with_prompt(messages: Sequence[dict[str, Any]], prompt: str, role: str) -> list[dict[str, Any]]:
    """Messages with the prompt appended to the system message, or put before the first user message."""
    place = next((index for index, message in enumerate(messages) if message["role"] == role), None)
    if place is None or (role == "system" and place > 0):
        place = 0 if role == "system" else sum(message["role"] == "system" for message in messages[:1])
        return [*messages[:place], {"role": role, "content": prompt}, *messages[place:]]
    content = messages[place].get("content") or ""
    texts = [content, prompt] if role == "system" else [prompt, content]
    joined = {**messages[place], "content": "\n\n".join(text for text in texts if text)}
    return [*messages[:place], joined, *messages[place + 1 :]]


def plain(value: Any, where: str, depth: int = 0) -> Any:
    """A copy in the types of JSON: other objects have methods that a template must not reach."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if depth > 64:
        raise InvalidInputError(f"{where} is nested too deeply.")
    if isinstance(value, Mapping):
        return {str(key): plain(item, where, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, where, depth + 1) for item in value]
    if isinstance(value, str):
        return str.__str__(value)
    raise InvalidInputError(
        f"{where} holds a {type(value).__name__}; only texts, numbers, lists and dicts are allowed."
    )


def texts_in(value: Any) -> list[str]:
    """All strings in plain data, keys included."""
    found: list[str] = []
    left = [value]
    while left:
        item = left.pop()
        if isinstance(item, str):
            found.append(item)
        elif isinstance(item, dict):
            left += [*item, *item.values()]
        elif isinstance(item, list):
            left += item
    return found


def marked_copy(value: Any, names: re.Pattern[str], mark: str) -> Any:
    """A copy with a mark before and after each name of a special token. Keys that are identifiers stay unchanged."""
    if isinstance(value, str):
        return names.sub(lambda match: f"{mark}{match.group()}{mark}", value)
    if isinstance(value, dict):
        keys = [key if key.isidentifier() else marked_copy(key, names, mark) for key in value]
        return {key: marked_copy(item, names, mark) for key, item in zip(keys, value.values(), strict=True)}
    return [marked_copy(item, names, mark) for item in value] if isinstance(value, list) else value
