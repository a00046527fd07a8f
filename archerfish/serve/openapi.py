"""The OpenAPI document, made of the types of bodies and answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.routing import BaseRoute, Route

from archerfish import __version__
from archerfish.serve import answers, encoder_routes, ollama_routes, view_routes
from archerfish.serve.bodies import NULL, STRING
from archerfish.serve.errors import AnthropicError, Error, PlainError, error_type
from archerfish.serve.http import OPERATOR_PATHS, BodyRoute
from archerfish.serve.metrics import CONTENT_TYPE as METRICS

PREFIX = "#/components/schemas/"
DESCRIPTIONS = {
    400: "The request is wrong; the message says how.",
    401: "The API key is missing or unknown.",
    403: "The key is not an operator's.",
    404: "The model does not exist.",
    413: "The request is too large.",
    429: "The tenant, or the engine, is over its limit; Retry-After says when to try again.",
    503: "The engine process does not answer or takes no more requests; Retry-After says when to try again.",
    504: "The deadline of the request passed before its first token.",
}
GENERATING = (400, 401, 404, 413, 429, 503, 504)
COMPUTING = (400, 401, 404, 413, 429, 503)
OPERATING = (400, 401, 403, 404, 413, 503)
FIGURES = (401, 403, 503)
OBJECT = dict[str, Any]  # figures or options by name
PATH_MODEL = {"parameters": [{"name": "model_id", "in": "path", "required": True, "schema": STRING}]}
QUERY_MODEL = {"parameters": [{"name": "model", "in": "query", "required": False, "schema": {"anyOf": [STRING, NULL]}}]}
OPTIONS = {"type": "object", "description": "Options by either of their names, with their new values."}
OPTIONS_BODY = {"requestBody": {"required": True, "content": {"application/json": {"schema": OPTIONS}}}}
# Of routes that are no BodyRoutes, by method and path: the type of a success (a media type if it is not JSON), the
# statuses of errors, and what else the operation has.
ANSWERS: dict[tuple[str, str], tuple[Any, tuple[int, ...], dict[str, Any]]] = {
    ("get", "/v1/models"): (answers.Models, (401, 503), {}),
    ("get", "/v1/models/{model_id}"): (answers.Model, (401, 404, 503), PATH_MODEL),
    ("get", "/version"): (answers.Version, (), {}),
    ("get", "/health"): (answers.Health, (), {}),
    ("get", "/ready"): (answers.Health, (), {}),
    ("get", "/stats"): (OBJECT, FIGURES, {}),
    ("get", "/metrics"): (METRICS, FIGURES, {}),
    ("get", "/v1/cache/view"): (view_routes.CacheView, (400, 401, 404, 503), QUERY_MODEL),
    ("get", "/"): ("text/html", (), {}),
    ("get", "/info"): (encoder_routes.TEIInfo, (400, 401, 503), {}),
    ("get", "/api/tags"): (ollama_routes.OllamaModels, (401, 503), {}),
    ("get", "/api/ps"): (ollama_routes.OllamaModels, (401, 503), {}),
    ("get", "/api/version"): (ollama_routes.OllamaVersion, (401,), {}),
    ("get", "/admin/optimization"): (OBJECT, OPERATING, QUERY_MODEL),
    ("patch", "/admin/optimization"): (OBJECT, OPERATING, QUERY_MODEL | OPTIONS_BODY),
    ("post", "/admin/restart"): (answers.Restarting, OPERATING, {}),
}


def openapi_document(routes: Iterable[BaseRoute]) -> dict[str, Any]:
    """The document of an app's routes."""
    found = [route for route in routes if isinstance(route, Route)]
    body_routes = [route for route in found if isinstance(route, BodyRoute)]
    _, bodies = models_json_schema(
        [(route.body_type, "validation") for route in body_routes], ref_template=PREFIX + "{model}"
    )
    paths: dict[str, Any] = {}
    for route in found:
        path = route.path.replace(":path", "")
        for method in sorted(name.lower() for name in route.methods or ()):
            operation: dict[str, Any] = {"summary": " ".join(str(route.endpoint.__doc__).partition("\n\n")[0].split())}
            if isinstance(route, BodyRoute):
                statuses = OPERATING if path.startswith(OPERATOR_PATHS) else GENERATING if route.events else COMPUTING
                operation["responses"] = responses_of(path, route.answer, statuses, event_content(route))
                operation["requestBody"] = {"required": True, "content": json_content(route.body_type)}
            elif (method, path) in ANSWERS:
                answer, errors, others = ANSWERS[method, path]
                operation |= {**others, "responses": responses_of(path, answer, errors, {})}
            else:
                continue
            paths.setdefault(path, {})[method] = operation
    info = {"title": "archerfish", "version": __version__}
    types = {kind for route in body_routes for kind in (route.answer, *route.events)} | {
        kind for kind, *_ in ANSWERS.values()
    }
    schemas = {
        **bodies["$defs"],
        **answer_schemas({kind for kind in types if not isinstance(kind, str) and kind != OBJECT}),
    }
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": schemas}}


def answer_schemas(types: set[Any]) -> dict[str, Any]:
    """The schemas of answers, events and errors."""
    ordered = sorted({Error, AnthropicError, PlainError, answers.Failing, *types}, key=str)
    _, schemas = msgspec.json.schema_components(ordered, ref_template=PREFIX + "{name}")
    for schema in schemas.values():  # members with a default are always written
        members = schema["properties"]
        schema["required"] = [name for name in members if name in schema["required"] or "default" in members[name]]
    return schemas


def responses_of(path: str, answer: Any, statuses: Iterable[int], events: Mapping[str, Any]) -> dict[str, Any]:
    """The responses of an operation. events: the content of its streams."""
    success = {**({answer: {"schema": STRING}} if isinstance(answer, str) else json_content(answer)), **events}
    error = json_content(error_type(path))
    found = {"200": {"description": "The answer.", "content": success}}
    found |= {str(status): {"description": DESCRIPTIONS[status], "content": error} for status in statuses}
    if answer is answers.Health:
        found["503"] = {"description": "No computation succeeds now.", "content": json_content(answers.Failing)}
    return found


def reference(kind: Any) -> dict[str, Any]:
    if kind == OBJECT or (isinstance(kind, type) and issubclass(kind, BaseModel)):
        return {"type": "object"} if kind == OBJECT else {"$ref": PREFIX + kind.__name__}
    [found], _ = msgspec.json.schema_components([kind], ref_template=PREFIX + "{name}")
    return found


def json_content(kind: Any) -> dict[str, Any]:
    return {"application/json": {"schema": reference(kind)}}


def event_content(route: BodyRoute) -> dict[str, Any]:
    """Lines of JSON, or server-sent events, whose data is JSON of one of the route's types; OpenAI's end with
    [DONE]."""
    schema = {"anyOf": [reference(kind) for kind in route.events]}
    if not route.events or route.event_type != "text/event-stream":
        return {route.event_type: {"schema": schema}} if route.events else {}
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": schema}
    members = {"event": STRING, "data": {"anyOf": [{"const": "[DONE]"}, data]}}
    return {"text/event-stream": {"schema": {"type": "object", "properties": members, "required": ["data"]}}}
