"""A real Prometheus scrapes a server under load for a minute: no gap, nothing twice, and every panel and rule has
figures.

Run with `make test-monitor`; needs Debian's package `prometheus`.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from archerfish.serve.tenants import add_key
from tests.serve.test_tracing import PHASES, Collector, collecting

pytestmark = pytest.mark.monitor
yaml: Any = pytest.importorskip("yaml")
ROOT = Path(__file__).parents[2]
DEPLOY, RULES = ROOT / "deploy", ROOT / "deploy" / "prometheus" / "alerts.yml"
LIMIT_S, SCRAPED_S = 120.0, 60
MAY_BE_NO_NUMBER = "Speculation: accepted share"  # while nothing is proposed

LOAD = [
    sys.executable,
    "-m",
    "archerfish",
    "bench",
    "serve",
    "--duration",
    "25",
    "--rounds",
    "2",
    "--workload",
    "chat:16-64/8-32",
    "--workload",
    "embeddings:16",
    "--api-key-env",
    "KEY",
]


def promtool(*words: str, text: str = "") -> subprocess.CompletedProcess[str]:
    found = shutil.which("promtool") or pytest.skip("promtool is not installed")
    return subprocess.run([found, *words], input=text, capture_output=True, text=True, check=False, cwd=ROOT)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def queries() -> list[tuple[str, str]]:
    """The title and the query of every target of the dashboard, with values for its variables."""
    board = json.loads((DEPLOY / "grafana" / "archerfish.json").read_text())
    names = {"$job": ".*", "$model": ".*", "$__rate_interval": "1m"}
    return [
        (panel["title"], re.sub(r"\$\w+", lambda word: names[word[0]], target["expr"]))
        for panel in board["panels"]
        for target in panel.get("targets", ())
    ]


def test_rules_are_valid_and_each_alert_fires() -> None:
    assert promtool("check", "rules", str(RULES)).returncode == 0
    done = promtool("test", "rules", "tests/monitor/alerts_test.yml")
    assert done.returncode == 0, done.stdout + done.stderr
    rules = yaml.safe_load(RULES.read_text())["groups"][0]["rules"]
    cases = yaml.safe_load((ROOT / "tests" / "monitor" / "alerts_test.yml").read_text())["tests"]
    fired = {case["alertname"] for test in cases for case in test["alert_rule_test"] if case["exp_alerts"]}
    assert fired == {rule["alert"] for rule in rules}
    page = (ROOT / "docs" / "metrics.md").read_text()
    assert all(rule["alert"] in page for rule in rules)


@dataclass
class Server:
    """`archerfish serve` with two replicas, and a Prometheus that has scraped it from its start."""

    url: str
    prometheus: str
    key: str
    failures: list[str] = field(default_factory=list)

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"}

    def ask(self, query: str) -> list[dict[str, Any]]:
        answer = httpx.get(f"{self.prometheus}/api/v1/query", params={"query": query}, timeout=LIMIT_S).json()
        assert answer["status"] == "success", (query, answer)
        found: list[dict[str, Any]] = answer["data"]["result"]
        return found


@contextmanager
def started(command: list[str], url: str, **options: Any) -> Iterator[None]:
    """A process that answers at a URL."""
    process = subprocess.Popen(command, start_new_session=True, **options)
    try:
        ends, pause = time.monotonic() + LIMIT_S, threading.Event()
        while True:
            try:
                if httpx.get(url).status_code == 200:
                    break
            except httpx.TransportError:
                pause.wait(0.2)
            assert process.poll() is None and time.monotonic() < ends
        yield
    finally:
        process.terminate()
        process.wait(LIMIT_S)


@pytest.fixture(scope="module")
def traces() -> Iterator[Collector]:
    with collecting() as made:
        yield made


@pytest.fixture(scope="module")
def endpoint(traces: Collector) -> Iterator[str]:
    """A real collector (rotel), which passes on what it gets; without its package, the one of the test."""
    spec = importlib.util.find_spec("rotel")
    if spec is None or spec.origin is None:
        yield traces.url
        return
    url, command = (
        f"127.0.0.1:{free_port()}",
        [str(Path(spec.origin).with_name("rotel-agent")), "start", "--exporter", "otlp"],
    )
    command += ["--otlp-http-endpoint", url, "--otlp-grpc-endpoint", f"127.0.0.1:{free_port()}"]
    command += ["--otlp-exporter-protocol", "http", "--otlp-exporter-endpoint", traces.url]
    agent = subprocess.Popen(command)
    try:
        yield f"http://{url}"
    finally:
        agent.terminate()
        agent.wait(LIMIT_S)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, endpoint: str) -> Iterator[Server]:
    program = shutil.which("prometheus") or pytest.skip("Prometheus is not installed")
    folder = tmp_path_factory.mktemp("prometheus")
    port = free_port()
    other = free_port()
    key = add_key(folder / "keys.toml", "alice", is_operator=True)
    made = Server(f"http://127.0.0.1:{port}", f"http://127.0.0.1:{other}", key)
    job = {"static_configs": [{"targets": [f"127.0.0.1:{port}"]}], "authorization": {"credentials": made.key}}
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "5s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [{"job_name": "archerfish", **job}],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))
    serve = [
        sys.executable,
        "-m",
        "archerfish",
        "serve",
        "--port",
        str(port),
        "--replicas",
        "2",
        "--model",
        "smollm2-135m-instruct",
        "--api-keys-file",
        str(folder / "keys.toml"),
        "--log-format",
        "json",
        "--otlp-endpoint",
        endpoint,
    ]
    scrape = [
        program,
        f"--config.file={folder}/prometheus.yml",
        f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address=127.0.0.1:{other}",
    ]
    with ExitStack() as stack:
        log = stack.enter_context((folder / "log").open("w"))
        stack.enter_context(started(serve, f"{made.url}/ready", stderr=log))
        stack.enter_context(started(scrape, f"{made.prometheus}/-/ready", stderr=subprocess.DEVNULL))
        environment, quiet = {**os.environ, "KEY": key}, subprocess.DEVNULL
        load = subprocess.Popen([*LOAD, "--server", f"fish={made.url}"], env=environment, stdout=quiet)
        began = time.monotonic()
        try:
            assert load.wait(10 * LIMIT_S) == 0
        finally:
            load.kill()
        threading.Event().wait(max(0.0, SCRAPED_S + 2 - (time.monotonic() - began)))
        yield made
        made.failures += [line for line in (folder / "log").read_text().splitlines() if not line.startswith("{")]
    assert not made.failures  # all of the log is JSON


def test_every_panel_has_figures(server: Server) -> None:
    found = {(title, query): server.ask(f"last_over_time(({query})[45s:1s])") for title, query in queries()}
    assert len(found) > 50
    empty = [
        title
        for (title, _), series in found.items()
        if not series or (title != MAY_BE_NO_NUMBER and all(math.isnan(float(one["value"][1])) for one in series))
    ]
    assert not empty
    running = next(series for (title, _), series in found.items() if title == "Running")
    assert {one["metric"]["replica"] for one in running} == {"replica-0", "replica-1"}


def test_a_minute_of_scrapes_has_no_gap_and_nothing_twice(server: Server) -> None:
    [up] = server.ask(f'up{{job="archerfish"}}[{SCRAPED_S}s]')
    times = [moment for moment, value in up["values"] if value == "1"]
    assert len(times) == len(up["values"]) >= SCRAPED_S - 1
    assert max(after - before for before, after in pairwise(times)) < 1.5
    [steady] = server.ask(f"min(count_over_time(archerfish_engine_up[{SCRAPED_S}s]))")
    assert float(steady["value"][1]) >= SCRAPED_S - 1
    own = httpx.get(f"{server.prometheus}/metrics").text
    wrong = re.findall(r"^(prometheus_target_scrapes_sample_(?:duplicate|out_of)\w+_total) (\d+)", own, re.MULTILINE)
    assert len(wrong) >= 3 and all(count == "0" for _, count in wrong), wrong
    counters = server.ask('count by (__name__) ({__name__=~"archerfish_.*_(total|count|bucket)"})')
    names = [one["metric"]["__name__"] for one in counters]
    assert len(names) > 40 and not [name for name in names if server.ask(f"resets({name}[{SCRAPED_S}s]) > 0")]


def test_rules_are_evaluated_and_none_fires(server: Server) -> None:
    groups = httpx.get(f"{server.prometheus}/api/v1/rules").json()["data"]["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len(rules) == 11 and {rule["health"] for rule in rules} == {"ok"}
    assert not [rule["name"] for rule in rules if rule["state"] == "firing"]


def test_promtool_finds_nothing_wrong_with_the_metrics(server: Server) -> None:
    text = httpx.get(f"{server.url}/metrics", headers=server.headers).text
    done = promtool("check", "metrics", text=text)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_collector_has_the_traces(server: Server, traces: Collector) -> None:
    """Of requests through a front end's process to an engine process."""
    names = {span["name"] for span in traces.spans}
    assert names >= {*PHASES, "chat smollm2-135m-instruct", "embeddings all-minilm-l6-v2"}
    assert {span["archerfish.tenant"] for span in traces.spans if span["name"] not in PHASES} == {"alice"}
    by_id = {span["id"]: span for span in traces.spans}
    children = [span for span in traces.spans if span["name"] in PHASES and span["parent"] in by_id]
    assert len(children) > 100
    for span in children:
        parent = by_id[span["parent"]]
        assert parent["began"] - 1000 <= span["began"] <= span["ended"] <= parent["ended"] + 1000
