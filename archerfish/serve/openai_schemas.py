"""Bodies of /v1/chat/completions and /v1/completions, and what the other routes for text share with them.

Parameters that OpenAI has and this engine has not are refused by name, unless they ask for what happens anyway.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field, PlainValidator, WithJsonSchema

from archerfish.errors import did_you_mean
from archerfish.params import MAX_LOGPROBS, MAX_N, MAX_SEED, MIN_SEED
from archerfish.serve.answer_formats import response_grammar
from archerfish.serve.errors import InvalidParameterError, UnsupportedParameterError, kind_of
from archerfish.serve.json_schemas import schema_complaint
from archerfish.serve.schemas import INPUTS, NULL, STRING, UNUSED, Body, inputs_at, text_at, wrong

TEXT_KINDS = ("text", "input_text", "output_text")
MESSAGE_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id")
FUNCTION_KEYS = ("name", "description", "parameters", "strict")
FUNCTION = '{"type": "function", "function": {"name": ..., "parameters": {...}}}'
# The parameters of a body that are SamplingParams by the same name.
SAMPLING = (
    "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed",
    "stop", "stop_token_ids", "ignore_eos", "min_tokens", "skip_special_tokens", "include_stop_str_in_output",
    "prompt_logprobs",
)  # fmt: skip

# What the answer must be, as extensions state it: by name, the kind of a grammar.
GUIDES = {"guided_json": "json_schema", "guided_regex": "regex", "guided_grammar": "lark", "guided_choice": "choice"}


def stop_strings(value: Any) -> list[str]:
    if value is None or isinstance(value, str):
        return [] if value is None else [text_at(value, "stop")]
    if not isinstance(value, list):
        raise wrong(f"stop must be a string or a list of strings, not {kind_of(value)}.")
    return [text_at(item, f"stop[{index}]") for index, item in enumerate(value)]


def biases(value: Any) -> dict[int, float] | None:
    """logit_bias: JSON has token ids as strings."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise wrong(f"logit_bias must be an object of token ids and numbers, not {kind_of(value)}.")
    for token_id in value:
        if not (token_id.isascii() and token_id.isdigit() and len(token_id) <= 10):
            raise wrong(f"logit_bias must be an object of token ids and numbers; {token_id!r} is no token id.")
    return {int(token_id): bias for token_id, bias in value.items()}


def schema_of(value: Any) -> dict[str, Any] | str | None:
    """guided_json: a JSON schema, as it is or written down."""
    if value is not None and not isinstance(value, dict | str):
        raise wrong(f"guided_json must be a JSON schema, which is an object, not {kind_of(value)}.")
    return value


Stops = Annotated[
    list[str], PlainValidator(stop_strings), WithJsonSchema({"anyOf": [STRING, {"type": "array", "items": STRING}, NULL]})
]
Biases = Annotated[
    dict[int, float] | None, PlainValidator(biases),
    WithJsonSchema({"anyOf": [{"type": "object", "additionalProperties": {"type": "number"}}, NULL]}),
]

Schema = Annotated[
    dict[str, Any] | str | None, PlainValidator(schema_of), WithJsonSchema({"anyOf": [{"type": "object"}, STRING, NULL]})
]


def stated(default: int | None = None, description: str | None = None, **bounds: float) -> Any:
    """A field whose bounds the document tells; SamplingParams checks them, with better words."""
    return Field(default, description=description, json_schema_extra={**bounds})


class TextBody(Body):
    """What all routes for text take beside what their makers defined: the rest of the engine's sampling parameters."""

    format_name: ClassVar[str] = "response_format"  # the route's own parameter for the form of an answer

    model: str | None = Field(None, description="Name of the served model; left out: the first that writes.")
    temperature: float | None = stated(minimum=0, maximum=100)
    top_p: float | None = stated(exclusiveMinimum=0, maximum=1)
    top_k: int | None = stated(minimum=-1)
    min_p: float | None = stated(minimum=0, maximum=1)
    presence_penalty: float | None = stated(minimum=-100, maximum=100)
    frequency_penalty: float | None = stated(minimum=-100, maximum=100)
    repetition_penalty: float | None = stated(minimum=0.01, maximum=100)
    seed: int | None = stated(minimum=MIN_SEED, maximum=MAX_SEED - 1, description="Left out or -1: another each time.")
    min_tokens: int | None = stated(minimum=0)
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    logit_bias: Biases = None
    guided_json: Schema = Field(None, description="A JSON schema that the answer follows.")
    guided_regex: str | None = None
    guided_grammar: str | None = Field(None, description="A grammar in Lark's notation.")
    guided_choice: list[str] | None = None
    priority: int = Field(0, description="Higher runs first.")
    deadline_s: float | None = Field(None, description="Seconds after which the request is given up.")
    stream: bool | None = False

    def sampling(self) -> dict[str, Any]:
        """SamplingParams that the body states."""
        stated = {name: getattr(self, name, None) for name in (*SAMPLING, "logit_bias")}
        found = {name: value for name, value in stated.items() if value is not None}
        grammar = self.grammar()
        return found if grammar is None else {**found, "grammar": grammar}

    def grammar(self) -> dict[str, Any] | None:
        """What the answer must be."""
        guides, stated = self._guides(), self.stated_format()
        if len(guides) + (stated is not None) > 1:
            names = guides + ([self.format_name] if stated else [])
            raise InvalidParameterError(f"{' and '.join(names)} exclude each other: an answer has one form.", names[0])
        return {"kind": GUIDES[guides[0]], "value": getattr(self, guides[0])} if guides else stated

    @property
    def grammar_name(self) -> str:
        """The parameter that says what the answer must be."""
        return next(iter(self._guides()), self.format_name)

    def _guides(self) -> list[str]:
        return [name for name in GUIDES if getattr(self, name) is not None]

    def stated_format(self) -> dict[str, Any] | None:
        """The grammar of `format_name`."""
        return None


class StreamOptions(Body):
    """stream_options."""

    include_usage: bool = False
    include_obfuscation: bool = Field(False, description=UNUSED)


def format_grammar(value: Mapping[str, Any] | None, where: str) -> dict[str, Any] | None:
    """The grammar of the format in a parameter that could say more than we have."""
    given = value or {}
    for name, member in given.items():
        if name != "format" and member is not None and (name, member) != ("verbosity", "medium"):
            raise UnsupportedParameterError(f"{where}.{name} is not supported.", where)
    return response_grammar(given.get("format"), f"{where}.format")


def parts_of(content: Any, where: str, *others: str) -> list[dict[str, Any]]:
    """The content of a message as parts: a string is one, and what is no text must be of one of these types."""
    if isinstance(content, str):
        return [{"type": "text", "text": text_at(content, where)}]
    if not isinstance(content, list):
        raise wrong(f"{where} must be a string or a list of parts, not {kind_of(content)}.")
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in TEXT_KINDS:
            text_at(part.get("text"), f"{where}[{index}].text")
        elif kind not in others:
            what = f"of type {kind!r}" if isinstance(kind, str) else kind_of(part)
            known = " and ".join(("text", *others))
            raise wrong(f"{where}[{index}] is {what}, which is not supported here: {known} parts are.")
    return content


def lines_of(parts: Sequence[dict[str, Any]]) -> str:
    """The texts among parts."""
    return "\n".join(part["text"] for part in parts if part["type"] in TEXT_KINDS)


def chat_messages(value: Any) -> list[dict[str, Any]]:
    """A conversation as chat templates expect it."""
    if not isinstance(value, list) or not value:
        raise wrong("messages must be a list of messages that is not empty.")
    names: dict[str, str] = {}  # of functions, by the ids of their calls
    return [chat_message(message, f"messages[{index}]", names) for index, message in enumerate(value)]


def chat_message(message: Any, where: str, names: dict[str, str]) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise wrong(f"{where} must be an object, not {kind_of(message)}.")
    check_members(message, MESSAGE_KEYS, where)
    role = message.get("role")
    if role not in ROLES:
        stated = f"not {role!r}" if isinstance(role, str) else "which is missing"
        raise wrong(f"{where}.role must be system, developer, user, assistant or tool, {stated}.")
    found: dict[str, Any] = {"role": "system" if role == "developer" else role}
    content = message.get("content")
    if content is not None or role != "assistant":
        if content is None:
            raise wrong(f"{where}.content is missing.")
        content = lines_of(parts_of(content, f"{where}.content"))
    calls = tool_calls(message.get("tool_calls"), f"{where}.tool_calls", names) if role == "assistant" else []
    if content is None and not calls:
        raise wrong(f"{where} has neither content nor tool_calls.")
    found["content"] = content or ""
    if calls:
        found["tool_calls"] = calls
    if isinstance(message.get("name"), str):
        found["name"] = message["name"]
    if role == "tool":
        call_id = text_at(message.get("tool_call_id"), f"{where}.tool_call_id")
        found["tool_call_id"] = call_id
        found.setdefault("name", names.get(call_id, ""))
    return found


def tool_calls(value: Any, where: str, names: dict[str, str]) -> list[dict[str, Any]]:
    """Earlier calls of an assistant; the names of their functions go into `names`."""
    if not value:
        return []
    if not isinstance(value, list):
        raise wrong(f"{where} must be a list, not {kind_of(value)}.")
    calls: list[dict[str, Any]] = []
    for index, call in enumerate(value):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise wrong(f"{where}[{index}] must be an object with a function.")
        name = text_at(function.get("name"), f"{where}[{index}].function.name")
        arguments = text_at(function.get("arguments"), f"{where}[{index}].function.arguments")
        call_id = call.get("id") if isinstance(call.get("id"), str) else ""
        names[str(call_id)] = name
        calls.append(function_call(str(call_id), name, arguments))
    return calls


def function_call(call_id: str, name: str, arguments: str | dict[str, Any]) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def function_tools(value: Any) -> list[dict[str, Any]]:
    """Tools in the form that templates expect; responses have the function's members beside its type."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise wrong(f"tools must be a list, not {kind_of(value)}.")
    tools: list[dict[str, Any]] = []
    for index, tool in enumerate(value):
        where = f"tools[{index}]"
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind is None:
            raise wrong(f"{where} must be an object of type function: {FUNCTION}.")
        if kind != "function":
            raise wrong(f"{where} must be an object of type function; {kind!r} is not supported.")
        function = tool.get("function", tool)
        if not isinstance(function, dict):
            raise wrong(f"{where}.function must be an object, not {kind_of(function)}: {FUNCTION}.")
        where = where if function is tool else f"{where}.function"
        check_members(function, FUNCTION_KEYS if function is not tool else ("type", *FUNCTION_KEYS), where)
        tools.append(function_tool(function.get("name"), function.get("description"), function.get("parameters"), where))
    return tools


def check_members(given: dict[str, Any], known: Sequence[str], where: str) -> None:
    """Refuse members that are not known, unless they are empty: clients repeat objects with all their fields."""
    for key, value in given.items():
        if key not in known and value:
            raise wrong(f"{where} has an unknown member {key!r}. {did_you_mean(key, known)}".strip())


def function_tool(
    name: Any, description: Any, parameters: Any, where: str, schema_name: str = "parameters"
) -> dict[str, Any]:
    if not text_at(name, f"{where}.name"):
        raise wrong(f"{where}.name must not be empty.")
    if parameters is not None:
        place = f"{where}.{schema_name}"
        complaint = schema_complaint(parameters, place)
        kind = parameters.get("type") if isinstance(parameters, dict) else None
        if complaint is None and (isinstance(parameters, bool) or kind not in (None, "object")):
            stated = kind_of(parameters) if isinstance(parameters, bool) else f"type {kind!r}"
            complaint = f'{place} must be a schema of type "object", not {stated}: a function has its arguments by name.'
        if complaint is not None:
            raise wrong(f"The tool {name!r}: {complaint}")
    described = "" if description is None else text_at(description, f"{where}.description")
    schema = parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": {"name": name, "description": described, "parameters": schema}}


def chosen_tool(value: Any) -> str:
    """tool_choice as "auto", "none", "required" or "=" and the name of a function."""
    if value is None or value in ("auto", "none", "required"):
        return str(value or "")
    if isinstance(value, dict) and value.get("type") == "function":
        name = value.get("function", value)
        name = name.get("name") if isinstance(name, dict) else None
        if isinstance(name, str):
            return f"={name}"
    raise wrong('tool_choice must be "auto", "none", "required" or an object that names a function.')


ROLES = ("system", "developer", "user", "assistant", "tool")
ROLE = {"enum": list(ROLES)}
CONTENT = {"anyOf": [STRING, {"type": "array", "items": {"type": "object"}}]}
Messages = Annotated[
    list[dict[str, Any]],
    PlainValidator(chat_messages),
    WithJsonSchema({
        "type": "array", "minItems": 1,
        "items": {"type": "object", "properties": {"role": ROLE, "content": CONTENT}, "required": ["role"]},
    }),
]
Tools = Annotated[
    list[dict[str, Any]], PlainValidator(function_tools),
    WithJsonSchema({"anyOf": [{"type": "array", "items": {"type": "object"}}, NULL]}),
]
ToolChoice = Annotated[str, PlainValidator(chosen_tool), WithJsonSchema({"anyOf": [STRING, {"type": "object"}, NULL]})]


Prompts = Annotated[
    list[str | list[int]], PlainValidator(lambda value: inputs_at(value, "prompt")), WithJsonSchema(INPUTS)
]


class ToolBody(TextBody):
    """A body with tools."""

    tools: Tools = Field([])
    tool_choice: ToolChoice = ""
    parallel_tool_calls: bool | None = Field(None, description="false: one call at most.")

    def check_tools(self) -> str:
        """What tool_choice comes to: "none" without tools, "auto" if nothing is said."""
        names = [tool["function"]["name"] for tool in self.tools]
        choice = self.tool_choice or ("auto" if names else "none")
        if choice in ("auto", "none"):
            return choice if names else "none"
        if not names:
            raise InvalidParameterError("tool_choice asks for a call, but there are no tools.", "tool_choice")
        if choice[0] == "=" and choice[1:] not in names:
            message = f"tool_choice names {choice[1:]!r}, which is none of tools. {did_you_mean(choice[1:], names)}"
            raise InvalidParameterError(message.strip(), "tool_choice")
        return choice


class ChoicesBody(TextBody):
    """What chat and completions have in common."""

    n: int | None = stated(minimum=1, maximum=MAX_N)
    stop: Stops = Field([])
    prompt_logprobs: int | None = stated(minimum=0, maximum=MAX_LOGPROBS)
    response_format: dict[str, Any] | None = None
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, description=UNUSED)

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def stated_format(self) -> dict[str, Any] | None:
        return response_grammar(self.response_format)

    def sampling(self) -> dict[str, Any]:
        if self.stream and self.prompt_logprobs is not None:
            raise UnsupportedParameterError("Logprobs of a prompt are not streamed; leave out stream.", "stream")
        if self.stream_options is not None and not self.stream:
            raise InvalidParameterError("stream_options is for streams; set stream to true.", "stream_options")
        return super().sampling()


class ChatBody(ToolBody, ChoicesBody):
    """POST /v1/chat/completions, as OpenAI has it."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "audio": (), "function_call": (), "functions": (), "modalities": (["text"],), "moderation": (), "prediction": (),
        "prompt_cache_options": (), "reasoning_effort": ("none",), "service_tier": ("auto", "default"), "store": (False,),
        "verbosity": ("medium",), "web_search_options": (), "best_of": (1,),
    }  # fmt: skip

    messages: Messages
    max_tokens: int | None = stated(minimum=1)
    max_completion_tokens: int | None = stated(description="The same, as OpenAI names it now.", minimum=1)
    logprobs: bool | None = None
    top_logprobs: int | None = stated(minimum=0, maximum=MAX_LOGPROBS)
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Values for the chat template.")
    metadata: dict[str, Any] | None = Field(None, description=UNUSED)
    safety_identifier: str | None = Field(None, description=UNUSED)
    prompt_cache_key: str | None = Field(None, description=UNUSED)
    prompt_cache_retention: str | None = Field(None, description=UNUSED)

    def sampling(self) -> dict[str, Any]:
        limits = {limit for limit in (self.max_tokens, self.max_completion_tokens) if limit is not None}
        if len(limits) > 1:
            raise InvalidParameterError("max_tokens and max_completion_tokens say different things.", "max_completion_tokens")
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidParameterError("top_logprobs needs logprobs to be true.", "top_logprobs")
        found = {**super().sampling(), "max_tokens": next(iter(limits), None)}
        return {**found, "logprobs": self.top_logprobs or 0} if self.logprobs else found


class CompletionBody(ChoicesBody):
    """POST /v1/completions, as OpenAI has it."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"best_of": (1,), "suffix": ("",)}

    prompt: Prompts
    max_tokens: int | None = stated(16, "0, with echo, gives the prompt alone.", minimum=0)
    logprobs: int | None = stated(minimum=0, maximum=MAX_LOGPROBS)
    echo: bool | None = None
    return_token_ids: bool = Field(False, description="Give token ids beside the text.")
    add_special_tokens: bool = Field(True, description="Whether tokens such as that of the beginning are put before a text.")

    def sampling(self) -> dict[str, Any]:
        found = {**super().sampling(), "max_tokens": self.max_tokens}
        if self.max_tokens == 0:
            if not self.echo:
                raise InvalidParameterError("max_tokens is 0, which only makes sense with echo.", "max_tokens")
            found["max_tokens"] = 1  # the engine has no smaller number; it is not shown
        if self.logprobs is not None:
            found["logprobs"] = self.logprobs
            if self.echo and self.stream:
                raise UnsupportedParameterError("Logprobs of a prompt are not streamed; leave out stream.", "stream")
            if self.echo:
                found.setdefault("prompt_logprobs", self.logprobs)
        return found
