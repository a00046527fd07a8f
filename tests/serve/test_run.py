"""`serve`: from options to a running service, and to its end."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, cast

import httpx
import msgspec
import pytest
import zmq.auth

from archerfish.config import EmbedConfig, EngineConfig, HubConfig, ServeConfig
from archerfish.errors import InvalidOptionError, MachineError
from archerfish.serve import run
from archerfish.serve.models import describe, make_entry
from archerfish.serve.processes import FrontConfig, HostConfig, ModelSpec
from archerfish.serve.tenants import add_key
from archerfish.types import no_progress
from tests.text.tiny_tokenizers import save_text_llama

from .client import LIMIT_S
from .test_sockets import CHAT, STREAMS, check_error_event

ENGINE, EMBED = EngineConfig(model="lab/writer"), EmbedConfig(model="lab/vectors")
TEMPLATE = "{% for message in messages %}<s>{{ message.content }}</s>{% endfor %}"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [("generation", "lab/writer"), ("embedding", "lab/vectors")]),
        ({"kinds": "generation"}, [("generation", "lab/writer")]),
        ({"kinds": "embedding"}, [("embedding", "lab/vectors")]),
        (
            {"rerank_model": "lab/pairs"},
            [("generation", "lab/writer"), ("embedding", "lab/vectors"), ("cross-encoder", "lab/pairs")],
        ),
        (
            {"kinds": "generation", "rerank_model": "lab/pairs"},
            [("generation", "lab/writer"), ("cross-encoder", "lab/pairs")],
        ),
    ],
)
def test_options_choose_the_models(options: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    models = run.models_of(ServeConfig(**options), ENGINE, EMBED.replace(num_threads=3))
    assert [(spec.kind, spec.model) for spec in models] == expected
    for spec in models:
        assert spec.aliases == (spec.model,)
        if spec.kind == "generation":
            assert EngineConfig(**spec.options) == ENGINE
        else:
            assert EmbedConfig(**spec.options) == EMBED.replace(num_threads=3, model=spec.model)


def test_first_model_gets_the_served_names() -> None:
    for kinds in ("all", "embedding"):
        first, *others = run.models_of(ServeConfig(kinds=kinds, served_model_name="gpt-4o, lab/b,"), ENGINE, EMBED)
        assert first.served_names == ("gpt-4o", "lab/b") and not any(spec.served_names for spec in others)
        assert "archerfish serves gpt-4o" in run.ready_text("http://x", (first, *others), ServeConfig(), {"embedding"})
    entry = make_entry(msgspec.structs.replace(first, loads="start"), HubConfig(), cast(Any, None))
    card = entry.card(with_adapters=True)
    assert card["id"] == "gpt-4o" and card["served_names"] == ["lab/b"]
    assert set(card["aliases"]) == {"lab/b", first.model}


def test_story_model_is_added_to_the_default_model() -> None:
    engine = EngineConfig(num_threads=3, max_model_len=64, load_format="dummy", enable_prefix_caching=False)
    for config, others in ((ServeConfig(), 2), (ServeConfig(kinds="generation", loads="idle"), 1)):
        *usual, story = run.models_of(config, engine, EMBED)
        assert len(usual) == others
        assert (story.kind, story.model, story.loads) == ("generation", "story-rwkv7", "demand")
        given = EngineConfig(**story.options)
        assert (given.num_threads, given.load_format, given.enable_prefix_caching) == (3, "auto", False)
        assert (
            describe(story, HubConfig())[0]["max_length"] == run.STORY_TOKENS
        )  # whatever the usual model is limited to
    for models in (
        run.models_of(ServeConfig(kinds="embedding"), EngineConfig(), EMBED),
        run.models_of(ServeConfig(), ENGINE, EMBED),
    ):
        assert "story-rwkv7" not in [spec.model for spec in models]


@pytest.mark.parametrize(("speaks", "kind"), [(False, "generation"), (True, "tts")])
def test_missing_models_are_fetched_with_progress(monkeypatch: pytest.MonkeyPatch, speaks: bool, kind: str) -> None:
    fetched: list[tuple[Any, ...]] = []
    monkeypatch.setattr("archerfish.engine.llm_loading.read_facts", lambda *given: fetched.append(given))
    monkeypatch.setattr("archerfish.engine.inference_core.locate", lambda *given: fetched.append(given))
    monkeypatch.setattr("archerfish.serve.hosted_llm.is_tts", lambda facts: speaks)
    hub = HubConfig(offline=True)
    assert run.fetch_models(run.models_of(ServeConfig(), ENGINE, EMBED), hub, no_progress) == {kind, "embedding"}
    assert fetched == [(ENGINE, hub, no_progress), (EMBED, hub, no_progress)]


# What a person sees


def spec(kind: Any, model: str) -> ModelSpec:
    return ModelSpec(kind=kind, options={"model": model})


@pytest.mark.parametrize(
    ("models", "begins", "call"),
    [
        ([spec("generation", "a")], "archerfish serves a at http://x (Ctrl+C stops it)", "/v1/chat/completions"),
        ([spec("embedding", "a"), spec("cross-encoder", "b")], "archerfish serves a and b at", "/v1/embeddings"),
        (
            [spec("generation", "a"), spec("embedding", "b"), spec("cross-encoder", "c")],
            "archerfish serves a, b and c at",
            "/v1/chat/completions",
        ),
    ],
)
def test_ready_text_names_models_and_a_call(models: list[ModelSpec], begins: str, call: str) -> None:
    kinds: set[str] = {spec.kind for spec in models}
    text = run.ready_text("http://x", tuple(models), ServeConfig(), kinds)
    assert text.startswith(begins)
    assert f"curl http://x{call}" in text
    tts = run.ready_text("http://x", tuple(models), ServeConfig(), {"tts", *kinds} - {"generation"})
    assert "curl http://x/v1/tts/tokens" in tts and "chat" not in tts
    assert "no API keys" not in text


def test_ready_text_names_each_device_once_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "choose_device", lambda wanted: {"auto": "cuda: H200"}.get(wanted, f"{wanted}: asked for"))
    models = (spec("generation", "a"), spec("embedding", "b"), ModelSpec(kind="generation", options={"device": "cpu"}))
    text = run.ready_text("http://x", models, ServeConfig(), {"generation"})
    assert text.splitlines()[1] == "Computing on cuda: H200 and cpu: asked for."


def test_warning_of_an_open_address_without_keys(caplog: pytest.LogCaptureFixture) -> None:
    models = (spec("generation", "a"),)
    for host, keys, is_warned in (
        ("0.0.0.0", "", True),
        ("::", "", True),
        ("192.168.0.1", "", True),
        ("0.0.0.0", "keys.toml", False),
        ("localhost", "", False),
        ("127.0.0.1", "", False),
        ("::1", "", False),
    ):
        config = ServeConfig(host=host, api_keys_file=keys)
        caplog.clear()
        run.host_config(config, models, HubConfig(), "/a")
        told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert [message.startswith("Anyone who reaches this address") for message in told] == [True] * is_warned, host
        text = run.ready_text("http://x", models, config, {"generation"})
        assert ("Authorization: Bearer" in text) == bool(keys)  # or what is printed would be refused


# The parts


class FakeChild:
    """Replaces an engine process or a front end and records the calls of its methods."""

    start_s = 3.5

    def __init__(self, name: str, calls: list[str], config: Any) -> None:
        self.name = name
        self.calls = calls
        self.config = config

    def start(self) -> None:
        self.calls.append(f"start {self.name}")

    def wait(self) -> dict[str, str]:
        return {"address": "ipc:///nowhere"}

    def terminate(self) -> None:
        pass

    def stop(self) -> None:
        self.calls.append(f"stop {self.name}")


@dataclass
class Parts:
    """The calls that `serve` makes, without processes and models."""

    calls: list[str] = field(default_factory=list)
    engines: list[FakeChild] = field(default_factory=list)
    front_ends: list[FakeChild] = field(default_factory=list)
    fetched: list[Any] = field(default_factory=list)

    def engine(self, config: HostConfig) -> FakeChild:
        self.engines.append(FakeChild("engine", self.calls, config))
        return self.engines[-1]

    def front_end(self, config: Callable[[], FrontConfig], listener: int, *, grace_s: float) -> FakeChild:
        self.front_ends.append(FakeChild("front end", self.calls, config))
        return self.front_ends[-1]

    def fetch(self, *given: Any) -> set[str]:
        self.fetched.append(given)
        return {"generation"}


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Parts:
    made = Parts()
    monkeypatch.setattr("archerfish.serve.replicas.engine_process", made.engine)
    monkeypatch.setattr(run, "front_process", made.front_end)
    monkeypatch.setattr(run, "fetch_models", made.fetch)
    monkeypatch.setattr(run, "wait_for_signal", lambda: None)
    return made


def test_serve_starts_and_stops_all_processes(parts: Parts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = tmp_path / "keys.toml"
    add_key(keys, "alice")
    texts: list[str] = []
    config = ServeConfig(port=0, num_front_ends=2, max_queue_texts=7, latency_budget_ms=20.0, api_keys_file=str(keys))
    settings: list[FrontConfig] = []
    monkeypatch.setattr(run, "wait_for_signal", lambda: settings.append(parts.front_ends[0].config()))
    run.serve(config, ENGINE, EMBED, HubConfig(offline=True), announce=texts.append)
    assert texts[0].startswith("archerfish serves lab/writer and lab/vectors at http://127.0.0.1:")
    host = parts.engines[0].config
    assert [one.model for one in host.models] == ["lab/writer", "lab/vectors"]
    assert (host.max_queue_texts, host.latency_budget_ms, host.hub["offline"]) == (7, 20.0, True)
    assert len(host.front_end_pass) >= 32 and host.front_end_pass not in texts[0]
    assert parts.fetched == [(host.models, HubConfig(offline=True), no_progress)]
    front = settings[0]
    assert (front.addresses, front.credentials, front.retry_after_s) == (("ipc:///nowhere",), host.front_end_pass, 3.5)
    assert front.serve == dataclasses.asdict(config)
    assert parts.calls == ["start engine", *["start front end"] * 2, *["stop front end"] * 2, "stop engine"]
    assert texts[1:] == [run.stopping_text(config)]
    assert not Path(host.address.removeprefix("ipc://")).parent.exists()


def test_service_stops_in_order_with_a_broken_pipe(parts: Parts) -> None:
    def announce(text: str) -> None:
        if text.startswith("Stopping: "):
            raise BrokenPipeError

    run.serve(ServeConfig(port=0, kinds="generation"), ENGINE, announce=announce)
    assert parts.calls[-2:] == ["stop front end", "stop engine"]


def test_configuration_errors_show_before_loading(parts: Parts, tmp_path: Path) -> None:
    with run.bind(ServeConfig(port=0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(MachineError, match=f"Cannot listen on 127.0.0.1:{port}"):
            run.serve(ServeConfig(port=port), ENGINE, EMBED)
    with pytest.raises(MachineError, match="no address of this machine"):
        run.serve(ServeConfig(host="nowhere.invalid"), ENGINE, EMBED)
    with pytest.raises(InvalidOptionError, match="cannot be read"):
        run.serve(ServeConfig(port=0, api_keys_file=str(tmp_path / "none.toml")), ENGINE, EMBED)
    assert parts.fetched == parts.engines == []


def test_signal_while_loading_stops_all_processes(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeChild, "wait", lambda child: os.kill(os.getpid(), signal.SIGTERM))
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        run.serve(ServeConfig(port=0), ENGINE, EMBED)
    assert ended.value.code == 128 + signal.SIGTERM
    assert parts.calls == ["start engine", "start front end", "stop front end", "stop engine"]
    assert signal.getsignal(signal.SIGTERM) == before


# The socket


def test_url_can_be_used_for_any_listening_address() -> None:
    with run.bind(ServeConfig(host="0.0.0.0", port=0)) as listener:
        assert run.url_of(listener).startswith("http://127.0.0.1:")
    if socket.has_ipv6:
        try:
            listener = run.bind(ServeConfig(host="::1", port=0))
        except MachineError:
            return
        with listener:
            assert run.url_of(listener).startswith("http://[::1]:")


# ZMQ


def test_zmq_options_open_a_second_address_with_keys(parts: Parts, tmp_path: Path) -> None:
    _, secret_file = zmq.auth.create_certificates(tmp_path, "server")
    config = ServeConfig(port=0, zmq_address="tcp://0.0.0.0:5555", zmq_key_file=secret_file, zmq_client_keys="one, two")
    texts: list[str] = []
    run.serve(config, ENGINE, announce=texts.append)
    host = parts.engines[0].config
    assert (host.open_address, host.client_keys) == ("tcp://0.0.0.0:5555", ("one", "two"))
    assert host.secret_key.encode() == zmq.auth.load_certificate(secret_file)[1]
    assert "ZMQ clients connect to tcp://0.0.0.0:5555." in texts[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"zmq_address": "nonsense"}, "is no address"),
        ({"zmq_address": "tcp://127.0.0.1:0"}, "needs a port"),
        ({"zmq_address": "tcp://0.0.0.0:5555"}, "no CURVE keys"),
        ({"zmq_address": "ipc:///tmp/fish", "zmq_key_file": "server.key_secret"}, "no tcp:// address"),
        ({"zmq_address": "tcp://127.0.0.1:5555", "zmq_client_keys": "one"}, "none of the ZMQ server"),
        ({"zmq_address": "tcp://0.0.0.0:5555", "zmq_key_file": "server.key"}, "no secret key"),
        ({"zmq_address": "tcp://0.0.0.0:5555", "zmq_key_file": "missing"}, "cannot be read"),
    ],
)
def test_wrong_zmq_options_are_refused(
    parts: Parts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    zmq.auth.create_certificates(".", "server")
    with pytest.raises(InvalidOptionError, match=message):
        run.serve(ServeConfig(port=0, **options), ENGINE)
    assert parts.fetched == []


# The real thing


class Service:
    """A whole service of a tiny model, as a user starts it, in a directory of its own."""

    def __init__(self, directory: Path, *flags: str, max_files: int = 256) -> None:
        model = save_text_llama(directory / "tiny", 65536, chat_template=TEMPLATE)
        self.scratch, self.log = directory / "scratch", directory / "log"
        self.scratch.mkdir()
        command = [
            "bash",
            "-c",
            f'ulimit -n {max_files}; exec "$@"',
            "bash",
            sys.executable,
            "-m",
            "archerfish",
            "serve",
            "--port",
            "0",
            "--kinds",
            "generation",
            "--model",
            str(model),
            "--load-format",
            "dummy",
            "--dtype",
            "float32",
            "--max-cache-tokens",
            "262144",
            "--num-threads",
            "1",
            *flags,
        ]
        environment = {**os.environ, "TMPDIR": str(self.scratch), "OMP_NUM_THREADS": "1"}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
        self.pids: set[int] = set()
        self._too_late = threading.Timer(10 * LIMIT_S, self.process.kill)
        self._too_late.start()
        line = self.read_until("http://")
        self.address, port = line.split("http://")[1].split(" ")[0].split(":")
        self.port = int(port)

    def read_until(self, text: str) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if text in line:
                self.children()
                return line
        raise AssertionError(self.log.read_text())

    def children(self) -> dict[int, str]:
        """The command lines of the child processes."""
        found: dict[int, str] = {}
        with contextlib.suppress(OSError):  # a process or a thread has just ended
            for thread in Path(f"/proc/{self.process.pid}/task").iterdir():
                for pid in map(int, (thread / "children").read_text().split()):
                    found[pid] = Path(f"/proc/{pid}/cmdline").read_text()
        self.pids |= found.keys()
        return found

    def engine_pid(self) -> int:
        return next((pid for pid, command in self.children().items() if "serve.host" in command), 0)

    def post(self, path: str, body: dict[str, Any]) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection(self.address, self.port, timeout=5 * LIMIT_S)
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        return connection.getresponse()

    def is_healthy(self) -> bool:
        answer = httpx.get(f"http://{self.address}:{self.port}/health", timeout=5 * LIMIT_S)
        return bool(answer.json()["status"] == "ok")

    def check_end(self, code: int) -> None:
        """Wait for the end: no process and no file is left, and the log has no error."""
        assert self.process.wait(2 * LIMIT_S) == code
        assert len(self.pids) >= 2
        for pid in self.pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)
        assert list(self.scratch.iterdir()) == []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._too_late.cancel()
        if self.process.poll() is None:
            self.process.kill()  # the children end with it
            self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def test_whole_service_leaves_nothing_behind(tmp_path: Path) -> None:
    with Service(tmp_path, "--num-front-ends", "2", "--log-level", "error", "--drain-s", "600") as service:
        assert [path.name.startswith("archerfish-") for path in service.scratch.iterdir()] == [True]
        body = {
            "messages": [{"role": "user", "content": "the cats"}],
            "max_tokens": 4,
            "temperature": 0,
            "ignore_eos": True,
        }
        answer = json.load(service.post("/v1/chat/completions", body))
        assert (answer["model"], answer["usage"]["completion_tokens"]) == ("tiny", 4)
        assert answer["choices"][0]["finish_reason"] == "length"
        assert service.is_healthy()
        with httpx.Client(base_url=f"http://{service.address}:{service.port}", timeout=LIMIT_S) as client:
            assert client.get("/ready").status_code == 200
            service.process.terminate()
            assert "600 s more while /ready answers 503" in service.read_until("Stopping: ")
            while client.get("/ready").status_code == 200:
                pass
            assert json.load(service.post("/v1/chat/completions", body))["usage"]["completion_tokens"] == 4
        for pid, command in service.children().items():
            if "serve.front" in command:
                os.kill(pid, signal.SIGINT)  # the drain is over
        service.check_end(0)
        assert not {"ERROR", "Traceback"} & set(service.log.read_text().split())


def test_engine_restarts_while_descriptors_are_used_up(tmp_path: Path) -> None:
    pause = threading.Event()
    with Service(tmp_path, max_files=64) as service, contextlib.ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(socket.create_connection((service.address, service.port), LIMIT_S))
        killed = service.engine_pid()
        os.kill(killed, signal.SIGKILL)
        while service.engine_pid() in (0, killed):
            pause.wait(0.01)
        stack.close()
        is_ok = False
        while not is_ok:
            with contextlib.suppress(httpx.HTTPError):  # refused for want of descriptors
                is_ok = service.is_healthy()
            pause.wait(0.01)
        stream = service.post(CHAT, STREAMS[CHAT])
        assert stream.readline().startswith(b"data: ")
        service.process.send_signal(signal.SIGINT)
        assert "30 s to finish" in service.read_until("Stopping: ")
        service.process.send_signal(signal.SIGINT)  # a second Ctrl+C ends the service at once
        check_error_event(CHAT, stream.read().decode())
        service.check_end(130)
