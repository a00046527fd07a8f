"""Traces: a collector receives them by OTLP, and reads them with OpenTelemetry's own classes."""

from __future__ import annotations

import gzip
import http.client
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from archerfish.errors import MachineError
from archerfish.serve import tracing
from archerfish.serve.client import RemoteError

from .client import LIMIT_S, app_of, host_with, running
from .fake_backend import CHAT, HI, TEXT, FakeBackend, post

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PHASES = ["read", "queue", "prefill", "decode", "write"]
Span = dict[str, Any]


class Collector(ThreadingHTTPServer):
    """Takes traces at /v1/traces, as a collector does."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.spans: list[Span] = []
        self.resources: list[dict[str, Any]] = []
        self.has_more = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def take(self, body: bytes) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.resources.append(values_of(resource.resource.attributes))
            for scope in resource.scope_spans:
                self.spans += [
                    {
                        "name": span.name,
                        "trace": span.trace_id.hex(),
                        "id": span.span_id.hex(),
                        "kind": span.kind,
                        "parent": span.parent_span_id.hex(),
                        "began": span.start_time_unix_nano,
                        "ended": span.end_time_unix_nano,
                        "error": span.status.code == 2,
                        **values_of(span.attributes),
                    }
                    for span in scope.spans
                ]
        self.has_more.set()


def values_of(attributes: Any) -> dict[str, Any]:
    found = {}
    for one in attributes:
        kind = one.value.WhichOneof("value")
        value = getattr(one.value, kind)
        found[one.key] = [item.string_value for item in value.values] if kind == "array_value" else value
    return found


class Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        assert self.path == "/v1/traces"
        self.server.take(gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def collecting() -> Iterator[Collector]:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    with Collector() as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        yield made
        made.shutdown()
        thread.join()


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as made:
        yield made


def test_a_request_has_a_span_with_its_phases(collector: Collector, tmp_path: Path) -> None:
    """Red: a trace of its own instead of the client's, phases that overlap, leave the request or are not what the log
    says."""
    with host_with(tmp_path, llm={"has_text": True}) as host:
        app = app_of(host, otlp_endpoint=collector.url)
        with running(app) as server:
            connection = http.client.HTTPConnection(*server.address, timeout=LIMIT_S)
            body = json.dumps({"prompt": "the cats", "max_tokens": 5, "ignore_eos": True, "stream": True})
            headers = {
                "Content-Type": "application/json",
                "traceparent": f"00-{TRACE}-{PARENT}-01",
                "X-Request-Id": "mine",
            }
            connection.request("POST", TEXT, body, headers)
            assert b"[DONE]" in connection.getresponse().read()
            connection.request("GET", "/health")
            connection.getresponse().read()
        connection.close()
    [request, *others] = sorted(collector.spans, key=lambda span: (span["name"] in PHASES, span["began"]))
    assert not [span for span in others if span["name"] not in PHASES]  # none of /health
    assert (request["name"], request["kind"]) == ("text_completion tiny", 2)
    assert (request["trace"], request["parent"]) == (TRACE, PARENT)
    assert {span["trace"] for span in others} == {TRACE} and {span["parent"] for span in others} == {request["id"]}
    assert {name: request[name] for name in request if "." in name} == {
        "http.request.method": "POST",
        "http.route": TEXT,
        "http.response.status_code": 200,
        "archerfish.request.id": "mine",
        "archerfish.tenant": "anonymous",
        "gen_ai.request.model": "tiny",
        "gen_ai.usage.input_tokens": 10,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "archerfish",
        "gen_ai.response.finish_reasons": ["length"],
    }
    by_name = {span["name"]: span for span in others}
    assert sorted(by_name) == sorted(PHASES) and len(others) == len(PHASES)
    for before, after in pairwise(PHASES):
        assert by_name[before]["ended"] <= by_name[after]["began"] + 1000  # ns, of rounding
    assert abs(by_name["read"]["began"] - request["began"]) <= 1000 >= abs(by_name["write"]["ended"] - request["ended"])
    assert all(span["began"] <= span["ended"] for span in (request, *others))
    assert collector.resources[0]["service.name"] == "archerfish"


def test_errors_are_in_the_spans(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    """The endpoint is that of OpenTelemetry's variable. Red: an answer that broke off and looks fine in its trace."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    failing = FakeBackend()
    failing.fails = {1: RemoteError("It broke.", code="engine_failed", status=500)}
    for backend, body in ((failing, {"messages": HI, "stream": True}), (FakeBackend(), {"messages": HI, "top_p": 7})):
        post(backend, CHAT, body)
    post(FakeBackend(), "/v1/embeddings", {"input": "a"})
    found = [span for span in collector.spans if span["name"] not in PHASES]
    assert [span["name"].split()[0] for span in found] == ["chat", "chat", "embeddings"]
    assert [span["error"] for span in found] == [True, False, False]  # a client's error is not the server's
    assert [span.get("error.type") for span in found] == ["engine_failed", "invalid_input", None]


def test_nothing_is_imported_while_traces_are_off() -> None:
    code = "import sys, archerfish.serve.front; assert not [name for name in sys.modules if name.startswith('opentelemetry')]"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "PACKAGE", "opentelemetry_that_is_missing.exporter")
    with pytest.raises(MachineError, match="not installed") as caught:
        tracing.needs_tracing("http://127.0.0.1:4318")
    assert "archerfish[otel]" in str(caught.value.hint)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318")
    assert tracing.make_tracer("") is None  # a variable of the machine stops no server
