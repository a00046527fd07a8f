"""Bodies of requests. An unknown parameter is refused with the nearest known one. No value is converted to another
type.

A parameter of OpenAI's or another API that changes no answer here is accepted with a remark. One whose effect a caller
would miss is refused, unless its value is the default.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Self

import pydantic
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PlainValidator,
    ValidationInfo,
    WithJsonSchema,
)

from archerfish.engine.request_maker import MAX_DEADLINE_S
from archerfish.errors import InvalidInputError, did_you_mean
from archerfish.params import MAX_LOGPROBS, MAX_SEED, MIN_SEED, SamplingParams, check_grammar_size, read_structured
from archerfish.serve import errors
from archerfish.serve.errors import InvalidParameterError, check_members, json_type, naming
from archerfish.serve.formats import check_schema, nested_grammar, response_grammar

MAX_TOKEN_ID = 2**31 - 1
UNUSED = "Accepted and not used."
TOKEN_ID = re.compile("[0-9]{1,10}")
STRING = {"type": "string"}
OBJECT = {"type": "object"}
NULL = {"type": "null"}
STRINGS = {"type": "array", "items": STRING, "minItems": 1}
IDS = {"type": "array", "items": {"type": "integer"}, "minItems": 1}
IntList = Annotated[list[int], Field(fail_fast=True)]  # the first wrong item ends the check
StringList = Annotated[list[str], Field(fail_fast=True)]
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


def without_effect(*names: str) -> str:
    """The remark about parameters that are ignored."""
    return f"without effect here: {', '.join(names)}"


class Body(BaseModel):
    """Base of all bodies. They are read with the list of the request's remarks as their context."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    # Parameters that this server does not support, with the values that are accepted because they change nothing.
    unsupported: ClassVar[Values] = {}
    # Parameters that are accepted without an effect. A remark says so, unless the value is one that changes nothing.
    ignored: ClassVar[Values] = {}
    takes_texts: ClassVar[bool] = False  # many texts for encoders, and not one prompt

    @pydantic.model_validator(mode="wrap")
    @classmethod
    def _read_known(cls, data: Any, read: ModelWrapValidatorHandler[Self], info: ValidationInfo) -> Self:
        if not isinstance(data, dict):
            return read(data)
        unused: list[str] = []
        for name in data.keys() - cls.model_fields.keys():
            accepted = cls.ignored.get(name, cls.unsupported.get(name))
            if accepted is None:
                message = f"Unknown parameter {name!r}. {did_you_mean(name, cls.model_fields)}".strip()
                raise errors.UnknownParameterError(message, name)
            if data[name] is None or data[name] in accepted:
                continue
            if name in cls.unsupported:
                raise errors.UnsupportedParameterError(f"The parameter {name!r} is not supported here.", name)
            unused.append(name)
        if unused and info.context is not None:
            info.context.append(without_effect(*sorted(unused)))
        return read({name: value for name, value in data.items() if name in cls.model_fields})


class ModelBody(Body):
    """A body that may name a model."""

    model: str | None = Field(None, description="Name of the served model; left out: the first that serves the route.")


class EncoderBody(ModelBody):
    """What the bodies of all routes for embeddings and ranking have."""

    takes_texts: ClassVar[bool] = True


class GenerationBody(ModelBody):
    """What the bodies of all routes that generate have."""

    priority: int = Field(0, ge=-(2**31), lt=2**31, description="Higher runs first.")
    deadline_s: float | None = Field(
        None, ge=0, le=MAX_DEADLINE_S, description="Seconds after which the request is given up."
    )
    stream: bool | None = False
    temperature: float | None = bounded(
        description="0: the most likely token; higher: more variety.", minimum=0, maximum=100
    )
    top_p: float | None = bounded(
        description="Draw from the likeliest tokens that together have this probability.", exclusiveMinimum=0, maximum=1
    )
    top_k: int | None = bounded(description="Draw from so many of the likeliest tokens; 0 or -1: all.", minimum=-1)
    seed: int | None = bounded(
        minimum=MIN_SEED, maximum=MAX_SEED - 1, description="Left out or -1: a new one each time."
    )


# Text

REASONING_MEMBERS = ("reasoning_content", "reasoning")  # of an earlier message; the second is vLLM's newer name
TEXT_TYPES = ("text", "input_text", "output_text")
UNUSED_MEMBERS = ("annotations", "cache_control", "provider_specific_fields", "reasoning_details", "thinking_blocks")
MESSAGE_MEMBERS = ("role", "content", "name", "tool_calls", "tool_call_id", *REASONING_MEMBERS, *UNUSED_MEMBERS)
FUNCTION_MEMBERS = ("name", "description", "parameters", "strict")
FUNCTION = '{"type": "function", "function": {"name": ..., "parameters": {...}}}'
# Parameters of SamplingParams that bodies have by the same name and with the same meaning.
NOT_READ = ("max_tokens", "logprobs", "structured_outputs")  # as they are: each has a meaning of its own in a body
SAMPLING = [name for name in SamplingParams.__dataclass_fields__ if name not in NOT_READ]
# Parameters that state a grammar, and its kind.
GUIDES = {"guided_json": "json_schema", "guided_regex": "regex", "guided_grammar": "lark", "guided_choice": "choice"}
# Parameters of other servers and labels of the caller, which change no answer.
IGNORED: Values = {
    "user": (),
    "metadata": (),
    "safety_identifier": (),
    "prompt_cache_key": (),
    "prompt_cache_retention": (),
    "prompt_cache_options": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "moderation": (),
    "prediction": (),
    "verbosity": ("medium",),
    "request_id": (),
    "vllm_xargs": (),
    "kv_transfer_params": (),
    "mm_processor_kwargs": (),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "spaces_between_special_tokens": (True,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "cache_prompt": (True,),
    "keep_alive": (),
}


def one_of(*schemas: dict[str, Any]) -> Any:
    """Annotation of a parameter of several types, which SamplingParams checks."""
    return WithJsonSchema({"anyOf": [*schemas, NULL]})


Stop = Annotated[Any, one_of(STRING, {"type": "array", "items": STRING})]


class TextBody(GenerationBody):
    """What all routes for text take: the engine's sampling parameters, beside those of the API that they follow."""

    format_param: ClassVar[str] = "response_format"  # the route's own parameter for the format of an answer
    ignored: ClassVar[Values] = IGNORED

    min_p: float | None = bounded(
        description="Leave out tokens less likely than this share of the likeliest.", minimum=0, maximum=1
    )
    presence_penalty: float | None = bounded(
        description="Subtracted once from the answer's tokens.", minimum=-100, maximum=100
    )
    frequency_penalty: float | None = bounded(
        description="Subtracted for each time that a token is in the answer.", minimum=-100, maximum=100
    )
    repetition_penalty: float | None = bounded(
        description="Above 1: tokens of prompt and answer become less likely.", minimum=0.01, maximum=100
    )
    min_tokens: int | None = bounded(description="End tokens and stops have no effect before.", minimum=0)
    stop_token_ids: IntList | None = Field(None, description="Tokens that end the answer.")
    ignore_eos: bool | None = Field(None, description="true: go on after the model's end token.")
    skip_special_tokens: bool | None = Field(None, description="false: special tokens are part of the text.")
    speculate: bool | None = Field(None, description="false: propose no tokens; the answer is the same.")
    include_stop_str_in_output: bool | None = Field(None, description="true: the stop string ends the text.")
    logit_bias: dict[str, float] | None = Field(None, description="Added to the logits of tokens, by their ids.")
    bad_words: StringList | None = Field(None, description="Words that the answer must not contain.")
    allowed_token_ids: IntList | None = Field(None, description="The only tokens that may be drawn.")
    guided_json: Annotated[Any, one_of(OBJECT, STRING)] = Field(
        None, description="A JSON schema that the answer follows."
    )
    guided_regex: str | None = Field(None, description="A regular expression that the answer matches.")
    guided_grammar: str | None = Field(None, description="A grammar in Lark's notation.")
    guided_choice: StringList | None = Field(None, description="The answer is one of these.")
    structured_outputs: dict[str, Any] | None = Field(None, description="vLLM's form: json, regex, choice or grammar.")

    @classmethod
    def read_format(cls, stated: Any, where: str) -> dict[str, Any] | None:
        """The grammar of a stated format."""
        return (response_grammar if where == "response_format" else nested_grammar)(stated, where)

    def sampling(self) -> tuple[dict[str, Any], dict[str, str]]:
        """The SamplingParams that the body states, and the names that the route has for some of them."""
        values = {name: value for name in SAMPLING if (value := getattr(self, name, None)) is not None}
        if self.logit_bias is not None:  # JSON has strings in the place of token ids
            values["logit_bias"] = {
                int(key) if TOKEN_ID.fullmatch(key) else key: bias for key, bias in self.logit_bias.items()
            }
        stated = {name: value for name in GUIDES if (value := getattr(self, name)) is not None}
        guides = {name: {"kind": GUIDES[name], "value": value} for name, value in stated.items()}
        if self.structured_outputs is not None:
            with naming("structured_outputs"):
                guides["structured_outputs"] = read_structured("structured_outputs", self.structured_outputs)
        form, grammar = getattr(self, self.format_param), None
        if form is not None:
            with naming(self.format_param):
                grammar = self.read_format(form, self.format_param)
        names = [*guides, *([self.format_param] if grammar else [])]
        if len(names) > 1:
            raise InvalidParameterError(
                f"{' and '.join(names)} exclude each other: an answer has one format.", names[0]
            )
        grammar = guides[names[0]] if guides else grammar
        if grammar is not None:
            values["grammar"] = grammar
        return values, {"grammar": names[0] if names else self.format_param}

    def num_kept(self, max_length: int, max_tokens: int | None) -> int | None:
        """How many tokens at the end of a prompt are kept; None: all."""
        return None


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
    check_members(message, MESSAGE_MEMBERS, where)
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        found = f"not {role!r}" if isinstance(role, str) else "which is missing"
        raise InvalidInputError(f"{where}.role must be system, developer, user, assistant or tool, {found}.")
    calls = read_tool_calls(message.get("tool_calls"), f"{where}.tool_calls", names) if role == "assistant" else []
    if content is None and not calls:
        missing = "has neither content nor tool_calls" if role == "assistant" else "has no content"
        raise InvalidInputError(f"{where} {missing}.")
    parts: Any = [] if content is None else content
    text = parts if isinstance(parts, str) else join_texts(read_parts(parts, f"{where}.content"))
    found_message: dict[str, Any] = {"role": "system" if role == "developer" else role, "content": text}
    if calls:
        found_message["tool_calls"] = calls
    if role == "assistant" and (thoughts := [message[name] for name in REASONING_MEMBERS if message.get(name)]):
        found_message["reasoning_content"] = check_text(thoughts[0], f"{where}.{REASONING_MEMBERS[0]}")
        if not text:  # gpt-oss's template has its own name for it, and takes one of both
            found_message["thinking"] = found_message["reasoning_content"]
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


def described_tools(tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tools as chat templates read them: without `strict`."""
    members = [tool["function"].items() for tool in tools]
    functions = [{name: value for name, value in items if name != "strict"} for items in members]
    return [{"type": "function", "function": function} for function in functions]


def template_tool(function: dict[str, Any], schema_name: str, where: str) -> dict[str, Any]:
    """A tool in OpenAI's form; schema_name: the member that holds the schema of its arguments."""
    name = function.get("name")
    description = function.get("description")
    schema = function.get(schema_name)
    if not check_text(name, f"{where}.name"):
        raise InvalidInputError(f"{where}.name must not be empty.")
    if schema is not None:
        place = f"The tool {name!r}: {where}.{schema_name}"
        check_grammar_size("json_schema", schema)
        check_schema(schema, place)
        kind = False if isinstance(schema, bool) else schema.get("type")
        if kind not in (None, "object"):
            found = f"type {kind!r}" if kind else "a boolean"
            reason = "a function has its arguments by name"
            raise InvalidInputError(f'{place} must be a schema of type "object", not {found}: {reason}.')
    described = "" if description is None else check_text(description, f"{where}.description")
    parameters = schema or {"type": "object", "properties": {}}
    tool: dict[str, Any] = {"name": name, "description": described, "parameters": parameters}
    return {"type": "function", "function": {**tool, "strict": True} if function.get("strict") is True else tool}


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
    return {
        "type": "array",
        "minItems": 1,
        "items": {"type": "object", "properties": members, "required": list(required)},
    }


Messages = Annotated[list[dict[str, Any]], checked(read_messages, messages_schema(ROLES, "role"))]
Tools = Annotated[list[dict[str, Any]], checked(read_tools, {"anyOf": [OBJECTS, NULL]})]
ToolChoice = Annotated[str, checked(read_tool_choice, {"anyOf": [STRING, OBJECT, NULL]})]
Prompts = Annotated[list[str | list[int]], checked(check_inputs, INPUTS)]


class ToolBody(TextBody):
    """A body with tools."""

    tools: Tools = Field([])
    tool_choice: ToolChoice = ""
    parallel_tool_calls: bool | None = Field(None, description="false: one call at most.")

    def effort(self) -> tuple[str, str]:
        """How much reasoning is asked for, "none" for none and "" if nothing is said; after the parameter that says
        it."""
        return "", ""

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
