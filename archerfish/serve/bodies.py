"""Bodies of requests. An unknown parameter is refused with the nearest known one. No value is converted to another type.

A parameter of OpenAI's or another API that this server does not support is refused, unless its value is the default.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from annotated_types import GroupedMetadata
from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationInfo, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from archerfish.engine.request_maker import MAX_DEADLINE_S
from archerfish.errors import did_you_mean
from archerfish.params import MAX_LOGPROBS, MAX_N, MAX_SEED, MIN_SEED
from archerfish.serve.errors import InvalidParameterError, UnsupportedParameterError, json_type
from archerfish.serve.formats import find_schema_problem, nested_grammar, response_grammar

MAX_TOKEN_ID = 2**31 - 1
UNUSED = "Accepted and not used."
STRING = {"type": "string"}
NULL = {"type": "null"}
STRINGS = {"type": "array", "items": STRING, "minItems": 1}
IDS = {"type": "array", "items": {"type": "integer"}, "minItems": 1}
INPUTS = {"anyOf": [STRING, STRINGS, IDS, {"type": "array", "items": IDS, "minItems": 1}]}


# Values


def wrong_value(message: str) -> PydanticCustomError:
    # The message is passed as a value, because braces in a template have a meaning. Half of a surrogate pair has no UTF-8 form.
    readable = message.encode("utf-8", "backslashreplace").decode()
    return PydanticCustomError("wrong_value", "{message}", {"message": readable})


def check_type(value: Any, kind: Any, where: str, expected: str) -> Any:
    """A value of a type, as `isinstance` takes it."""
    if not isinstance(value, kind):
        raise wrong_value(f"{where} must be {expected}, not {json_type(value)}.")
    return value


def check_text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise wrong_value(f"{where} must be a string, not {json_type(value)}.")
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            raise wrong_value(f"{where} is not valid Unicode: it holds half of a surrogate pair.") from None
    return value


def check_texts(value: Any, where: str) -> list[str]:
    items = check_type(value, list, where, "a list of strings")
    return [check_text(item, f"{where}[{index}]") for index, item in enumerate(items)]


def check_some_texts(value: Any, where: str) -> list[str]:
    texts = check_texts(value, where)
    if not texts:
        raise wrong_value(f"{where} must be a list of strings that is not empty.")
    return texts


def check_token_ids(value: Any, where: str) -> list[int]:
    if not isinstance(value, list) or not value:
        raise wrong_value(f"{where} must be a list of token ids that is not empty.")
    for position, token_id in enumerate(value):
        if type(token_id) is not int or not 0 <= token_id <= MAX_TOKEN_ID:
            raise wrong_value(f"{where}[{position}] must be a token id.")
    return value


def check_inputs(value: Any, where: str) -> list[str | list[int]]:
    """One text or one list of token ids, or several of them."""
    if isinstance(value, str):
        return [check_text(value, where)]
    if not isinstance(value, list) or not value:
        what = "an empty list" if value == [] else json_type(value)
        raise wrong_value(f"{where} must be a string, a list of strings, or token ids, not {what}.")
    if type(value[0]) is int:
        return [check_token_ids(value, where)]
    check = check_token_ids if isinstance(value[0], list) else check_text
    return [check(item, f"{where}[{index}]") for index, item in enumerate(value)]


def check_members(given: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    """Refuse unknown members of an object. Empty ones are accepted, because clients send objects with all their fields."""
    for name, value in given.items():
        if name not in known and value:
            raise wrong_value(f"{where} has an unknown member {name!r}. {did_you_mean(name, known)}".strip())


@dataclass(frozen=True, eq=False)
class Checked(GroupedMetadata):
    """Annotation of a parameter: `check(value, name of the parameter)` reads it; `schema` is its JSON schema."""

    check: Callable[[Any, str], Any]
    schema: dict[str, Any]

    def __iter__(self) -> Iterator[object]:
        def read(value: Any, info: ValidationInfo) -> Any:
            return self.check(value, info.field_name or "")

        yield PlainValidator(read)
        yield WithJsonSchema(self.schema)


def bounded(default: int | None = None, description: str | None = None, **bounds: float) -> Any:
    """A field whose bounds are stated in the OpenAPI document; SamplingParams checks them, with better messages."""
    return Field(default, description=description, json_schema_extra={**bounds})


Values = Mapping[str, tuple[Any, ...]]  # values by the names of parameters


class Body(BaseModel):
    """Base of all bodies."""

    model_config = ConfigDict(extra="forbid", strict=True)
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
                param = str(name).encode("utf-8", "backslashreplace").decode()
                message = f"Unknown parameter '{param}'. {did_you_mean(name, cls.model_fields)}".strip()
                raise PydanticCustomError("unknown_parameter", "{message}", {"message": message, "param": param})
        return {name: value for name, value in data.items() if name not in cls.unsupported}


class GenerationBody(Body):
    """What the bodies of all routes that generate have."""

    priority: int = Field(0, ge=-(2**31), lt=2**31, description="Higher runs first.")
    deadline_s: float | None = Field(None, ge=0, le=MAX_DEADLINE_S, description="Seconds after which the request is given up.")
    stream: bool | None = False


# Text

TEXT_TYPES = ("text", "input_text", "output_text")
MESSAGE_MEMBERS = ("role", "content", "name", "tool_calls", "tool_call_id")
FUNCTION_MEMBERS = ("name", "description", "parameters", "strict")
FUNCTION = '{"type": "function", "function": {"name": ..., "parameters": {...}}}'
SAMPLING = (  # parameters of bodies that SamplingParams has by the same name
    "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed",
    "stop", "stop_token_ids", "ignore_eos", "min_tokens", "skip_special_tokens", "include_stop_str_in_output",
    "prompt_logprobs", "logit_bias",
)  # fmt: skip
# Parameters that state a grammar, and its kind.
GUIDES = {"guided_json": "json_schema", "guided_regex": "regex", "guided_grammar": "lark", "guided_choice": "choice"}


def read_stop(value: Any, where: str) -> list[str]:
    if isinstance(value, str):
        return [check_text(value, where)]
    return check_texts(check_type(value, list | None, where, "a string or a list of strings") or [], where)


def read_logit_bias(value: Any, where: str) -> dict[int, float] | None:
    """Token ids are strings in JSON."""
    if value is None:
        return None
    for token_id in check_type(value, dict, where, "an object of token ids and numbers"):
        if not (token_id.isascii() and token_id.isdigit() and len(token_id) <= 10):
            raise wrong_value(f"{where} must be an object of token ids and numbers; {token_id!r} is not a token id.")
    return {int(token_id): bias for token_id, bias in value.items()}


def read_guided_json(value: Any, where: str) -> Any:
    """A JSON schema, as an object or as text."""
    return check_type(value, dict | str | None, where, "a JSON schema, which is an object")


STOP = {"anyOf": [STRING, {"type": "array", "items": STRING}, NULL]}
BIAS = {"anyOf": [{"type": "object", "additionalProperties": {"type": "number"}}, NULL]}
Stop = Annotated[list[str], Checked(read_stop, STOP)]
LogitBias = Annotated[dict[int, float] | None, Checked(read_logit_bias, BIAS)]
GuidedJSON = Annotated[dict[str, Any] | str | None, Checked(read_guided_json, {"anyOf": [{"type": "object"}, STRING, NULL]})]


class TextBody(GenerationBody):
    """What all routes for text take: the engine's sampling parameters, beside those of the API that they follow."""

    format_param: ClassVar[str] = "response_format"  # the route's own parameter for the format of an answer

    model: str | None = Field(None, description="Name of the served model; left out: the first that generates.")
    temperature: float | None = bounded(minimum=0, maximum=100)
    top_p: float | None = bounded(exclusiveMinimum=0, maximum=1)
    top_k: int | None = bounded(minimum=-1)
    min_p: float | None = bounded(minimum=0, maximum=1)
    presence_penalty: float | None = bounded(minimum=-100, maximum=100)
    frequency_penalty: float | None = bounded(minimum=-100, maximum=100)
    repetition_penalty: float | None = bounded(minimum=0.01, maximum=100)
    seed: int | None = bounded(minimum=MIN_SEED, maximum=MAX_SEED - 1, description="Left out or -1: a new one each time.")
    min_tokens: int | None = bounded(minimum=0)
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    logit_bias: LogitBias = None
    guided_json: GuidedJSON = Field(None, description="A JSON schema that the answer follows.")
    guided_regex: str | None = None
    guided_grammar: str | None = Field(None, description="A grammar in Lark's notation.")
    guided_choice: list[str] | None = None

    def sampling(self) -> tuple[dict[str, Any], dict[str, str]]:
        """The SamplingParams that the body states, and the names that the route has for some of them."""
        values = {name: value for name in SAMPLING if (value := getattr(self, name, None)) is not None}
        guides = [name for name in GUIDES if getattr(self, name) is not None]
        stated, grammar = getattr(self, self.format_param), None
        if stated is not None:
            read = response_grammar if self.format_param == "response_format" else nested_grammar
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
            raise wrong_value(f"{where}[{index}] is {found}, which is not supported here: {known} parts are.")
    return parts


def join_texts(parts: Sequence[dict[str, Any]]) -> str:
    return "\n".join(part["text"] for part in parts if part["type"] in TEXT_TYPES)


def read_messages(value: Any, where: str) -> list[dict[str, Any]]:
    """A conversation as chat templates expect it."""
    if not isinstance(value, list) or not value:
        raise wrong_value(f"{where} must be a list of messages that is not empty.")
    names: dict[str, str] = {}  # names of functions by the ids of their calls
    return [read_message(message, f"{where}[{index}]", names) for index, message in enumerate(value)]


def read_message(message: Any, where: str, names: dict[str, str]) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise wrong_value(f"{where} must be an object, not {json_type(message)}.")
    check_members(message, MESSAGE_MEMBERS, where)
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        found = f"not {role!r}" if isinstance(role, str) else "which is missing"
        raise wrong_value(f"{where}.role must be system, developer, user, assistant or tool, {found}.")
    calls = read_tool_calls(message.get("tool_calls"), f"{where}.tool_calls", names) if role == "assistant" else []
    if content is None and role != "assistant":
        raise wrong_value(f"{where}.content is missing.")
    if content is None and not calls:
        raise wrong_value(f"{where} has neither content nor tool_calls.")
    if isinstance(content, str):
        text = check_text(content, f"{where}.content")
    else:
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
            raise wrong_value(f"{where}[{index}] must be an object with a function.")
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
        raise wrong_value(f"{where} must be an object of type function: {FUNCTION}.")
    if kind != "function":
        raise wrong_value(f"{where} must be an object of type function; {kind!r} is not supported.")
    function = check_type(tool.get("function", tool), dict, f"{where}.function", f"an object, as in {FUNCTION}")
    is_flat = function is tool
    where = where if is_flat else f"{where}.function"
    check_members(function, ("type", *FUNCTION_MEMBERS) if is_flat else FUNCTION_MEMBERS, where)
    return template_tool(function, "parameters", where)


def template_tool(function: dict[str, Any], schema_name: str, where: str) -> dict[str, Any]:
    """A tool as chat templates expect it; schema_name: the member that holds the schema of its arguments."""
    name, description, schema = function.get("name"), function.get("description"), function.get(schema_name)
    if not check_text(name, f"{where}.name"):
        raise wrong_value(f"{where}.name must not be empty.")
    if schema is not None:
        place = f"{where}.{schema_name}"
        problem = find_schema_problem(schema, place)
        kind = schema.get("type") if isinstance(schema, dict) else None
        if problem is None and (isinstance(schema, bool) or kind not in (None, "object")):
            found = json_type(schema) if isinstance(schema, bool) else f"type {kind!r}"
            problem = f'{place} must be a schema of type "object", not {found}: a function has its arguments by name.'
        if problem is not None:
            raise wrong_value(f"The tool {name!r}: {problem}")
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
    raise wrong_value(f'{where} must be "auto", "none", "required" or an object that names a function.')


ROLES = ("system", "developer", "user", "assistant", "tool")
CONTENT = {"anyOf": [STRING, {"type": "array", "items": {"type": "object"}}]}
OBJECTS = {"type": "array", "items": {"type": "object"}}


def messages_schema(roles: Sequence[str], *required: str) -> dict[str, Any]:
    members = {"role": {"enum": list(roles)}, "content": CONTENT}
    return {"type": "array", "minItems": 1, "items": {"type": "object", "properties": members, "required": list(required)}}


Messages = Annotated[list[dict[str, Any]], Checked(read_messages, messages_schema(ROLES, "role"))]
Tools = Annotated[list[dict[str, Any]], Checked(read_tools, {"anyOf": [OBJECTS, NULL]})]
ToolChoice = Annotated[str, Checked(read_tool_choice, {"anyOf": [STRING, {"type": "object"}, NULL]})]
Prompts = Annotated[list[str | list[int]], Checked(check_inputs, INPUTS)]


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


class StreamOptions(Body):
    """stream_options."""

    include_usage: bool = False
    include_obfuscation: bool = Field(False, description=UNUSED)


class ChoicesBody(TextBody):
    """What chat and completions have in common."""

    n: int | None = bounded(minimum=1, maximum=MAX_N)
    stop: Stop = Field([])
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


class ChatBody(ToolBody, ChoicesBody):
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
    top_logprobs: int | None = bounded(minimum=0, maximum=MAX_LOGPROBS)
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Values for the chat template.")
    metadata: dict[str, Any] | None = Field(None, description=UNUSED)
    safety_identifier: str | None = Field(None, description=UNUSED)
    prompt_cache_key: str | None = Field(None, description=UNUSED)
    prompt_cache_retention: str | None = Field(None, description=UNUSED)

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
