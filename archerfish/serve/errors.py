"""Every error as an answer, in the shape of the API that the route belongs to.

OpenAI: {"error": {"message", "type", "param", "code"}}; Anthropic: {"type": "error", "error": {"type", "message"}};
Ollama and
TEI: {"error": message}.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from archerfish.errors import ArcherfishError, CallerError, InvalidInputError, did_you_mean
from archerfish.serve.overload import retry_after

logger = logging.getLogger("archerfish.serve")
CODES = {400: "bad_request", 404: "not_found", 405: "method_not_allowed"}
RETRY_AFTER_S = 1.0  # for a temporary error that states no time
MAX_MESSAGE = 1000  # characters: a message may repeat what a client sent, which may be long
MAX_PROBLEMS = 100  # wrong values of a body that pydantic describes, though only the first is told
EXCERPT = 40  # characters of a wrong value in an error message
EXPECTED = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "a string",
    "list": "an array",
    "dict": "an object",
    "model": "an object",
}
BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
ANTHROPIC_PATH = "/v1/messages"
PLAIN_PATHS = ("/", "/embed", "/predict", "/info")  # of TEI; those of Ollama begin with /api/
ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
_encode = msgspec.json.Encoder().encode


class Schema(msgspec.Struct, forbid_unknown_fields=True):
    """Base of all answers. Every member is written, except those that are UNSET."""


class ErrorDetail(Schema):
    message: str
    type: str
    param: str | None
    code: str


class Error(Schema):
    """An error in OpenAI's shape."""

    error: ErrorDetail


class AnthropicErrorDetail(Schema):
    type: str
    message: str


class AnthropicError(Schema, tag_field="type", tag="error"):
    """An error in Anthropic's shape."""

    error: AnthropicErrorDetail


class PlainError(Schema):
    """An error in the shape of Ollama and TEI."""

    error: str


AnyError = Error | AnthropicError | PlainError


class InvalidParameterError(InvalidInputError):
    """A value that is invalid for the served model; names its parameter."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


class UnknownParameterError(InvalidParameterError):
    code = "unknown_parameter"


class UnsupportedParameterError(InvalidParameterError):
    """A parameter of OpenAI's or Anthropic's API that this server does not support."""

    code = "unsupported_parameter"


class BadJSONError(CallerError):
    """A body that is not JSON."""

    code = "invalid_json"


@contextmanager
def naming(param: str) -> Iterator[None]:
    """Give errors about input the parameter that caused them, unless they have one."""
    try:
        yield
    except InvalidInputError as error:
        error.param = error.param or param
        raise


def check_members(given: Any, known: Sequence[str], where: str, hints: Mapping[str, str] | None = None) -> None:
    """Refuse what is no object, and unknown members. Empty ones are accepted: clients send objects with all their
    fields."""
    if not isinstance(given, dict):
        raise InvalidInputError(f"{where} must be an object, not {json_type(given)}.")
    for name, value in given.items():
        if name not in known and value:
            hint = (hints or {}).get(name) or did_you_mean(name, known)
            raise InvalidInputError(f"{where} has no member {name!r}.", hint=hint)


def encode_json(data: Any) -> bytes:
    """JSON of an answer or an event."""
    try:
        return _encode(data)
    except OverflowError:  # answers may repeat whole numbers beyond 64 bits that a client sent
        return json.dumps(msgspec.to_builtins(data), separators=(",", ":")).encode()


def data_event(data: Any) -> bytes:
    return b"data: " + encode_json(data) + b"\n\n"


def named_event(data: Any) -> bytes:
    """An event that is named by the type of its data."""
    name: str = data.__struct_config__.tag or data.type
    return f"event: {name}\n".encode() + data_event(data)


def json_response(data: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(encode_json(data), status, headers=dict(headers or {}), media_type="application/json")


def error_body(status: int, message: str, code: str, param: str | None, path: str) -> AnyError:
    """An error in the shape of the API that the path of its request belongs to."""
    message = message if len(message) <= MAX_MESSAGE else f"{message[:MAX_MESSAGE]}..."
    if error_type(path) is PlainError:
        return PlainError(message)
    if error_type(path) is AnthropicError:
        kind = ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
        return AnthropicError(error=AnthropicErrorDetail(type=kind, message=message))
    param = param[:MAX_MESSAGE] if param else None
    kind = "rate_limit_error" if status == 429 else "invalid_request_error" if status < 500 else "server_error"
    return Error(error=ErrorDetail(message=message, type=kind, param=param, code=code))


def error_type(path: str) -> type[AnyError]:
    """The shape of the errors of a path."""
    if path == ANTHROPIC_PATH or path.startswith(f"{ANTHROPIC_PATH}/"):
        return AnthropicError
    return PlainError if path in PLAIN_PATHS or path.startswith("/api/") else Error


def error_headers(error: ArcherfishError) -> dict[str, str] | None:
    if error.status == 401:
        return {"WWW-Authenticate": "Bearer"}
    seconds = error.retry_after_s
    if seconds is None and error.status in (429, 503):
        seconds = RETRY_AFTER_S
    return None if seconds is None else {"Retry-After": retry_after(seconds)}


def failure_body(error: Exception, path: str = "") -> AnyError:
    """The error that a client sees. The text of an unexpected error is hidden; the server logs its traceback."""
    if not isinstance(error, ArcherfishError):
        error = ArcherfishError("The server failed to answer this request; its log says why.", hint="")
    return error_body(error.status, str(error), error.code, error.param, path)


def failure_response(error: ArcherfishError, path: str) -> Response:
    return json_response(failure_body(error, path), error.status, error_headers(error))


async def _on_our_error(request: Request, error: ArcherfishError) -> Response:
    request.state.error = error
    if error.status >= 500 and error.retry_after_s is None:
        logger.error(
            "%s %r: %s", request.method, request.scope["path"], error
        )  # %r: a path may hold control characters
    return failure_response(error, request.scope["path"])


def json_type(value: Any) -> str:
    """The JSON type of a value, with its article."""
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def expected_value(problem: Mapping[str, Any]) -> str | None:
    """What pydantic expected instead of a value; None: use pydantic's own message."""
    context = problem.get("ctx") or {}
    if problem["type"] == "literal_error":
        return str(context["expected"])
    bounds = [f"{words} {context[name]:,.15g}" for name, words in BOUNDS.items() if name in context]
    return bounds[0] if bounds else EXPECTED.get(problem["type"].partition("_")[0])


def short_value(value: Any) -> str:
    """A value in an error message: the start of a string or number, the type of anything else."""
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        text = repr(value)
        return text if len(text) <= EXCERPT else f"{text[:EXCERPT]}..."
    return json_type(value)


async def _on_invalid_body(request: Request, error: ValidationError) -> Response:
    """An answer about the first problem with a body."""
    if error.error_count() > MAX_PROBLEMS:
        return await _on_our_error(request, InvalidInputError(f"The body has {error.error_count():,} wrong values."))
    problem = error.errors()[0]
    param = str(problem["loc"][0])
    place = param + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in problem["loc"][1:])
    if problem["type"] == "missing":
        message = f"The parameter {place!r} is missing."
    elif expected := expected_value(problem):
        message = f"{place} must be {expected}, not {short_value(problem['input'])}."
    else:
        message = f"{place}: {problem['msg']}."
    return await _on_our_error(request, InvalidParameterError(message, param))


async def _on_http_error(request: Request, error: HTTPException) -> Response:
    message, path = str(error.detail), request.scope["path"]
    headers = dict(error.headers or {})
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    if error.status_code == 404:
        hint = did_you_mean(path, sorted({route.path for route in routes})) if len(path) <= MAX_MESSAGE else ""
        message = f"There is no route {request.method} {path}. {hint} GET /docs lists all.".replace("  ", " ")
    elif error.status_code == 405:
        allowed = {method for route in routes if route.path_regex.match(path) for method in route.methods or ()}
        headers["Allow"] = ", ".join(sorted(allowed))
        message = f"{path} does not take {request.method}; it takes {headers['Allow']}."
    code = CODES.get(error.status_code, "http_error")
    request.state.error = code
    return json_response(error_body(error.status_code, message, code, None, path), error.status_code, headers)


async def _on_unexpected_error(request: Request, error: Exception) -> Response:
    return json_response(failure_body(error, request.scope["path"]), 500)


HANDLERS: Mapping[Any, Any] = {
    ArcherfishError: _on_our_error,
    ValidationError: _on_invalid_body,
    HTTPException: _on_http_error,
    Exception: _on_unexpected_error,
}
