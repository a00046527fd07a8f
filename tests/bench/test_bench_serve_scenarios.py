"""The scenarios of `bench serve` on servers that keep their targets and on servers that do not; its command; its page."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import shlex
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from archerfish.bench import serve, serve_processes
from archerfish.bench.serve import SCENARIOS
from archerfish.bench.serve_bench import BenchOptions, Found, ServeBench
from archerfish.bench.serve_http import Address, Pool
from archerfish.bench.serve_load import Load
from archerfish.bench.serve_plots import HEIGHT, WIDTH, Series, chart, page, ticks
from archerfish.bench.serve_processes import ProcessUse, ServerProcess, tree_bytes
from archerfish.bench.serve_report import Limits
from archerfish.bench.serve_requests import Shape
from archerfish.bench.serve_server import Server, ServerOptions, choose_models, in_use
from archerfish.bench.targets import Bar
from archerfish.cli import bench_serve
from archerfish.cli.main import main
from archerfish.errors import InvalidOptionError, ServiceError
from tests.bench.serve_fakes import MODELS, Answer, Asked, FakeServer, Script, error, stream, whole, with_server

QUICK = BenchOptions(rounds=1, num_warmup=0)
FEW = BenchOptions(rounds=1, num_warmup=0, count=100)


def tried(asked: Asked) -> bool:
    """Whether this is the small request of `prepare`."""
    return bool(asked.body.get("max_tokens") == 2)


def run_bench(script: Script, scenarios: list[str], options: BenchOptions = QUICK, loads: tuple[Load, ...] = ()) -> Found:
    async def test(server: FakeServer, pool: Pool) -> Found:
        made = Server(ServerOptions("fake", pool.address.url), pool)
        return await ServeBench([made], options).run({name: SCENARIOS[name] for name in scenarios}, loads)

    return with_server(script, test)


def verdicts(found: Found) -> dict[str, bool | None]:
    return {target.name: target.is_met for _, _, target in found.targets}


def vectors(delay_s: float) -> Answer:
    return whole({"data": [{"embedding": [0.0]}]}, delay_s=delay_s)


def answering(asked: Asked, first_s: float = 0.1, gap_s: float = 0.01, embedding_s: float = 0.01) -> Answer:
    return vectors(embedding_s) if asked.path == "/v1/embeddings" else stream(int(asked.body["max_tokens"]), first_s, gap_s)


# Scenarios


@pytest.mark.parametrize(
    ("first_s", "expected"), [(0.1, [True, True, True]), (0.5, [False, True, True]), (2.0, [False, False, True])]
)
def test_chat8(first_s: float, expected: list[bool]) -> None:
    found = run_bench(lambda asked: answering(asked, first_s), ["chat8"])
    assert list(verdicts(found).values()) == expected
    (point,) = found.points
    assert point.concurrency == 8
    assert point.median("e2e_p50_ms") == pytest.approx(1000 * (first_s + 15 * 0.01))
    assert point.median("num_ok") == 200


def test_chat8_of_a_server_that_refuses_some() -> None:
    found = run_bench(lambda asked: error(429, "busy") if asked.number % 10 == 5 else answering(asked), ["chat8"])
    assert verdicts(found)["not answered well"] is False
    assert found.points[0].errors["429 busy"] == 20


@pytest.mark.parametrize(("delay_s", "expected"), [(0.05, [True, True, True, True]), (0.1, [False, True, True, True]),
                                                   (0.3, [False, False, False, True])])  # fmt: skip
def test_embed(delay_s: float, expected: list[bool]) -> None:
    found = run_bench(lambda asked: answering(asked, embedding_s=delay_s), ["embed"])
    assert list(verdicts(found).values()) == expected
    closed, opened = found.points
    assert closed.median("requests_s") == pytest.approx(8 / delay_s, rel=0.05)
    assert opened.median("e2e_p99_ms") == pytest.approx(1000 * delay_s, abs=0.01)


@pytest.mark.no_cover
def test_table() -> None:
    options = BenchOptions(rounds=2, num_warmup=0, duration_s=2.0)
    found = run_bench(answering, ["table"], options)
    assert [(point.load.split(":")[0], point.concurrency) for point in found.points] == [
        (kind, size) for kind in ("embeddings", "chat") for size in (1, 4, 8, 16)
    ]
    assert all(len(point.rounds) == 2 for point in found.points)
    for point in found.points:
        latency_s = 0.01 if point.load.startswith("embeddings") else 0.25
        assert point.median("requests_s") == pytest.approx(point.concurrency / latency_s, rel=0.01)


def limited(most_running: int, refuses: bool) -> Script:
    """A server with room for so many, which refuses the others or lets them wait."""
    room: list[asyncio.Semaphore] = []

    async def script(asked: Asked) -> Answer:
        if not room:
            room.append(asyncio.Semaphore(most_running))
        if tried(asked):
            return answering(asked)
        if refuses and room[0].locked():
            return error(429, "overloaded", {"Retry-After": "1"})
        async with room[0]:
            await asyncio.sleep(0.8)
        return stream(16, 0.001, 0.0)

    return script


@pytest.mark.no_cover
def test_overload_of_a_server_with_manners() -> None:
    found = run_bench(limited(32, refuses=True), ["overload"], BenchOptions(num_warmup=0, duration_s=16.0))
    assert verdicts(found) == {
        "not answered, nor refused with Retry-After": True, "load / capacity": True,
        "goodput / capacity": True, "growth of memory beside KV": None, "capacity afterwards / before": True,
    }  # fmt: skip
    over = next(point for point in found.points if point.rate)
    assert over.rate == pytest.approx(3 * 32 / 0.8, rel=0.1)
    assert 0 < (over.median("num_refused") or 0) < (over.median("num_requests") or 0)


@pytest.mark.no_cover
def test_only_answers_within_the_deadline_are_goodput() -> None:
    """And the deadline is sent to servers that take it."""
    asked_for: set[float | None] = set()

    def script(asked: Asked) -> Answer:
        if asked.body.get("deadline_s") and refuses:
            return error(400, "unknown_parameter")
        asked_for.add(asked.body.get("deadline_s"))
        return answering(asked, first_s=2.0 if asked.number % 2 else 0.1)

    options = BenchOptions(num_warmup=0, duration_s=12.0, limits=Limits(latency_s=1.0))
    for refuses in (False, True):
        asked_for.clear()
        found = run_bench(script, ["overload"], options)
        assert asked_for == ({None} if refuses else {None, 1.0})
        over = next(point for point in found.points if point.rate)
        assert over.median("goodput_s") == pytest.approx((over.median("requests_s") or 0) / 2, rel=0.15)
        assert any("deadline_s" in note for note in found.notes) == refuses


def test_overload_of_embeddings() -> None:
    slow = lambda asked: answering(asked, embedding_s=0.25)  # noqa: E731
    found = run_bench(slow, ["overload-embed"], BenchOptions(num_warmup=0, duration_s=2.0))
    assert {scenario for scenario, _, _ in found.targets} == {"overload-embed"}
    assert all(point.load.startswith("embeddings") for point in found.points)


@pytest.mark.parametrize("leaked", [0, 2])
def test_files_and_threads_that_stay_are_leaks(leaked: int, monkeypatch: pytest.MonkeyPatch) -> None:
    uses = [ProcessUse(1.0, 10, 3), ProcessUse(1.0, 60, 3), ProcessUse(1.0, 10 + leaked, 3 + leaked)]
    monkeypatch.setattr(serve, "tree_use", lambda pid: {pid: uses.pop(0) if len(uses) > 1 else uses[0]})

    async def test(fake: FakeServer, pool: Pool) -> Found:
        server = Server(ServerOptions("fake", pool.address.url, pid=1 << 30), pool)
        return await ServeBench([server], FEW).run({"disconnect": SCENARIOS["disconnect"]})

    script = lambda asked: whole({"num_running": 0, "blocks_in_use": 0}) if asked.path == "/stats" else answering(asked)  # noqa: E731
    found = verdicts(with_server(script, test))
    assert found["more files and sockets than before"] is (leaked == 0)
    assert found["more threads than before"] is (leaked == 0)


@pytest.mark.no_cover
def test_overload_of_a_server_that_queues_without_end() -> None:
    options = BenchOptions(num_warmup=0, duration_s=12.0, timeout_s=4.0)
    found = run_bench(limited(32, refuses=False), ["overload"], options)
    assert verdicts(found)["not answered, nor refused with Retry-After"] is False
    over = next(point for point in found.points if point.rate)
    assert (over.median("num_timeout") or 0) > 100


def test_overload_of_a_server_that_fails() -> None:
    options = BenchOptions(num_warmup=0, duration_s=2.0)
    found = run_bench(lambda asked: answering(asked) if tried(asked) else error(500, "internal_error"), ["overload"], options)
    assert verdicts(found) == {"capacity, requests/s": False}


@pytest.mark.parametrize(("leaked", "options", "num_leavers"), [(0, QUICK, 500), (3, FEW, 100)])
def test_disconnect(leaked: int, options: BenchOptions, num_leavers: int) -> None:
    async def test(server: FakeServer, pool: Pool) -> Found:
        bench = ServeBench([Server(ServerOptions("fake", pool.address.url), pool)], options)
        return await bench.run({"disconnect": SCENARIOS["disconnect"]})

    def script(asked: Asked) -> Answer:
        if asked.path == "/stats":  # after a while nothing runs, and blocks come back, or do not
            blocks = leaked if asked.number >= 3 else 9
            return whole({"models": [{"name": "talker", "blocks_in_use": blocks, "num_running": 0}], "queue_size": 0})
        return answering(asked)

    found = with_server(script, test)
    assert verdicts(found) == {
        "blocks in use afterwards": leaked == 0, "requests running or waiting afterwards": True,
        "not answered well afterwards": True, "more files and sockets than before": None, "more threads than before": None,
    }  # fmt: skip
    leavers = found.points[1]
    assert (leavers.median("num_left") or 0) > 0.3 * num_leavers
    assert leavers.median("num_left") == num_leavers - (leavers.median("num_ok") or 0)


def test_disconnect_of_a_server_without_stats_is_not_measured() -> None:
    script = lambda asked: error(404, "not_found") if asked.path == "/stats" else answering(asked)  # noqa: E731
    found = run_bench(script, ["disconnect"], FEW)
    assert verdicts(found)["blocks in use afterwards"] is None


def test_every_scenario_is_known_to_the_command() -> None:
    assert tuple(SCENARIOS) == bench_serve.NAMES


# Servers


def test_servers_take_turns_and_one_that_is_away_is_left_out() -> None:
    order: list[str] = []

    async def test(server: FakeServer, pool: Pool) -> Found:
        class Noting(Server):
            async def drive(self, load: Load) -> Any:
                order.append(f"{self.name}{load.concurrency}")
                return await super().drive(load)

        away = Pool(Address.parse("unix:/nowhere/at/all"), clock=pool.clock)
        servers = [Noting(ServerOptions(name, pool.address.url), pool) for name in "ab"]
        servers.append(Noting(ServerOptions("c", "unix:/nowhere/at/all"), away))
        loads = [Load((Shape("chat", (3, 3), (4, 4)),), concurrency=size, count=4) for size in (1, 2)]
        return await ServeBench(servers, BenchOptions(rounds=3)).run({}, loads)

    found = with_server(answering, test)
    assert order == ["a1", "b1", "a2", "b2", "b1", "a1", "b2", "a2", "a1", "b1", "a2", "b2"]
    assert list(found.errors) == ["c"]
    assert "unix:/nowhere/at/all" in found.errors["c"]
    assert [(point.server, len(point.rounds)) for point in found.points] == [("a", 3), ("a", 3), ("b", 3), ("b", 3)]


@pytest.mark.parametrize(
    ("refused", "taken", "num_notes"),
    [((), {"ignore_eos", "stream_options"}, 0), (("ignore_eos",), {"stream_options"}, 1),
     (("stream_options",), {"ignore_eos"}, 1), (("ignore_eos", "stream_options"), set(), 2)],
)  # fmt: skip
def test_extras_that_a_server_refuses_are_left_out(refused: tuple[str, ...], taken: set[str], num_notes: int) -> None:
    def script(asked: Asked) -> Answer:
        return error(422, "unknown_parameter") if set(refused) & set(asked.body) else answering(asked)

    async def test(fake: FakeServer, pool: Pool) -> Server:
        server = Server(ServerOptions("fake", pool.address.url, body={"top_p": 0.5}), pool)
        await server.prepare([Shape("chat", (64, 64), (16, 16)), Shape("embeddings", (9, 9))])
        return server

    server = with_server(script, test)
    assert set(server.manner.extras) == taken | {"top_p"}
    assert (server.manner.model, server.manner.embedding_model) == ("talker", "embedder")
    assert len(server.notes) == num_notes


def test_a_server_that_does_not_know_the_model_is_told() -> None:
    async def test(fake: FakeServer, pool: Pool) -> None:
        await Server(ServerOptions("fake", pool.address.url), pool).prepare([Shape("chat", (64, 64), (16, 16))])

    with pytest.raises(ServiceError, match="404 model_not_found") as caught:
        with_server(lambda asked: error(404, "model_not_found"), test)
    assert "--model" in caught.value.hint


def test_models_are_chosen_by_kind_or_by_place() -> None:
    assert choose_models(MODELS) == ("talker", "embedder")
    assert choose_models({"data": [{"id": "a"}, {"id": "b"}]}) == ("a", "a")
    assert choose_models(None) == choose_models({"data": None}) == choose_models([1]) == ("", "")


def test_use_is_summed_however_deep() -> None:
    stats = {"models": [{"blocks_in_use": 2}, {"cache": {"blocks_in_use": 3, "num_running": 1}}], "blocks_total": 9}
    assert in_use(stats, ("blocks_in_use",)) == 5
    assert in_use(stats, ("num_running",)) == 1
    assert in_use(stats, ("other",)) is None is in_use(None, ("other",))


# Processes


CHILD = "import os, sys; fifo = open(sys.argv[1], 'w'); print(os.getpid(), file=fifo, flush=True); sys.stdin.read()"
PARENT = """
import signal, subprocess, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
subprocess.Popen([sys.executable, "-c", sys.argv[2], sys.argv[1]], stdin=subprocess.PIPE).wait()
"""


def test_memory_of_a_server_counts_its_children_and_they_end_with_it(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    command = shlex.join([sys.executable, "-c", PARENT, str(fifo), CHILD])
    with ServerProcess("x", command) as process, fifo.open() as lines:
        child = int(lines.readline())
        process.check()
        assert child != process.pid
        own = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]) * serve_processes.PAGE_BYTES
        assert tree_bytes(process.pid) == pytest.approx(own + tree_bytes(child), rel=0.1)
        assert min(own, tree_bytes(child)) > 1e6
        process.close()
        assert lines.read() == ""  # it ends when nobody has it open: the child is gone
    assert tree_bytes(process.pid) == 0


def test_a_server_that_ends_says_why() -> None:
    with ServerProcess("x", f"{sys.executable} -c \"print('no such model'); raise SystemExit(3)\"") as process:
        process._process.wait()
        with pytest.raises(ServiceError, match="ended with 3: no such model"):
            process.check()


def test_no_server_is_started_where_another_answers(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        assert main(["bench", "serve", "--server", f"x={url}", "--start", "x=/no/such/program"]) == 2
    assert f"answers at {url} already" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["", "/no/such/program", "'unclosed"])
def test_what_cannot_be_started_is_told(command: str) -> None:
    with pytest.raises(InvalidOptionError, match="--start of x"):
        ServerProcess("x", command)


def test_the_limit_on_open_files_is_never_lowered(monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    set_to: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: set_to.append(limits))
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, 2000))
    serve_processes.allow_connections(10)
    assert set_to == []
    serve_processes.allow_connections(5000)
    assert set_to == [(2000, 2000)]


# The page


@given(st.floats(1e-6, 1e9))
def test_ticks_are_few_and_reach_the_top(high: float) -> None:
    found = ticks(high)
    assert found[0] == 0
    assert found[-1] >= high * (1 - 1e-9)
    assert found[-2] < high
    assert 3 <= len(found) <= 7


@example([(5e-324, 5e-324)])
@given(st.lists(st.tuples(st.floats(0, 1e6), st.sampled_from([None, math.nan]) | st.floats(0, 1e6)), max_size=30))
def test_lines_stay_inside_their_chart(points: list[tuple[float, float | None]]) -> None:
    drawn = ElementTree.fromstring(chart("t < & >", "x", "y", [Series("<one>", points), Series("two", [])]))
    shown = [(x, y) for x, y in points if y is not None and math.isfinite(y)]
    places = [place.split(",") for line in drawn.iter("polyline") for place in line.attrib["points"].split()]
    assert len(places) == len(shown)
    assert all(0 <= float(x) <= WIDTH and 0 <= float(y) <= HEIGHT for x, y in places)


def test_the_page_shows_what_was_found_and_needs_nothing_else() -> None:
    script = lambda asked: answering(asked, embedding_s=0.05)  # noqa: E731
    found = run_bench(script, ["chat8", "table"], BenchOptions(rounds=1, num_warmup=0, duration_s=1.0))
    found.notes.append("<b>a remark</b>")
    found.targets.append(("s", "x", Bar("not looked at", 1.0, at_least=True).judged(None)))
    text = page(found, "heading")
    drawings = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    titles = [ElementTree.fromstring(drawing).findtext("title") for drawing in drawings]
    assert "table: chat:64/16, end to end" in titles
    assert "table: embeddings:32, answers" in titles
    assert "chat8: fake, chat:64/16, 8 at once" in titles
    assert not any("embeddings" in str(title) and "first token" in str(title) for title in titles)
    assert "&lt;b&gt;a remark" in text and "<b>a remark" not in text
    assert 'class="met"' in text and "not measured" in text
    assert not re.search(r"(src|href)=", text)


def test_a_page_of_nothing() -> None:
    assert "<svg" not in page(Found(errors={"x": "away"}), "h")


# The command


@pytest.fixture
def fake(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[str]]:
    """Arguments for a server of its own, which streams as fast as it can."""

    def arguments(name: str = "fake") -> list[str]:
        path = tmp_path_factory.mktemp("s") / "s"
        command = f"{sys.executable} -m archerfish.bench.fake_stream_server --socket {path} --chunks-per-second 1e9"
        return ["--server", f"{name}=unix:{path}", "--start", f"{name}={command}"]

    return arguments


def test_the_command_starts_servers_and_writes_its_reports(
    fake: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["bench", "serve", *fake("one"), *fake("two"), "--requests", "12", "--rounds", "2", "--concurrency", "1,3"]
    arguments += [
        "--rate",
        "200",
        "--e2e-target",
        "60000",
        "--output",
        str(tmp_path / "r.json"),
        "--html",
        str(tmp_path / "r.html"),
    ]
    assert main(arguments) == 0
    written = json.loads((tmp_path / "r.json").read_text())
    assert [(point["server"], point["load"]) for point in written["points"]] == [
        (name, f"chat:64/16, {load}") for name in ("one", "two") for load in ("1 at once", "3 at once", "200/s")
    ]
    for point in written["points"]:
        assert point["summary"]["num_ok"] == {"median": 12, "low": 12, "high": 12, "rounds": 2}
        assert point["summary"]["goodput_s"]["median"] == point["summary"]["requests_s"]["median"] > 0
    assert written["servers"]["one"]["model"] == "fake"
    assert (tmp_path / "r.html").read_text().count("<svg") >= 6
    said = capsys.readouterr().out
    assert "load: chat:64/16, 3 at once" in said
    assert re.search(r"median \(range\) +one +two", said)


def test_the_command_judges_scenarios(fake: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "chat8", *fake(), "--requests", "8", "--rounds", "1"]) == 0
    assert "end to end p50, ms" in capsys.readouterr().out
    assert main(["bench", "serve", "chat8", *fake(), "--requests", "8", "--rounds", "1", "--json"]) == 0
    (first, *_) = json.loads(capsys.readouterr().out)["targets"]
    assert (first["scenario"], first["server"], first["wanted"]) == ("chat8", "fake", 500)


def test_a_server_that_dies_at_its_start_is_an_error_of_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    start = f"x={sys.executable} -c \"raise SystemExit('no such port')\""
    assert main(["bench", "serve", "--server", "x=http://127.0.0.1:1", "--start", start]) == 1
    assert "x: not measured. x ended with 1: no such port" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["chat9"], "Did you mean 'chat8'?"),
        (["chat8", "--rate", "3"], "--rate is for a load without a scenario"),
        (["--server", "nonsense"], "--server is NAME=VALUE"),
        (["--server", "a=http://x", "--server", "a=http://y"], "names 'a' twice"),
        (["--server", "a=x"], "not the address of a server"),
        (
            ["--server", "a=http://x", "--server", "b=http://y", "--start", "serve it"],
            "does not begin with the name of a server",
        ),
        (["--requests", "3", "--duration", "3"], "give one of them"),
        (["--rounds", "0"], "--rounds must be at least 1"),
        (["--concurrency", "1,-2"], "numbers above 0"),
        (["--concurrency", "1.5"], "whole numbers"),
        (["--rate", "fast"], "numbers above 0"),
        (["--workload", "chat"], "is no workload"),
        (["--body", "{"], "--body is no JSON"),
        (["--body", "[]"], "must be a JSON object"),
        (["--api-key-env", "NO_SUCH_VARIABLE_HERE"], "NO_SUCH_VARIABLE_HERE"),
        (["--pid", "me"], "--pid takes a number"),
        (["--ttft-target", "-1"], "--ttft-target must not be negative"),
    ],
)
def test_mistakes_are_told_before_anything_runs(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "serve", *arguments]) == 2
    assert expected in capsys.readouterr().err


def test_values_are_for_one_server_or_for_all() -> None:
    assert bench_serve.named_values("--model", ["m", "b=n"], ["a", "b"]) == {"a": "m", "b": "n"}
    assert bench_serve.named_values("--model", ["b=n", "m"], ["a", "b"]) == {"a": "m", "b": "n"}
    assert bench_serve.named_values("--model", ["repo=x/y"], ["a"]) == {"a": "repo=x/y"}
    assert bench_serve.named_values("--start", ["serve --x=1"], ["a"]) == {"a": "serve --x=1"}


def test_keys_come_from_the_environment_and_stay_out_of_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "a-secret")
    assert bench_serve.read_key("SOME_KEY") == "a-secret"
    server = Server(ServerOptions("x", "http://127.0.0.1:1", api_key="a-secret"))
    assert "a-secret" not in json.dumps(server.as_dict())
