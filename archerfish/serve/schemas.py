"""Bodies of requests. Unknown parameters are refused with the nearest known one, and nothing is converted silently."""

from __future__ import annotations

import inspect
import json
import math
import re
import sys
from collections.abc import Callable, Coroutine, Mapping
from typing import Annotated, Any, ClassVar, Literal, NoReturn

from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError
from starlette.requests import Request
from starlette.responses import Response

from archerfish.errors import did_you_mean
from archerfish.serve.errors import EXCERPT, BadJSONError, UnsupportedParameterError, kind_of

MAX_TOKEN_ID = 2**31 - 1


def wrong(message: str) -> PydanticCustomError:
    # The message goes in as a value, because a template would give braces in it a meaning. Half a character has no UTF-8 form.
    return PydanticCustomError("wrong_value", "{message}", {"message": message.encode("utf-8", "backslashreplace").decode()})


def text_at(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise wrong(f"{where} must be a string, not {kind_of(value)}.")
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            raise wrong(f"{where} is not valid Unicode: it holds half of a surrogate pair.") from None
    return value


def token_ids_at(value: Any, where: str) -> list[int]:
    if not isinstance(value, list) or not value:
        raise wrong(f"{where} must be a list of token ids that is not empty.")
    for position, token_id in enumerate(value):
        if type(token_id) is not int or not 0 <= token_id <= MAX_TOKEN_ID:
            raise wrong(f"{where}[{position}] must be a token id.")
    return value


def inputs_at(value: Any, where: str) -> list[str | list[int]]:
    """One text or one list of token ids, or several of them."""
    if isinstance(value, str):
        return [text_at(value, where)]
    if not isinstance(value, list) or not value:
        what = "an empty list" if value == [] else kind_of(value)
        raise wrong(f"{where} must be a string, a list of strings, or token ids, not {what}.")
    if type(value[0]) is int:
        return [token_ids_at(value, where)]
    check = token_ids_at if isinstance(value[0], list) else text_at
    return [check(item, f"{where}[{index}]") for index, item in enumerate(value)]


def texts_at(value: Any, where: str) -> list[str]:
    if not isinstance(value, list) or not value:
        raise wrong(f"{where} must be a list of strings that is not empty.")
    return [text_at(item, f"{where}[{index}]") for index, item in enumerate(value)]


def documents_of(value: Any) -> list[str]:
    if not isinstance(value, list) or not value:
        raise wrong("documents must be a list that is not empty.")
    return [
        text_at(item["text"], f"documents[{index}].text")
        if isinstance(item, dict) and "text" in item
        else text_at(item, f"documents[{index}]")
        for index, item in enumerate(value)
    ]


UNUSED = "Accepted and not used."
STRING = {"type": "string"}
NULL = {"type": "null"}
STRINGS = {"type": "array", "items": STRING, "minItems": 1}
IDS = {"type": "array", "items": {"type": "integer"}, "minItems": 1}
INPUTS = {"anyOf": [STRING, STRINGS, IDS, {"type": "array", "items": IDS, "minItems": 1}]}
DOCUMENT = {"anyOf": [STRING, {"type": "object", "properties": {"text": STRING}, "required": ["text"]}]}
EmbeddingInput = Annotated[
    list[str | list[int]], PlainValidator(lambda value: inputs_at(value, "input")), WithJsonSchema(INPUTS)
]
OneText = Annotated[str, PlainValidator(lambda value: text_at(value, "query")), WithJsonSchema(STRING)]
OneOrMore = Annotated[
    str | list[str],
    PlainValidator(lambda value: texts_at(value, "source") if isinstance(value, list) else text_at(value, "source")),
    WithJsonSchema({"anyOf": [STRING, STRINGS]}),
]
Sentences = Annotated[list[str], PlainValidator(lambda value: texts_at(value, "sentences")), WithJsonSchema(STRINGS)]
Documents = Annotated[
    list[str], PlainValidator(documents_of), WithJsonSchema({"type": "array", "minItems": 1, "items": DOCUMENT})
]


class NoNumberError(ValueError):
    """What Python's JSON has as a number and JSON has not."""


def _refuse_constant(text: str) -> NoReturn:
    raise NoNumberError(text)


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse_constant(text)


_decoder = json.JSONDecoder(parse_float=_finite, parse_constant=_refuse_constant)


def read_json(body: bytes) -> Any:
    """JSON by the standard: NaN and numbers without end are none. BadJSONError says what is wrong, and where."""
    try:
        return _decoder.decode(body.decode(json.detect_encoding(body), "surrogatepass"))
    except json.JSONDecodeError as error:
        raise BadJSONError(f"{error.msg}, {place_in(error.doc, error.pos)}") from None
    except NoNumberError as error:
        text = body.decode(json.detect_encoding(body), "surrogatepass")
        found = re.finditer(rf'"(?:[^"\\]|\\.)*"|{re.escape(str(error))}', text, re.DOTALL)
        position = next((match.start() for match in found if match[0][0] != '"'), 0)
        raise BadJSONError(f"{error} is no number of JSON, {place_in(text, position)}") from None
    except UnicodeDecodeError as error:
        where = f"byte {error.start + 1:,} (0x{error.object[error.start]:02x})"
        raise BadJSONError(f"it is no {error.encoding.upper()}, by its {where}: {error.reason}") from None
    except RecursionError:
        raise BadJSONError("it is nested too deeply") from None
    except ValueError:
        raise BadJSONError(f"a whole number has more than {sys.get_int_max_str_digits():,} digits") from None


def place_in(text: str, position: int) -> str:
    """A position for people, with what stands there."""
    line, column = text.count("\n", 0, position) + 1, position - text.rfind("\n", 0, position)
    there = text[position : position + EXCERPT].partition("\n")[0]
    return f"in line {line}, column {column}, at {there!r}" if there else f"in line {line}, column {column}, where it ends"


class StrictRequest(Request):
    """A request whose body is JSON by the standard."""

    async def json(self) -> Any:
        return read_json(await self.body())


class BodyRoute(APIRoute):
    """A route of strict requests."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle, endpoint, model = super().get_route_handler(), self.endpoint, self._only_body()

        async def answer(request: Request) -> Response:
            strict = StrictRequest(request.scope, request.receive)
            if model is None or strict.headers.get("content-type") != "application/json":
                return await handle(strict)
            try:
                body = model.model_validate(await strict.json())
            except (ValueError, RecursionError, BadJSONError):
                return await handle(strict)  # which says what is wrong
            answered: Response = await endpoint(strict, body)
            return answered

        return answer

    def _only_body(self) -> type[Body] | None:
        """The model of the body, where that and the request are all that an endpoint takes."""
        found = [*inspect.get_annotations(self.endpoint, eval_str=True).items()]
        models = [kind for name, kind in found if name == "body"]
        is_plain = [name for name, _ in found if name != "return"] == ["request", "body"] and not self.dependencies
        return models[0] if is_plain and isinstance(models[0], type) and issubclass(models[0], Body) else None


class Body(BaseModel):
    """Base of all bodies."""

    model_config = ConfigDict(extra="forbid", strict=True)
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}  # what others have, by name: values that ask for nothing

    @model_validator(mode="before")
    @classmethod
    def _refuse_others(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for name, value in data.items():
            if name in cls.unsupported:
                if value is not None and value not in cls.unsupported[name]:
                    raise UnsupportedParameterError(f"The parameter {name!r} is not supported here.", name)
            elif name not in cls.model_fields:
                param = str(name).encode("utf-8", "backslashreplace").decode()
                hint = did_you_mean(name, cls.model_fields)
                message = f"Unknown parameter '{param}'. {hint}".strip()
                raise PydanticCustomError("unknown_parameter", "{message}", {"message": message, "param": param})
        return {name: value for name, value in data.items() if name not in cls.unsupported}


Deadline = Annotated[
    float | None, Field(gt=0, description="Seconds in which the answer is wanted; what cannot be in time is refused at once.")
]


class EmbeddingsBody(Body):
    """POST /v1/embeddings, as OpenAI has it."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"truncate_prompt_tokens": (-1,)}  # the model's length

    input: EmbeddingInput
    model: str | None = Field(None, description="Name of the served model; left out: the one there is.")
    encoding_format: Literal["float", "base64"] = Field("float", description="base64: little-endian float32.")
    dimensions: int | None = Field(None, ge=1, description="Keep only the first so many dimensions, scaled to length 1.")
    deadline_s: Deadline = None
    user: str | None = Field(None, description=UNUSED)


class RerankBody(Body):
    """POST /v1/rerank, in the common form of Jina and Cohere."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "rank_fields": ([], ["text"]), "max_chunks_per_doc": (), "max_tokens_per_doc": (), "truncate_prompt_tokens": (-1,)
    }  # fmt: skip

    query: OneText
    documents: Documents
    model: str | None = None
    top_n: int | None = Field(None, ge=1, description="Give only the best so many; left out: all.")
    return_documents: bool = Field(False, description="Repeat the text of each document in the answer.")
    deadline_s: Deadline = None


class SimilarityBody(Body):
    """POST /similarity: the cosine of one source with each sentence, or of each of several sources."""

    source: OneOrMore
    sentences: Sentences
    model: str | None = None
    deadline_s: Deadline = None
