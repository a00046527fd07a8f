"""Bodies of requests. Unknown parameters are refused with the nearest known one, and no value is converted to another type."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

from annotated_types import GroupedMetadata
from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationInfo, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from archerfish.errors import did_you_mean
from archerfish.serve.errors import EXCERPT, BadJSONError, NoObjectError, UnsupportedParameterError, json_type

MAX_TOKEN_ID = 2**31 - 1
JSON_TYPE = re.compile(r"application/(.*\+)?json")
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
    if not isinstance(value, list):
        raise wrong_value(f"{where} must be a list of strings, not {json_type(value)}.")
    return [check_text(item, f"{where}[{index}]") for index, item in enumerate(value)]


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
    # Parameters of others' APIs that are refused, unless they have one of these values, which ask for what happens anyway.
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

    priority: int = Field(0, description="Higher runs first.")
    deadline_s: float | None = Field(None, description="Seconds after which the request is given up.")
    stream: bool | None = False


# JSON


class NotANumberError(ValueError):
    """A number that Python's JSON reads and the JSON standard does not have."""


def _refuse_constant(text: str) -> NoReturn:
    raise NotANumberError(text)


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse_constant(text)


_decoder = json.JSONDecoder(parse_float=_finite, parse_constant=_refuse_constant)


def read_json(body: bytes) -> Any:
    """JSON by the standard, without NaN and infinite numbers. BadJSONError says what is wrong, and where."""
    try:
        return _decoder.decode(body.decode(json.detect_encoding(body), "surrogatepass"))
    except json.JSONDecodeError as error:
        raise BadJSONError(f"{error.msg}, {describe_place(error.doc, error.pos)}") from None
    except NotANumberError as error:
        text = body.decode(json.detect_encoding(body), "surrogatepass")
        found = re.finditer(rf'"(?:[^"\\]|\\.)*"|{re.escape(str(error))}', text, re.DOTALL)
        position = next((match.start() for match in found if match[0][0] != '"'), 0)
        raise BadJSONError(f"{error} is not a JSON number, {describe_place(text, position)}") from None
    except UnicodeDecodeError as error:
        where = f"byte {error.start + 1:,} (0x{error.object[error.start]:02x})"
        raise BadJSONError(f"it is not {error.encoding.upper()}: {where}: {error.reason}") from None
    except RecursionError:
        raise BadJSONError("it is nested too deeply") from None
    except ValueError:
        raise BadJSONError(f"a whole number has more than {sys.get_int_max_str_digits():,} digits") from None


def describe_place(text: str, position: int) -> str:
    """Line, column and the characters there."""
    line, column = text.count("\n", 0, position) + 1, position - text.rfind("\n", 0, position)
    there = text[position : position + EXCERPT].partition("\n")[0]
    return f"in line {line}, column {column}, at {there!r}" if there else f"in line {line}, column {column}, where it ends"


class BodyRoute(Route):
    """A route that takes a body of a type by POST: `handler(request, body)` answers it."""

    def __init__(
        self, path: str, handler: Callable[[Request, Any], Coroutine[Any, Any, Response]], body_type: type[Body]
    ) -> None:
        async def endpoint(request: Request) -> Response:
            content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            data = read_json(await request.body() or b"null") if JSON_TYPE.fullmatch(content_type) else None
            if not isinstance(data, dict):
                raise NoObjectError
            return await handler(request, body_type.model_validate(data))

        super().__init__(path, endpoint, methods=["POST"])
        self.handler, self.body_type = handler, body_type
