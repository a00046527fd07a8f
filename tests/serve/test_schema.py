"""schemathesis makes requests from our OpenAPI document and checks every answer and event against it."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from pydantic import ValidationError
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from archerfish.serve.app import create_app
from archerfish.serve.bodies import Body
from archerfish.serve.openapi import ANSWERS, openapi_document

from .fake_backend import FakeBackend

# Not among them: that valid data is accepted. Models, templates and grammars have rules that no schema can state.
CHECKS = [
    not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance,
    response_headers_conformance, negative_data_rejection, unsupported_method,
]  # fmt: skip
GENERATED = [phase for phase in Phase if phase != Phase.explicit]  # the explicit ones are those of the short test
APP = create_app(FakeBackend())
DOCUMENT = openapi_document(APP.routes)
schema = schemathesis.openapi.from_asgi("/openapi.json", APP)


def check(case: schemathesis.Case[Any]) -> None:
    case.call_and_validate(checks=CHECKS)


@pytest.mark.no_cover
@schema.parametrize()
@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
def test_answers_match_the_document(case: schemathesis.Case[Any]) -> None:
    check(case)


@pytest.mark.slow
@schema.parametrize()
@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck), phases=GENERATED)
def test_many_answers_match_the_document(case: schemathesis.Case[Any]) -> None:
    check(case)


def test_document_has_the_answers_of_every_route() -> None:
    stated = {(method, path) for path, operations in DOCUMENT["paths"].items() for method in operations}
    assert stated == ANSWERS.keys() | {("post", path) for path in LEAST}
    for operations in DOCUMENT["paths"].values():
        for operation in operations.values():
            assert "422" not in operation["responses"]


HI = [{"role": "user", "content": "hi"}]
LEAST: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI}, "/v1/completions": {"prompt": "a"}, "/v1/responses": {"input": "a"},
    "/v1/messages": {"messages": HI, "max_tokens": 1}, "/v1/messages/count_tokens": {"messages": HI},
    "/v1/embeddings": {"input": "a"}, "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/similarity": {"source": "a", "sentences": ["b"]}, "/tokenize": {"prompt": "a"}, "/detokenize": {"tokens": [1]},
    "/v1/cache/explain": {"prompt": "a"}, "/v1/tts/tokens": {"text": "a"},
}  # fmt: skip


def bodies(kind: type[Body]) -> dict[str, type[Body]]:
    return {kind.__name__: kind} | {name: each for child in kind.__subclasses__() for name, each in bodies(child).items()}


@pytest.mark.parametrize("path", LEAST)
def test_document_marks_nullable_parameters(path: str) -> None:
    reference = DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    name = reference.rpartition("/")[2]
    model = bodies(Body)[name]
    members = DOCUMENT["components"]["schemas"][name]["properties"]
    may_be, say_so = set[str](), {key for key, member in members.items() if not member.get("type") and admits_null(member)}
    for key in members:
        with suppress(ValidationError):
            model.model_validate({**LEAST[path], key: None})
            may_be.add(key)
    assert may_be == say_so


def admits_null(member: dict[str, Any]) -> bool:
    return {"type": "null"} in member.get("anyOf", [{"type": "null"}])
