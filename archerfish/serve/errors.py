"""Every error as an answer in OpenAI's shape: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.responses import Response

from archerfish.errors import ArcherfishError, InvalidInputError, ModelNotFoundError

logger = logging.getLogger("archerfish.serve")
CODES = {400: "bad_request", 404: "not_found", 405: "method_not_allowed", 413: "input_too_large"}


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
    status: int, message: str, code: str, param: str | None = None, headers: Mapping[str, str] | None = None
) -> Response:
    if status == 429:
        kind = "rate_limit_error"
    else:
        kind = "invalid_request_error" if status < 500 else "server_error"
    return json_response({"error": {"message": message, "type": kind, "param": param, "code": code}}, status, headers)


def install_handlers(app: FastAPI, retry_after_s: Callable[[], int]) -> None:
    """Make the app answer all errors in one shape."""

    async def ours(request: Request, error: Exception) -> Response:
        assert isinstance(error, ArcherfishError)
        if error.status >= 500:
            logger.error("%s %s: %s", request.method, request.url.path, error)
        headers = {"Retry-After": str(retry_after_s())} if error.status in (429, 503) else None
        return error_response(error.status, str(error), error.code, getattr(error, "param", None), headers)

    app.add_exception_handler(ArcherfishError, ours)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(StarletteHTTPException, _http)
    app.add_exception_handler(ClientGoneError, _gone)
    app.add_exception_handler(Exception, _unexpected)


async def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    context = first.get("ctx") or {}
    location = tuple(first["loc"])[1:]
    if first["type"] == "json_invalid":
        return error_response(400, f"The body is not valid JSON: {context.get('error', first['msg'])}.", "invalid_json")
    if not location and first["type"] != "unknown_parameter":
        message = "The body must be a JSON object, sent with the header Content-Type: application/json."
        return error_response(400, message, "bad_request")
    param = str(context.get("param") or ".".join(map(str, location)))
    if first["type"] in ("wrong_value", "unknown_parameter"):
        message = str(context["message"])
    elif first["type"] == "missing":
        message = f"The parameter {param!r} is missing."
    else:
        message = f"{param}: {first['msg']}."
    code = "unknown_parameter" if first["type"] == "unknown_parameter" else "invalid_value"
    return error_response(400, message, code, param)


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, StarletteHTTPException)
    message = str(error.detail)
    if error.status_code == 404:
        message = f"There is no route {request.method} {request.url.path}; GET / lists them."
    elif error.status_code == 405:
        message = f"{request.url.path} does not take {request.method}."
    code = CODES.get(error.status_code, "http_error")
    return error_response(error.status_code, message, code, headers=error.headers)


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)


async def _unexpected(request: Request, error: Exception) -> Response:
    """What is not ours says nothing about itself to the client; the server logs its traceback."""
    return error_response(500, "The server failed to answer this request; its log says why.", ArcherfishError.code)
