"""`archerfish top`: figures between two reports, and errors; over a server that answers with given reports."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, generate_latest

from archerfish.cli import top
from archerfish.cli.main import main
from archerfish.errors import UnreachableError


def engine(**figures: Any) -> dict[str, Any]:
    return {
        "tokens_per_second": 25.0,
        "num_running": 2,
        "num_waiting": 1,
        "kv_usage": 0.25,
        "ttft_p50_s": 0.15,
        **figures,
    }


def snapshot(at_s: float, engines: dict[str, dict[str, Any]], refused: int = 0, prefix: str = "vllm:") -> top.Snapshot:
    registry = CollectorRegistry()
    Counter(f"{prefix}refused_requests", "", ["model_name", "code"], registry=registry).labels('m"\\', "busy").inc(
        refused
    )
    refusals = top.read_refusals(generate_latest(registry).decode())
    return top.Snapshot("http://here", "1", at_s, {("m", name): one for name, one in engines.items()}, {}, refusals)


def frames(*snapshots: top.Snapshot | UnreachableError) -> list[top.Frame]:
    given = iter(snapshots)

    def take() -> top.Snapshot:
        one = next(given)
        if isinstance(one, UnreachableError):
            raise one
        return one

    found = top.watch(take, 1.0, lambda _: None)
    return [next(found) for _ in snapshots]


@pytest.mark.parametrize("prefix", ["vllm:", "archerfish_"])
def test_figures_of_the_last_minute(prefix: str) -> None:
    before = snapshot(10.0, {"": engine(cache_hits=0, cache_misses=50)}, prefix=prefix)
    [_, second] = frames(before, snapshot(12.0, {"": engine(cache_hits=30, cache_misses=60)}, 3, prefix))
    [row] = second.rows
    assert (row["tokens_per_s"], row["running"], row["waiting"], row["kv_usage"]) == (25.0, 2, 1, 0.25)
    assert (row["first_token_p50_s"], row["gap_p50_s"], row["hit_rate"]) == (0.15, None, 0.75)
    assert second.refusals == [{"model_name": 'm"\\', "code": "busy", "count": 3.0, "last_minute": 3.0}]


def test_restarted_replica_and_a_server_that_is_away() -> None:
    """Red if a counter that begins again gives a wrong rate, or if the view ends while a server restarts."""
    before, after = (
        snapshot(at, {"a": engine(cache_hits=num, cache_misses=num), "b": engine()})
        for at, num in ((0.0, 100), (1.0, 7))
    )
    _, away, back = frames(before, UnreachableError("No server"), after)
    assert away.problem.startswith("No server") and not back.problem
    assert [row["hit_rate"] for row in back.rows] == [0.5, None]
    (_, columns, rows), *_ = top.tables(back)
    assert len(rows) == 3 and rows[2][0] == "all" and rows[2][columns.index("running")] == "4"


def test_only_the_last_minute_counts() -> None:
    hits = {0: 0, 50: 100, 120: 200}  # by time
    reports = [snapshot(at, {"": engine(cache_hits=num, cache_misses=100)}) for at, num in hits.items()]
    assert [frame.rows[0]["hit_rate"] for frame in frames(*reports)] == [0.0, 1.0, 1.0]


@pytest.fixture
def server() -> Iterator[tuple[str, dict[str, tuple[int, Any]]]]:
    """Its address, and what it answers on each path."""
    answers: dict[str, tuple[int, Any]] = {"/version": (200, {"version": "1.2"}), "/metrics": (200, "")}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = answers.get(self.path, (404, "nothing"))
            if "/stats" in self.path and self.headers["Authorization"] != "Bearer good" and "key" in answers:
                status, body = 401, {"error": {"message": "a key is needed"}}
            self.send_response(status)
            self.end_headers()
            self.wfile.write((body if isinstance(body, str) else json.dumps(body)).encode())

        def log_message(self, *_: object) -> None:
            pass

    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=made.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{made.server_port}", answers
    made.shutdown()
    thread.join()
    made.server_close()


def test_one_frame_of_replicas(
    server: tuple[str, dict[str, tuple[int, Any]]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, answers = server
    one = {"state": "ready", "models": {"m": engine()}}
    answers["/stats"] = 200, {"replicas": {"replica-0": one, "replica-1": {"state": "away", "problem": "it died"}}}
    monkeypatch.setattr("time.sleep", lambda _: None)
    assert main(["top", f"{url}/v1", "--once", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["url"], found["version"]) == (url, "1.2")
    assert [(row["model"], row["state"]) for row in found["rows"]] == [("m", "ready"), ("", "away")]
    assert main(["top", url, "--once"]) == 0
    assert "tokens/s" in capsys.readouterr().out
    from rich.console import Console

    console = Console(width=160)
    with console.capture() as drawn:
        console.print(top.draw(next(top.watch(top.Server(url).snapshot, 1.0, lambda _: None))))
    assert "replica-1" in drawn.get() and "away" in drawn.get()


@pytest.mark.parametrize("answer", [(404, "x"), (200, "no json"), (200, []), (200, {}), (200, {"models": 5})])
def test_what_is_not_ours(
    answer: tuple[int, Any], server: tuple[str, dict[str, tuple[int, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    url, answers = server
    answers["/stats"] = answer
    assert main(["top", url, "--once"]) == 2
    assert "not an archerfish server" in capsys.readouterr().err


def test_keys_and_a_server_that_is_not_there(
    server: tuple[str, dict[str, tuple[int, Any]]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, answers = server
    answers |= {"key": (200, ""), "/stats": (200, {"models": {}})}
    monkeypatch.setattr("time.sleep", lambda _: None)
    monkeypatch.setenv("MY_KEY", "good")
    assert main(["top", url, "--once", "--api-key-env", "MY_KEY"]) == 0
    assert main(["top", url, "--once"]) == 2 and "a key is needed" in capsys.readouterr().err
    assert main(["top", url, "--api-key-env", "NO_KEY"]) == 2 and "NO_KEY" in capsys.readouterr().err
    assert main(["top", "http://127.0.0.1:1", "--once"]) == UnreachableError.exit_code
    assert "archerfish serve" in capsys.readouterr().err
    assert main(["top", "ftp://x"]) == main(["top", "http://a:b"]) == main(["top", url, "--interval", "0"]) == 2
