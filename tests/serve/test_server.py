"""A real server on a real socket."""

import base64
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import openai
import pytest

from archerfish.config import EmbedConfig, HubConfig, ServeConfig
from archerfish.engine.fakes import FakeCrossEncoder, FakeEngine
from archerfish.errors import MachineError
from archerfish.observe import MetricRegistry
from archerfish.serve import run
from archerfish.serve.app import create_app

LIMIT_S = 20


@contextmanager
def running(engine: FakeEngine, registry: MetricRegistry | None = None) -> Iterator[tuple[str, int]]:
    """Host and port of a server in a thread."""
    config = ServeConfig(port=0, log_level="error", max_body_bytes=100_000)
    ready = threading.Event()
    with run.bind(config) as listener:
        app = create_app(engine, config, registry=registry)
        server = run.make_server(app, listener, config, lambda url: ready.set())
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            assert ready.wait(LIMIT_S)
            yield listener.getsockname()
        finally:
            server.should_exit = True
            thread.join(LIMIT_S)
            assert not thread.is_alive()


@pytest.mark.parametrize("encoding_format", ["float", "base64", None])
def test_the_openai_package_gets_its_vectors(encoding_format: str | None) -> None:
    with running(FakeEngine()) as (host, port):
        client = openai.OpenAI(base_url=f"http://{host}:{port}/v1", api_key="none", max_retries=0)
        # Without encoding_format the package itself asks for base64 and decodes it.
        chosen: dict[str, Any] = {"encoding_format": encoding_format} if encoding_format else {}
        answer = client.embeddings.create(model="engine", input=["one", "two words"], **chosen)
        embedding: Any = answer.data[0].embedding
        if encoding_format == "base64":
            embedding = np.frombuffer(base64.b64decode(embedding), "<f4")
        np.testing.assert_array_equal(np.asarray(embedding, np.float32), FakeEngine().encode_batch(["one"])[0])
        assert answer.usage.prompt_tokens == 7
        assert len(client.embeddings.create(model="engine", input="x", dimensions=2).data[0].embedding) == 2
        assert [model.id for model in client.models.list()] == ["fake/engine"]
        assert client.models.retrieve("fake/engine").owned_by == "archerfish"
        with pytest.raises(openai.NotFoundError) as caught:
            client.embeddings.create(model="text-embedding-ada-002", input="x")
        assert caught.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as wrong:
            client.embeddings.create(model="engine", input=[])
        assert wrong.value.param == "input"
        client.close()


def test_a_closed_connection_frees_the_queue() -> None:
    engine = FakeEngine()
    registry = MetricRegistry()
    with running(engine, registry) as (host, port):
        engine.gate.clear()
        first = http.client.HTTPConnection(host, port, timeout=LIMIT_S)
        headers = {"Content-Type": "application/json"}
        first.request("POST", "/v1/embeddings", json.dumps({"input": "first"}), headers)
        assert engine.entered.wait(LIMIT_S)
        depth = registry.gauge("archerfish_queue_depth", label_names=("queue",))
        leaving = http.client.HTTPConnection(host, port, timeout=LIMIT_S)
        leaving.request("POST", "/v1/embeddings", json.dumps({"input": ["gone"] * 50}), headers)
        wait_for(lambda: depth.value(queue="texts") == 50)
        leaving.close()
        wait_for(lambda: depth.value(queue="texts") == 0)
        engine.gate.set()
        assert first.getresponse().status == 200
        first.close()
        assert engine.batches == [["first"]]


def wait_for(condition: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(LIMIT_S * 1000):
        if condition():
            return
        pause.wait(0.001)
    raise AssertionError("the server did not get there")


def test_a_chunked_body_over_the_limit_is_refused() -> None:
    with running(FakeEngine()) as (host, port):
        connection = http.client.HTTPConnection(host, port, timeout=LIMIT_S)
        body = (b"x" * 10_000 for _ in range(11))
        connection.request("POST", "/v1/embeddings", body, {"Content-Type": "application/json"}, encode_chunked=True)
        answer = connection.getresponse()
        assert answer.status == 413
        assert json.load(answer)["error"]["code"] == "input_too_large"
        connection.close()


SCRIPT = """
import threading
from archerfish.config import ServeConfig
from archerfish.engine.fakes import FakeEngine
from archerfish.serve import run
from archerfish.serve.app import create_app

config = ServeConfig(port=0, log_level="error")
engine = FakeEngine()
with run.bind(config) as listener:
    app = create_app(engine, config)
    run.run_app(app, listener, config, lambda url: run.say(run.ready_text(url, engine, None)))
print("ended", sorted(thread.name for thread in threading.enumerate()), flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_service_cleanly(number: int) -> None:
    process = subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    too_late = threading.Timer(LIMIT_S, process.kill)
    too_late.start()
    try:
        line = process.stdout.readline()
        assert line.startswith("archerfish serves fake/engine at http://127.0.0.1:")
        host, port = line.split("http://")[1].split(" ")[0].split(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=LIMIT_S)
        connection.request("GET", "/health")
        assert connection.getresponse().status == 200
        connection.close()
        os.kill(process.pid, number)
        rest = process.stdout.read()
        assert "curl http://127.0.0.1:" in rest
        assert rest.endswith("ended ['MainThread']\n")
        assert process.wait(LIMIT_S) == 0
    finally:
        too_late.cancel()
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_taken_port_is_named() -> None:
    with run.bind(ServeConfig(port=0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(MachineError, match=f"Cannot listen on 127.0.0.1:{port}"):
            run.bind(ServeConfig(port=port))
    with pytest.raises(MachineError, match="no address of this machine"):
        run.bind(ServeConfig(host="nowhere.invalid"))


def test_addresses_are_shown_as_one_can_use_them() -> None:
    with run.bind(ServeConfig(host="0.0.0.0", port=0)) as listener:
        assert run.url_of(listener).startswith("http://127.0.0.1:")
    if socket.has_ipv6:
        try:
            listener = run.bind(ServeConfig(host="::1", port=0))
        except MachineError:
            return
        with listener:
            assert run.url_of(listener).startswith("http://[::1]:")


def test_serve_puts_the_parts_together(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    engine, reranker = FakeEngine(), FakeCrossEncoder()
    run.warm_up(engine)
    run.warm_up(reranker)
    assert len(engine.batches) == len(reranker.batches) == 1
    monkeypatch.setattr(run, "build_engines", lambda *_: (engine, reranker))

    def run_app(app: object, listener: socket.socket, config: ServeConfig, on_ready: object) -> None:
        assert callable(on_ready)
        on_ready(run.url_of(listener))

    monkeypatch.setattr(run, "run_app", run_app)
    run.serve(EmbedConfig(), ServeConfig(port=0), HubConfig(), announce=said.append)
    assert said[0].startswith("archerfish serves fake/engine and fake/cross-encoder at http://127.0.0.1:")
