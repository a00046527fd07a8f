"""OpenTelemetry traces: a span for every request to a model, with its phases as children.

Spans are made when a request is over, from the times that were recorded anyway, and a thread of the SDK sends them.
Attributes have the names of the semantic conventions for HTTP and for generative AI. The SDK reads the OTEL_*
variables.
"""

from __future__ import annotations

import os
import time
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from archerfish import __version__
from archerfish.errors import MachineError
from archerfish.serve.logs import EngineTimes

if TYPE_CHECKING:
    from starlette.types import Scope

VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
PACKAGE = "opentelemetry.exporter.otlp.proto.http"
ATTRIBUTES = {  # of a span, by the member of the request's line in the log
    "method": "http.request.method",
    "route": "http.route",
    "status": "http.response.status_code",
    "code": "error.type",
    "id": "archerfish.request.id",
    "tenant": "archerfish.tenant",
    "model": "gen_ai.request.model",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "output_tokens": "gen_ai.usage.output_tokens",
    "cached_tokens": "gen_ai.usage.cache_read.input_tokens",
}
OPERATIONS = {  # by a part of the route, the first that fits
    "embed": "embeddings",
    "chat": "chat",
    "messages": "chat",
    "responses": "chat",
    "generat": "text_completion",
    "completions": "text_completion",
}


def is_installed() -> bool:
    try:
        return find_spec(PACKAGE) is not None
    except ModuleNotFoundError:
        return False


def needs_tracing(endpoint: str) -> None:
    """Raise an error if traces are asked for and the packages for them are missing."""
    if endpoint and not is_installed():
        message = f"[serve] otlp_endpoint is {endpoint}, but OpenTelemetry's packages are not installed."
        raise MachineError(message, hint="Run `pip install 'archerfish[otel]'`.")


def make_tracer(endpoint: str) -> Tracer | None:
    """A tracer for an endpoint, or for that of the OTEL_* variables. None where neither is given: nothing is imported
    then."""
    if not endpoint and (not any(map(os.environ.get, VARIABLES)) or not is_installed()):
        return None
    return Tracer(endpoint)


class Tracer:
    """Sends the spans of requests to a collector. endpoint: its address, without /v1/traces; "": as OTEL_* variables
    say."""

    def __init__(self, endpoint: str) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        name = os.environ.get("OTEL_SERVICE_NAME", "archerfish")
        resource = Resource.create({"service.name": name, "service.version": __version__, "process.pid": os.getpid()})
        exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces" if endpoint else None)
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("archerfish", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def record(self, scope: Scope, members: dict[str, Any], began: float, ended: float) -> None:
        """Make the spans of a request that is over. Only requests to models, which are posted, have spans.

        members: of its line in the log. began, ended: by time.monotonic.
        """
        from opentelemetry.trace import SpanKind, Status, StatusCode

        if members["method"] != "POST":
            return
        offset_ns = time.time_ns() - time.monotonic_ns()
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        attributes = {name: members[member] for member, name in ATTRIBUTES.items() if member in members}
        operation = next((name for part, name in OPERATIONS.items() if part in members["route"]), "")
        if operation:
            attributes |= {"gen_ai.operation.name": operation, "gen_ai.provider.name": "archerfish"}
        if "finish_reason" in members:
            attributes["gen_ai.response.finish_reasons"] = members["finish_reason"].split(",")
        span = self._tracer.start_span(
            f"{operation} {members.get('model', '')}".rstrip() if operation else f"POST {members['route']}",
            context=self._propagator.extract(headers),
            kind=SpanKind.SERVER,
            attributes=attributes,
            start_time=int(1e9 * began) + offset_ns,
        )
        if "code" in members and (members["status"] >= 500 or members["status"] < 400):  # also an answer that broke off
            span.set_status(Status(StatusCode.ERROR, members.get("reason", "")))
        if span.is_recording():
            self._add_phases(span, scope["state"]["engine_times"], began, ended, offset_ns)
        span.end(int(1e9 * ended) + offset_ns)

    def _add_phases(self, parent: Any, times: list[EngineTimes], began: float, ended: float, offset_ns: int) -> None:
        """Children of a span. The engine's durations end when its last message came: between machines no clock is
        shared."""
        from opentelemetry.trace import set_span_in_context

        if not times:
            return
        context = set_span_in_context(parent)
        last_at = max(max(one.last_at, one.sent_at) for one in times)
        spans = [("read", began, min(one.sent_at for one in times))]
        for one in times:
            phases = one.phases_ms()
            start = one.last_at - sum(phases.values()) / 1000
            for name, ms in phases.items():
                spans.append((name.removesuffix("_ms"), start, start + ms / 1000))
                start += ms / 1000
        for name, start, end in (*spans, ("write", last_at, ended)):
            child = self._tracer.start_span(name, context=context, start_time=int(1e9 * start) + offset_ns)
            child.end(int(1e9 * end) + offset_ns)

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()
