"""`serve`: from options to a running service, and to its end."""

from __future__ import annotations

import dataclasses
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pytest

from archerfish.config import EmbedConfig, EngineConfig, HubConfig, ServeConfig
from archerfish.errors import InvalidOptionError, MachineError
from archerfish.serve import front, run
from archerfish.serve.front import FrontConfig
from archerfish.serve.front_ends import FrontEnds
from archerfish.serve.host_config import HostConfig, ModelSpec
from archerfish.serve.model_cards import describe
from archerfish.serve.tenants import add_key
from archerfish.types import no_progress
from tests.engine.tiny_llama import save_tiny_llama
from tests.text.tiny_tokenizers import byte_fallback

from .client import LIMIT_S

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
        ({"kinds": "generation", "rerank_model": "lab/pairs"}, [("generation", "lab/writer"), ("cross-encoder", "lab/pairs")]),
    ],
)
def test_the_models_that_are_served(options: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    models = run.models_of(ServeConfig(**options), ENGINE, EMBED.replace(num_threads=3))
    assert [(spec.kind, spec.model) for spec in models] == expected
    for spec in models:
        assert spec.aliases == (spec.model,)
        if spec.kind == "generation":
            assert EngineConfig(**spec.options) == ENGINE
        else:
            assert EmbedConfig(**spec.options) == EMBED.replace(num_threads=3, model=spec.model)


def test_stories_are_served_beside_the_usual_model_once_they_are_asked_for() -> None:
    engine = EngineConfig(num_threads=3, max_model_len=64, load_format="dummy", enable_prefix_caching=False)
    for config, others in ((ServeConfig(), 2), (ServeConfig(kinds="generation", loads="idle"), 1)):
        *usual, story = run.models_of(config, engine, EMBED)
        assert len(usual) == others and not any(spec.is_beside for spec in usual)
        assert (story.kind, story.model, story.loads, story.is_beside) == ("generation", "story-rwkv7", "demand", True)
        given = EngineConfig(**story.options)
        assert (given.num_threads, given.load_format, given.enable_prefix_caching) == (3, "auto", False)
        assert describe(story, HubConfig()).card["max_length"] == run.STORY_TOKENS  # whatever the usual model is limited to
    for models in (
        run.models_of(ServeConfig(kinds="embedding"), EngineConfig(), EMBED), run.models_of(ServeConfig(), ENGINE, EMBED)
    ):
        assert "story-rwkv7" not in [spec.model for spec in models]


@pytest.mark.parametrize(("speaks", "kind"), [(False, "generation"), (True, "tts")])
def test_every_model_is_fetched_where_somebody_sees_it(monkeypatch: pytest.MonkeyPatch, speaks: bool, kind: str) -> None:
    fetched: list[tuple[Any, ...]] = []
    monkeypatch.setattr("archerfish.engine.llm_loading.read_facts", lambda *given: fetched.append(given))
    monkeypatch.setattr("archerfish.engine.arrow_engine.locate", lambda *given: fetched.append(given))
    monkeypatch.setattr("archerfish.serve.model_cards.is_tts", lambda facts: speaks)
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
            [spec("generation", "a"), spec("embedding", "b"), spec("cross-encoder", "c")], "archerfish serves a, b and c at",
            "/v1/chat/completions",
        ),
    ],
)  # fmt: skip
def test_the_ready_text_names_models_and_a_call(models: list[ModelSpec], begins: str, call: str) -> None:
    text = run.ready_text("http://x", tuple(models), ServeConfig(), {spec.kind for spec in models})
    assert text.startswith(begins)
    assert f"curl http://x{call}" in text
    assert "no API keys" not in text


def test_what_speaks_is_not_offered_for_a_chat() -> None:
    text = run.ready_text("http://x", (spec("generation", "a"), spec("embedding", "b")), ServeConfig(), {"tts", "embedding"})
    assert "curl http://x/v1/tts/tokens" in text
    assert "chat" not in text


def test_an_open_address_without_keys_is_warned_of() -> None:
    models = (spec("generation", "a"),)
    for host, keys, is_warned in (
        ("0.0.0.0", "", True), ("::", "", True), ("192.168.0.1", "", True), ("0.0.0.0", "keys.toml", False),
        ("localhost", "", False), ("127.0.0.1", "", False), ("::1", "", False),
    ):  # fmt: skip
        text = run.ready_text("http://x", models, ServeConfig(host=host, api_keys_file=keys), {"generation"})
        assert ("Anyone who reaches this address" in text) == is_warned, host
        assert ("Authorization: Bearer" in text) == bool(keys)  # or what is printed would be refused


# The parts


class FakeSupervisor:
    """Instead of an engine process."""

    made: list[FakeSupervisor]

    def __init__(self, config: HostConfig) -> None:
        self.config, self.address, self.start_s, self.is_stopped = config, "ipc:///nowhere", 3.5, False
        self.made.append(self)

    def kill(self) -> None:
        self.is_stopped = True

    def __enter__(self) -> FakeSupervisor:
        return self

    def __exit__(self, *_: object) -> None:
        self.is_stopped = True


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What `serve` does, without processes and models."""
    seen: list[Any] = []

    class Others:
        def __init__(self, settings: FrontConfig, number: int) -> None:
            seen.append(("front ends", settings, number))

        def __enter__(self) -> Self:
            return self

        def stop(self) -> None:
            seen.append("stop others")

        def kill(self) -> None:
            seen.append("kill others")

        def __exit__(self, *_: object) -> None:
            seen.append("front ends over")

    def fetch_models(*given: Any) -> set[str]:
        seen.append(("fetch", *given))
        return {"generation"}

    def run_app(
        app: object, listener: socket.socket, config: ServeConfig, on_ready: Callable[[str], None], on_stop: Callable[[], None],
        on_force: Callable[[], None],
    ) -> None:
        on_ready(front.url_of(listener))
        on_stop()

    monkeypatch.setattr(FakeSupervisor, "made", [], raising=False)
    monkeypatch.setattr(run, "Supervisor", FakeSupervisor)
    monkeypatch.setattr(run, "fetch_models", fetch_models)
    monkeypatch.setattr(run, "FrontEnds", Others)
    monkeypatch.setattr(run, "run_app", run_app)
    return seen


def test_serve_puts_the_parts_together(parts: list[Any], tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    add_key(keys, "alice")
    said: list[str] = []
    config = ServeConfig(port=0, num_front_ends=3, max_queue_texts=7, latency_budget_ms=20.0, api_keys_file=str(keys))
    run.serve(config, ENGINE, EMBED, HubConfig(offline=True), announce=said.append)
    assert said[0].startswith("archerfish serves lab/writer and lab/vectors at http://127.0.0.1:")
    [supervisor] = FakeSupervisor.made
    host = supervisor.config
    assert [one.model for one in host.models] == ["lab/writer", "lab/vectors"]
    assert (host.max_queue_texts, host.latency_budget_ms, host.hub["offline"]) == (7, 20.0, True)
    assert len(host.front_end_pass) >= 32
    fetched, (_, settings, number), *rest = parts
    assert fetched == ("fetch", host.models, HubConfig(offline=True), no_progress)
    assert number == 2
    assert (settings.address, settings.credentials, settings.retry_after_s) == ("ipc:///nowhere", host.front_end_pass, 3.5)
    assert settings.serve == dataclasses.asdict(config)
    assert rest == ["stop others", "front ends over"]
    assert said[1:] == [run.STOPPING]
    assert supervisor.is_stopped
    assert host.front_end_pass not in said[0]


def test_serve_says_where_by_itself(parts: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    run.serve(ServeConfig(port=0, kinds="generation"), ENGINE)
    assert capsys.readouterr().out.startswith("archerfish serves lab/writer at http://127.0.0.1:")


def test_a_service_whose_words_nobody_reads_stops_in_order_too(parts: list[Any]) -> None:
    def announce(text: str) -> None:
        if text == run.STOPPING:
            raise BrokenPipeError

    run.serve(ServeConfig(port=0, kinds="generation"), ENGINE, announce=announce)
    assert parts[-2:] == ["stop others", "front ends over"]


def test_what_is_wrong_shows_before_a_model_is_loaded(parts: list[Any], tmp_path: Path) -> None:
    with front.bind(ServeConfig(port=0)) as taken, pytest.raises(MachineError, match="Cannot listen"):
        run.serve(ServeConfig(port=taken.getsockname()[1]), ENGINE, EMBED)
    with pytest.raises(InvalidOptionError, match="cannot be read"):
        run.serve(ServeConfig(port=0, api_keys_file=str(tmp_path / "none.toml")), ENGINE, EMBED)
    assert parts == FakeSupervisor.made == []


def test_a_signal_while_models_are_loaded_is_an_orderly_end(parts: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    tidied: list[str] = []

    class Loading(FakeSupervisor):
        def __enter__(self) -> FakeSupervisor:
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                raise AssertionError("still here")
            finally:
                tidied.append("supervisor")

    monkeypatch.setattr(run, "Supervisor", Loading)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        run.serve(ServeConfig(port=0), ENGINE, EMBED)
    assert ended.value.code == 128 + signal.SIGTERM
    assert tidied == ["supervisor"]
    assert signal.getsignal(signal.SIGTERM) == before


def test_front_ends_are_ended_whatever_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[subprocess.Popen[bytes]] = []

    class Deaf(subprocess.Popen[bytes]):
        """One that does not heed SIGTERM."""

        def __init__(self, command: object, **options: Any) -> None:
            script = "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); sys.stdin.read()"
            super().__init__([sys.executable, "-c", script], stdout=subprocess.PIPE, **options)
            assert self.stdout is not None
            self.stdout.readline()
            made.append(self)

    monkeypatch.setattr("archerfish.serve.front_ends.subprocess.Popen", Deaf)
    monkeypatch.setattr("archerfish.serve.front_ends.GRACE_S", -4.9)
    with front.bind(ServeConfig(port=0)) as listener, pytest.raises(ZeroDivisionError):
        settings = FrontConfig(address="ipc:///nowhere", credentials="", listener=listener.fileno())
        with FrontEnds(settings, 2):
            raise ZeroDivisionError
    assert [process.returncode for process in made] == [-signal.SIGKILL] * 2
    for process in made:
        assert process.stdin is not None and process.stdin.closed
        assert process.stdout is not None
        process.stdout.close()


# The real thing


def test_the_whole_service_starts_answers_and_leaves_nothing_behind(tmp_path: Path) -> None:
    model, scratch = tmp_path / "tiny", tmp_path / "scratch"
    model.mkdir()
    scratch.mkdir()
    save_tiny_llama(model, vocab_size=288)
    byte_fallback(model, chat_template=TEMPLATE)
    command = [
        sys.executable, "-m", "archerfish", "serve", "--port", "0", "--kinds", "generation", "--model", str(model),
        "--load-format", "dummy", "--dtype", "float32", "--max-cache-tokens", "4096", "--num-threads", "1",
        "--num-front-ends", "2", "--log-level", "error",
    ]  # fmt: skip
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True,
            env={**os.environ, "TMPDIR": str(scratch), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    assert process.stdout is not None
    too_late = threading.Timer(5 * LIMIT_S, os.killpg, (process.pid, signal.SIGKILL))
    too_late.start()
    try:
        line = process.stdout.readline()
        assert line.startswith(f"archerfish serves {model} at http://127.0.0.1:"), (tmp_path / "log").read_text()
        assert [path.name.startswith("archerfish-") for path in scratch.iterdir()] == [True]
        host, port = line.split("http://")[1].split(" ")[0].split(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=LIMIT_S)
        body = {"messages": [{"role": "user", "content": "the cats"}], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = json.load(connection.getresponse())
        assert (answer["model"], answer["usage"]["completion_tokens"]) == ("tiny", 4)
        assert answer["choices"][0]["finish_reason"] == "length"
        connection.request("GET", "/health")
        assert json.load(connection.getresponse())["status"] == "ok"
        connection.close()
        process.terminate()
        rest = process.stdout.read()  # until all who hold its standard output are gone
        assert "curl http://127.0.0.1:" in rest
        assert process.wait(LIMIT_S) == 0
        with pytest.raises(ProcessLookupError):
            os.killpg(process.pid, 0)
        assert list(scratch.iterdir()) == []
        assert not {"ERROR", "Traceback"} & set((tmp_path / "log").read_text().split())
    finally:
        too_late.cancel()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        process.stdout.close()
