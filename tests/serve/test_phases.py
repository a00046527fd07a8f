"""Where the time of requests goes: the parts add up in the log and in the metrics, for every request."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from archerfish.observe.metrics import TTFT
from archerfish.serve.logs import JSONFormatter
from scripts import metrics_page

from .client import WORDS, host_with, serving, until
from .hosting import WordEncoder

pytestmark = pytest.mark.anyio
PHASES = ("queue_ms", "prefill_ms", "decode_ms", "network_ms")
TEXT, EMBEDDINGS = "/v1/completions", "/v1/embeddings"
KINDS: list[dict[str, Any]] = [
    {},
    {"stream": True},
    {"n": 3, "seed": 4},
    {"stream": True, "ignore_eos": True},
    {"logprobs": 2},
    {"stop": ["a", "e"]},
]
BODIES: list[dict[str, Any]] = [
    {"prompt": f"the cats {number} " * (1 + number % 5), "max_tokens": 1 + number % 9, "temperature": 1.0, **more}
    for number, more in enumerate(KINDS * 8)
]


def members_of(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """The lines of requests, as JSON has them."""
    formatter = JSONFormatter("front")
    return [json.loads(formatter.format(record)) for record in caplog.records if record.name == "archerfish.access"]


async def totals(client: Any) -> dict[str, float]:
    """The sums and counts of /metrics, each over all labels."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families((await client.get("/metrics")).text):
        for sample in family.samples:
            if sample.labels.get("route", TEXT) == TEXT:
                name = sample.name.removeprefix("archerfish_")
                found[name] = found.get(name, 0) + sample.value
    return found


async def test_phases_of_every_request_add_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Red: a phase on another clock, one that overlaps another, a request that ends without its times."""
    caplog.set_level(logging.INFO, "archerfish.access")
    async with serving(host_with(tmp_path, llm={"has_text": True, "max_num_seqs": 4})) as client:
        answers = await asyncio.gather(*(client.post(TEXT, json=body) for body in BODIES))
        assert {answer.status_code for answer in answers} == {200}
        lines = [line for line in members_of(caplog) if line["route"] == TEXT]
        assert len(lines) == len(BODIES)
        for line in lines:
            assert sum(line[name] for name in PHASES) == pytest.approx(line["ms"], abs=1e-6), line
            assert all(line[name] >= -0.002 for name in PHASES), line  # rounded to 0.001
            assert line["prompt_tokens"] > 0 and line["output_tokens"] > 0 and line["finish_reason"]
        assert {line["id"] for line in lines} == {answer.headers["x-request-id"] for answer in answers}
        found = await totals(client)
    assert found["e2e_request_latency_seconds_count"] == found["request_seconds_count"] == len(BODIES)
    parts = [found[f"request_{name}_time_seconds_sum"] for name in ("queue", "prefill", "decode")]
    assert found["e2e_request_latency_seconds_sum"] == pytest.approx(sum(parts))
    assert found["time_to_first_token_seconds_sum"] == pytest.approx(sum(parts[:2]))
    assert found["request_seconds_sum"] == pytest.approx(sum(line["ms"] for line in lines) / 1000, abs=1e-3)
    assert found["request_generation_tokens_sum"] == found["generation_tokens_total"] > 0
    assert found["request_prompt_tokens_sum"] == sum(line["prompt_tokens"] for line in lines)
    network = found["request_network_time_seconds_sum"]
    assert network == pytest.approx(sum(line["network_ms"] for line in lines) / 1000, abs=1e-3)


async def test_parts_of_a_stream_that_is_broken_off_add_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "archerfish.access")
    host = host_with(tmp_path, llm={"has_text": True, "max_len": 4096})
    async with serving(host) as client:
        body = {"prompt": "the cats", "max_tokens": 4000, "ignore_eos": True, "stream": True}
        asked = asyncio.create_task(client.post(TEXT, json=body))
        await until(lambda: bool(host.figures.histograms[TTFT].samples()))
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        await until(lambda: bool(members_of(caplog)))
        [line] = [line for line in members_of(caplog) if line["route"] == TEXT]
        while not (found := await totals(client)).get("request_success_total"):
            await asyncio.sleep(0)
    assert found["e2e_request_latency_seconds_count"] == 1  # an aborted one has its time too
    assert "queue_ms" not in line or sum(line[name] for name in PHASES) == pytest.approx(line["ms"], abs=1e-6)


async def test_a_line_of_json_has_no_prompt_unless_asked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "archerfish.access")
    host = host_with(tmp_path, WordEncoder(WORDS), llm={"has_text": True})
    for asks in (False, True):
        caplog.clear()
        async with serving(
            host if not asks else host_with(tmp_path, llm={"has_text": True}), log_prompts=asks
        ) as client:
            answer = await client.post(
                TEXT, json={"prompt": "the cats", "max_tokens": 2}, headers={"X-Request-Id": "mine-1"}
            )
        [line] = [line for line in members_of(caplog) if line["route"] == TEXT]
        assert line["id"] == answer.headers["x-request-id"] == "mine-1"
        assert (line["process"], line["level"]) == ("front", "info")
        assert ("the cats" in json.dumps(line)) is asks
        assert line.get("outputs") == ([answer.json()["choices"][0]["text"]] if asks else None)


async def test_an_id_that_is_no_plain_word_is_replaced() -> None:
    async with serving() as client:
        for given in ("a b", "x" * 129, '"', ""):
            answer = await client.post(EMBEDDINGS, json={"input": "a"}, headers={"X-Request-Id": given})
            assert answer.headers["x-request-id"].startswith("req_")


def test_the_table_of_metrics_is_up_to_date(tmp_path: Path) -> None:
    assert metrics_page.main(["--check"]) == 0, f"run `{metrics_page.COMMAND}`"
    page = tmp_path / "metrics.md"
    page.write_text(metrics_page.PAGE.read_text().replace("archerfish_num_preemptions_total", "gone"))
    assert metrics_page.main(["--check"], page) == 1
    assert metrics_page.main([], page) == metrics_page.main(["--check"], page) == 0


def test_every_metric_has_a_text_and_no_name_twice() -> None:
    found = metrics_page.declared()
    assert all(metric.description.endswith(".") for metric in found)
    assert (
        len({metrics_page.shown_name(metric) for metric in found}) == len(found)
        and "opentelemetry.sdk" not in sys.modules
    )


def test_dashboard_alerts_and_chart_name_metrics_that_there_are() -> None:
    """Red: a metric that was renamed and is still asked for."""
    parts = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("",), "gauge": ("",)}
    known = {metrics_page.shown_name(one) + part for one in metrics_page.declared() for part in parts[one.kind]}
    deploy = metrics_page.PAGE.parents[1] / "deploy"
    places = ("grafana/archerfish.json", "prometheus/alerts.yml")
    for place in places:
        named = set(re.findall(r"\barcherfish_\w+", (deploy / place).read_text()))
        assert len(named) > 8 and named <= known, named - known
