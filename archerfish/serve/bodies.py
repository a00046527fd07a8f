"""Bodies of requests. An unknown parameter is refused with the nearest known one. No value is converted to another type.

A parameter of OpenAI's or another API that this server does not support is refused, unless its value is the default.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationInfo, WithJsonSchema, model_validator

from archerfish.engine.request_maker import MAX_DEADLINE_S
from archerfish.errors import InvalidInputError, did_you_mean
from archerfish.params import MAX_LOGPROBS, MAX_N, MAX_SEED, MIN_SEED, SamplingParams
from archerfish.serve.errors import InvalidParameterError, UnknownParameterError, UnsupportedParameterError, json_type, naming
from archerfish.serve.formats import check_members, check_schema, nested_grammar, response_grammar

MAX_TOKEN_ID = 2**31 - 1
UNUSED = "Accepted and not used."
TOKEN_ID = re.compile("[0-9]{1,10}")
STRING = {"type": "string"}
OBJECT = {"type": "object"}
NULL = {"type": "null"}
STRINGS = {"type": "array", "items": STRING, "minItems": 1}
IDS = {"type": "array", "items": {"type": "integer"}, "minItems": 1}
INPUTS = {"anyOf": [STRING, STRINGS, IDS, {"type": "array", "items": IDS, "minItems": 1}]}


# Values


def check_type(value: Any, kind: Any, where: str, expected: str) -> Any:
    """A value of a type, as `isinstance` takes it."""
    if not isinstance(value, kind):
        raise InvalidInputError(f"{where} must be {expected}, not {json_type(value)}.")
    return value


def check_text(value: Any, where: str) -> str:
    return str(check_type(value, str, where, "a string"))


def check_items(value: Any, where: str, what: str) -> list[Any]:
    """A list that is not empty."""
    if not isinstance(value, list) or not value:
        raise InvalidInputError(f"{where} must be a list of {what} that is not empty.")
    return value


def check_token_ids(value: Any, where: str) -> list[int]:
    token_ids: list[int] = check_items(value, where, "token ids")
    for position, token_id in enumerate(token_ids):
        if type(token_id) is not int or not 0 <= token_id <= MAX_TOKEN_ID:
            raise InvalidInputError(f"{where}[{position}] must be a token id.")
    return token_ids


def check_inputs(value: Any, where: str) -> list[str | list[int]]:
    """One text or one list of token ids, or several of them."""
    if isinstance(value, str):
        return [check_text(value, where)]
    if not isinstance(value, list) or not value:
        what = "an empty list" if value == [] else json_type(value)
        raise InvalidInputError(f"{where} must be a string, a list of strings, or token ids, not {what}.")
    if type(value[0]) is int:
        return [check_token_ids(value, where)]
    check = check_token_ids if isinstance(value[0], list) else check_text
    return [check(item, f"{where}[{index}]") for index, item in enumerate(value)]


def checked(check: Callable[[Any, str], Any], schema: dict[str, Any]) -> PlainValidator:
    """Annotation of a parameter: `check(value, name of the parameter)` reads it; `schema` is its JSON schema."""

    def read(value: Any, info: ValidationInfo) -> Any:
        name = info.field_name or ""
        with naming(name):
            return check(value, name)

    return PlainValidator(read, json_schema_input_type=Annotated[Any, WithJsonSchema(schema)])


def bounded(default: int | None = None, description: str | None = None, **bounds: float) -> Any:
    """A field whose bounds are stated in the OpenAPI document; SamplingParams checks them, with better messages."""
    return Field(default, description=description, json_schema_extra={**bounds})


Values = Mapping[str, tuple[Any, ...]]  # values by the names of parameters


class Body(BaseModel):
    """Base of all bodies."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    # Parameters that this server does not support, with the values that are accepted because they change nothing.
    unsupported: ClassVar[Values] = {}

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for name, value in data.items():
            if name in cls.unsupported:
                if value is not None and value not in cls.unsupported[name]:
                    raise UnsupportedParameterError(f"The parameter {name!r} is not supported here.", name)
            elif name not in cls.model_fields:
                message = f"Unknown parameter {name!r}. {did_you_mean(name, cls.model_fields)}".strip()
                raise UnknownParameterError(message, name)
        return {name: value for name, value in data.items() if name not in cls.unsupported}


class GenerationBody(Body):
    """What the bodies of all routes that generate have."""

    model: str | None = Field(None, description="Name of the served model; left out: the first that serves the route.")
    priority: int = Field(0, ge=-(2**31), lt=2**31, description="Higher runs first.")
    deadline_s: float | None = Field(None, ge=0, le=MAX_DEADLINE_S, description="Seconds after which the request is given up.")
    stream: bool | None = False
    temperature: float | None = bounded(minimum=0, maximum=100)
    top_p: float | None = bounded(exclusiveMinimum=0, maximum=1)
    top_k: int | None = bounded(minimum=-1)
    seed: int | None = bounded(minimum=MIN_SEED, maximum=MAX_SEED - 1, description="Left out or -1: a new one each time.")


# Text

TEXT_TYPES = ("text", "input_text", "output_text")
MESSAGE_MEMBERS = ("role", "content", "name", "tool_calls", "tool_call_id")
FUNCTION_MEMBERS = ("name", "description", "parameters", "strict")
FUNCTION = '{"type": "function", "function": {"name": ..., "parameters": {...}}}'
# Parameters of SamplingParams that bodies have by the same name and with the same meaning.
SAMPLING = [name for name in SamplingParams.__dataclass_fields__ if name not in ("max_tokens", "logprobs")]
# Parameters that state a grammar, and its kind.
GUIDES = {"guided_json": "json_schema", "guided_regex": "regex", "guided_grammar": "lark", "guided_choice": "choice"}


def one_of(*schemas: dict[str, Any]) -> Any:
    """Annotation of a parameter of several types, which SamplingParams checks."""
    return WithJsonSchema({"anyOf": [*schemas, NULL]})


Stop = Annotated[Any, one_of(STRING, {"type": "array", "items": STRING})]


class TextBody(GenerationBody):
    """What all routes for text take: the engine's sampling parameters, beside those of the API that they follow."""

    format_param: ClassVar[str] = "response_format"  # the route's own parameter for the format of an answer

    min_p: float | None = bounded(minimum=0, maximum=1)
    presence_penalty: float | None = bounded(minimum=-100, maximum=100)
    frequency_penalty: float | None = bounded(minimum=-100, maximum=100)
    repetition_penalty: float | None = bounded(minimum=0.01, maximum=100)
    min_tokens: int | None = bounded(minimum=0)
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    logit_bias: dict[str, float] | None = None
    bad_words: list[str] | None = Field(None, description="Words that the answer must not contain.")
    allowed_token_ids: list[int] | None = Field(None, description="The only tokens that may be drawn.")
    guided_json: Annotated[Any, one_of(OBJECT, STRING)] = Field(None, description="A JSON schema that the answer follows.")
    guided_regex: str | None = None
    guided_grammar: str | None = Field(None, description="A grammar in Lark's notation.")
    guided_choice: list[str] | None = None

    def sampling(self) -> tuple[dict[str, Any], dict[str, str]]:
        """The SamplingParams that the body states, and the names that the route has for some of them."""
        values = {name: value for name in SAMPLING if (value := getattr(self, name, None)) is not None}
        if self.logit_bias is not None:  # JSON has strings in the place of token ids
            values["logit_bias"] = {int(key) if TOKEN_ID.fullmatch(key) else key: bias for key, bias in self.logit_bias.items()}
        guides = [name for name in GUIDES if getattr(self, name) is not None]
        stated, grammar = getattr(self, self.format_param), None
        if stated is not None:
            read = response_grammar if self.format_param == "response_format" else nested_grammar
            with naming(self.format_param):
                grammar = read(stated, self.format_param)
        names = guides + ([self.format_param] if grammar else [])
        if len(names) > 1:
            raise InvalidParameterError(f"{' and '.join(names)} exclude each other: an answer has one format.", names[0])
        if guides:
            grammar = {"kind": GUIDES[guides[0]], "value": getattr(self, guides[0])}
        if grammar is not None:
            values["grammar"] = grammar
        return values, {"grammar": names[0] if names else self.format_param}


# Messages


def read_parts(content: Any, where: str, *other_types: str) -> list[dict[str, Any]]:
    """The content of a message as a list of parts, which are text or of one of the other types."""
    if isinstance(content, str):
        return [{"type": "text", "text": check_text(content, where)}]
    parts: list[dict[str, Any]] = check_type(content, list, where, "a string or a list of parts")
    for index, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in TEXT_TYPES:
            check_text(part.get("text"), f"{where}[{index}].text")
        elif kind not in other_types:
            found = f"of type {kind!r}" if isinstance(kind, str) else json_type(part)
            known = " and ".join(("text", *other_types))
            raise InvalidInputError(f"{where}[{index}] is {found}, which is not supported here: {known} parts are.")
    return parts


def join_texts(parts: Sequence[dict[str, Any]]) -> str:
    return "\n".join(part["text"] for part in parts if part["type"] in TEXT_TYPES)


def read_messages(value: Any, where: str) -> list[dict[str, Any]]:
    """A conversation as chat templates expect it."""
    names: dict[str, str] = {}  # names of functions by the ids of their calls
    messages = check_items(value, where, "messages")
    return [read_message(message, f"{where}[{index}]", names) for index, message in enumerate(messages)]


def read_message(message: Any, where: str, names: dict[str, str]) -> dict[str, Any]:
    check_members(check_type(message, dict, where, "an object"), MESSAGE_MEMBERS, where)
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        found = f"not {role!r}" if isinstance(role, str) else "which is missing"
        raise InvalidInputError(f"{where}.role must be system, developer, user, assistant or tool, {found}.")
    calls = read_tool_calls(message.get("tool_calls"), f"{where}.tool_calls", names) if role == "assistant" else []
    if content is None and not calls:
        missing = "has neither content nor tool_calls" if role == "assistant" else "has no content"
        raise InvalidInputError(f"{where} {missing}.")
    text = "" if content is None else join_texts(read_parts(content, f"{where}.content"))
    found_message: dict[str, Any] = {"role": "system" if role == "developer" else role, "content": text}
    if calls:
        found_message["tool_calls"] = calls
    if isinstance(message.get("name"), str):
        found_message["name"] = message["name"]
    if role == "tool":
        call_id = check_text(message.get("tool_call_id"), f"{where}.tool_call_id")
        found_message["tool_call_id"] = call_id
        found_message.setdefault("name", names.get(call_id, ""))
    return found_message


def read_tool_calls(value: Any, where: str, names: dict[str, str]) -> list[dict[str, Any]]:
    """Earlier calls of an assistant; the names of their functions go into `names`."""
    calls: list[dict[str, Any]] = []
    for index, call in enumerate(check_type(value or [], list, where, "a list")):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise InvalidInputError(f"{where}[{index}] must be an object with a function.")
        name = check_text(function.get("name"), f"{where}[{index}].function.name")
        arguments = check_text(function.get("arguments"), f"{where}[{index}].function.arguments")
        call_id = call["id"] if isinstance(call.get("id"), str) else ""
        names[call_id] = name
        calls.append(template_call(call_id, name, arguments))
    return calls


def template_call(call_id: str, name: str, arguments: str | dict[str, Any]) -> dict[str, Any]:
    """A call as chat templates expect it."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


# Tools


def read_tools(value: Any, where: str) -> list[dict[str, Any]]:
    """Tools as chat templates expect them; in responses the members of the function stand beside its type."""
    tools = check_type(value, list | None, where, "a list")
    return [read_tool(tool, f"{where}[{index}]") for index, tool in enumerate(tools or ())]


def read_tool(tool: Any, where: str) -> dict[str, Any]:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind is None:
        raise InvalidInputError(f"{where} must be an object of type function: {FUNCTION}.")
    if kind != "function":
        raise InvalidInputError(f"{where} must be an object of type function; {kind!r} is not supported.")
    function = check_type(tool.get("function", tool), dict, f"{where}.function", f"an object, as in {FUNCTION}")
    is_flat = function is tool
    where = where if is_flat else f"{where}.function"
    check_members(function, ("type", *FUNCTION_MEMBERS) if is_flat else FUNCTION_MEMBERS, where)
    return template_tool(function, "parameters", where)


def template_tool(function: dict[str, Any], schema_name: str, where: str) -> dict[str, Any]:
    """A tool as chat templates expect it; schema_name: the member that holds the schema of its arguments."""
    name, description, schema = function.get("name"), function.get("description"), function.get(schema_name)
    if not check_text(name, f"{where}.name"):
        raise InvalidInputError(f"{where}.name must not be empty.")
    if schema is not None:
        place = f"The tool {name!r}: {where}.{schema_name}"
        check_schema(schema, place)
        kind = False if isinstance(schema, bool) else schema.get("type")
        if kind not in (None, "object"):
            found = f"type {kind!r}" if kind else "a boolean"
            raise InvalidInputError(
                f'{place} must be a schema of type "object", not {found}: a function has its arguments by name.'
            )
    described = "" if description is None else check_text(description, f"{where}.description")
    parameters = schema or {"type": "object", "properties": {}}
    return {"type": "function", "function": {"name": name, "description": described, "parameters": parameters}}


def read_tool_choice(value: Any, where: str) -> str:
    """tool_choice as "auto", "none", "required" or "=" and the name of a function."""
    if value is None or value in ("auto", "none", "required"):
        return str(value or "")
    if isinstance(value, dict) and value.get("type") == "function":
        function = value.get("function", value)
        name = function.get("name") if isinstance(function, dict) else None
        if isinstance(name, str):
            return f"={name}"
    raise InvalidInputError(f'{where} must be "auto", "none", "required" or an object that names a function.')


ROLES = ("system", "developer", "user", "assistant", "tool")
OBJECTS = {"type": "array", "items": OBJECT}
CONTENT = {"anyOf": [STRING, OBJECTS]}


def messages_schema(roles: Sequence[str], *required: str) -> dict[str, Any]:
    members = {"role": {"enum": list(roles)}, "content": CONTENT}
    return {"type": "array", "minItems": 1, "items": {"type": "object", "properties": members, "required": list(required)}}


Messages = Annotated[list[dict[str, Any]], checked(read_messages, messages_schema(ROLES, "role"))]
Tools = Annotated[list[dict[str, Any]], checked(read_tools, {"anyOf": [OBJECTS, NULL]})]
ToolChoice = Annotated[str, checked(read_tool_choice, {"anyOf": [STRING, OBJECT, NULL]})]
Prompts = Annotated[list[str | list[int]], checked(check_inputs, INPUTS)]


class ToolBody(TextBody):
    """A body with tools."""

    tools: Tools = Field([])
    tool_choice: ToolChoice = ""
    parallel_tool_calls: bool | None = Field(None, description="false: one call at most.")

    def check_tool_choice(self) -> str:
        """tool_choice with its default: "auto", or "none" without tools."""
        names = [tool["function"]["name"] for tool in self.tools]
        choice = self.tool_choice or "auto"
        if choice in ("auto", "none"):
            return choice if names else "none"
        if not names:
            raise InvalidParameterError("tool_choice asks for a call, but there are no tools.", "tool_choice")
        if choice[0] == "=" and choice[1:] not in names:
            message = f"tool_choice names {choice[1:]!r}, which is not one of tools. {did_you_mean(choice[1:], names)}"
            raise InvalidParameterError(message.strip(), "tool_choice")
        return choice


class ConversationBody(ToolBody):
    """What chat and responses have in common."""

    top_logprobs: int | None = bounded(minimum=0, maximum=MAX_LOGPROBS)
    metadata: dict[str, Any] | None = Field(None, description="Has no effect; responses repeat it.")
    safety_identifier: str | None = Field(None, description=UNUSED)
    prompt_cache_key: str | None = Field(None, description=UNUSED)
    prompt_cache_retention: str | None = Field(None, description=UNUSED)


class StreamOptions(Body):
    """stream_options."""

    include_usage: bool = False
    include_obfuscation: bool = Field(False, description=UNUSED)


class ChoicesBody(TextBody):
    """What chat and completions have in common."""

    n: int | None = bounded(minimum=1, maximum=MAX_N)
    stop: Stop = None
    prompt_logprobs: int | None = bounded(minimum=0, maximum=MAX_LOGPROBS)
    response_format: dict[str, Any] | None = None
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, description=UNUSED)

    def sampling(self) -> tuple[dict[str, Any], dict[str, str]]:
        if self.stream and self.prompt_logprobs is not None:
            raise UnsupportedParameterError("Logprobs of a prompt are not streamed; leave out stream.", "stream")
        if self.stream_options is not None and not self.stream:
            raise InvalidParameterError("stream_options is for streams; set stream to true.", "stream_options")
        return super().sampling()


class ChatBody(ConversationBody, ChoicesBody):
    """POST /v1/chat/completions, in OpenAI's form."""

    unsupported: ClassVar[Values] = {
        "audio": (), "function_call": (), "functions": (), "modalities": (["text"],), "moderation": (), "prediction": (),
        "prompt_cache_options": (), "reasoning_effort": ("none",), "service_tier": ("auto", "default"), "store": (False,),
        "verbosity": ("medium",), "web_search_options": (), "best_of": (1,),
    }  # fmt: skip

    messages: Messages
    max_tokens: int | None = bounded(minimum=1)
    max_completion_tokens: int | None = bounded(description="OpenAI's newer name of max_tokens.", minimum=1)
    logprobs: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Values for the chat template.")

    def sampling(self) -> tuple[dict[str, Any], dict[str, str]]:
        values, names = super().sampling()
        limits = {limit for limit in (self.max_tokens, self.max_completion_tokens) if limit is not None}
        if len(limits) > 1:
            raise InvalidParameterError("max_tokens and max_completion_tokens differ.", "max_completion_tokens")
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidParameterError("top_logprobs needs logprobs to be true.", "top_logprobs")
        values["max_tokens"], names["logprobs"] = next(iter(limits), None), "top_logprobs"
        if self.max_tokens is None:
            names["max_tokens"] = "max_completion_tokens"
        if self.logprobs:
            values["logprobs"] = self.top_logprobs or 0
        return values, names


class CompletionBody(ChoicesBody):
    """POST /v1/completions, in OpenAI's form."""

    unsupported: ClassVar[Values] = {"best_of": (1,), "suffix": ("",)}

    prompt: Prompts
    max_tokens: int | None = bounded(16, "0, with echo, gives the prompt alone.", minimum=0)
    logprobs: int | None = bounded(minimum=0, maximum=MAX_LOGPROBS)
    echo: bool | None = None
    return_token_ids: bool = Field(False, description="Give token ids beside the text.")
    add_special_tokens: bool = Field(True, description="Put special tokens, such as the one for the beginning, before a text.")

    def sampling(self) -> tuple[dict[str, Any], dict[str, str]]:
        values, names = super().sampling()
        values["max_tokens"] = self.max_tokens
        if self.max_tokens == 0:
            if not self.echo:
                raise InvalidParameterError("max_tokens is 0, which is only allowed with echo.", "max_tokens")
            values["max_tokens"] = 1  # the least that the engine generates; it is not shown
        if self.logprobs is not None:
            values["logprobs"] = self.logprobs
            if self.echo and self.stream:
                raise UnsupportedParameterError("Logprobs of a prompt are not streamed; leave out stream.", "stream")
            if self.echo:
                values.setdefault("prompt_logprobs", self.logprobs)
        return values, names
