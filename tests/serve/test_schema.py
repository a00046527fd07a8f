"""Requests that schemathesis makes of our own OpenAPI document: every answer is one that the document allows."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings

from archerfish.serve.app import create_app

from .fake_backend import FakeBackend

OTHERS = ["/metrics", "/health", "/ready", "/stats", "/v1/embeddings", "/v1/rerank", "/similarity"]  # not of this backend
schema = schemathesis.openapi.from_asgi("/openapi.json", create_app(FakeBackend())).exclude(path=OTHERS)


@pytest.mark.slow
@schema.parametrize()
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_request_of_the_document_is_the_servers_fault(case: schemathesis.Case[Any]) -> None:
    answer = case.call()
    assert answer.status_code < 500, (case.as_curl_command(), answer.status_code, answer.text)
