"""Every error as an answer, in the shape of whose route it is.

OpenAI's: {"error": {"message", "type", "param", "code"}}; Anthropic's: {"type": "error", "error": {"type", "message"}}.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from archerfish.errors import ArcherfishError, InvalidInputError, ModelNotFoundError
from archerfish.serve.limits import retry_after

logger = logging.getLogger("archerfish.serve")
CODES = {400: "bad_request", 404: "not_found", 405: "method_not_allowed", 413: "input_too_large"}
MAX_MESSAGE = 1000  # characters: a message may repeat what a client sent, which may be long
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


class UnservedModelError(ModelNotFoundError):
    """A request asks for a model that this service does not have."""

    param = "model"


class BodyTooLargeError(HTTPException):
    """Raised while a body is read; FastAPI passes on no other kind of error from there."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__(413, f"The request body has more than {max_bytes} bytes.")


class ClientGoneError(Exception):
    """The client closed its connection; nobody reads the answer."""


def json_response(data: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    # Escaped to ASCII: a lone surrogate that a client sent may come back in a message and has no UTF-8 form.
    body = json.dumps(data, separators=(",", ":"))
    return Response(body, status, headers=dict(headers or {}), media_type="application/json")


def error_response(
    status: int, message: str, code: str, param: str | None = None, headers: Mapping[str, str] | None = None, *, path: str = ""
) -> Response:
    """path: of the request, which says whose shape the error has."""
    message = message if len(message) <= MAX_MESSAGE else f"{message[:MAX_MESSAGE]}..."
    param = None if param is None else param[:MAX_MESSAGE]
    if is_anthropic(path):
        return json_response(anthropic_error(status, message), status, headers)
    if status == 429:
        kind = "rate_limit_error"
    else:
        kind = "invalid_request_error" if status < 500 else "server_error"
    return json_response({"error": {"message": message, "type": kind, "param": param, "code": code}}, status, headers)


def is_anthropic(path: str) -> bool:
    return path == ANTHROPIC_PATH or path.startswith(f"{ANTHROPIC_PATH}/")


def anthropic_error(status: int, message: str) -> dict[str, Any]:
    kind = ANTHROPIC_KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def retry_headers(error: ArcherfishError) -> dict[str, str] | None:
    seconds = getattr(error, "retry_after_s", None)
    return None if seconds is None else {"Retry-After": retry_after(seconds)}


def failure_response(error: ArcherfishError, headers: Mapping[str, str] | None = None, *, path: str = "") -> Response:
    """An error of ours; headers: of one that does not say itself when to try again."""
    param = getattr(error, "param", None)
    return error_response(error.status, str(error), error.code, param, retry_headers(error) or headers, path=path)


def install_handlers(app: FastAPI, retry_after_s: Callable[[], int]) -> None:
    """Make the app answer all errors in their shape."""

    async def ours(request: Request, error: Exception) -> Response:
        assert isinstance(error, ArcherfishError)
        if error.status >= 500 and retry_headers(error) is None:
            logger.error("%s %s: %s", request.method, request.scope["path"], error)
        headers = {"Retry-After": str(retry_after_s())} if error.status in (429, 503) else None
        return failure_response(error, headers, path=request.scope["path"])

    app.add_exception_handler(ArcherfishError, ours)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(StarletteHTTPException, _http)
    app.add_exception_handler(ClientGoneError, _gone)
    app.add_exception_handler(ClientDisconnect, _gone)
    app.add_exception_handler(Exception, _unexpected)


async def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    message, code, param = complaint(error)
    return error_response(400, message, code, param, path=request.scope["path"])


def complaint(error: RequestValidationError) -> tuple[str, str, str | None]:
    """Message, code and parameter of the first of what is wrong with a body."""
    first = error.errors()[0]
    context = first.get("ctx") or {}
    location = tuple(first["loc"])[1:]
    if first["type"] == "json_invalid":
        return f"The body is not valid JSON: {context.get('error', first['msg'])}.", "invalid_json", None
    if not location and first["type"] != "unknown_parameter":
        return "The body must be a JSON object, sent with the header Content-Type: application/json.", "bad_request", None
    param = str(context.get("param") or ".".join(map(str, location)))
    if first["type"] in ("wrong_value", "unknown_parameter"):
        message = str(context["message"])
    elif first["type"] == "missing":
        message = f"The parameter {param!r} is missing."
    else:
        message = f"{param}: {first['msg']}."
    return message, "unknown_parameter" if first["type"] == "unknown_parameter" else "invalid_value", param


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, StarletteHTTPException)
    message, path = str(error.detail), request.scope["path"]
    if error.status_code == 404:
        message = f"There is no route {request.method} {path}; GET / lists them."
    elif error.status_code == 405:
        message = f"{path} does not take {request.method}."
    code = CODES.get(error.status_code, "http_error")
    return error_response(error.status_code, message, code, headers=error.headers, path=path)


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)


def unexpected() -> ArcherfishError:
    """What is not ours says nothing about itself to the client; the server logs its traceback."""
    return ArcherfishError("The server failed to answer this request; its log says why.", hint="")


async def _unexpected(request: Request, error: Exception) -> Response:
    return failure_response(unexpected(), path=request.scope["path"])
