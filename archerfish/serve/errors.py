"""Every error as an answer, in the shape of whose route it is.

OpenAI's: {"error": {"message", "type", "param", "code"}}; Anthropic's: {"type": "error", "error": {"type", "message"}}.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import Route

from archerfish.errors import ArcherfishError, InvalidInputError, ModelNotFoundError, did_you_mean
from archerfish.serve.limits import retry_after

logger = logging.getLogger("archerfish.serve")
CODES = {400: "bad_request", 404: "not_found", 405: "method_not_allowed", 413: "input_too_large"}
RETRY_AFTER_S = 1.0  # where an error that will pass does not say when
MAX_MESSAGE = 1000  # characters: a message may repeat what a client sent, which may be long
EXCERPT = 24  # characters of a body in what is said of it
EXPECTED = {
    "int": "a whole number", "float": "a number", "bool": "true or false", "string": "a string", "list": "an array",
    "dict": "an object", "model": "an object",
}  # fmt: skip
BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
ANTHROPIC_PATH = "/v1/messages"
ANTHROPIC_KINDS = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error", 529: "overloaded_error",
}  # fmt: skip


class InvalidParameterError(InvalidInputError):
    """A value that only the served model makes invalid; names its parameter."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


class UnsupportedParameterError(InvalidParameterError):
    """A parameter that others have."""

    code = "unsupported_parameter"


class UnservedModelError(ModelNotFoundError):
    """A request asks for a model that this service does not have."""

    param = "model"


class BodyTooLargeError(HTTPException):
    """Raised while a body is read; FastAPI passes on no other kind of error from there."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__(413, f"The request body has more than {max_bytes} bytes.")


class BadJSONError(HTTPException):
    """A body that is no JSON; FastAPI would not say why."""

    code = "invalid_json"

    def __init__(self, reason: str) -> None:
        super().__init__(400, f"The body is not valid JSON: {reason}.")


class ClientGoneError(Exception):
    """The client closed its connection; nobody reads the answer."""


def json_response(data: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    # Escaped to ASCII: a lone surrogate that a client sent may come back in a message and has no UTF-8 form.
    body = json.dumps(data, separators=(",", ":"))
    return Response(body, status, headers=dict(headers or {}), media_type="application/json")


def error_response(
    status: int, message: str, code: str, param: str | None = None, headers: Mapping[str, str] | None = None, *, path: str = ""
) -> Response:
    return json_response(error_body(status, message, code, param, path), status, headers)


def error_body(status: int, message: str, code: str, param: str | None, path: str) -> dict[str, Any]:
    """path: of the request, which says whose shape the error has."""
    message = message if len(message) <= MAX_MESSAGE else f"{message[:MAX_MESSAGE]}..."
    if is_anthropic(path):
        kind = ANTHROPIC_KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": message}}
    param = None if param is None else param[:MAX_MESSAGE]
    kind = "rate_limit_error" if status == 429 else "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def is_anthropic(path: str) -> bool:
    return path == ANTHROPIC_PATH or path.startswith(f"{ANTHROPIC_PATH}/")


def headers_of(error: ArcherfishError) -> dict[str, str] | None:
    """When to try again, or how to say who one is."""
    if error.status == 401:
        return {"WWW-Authenticate": "Bearer"}
    seconds = getattr(error, "retry_after_s", None)
    if seconds is None and error.status in (429, 503):
        seconds = RETRY_AFTER_S
    return None if seconds is None else {"Retry-After": retry_after(seconds)}


def told(error: Exception) -> ArcherfishError:
    """What is not ours says nothing about itself to the client; the server logs its traceback."""
    unexpected = "The server failed to answer this request; its log says why."
    return error if isinstance(error, ArcherfishError) else ArcherfishError(unexpected, hint="")


def failure_body(error: Exception, path: str = "") -> dict[str, Any]:
    shown = told(error)
    return error_body(shown.status, str(shown), shown.code, getattr(shown, "param", None), path)


def failure_response(error: Exception, *, path: str = "") -> Response:
    shown = told(error)
    return json_response(failure_body(shown, path), shown.status, headers_of(shown))


def install_handlers(app: FastAPI) -> None:
    """Make the app answer all errors in their shape."""
    app.add_exception_handler(ArcherfishError, _ours)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(StarletteHTTPException, _http)
    app.add_exception_handler(ClientGoneError, _gone)
    app.add_exception_handler(ClientDisconnect, _gone)
    app.add_exception_handler(Exception, _unexpected)


async def _ours(request: Request, error: Exception) -> Response:
    if told(error).status >= 500 and getattr(error, "retry_after_s", None) is None:
        logger.error("%s %r: %s", request.method, request.scope["path"], error)  # %r: a path may hold anything
    return failure_response(error, path=request.scope["path"])


async def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    message, code, param = complaint(error)
    return error_response(400, message, code, param, path=request.scope["path"])


def kind_of(value: Any) -> str:
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def expected_of(first: Mapping[str, Any]) -> str | None:
    """What a value must be by a validator's complaint; None where the validator's own words have to do."""
    context = first.get("ctx") or {}
    if first["type"] == "literal_error":
        return str(context["expected"])
    bounds = [f"{words} {context[name]:g}" for name, words in BOUNDS.items() if name in context]
    return bounds[0] if bounds else EXPECTED.get(first["type"].partition("_")[0])


def shown_value(value: Any) -> str:
    """A value in an error: what was sent if that is short."""
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        text = repr(value)
        return text if len(text) <= EXCERPT else f"{text[:EXCERPT]}..."
    return kind_of(value)


def complaint(error: RequestValidationError) -> tuple[str, str, str | None]:
    """Message, code and parameter of the first of what is wrong with a body."""
    first = error.errors()[0]
    context = first.get("ctx") or {}
    location = tuple(first["loc"])[1:]
    if not location and first["type"] != "unknown_parameter":
        return "The body must be a JSON object, sent with the header Content-Type: application/json.", "bad_request", None
    param = str(context.get("param") or ".".join(map(str, location)))
    if first["type"] in ("wrong_value", "unknown_parameter"):
        message = str(context["message"])
    elif first["type"] == "missing":
        message = f"The parameter {param!r} is missing."
    elif expected := expected_of(first):
        message = f"{param} must be {expected}, not {shown_value(first['input'])}."
    else:
        message = f"{param}: {first['msg']}."
    return message, "unknown_parameter" if first["type"] == "unknown_parameter" else "invalid_value", param


def paths_of(app: FastAPI) -> list[str]:
    return sorted({route.path for route in app.routes if isinstance(route, Route)})


def methods_of(app: FastAPI, path: str) -> list[str]:
    """What may be asked of a path; a route of its own may stand behind each."""
    found = [route.methods or () for route in app.routes if isinstance(route, Route) and route.path_regex.match(path)]
    return sorted({method for methods in found for method in methods})


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, StarletteHTTPException)
    message, path = str(error.detail), request.scope["path"]
    headers = dict(error.headers or {})
    if error.status_code == 404:
        nearest = f"{did_you_mean(path, paths_of(request.app))} " if len(path) <= MAX_MESSAGE else ""
        message = f"There is no route {request.method} {path}. {nearest.lstrip()}GET /openapi.json lists all."
    elif error.status_code == 405:
        headers["Allow"] = ", ".join(methods_of(request.app, path))
        message = f"{path} does not take {request.method}; it takes {headers['Allow']}."
    code = getattr(error, "code", None) or CODES.get(error.status_code, "http_error")
    return error_response(error.status_code, message, code, headers=headers, path=path)


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)


async def _unexpected(request: Request, error: Exception) -> Response:
    return failure_response(error, path=request.scope["path"])
