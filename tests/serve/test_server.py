"""A real server on a real socket."""

import base64
import http.client
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from .client import LIMIT_S, WORDS, app_of, running, words_host
from .hosting import WordEncoder

JSON = {"Content-Type": "application/json"}
EMBEDDINGS = "/v1/embeddings"


@contextmanager
def words_server() -> Iterator[tuple[str, int]]:
    with words_host() as host, host, running(app_of(host, max_body_bytes=100_000)) as address:
        yield address


@pytest.mark.parametrize("encoding_format", ["float", "base64", None])
def test_openai_package_embeddings(encoding_format: str | None) -> None:
    with words_server() as (host, port):
        client = openai.OpenAI(base_url=f"http://{host}:{port}/v1", api_key="none", max_retries=0)
        # Without encoding_format the package itself asks for base64 and decodes it.
        chosen: dict[str, Any] = {"encoding_format": encoding_format} if encoding_format else {}
        answer = client.embeddings.create(model="words", input=["one", "two words"], **chosen)
        embedding: Any = answer.data[0].embedding
        if encoding_format == "base64":
            embedding = np.frombuffer(base64.b64decode(embedding), "<f4")
        np.testing.assert_array_equal(np.asarray(embedding, np.float32), WordEncoder.vector("one"))
        assert answer.usage.prompt_tokens == 3
        assert len(client.embeddings.create(model="words", input="x", dimensions=2).data[0].embedding) == 2
        assert [model.id for model in client.models.list()] == [WORDS]
        assert client.models.retrieve(WORDS).owned_by == "archerfish"
        with pytest.raises(openai.NotFoundError) as caught:
            client.embeddings.create(model="text-embedding-ada-002", input="x")
        assert caught.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as wrong:
            client.embeddings.create(model="words", input=[])
        assert wrong.value.param == "input"
        client.close()


def test_head_is_get_without_a_body() -> None:
    with words_server() as (host, port):
        connection = http.client.HTTPConnection(host, port, timeout=LIMIT_S)
        for path in ("/", "/health", "/ready", "/metrics", "/stats", "/v1/models", f"/v1/models/{WORDS}", "/openapi.json"):
            found = []
            for method in ("GET", "HEAD"):
                connection.request(method, path)
                answer = connection.getresponse()
                found.append((answer.status, answer.getheader("content-type"), bool(answer.read())))
            status, kind, _ = found[0]
            assert found == [(200, kind, True), (200, kind, False)], (path, status)
        connection.request("HEAD", "/v1/models/nobody")
        answer = connection.getresponse()
        assert (answer.status, answer.read()) == (404, b"")
        connection.close()


SCRIPT = """
import threading
from archerfish.config import ServeConfig
from archerfish.serve import front, run
from archerfish.serve.processes import ModelSpec
from tests.serve.client import app_of, words_host

config = ServeConfig(port=0, log_level="error")
models = (ModelSpec(kind="embedding", options={"model": "fake/words"}),)
with words_host() as host, host, run.bind(config) as listener:
    text = run.ready_text(run.url_of(listener), models, config, {"embedding"})
    front.make_server(app_of(host), config, lambda: print(text, flush=True)).run(sockets=[listener])
print("ended", sorted(thread.name for thread in threading.enumerate()), flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_the_service_cleanly(number: int) -> None:
    command = [sys.executable, "-c", SCRIPT]
    root = Path(__file__).parents[2]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=root)
    assert process.stdout is not None
    too_late = threading.Timer(3 * LIMIT_S, process.kill)
    too_late.start()
    try:
        line = process.stdout.readline()
        assert line.startswith("archerfish serves fake/words at http://127.0.0.1:")
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
