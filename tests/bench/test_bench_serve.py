"""The load generator against a server whose latencies are known, in time that jumps: figures are exact."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from archerfish.bench.serve_http import IDLE_S, Address, EventParser, Pool
from archerfish.bench.serve_load import TIMER_S, Driver, Load, Run, arrivals
from archerfish.bench.serve_report import Limits, Point, measure, percentiles, timeline
from archerfish.bench.serve_requests import OUTCOMES, WORDS, Manner, Record, RequestMaker, Shape, error_code
from archerfish.bench.stats import percentile
from archerfish.errors import InvalidOptionError
from tests.bench.serve_fakes import (
    Answer,
    Asked,
    FakeServer,
    Script,
    chunked,
    error,
    event,
    head,
    stream,
    stream_bytes,
    token,
    whole,
    with_server,
)  # fmt: skip

CHAT = (Shape("chat", (5, 5), (4, 4)),)
EMBEDDINGS = (Shape("embeddings", (3, 3), num_texts=2),)
MANNER = Manner("talker", "embedder")
VECTORS = {"data": [{"embedding": [0.0]}] * 2, "usage": {"prompt_tokens": 6, "total_tokens": 6}}


def drive(script: Script, load: Load) -> tuple[Run, FakeServer]:
    async def test(server: FakeServer, pool: Pool) -> tuple[Run, FakeServer]:
        return await Driver(pool, MANNER, load).run(), server

    return with_server(script, test)


def one_record(answer: Answer, shapes: tuple[Shape, ...] = CHAT, timeout_s: float = 50.0) -> Record:
    run, _ = drive(lambda asked: answer, Load(shapes, concurrency=1, count=1, timeout_s=timeout_s))
    (record,) = run.records
    return record


# Arithmetic


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300), st.integers(1, 100))
def test_a_percentile_is_the_smallest_sample_that_so_many_do_not_exceed(samples: list[float], percent: int) -> None:
    (value,) = percentiles(samples, (percent,))
    assert value in samples
    assert 100 * sum(sample <= value for sample in samples) >= percent * len(samples)
    assert 100 * sum(sample < value for sample in samples) < percent * len(samples)


def test_percentiles_of_nothing_and_of_a_hundred() -> None:
    assert all(math.isnan(value) for value in percentiles([]))
    hundred = [float(number) for number in range(1, 101)]
    assert percentiles(hundred) == [50, 90, 95, 99] == [percentile(hundred, share) for share in (0.5, 0.9, 0.95, 0.99)]


@given(st.floats(0.1, 500), st.integers(0, 5), st.floats(0.1, 20), st.integers(0, 50))
def test_arrivals_are_the_same_process_however_long_it_is_watched(
    rate: float, seed: int, duration_s: float, count: int
) -> None:
    short = list(arrivals(rate, str(seed), duration_s=duration_s))
    longer = list(itertools.islice(arrivals(rate, str(seed), duration_s=2 * duration_s), len(short)))
    assert short == longer == sorted(short)
    assert all(0 < at < duration_s for at in short)
    if count:
        assert len(list(arrivals(rate, str(seed), count=count))) == count


@pytest.mark.parametrize("rate", [0.5, 30.0])
def test_arrivals_are_poisson(rate: float) -> None:
    """Gaps have the mean 1/rate and, unlike those of a metronome or of uniform draws, as large a deviation."""
    number = 20_000
    times = [0.0, *arrivals(rate, "7", count=number)]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    mean = sum(gaps) / number
    deviation = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / number)
    assert mean * rate == pytest.approx(1, abs=5 / math.sqrt(number))
    assert deviation * rate == pytest.approx(1, abs=0.05)
    assert sum(gap > mean for gap in gaps) / number == pytest.approx(math.exp(-1), abs=5 * 0.5 / math.sqrt(number))


def test_seeds_give_different_arrivals() -> None:
    assert list(arrivals(10, "1", count=5)) != list(arrivals(10, "2", count=5))


# What is asked


@given(
    st.sampled_from(["chat", "completions", "ids"]), st.tuples(st.integers(1, 99), st.integers(1, 99)),
    st.tuples(st.integers(1, 99), st.integers(1, 99)), st.integers(1, 9),
)  # fmt: skip
def test_a_workload_reads_what_it_shows(kind: str, inputs: tuple[int, int], outputs: tuple[int, int], weight: int) -> None:
    low, high = sorted(inputs)
    low_out, high_out = sorted(outputs)
    shape = Shape(kind, (low, high), (low_out, high_out), weight=weight)
    assert Shape.parse(str(shape)) == shape
    embedding = Shape("embeddings", (low, high), num_texts=low_out, weight=weight)
    assert Shape.parse(str(embedding)) == embedding


@pytest.mark.parametrize(
    "text",
    ["", "chat", "chat:64", "chat:0/16", "chat:64/0", "chat:64-32/16", "chat:64/16x2", "chats:64/16", "embeddings:32/16",
     "embeddings:32x0", "chat:64/16@0", "chat:6 4/16"],
)  # fmt: skip
def test_what_is_no_workload_is_refused(text: str) -> None:
    with pytest.raises(InvalidOptionError) as caught:
        Shape.parse(text)
    assert repr(text) in caught.value.message
    assert "chat:64/16" in caught.value.hint


def test_requests_depend_on_seed_and_index_alone() -> None:
    shapes = (Shape("chat", (2, 40), (1, 9)), Shape("ids", (7, 7), (3, 3)), Shape("embeddings", (5, 5), num_texts=3, weight=2))
    maker, again, other = (RequestMaker(shapes, MANNER, seed) for seed in ("a", "a", "b"))
    made = {index: maker.make(index) for index in range(200)}
    assert {index: again.make(index) for index in reversed(range(200))} == made
    assert other.make(0) != made[0]
    kinds = [prepared.kind for prepared in made.values()]
    assert kinds.count("embeddings") > kinds.count("chat") > 0
    assert kinds.count("ids") > 0
    for prepared in made.values():
        body = json.loads(prepared.body)
        if prepared.kind == "embeddings":
            assert body["model"] == "embedder"
            assert [len(text.split()) for text in body["input"]] == [5, 5, 5]
        elif prepared.kind == "ids":
            assert (len(body["prompt"]), body["max_tokens"], body["model"]) == (7, 3, "talker")
        else:
            words = body["messages"][0]["content"].split()
            assert 2 <= len(words) <= 40
            assert set(words) <= set(WORDS)
            assert body["max_tokens"] == prepared.num_wanted_tokens


def test_extras_are_in_requests_that_generate() -> None:
    manner = Manner("talker", "embedder", {"ignore_eos": True, "temperature": 1})
    body = json.loads(RequestMaker((Shape("completions", (3, 3), (2, 2)),), manner, "").make(0).body)
    assert body["ignore_eos"] is True
    assert body["temperature"] == 1
    assert "ignore_eos" not in json.loads(RequestMaker(EMBEDDINGS, manner, "").make(0).body)


# Parsing


@given(
    st.lists(st.sampled_from(["a", "b c", "", "[DONE]", '{"x": 1}', "line\nline", "é☃"]), max_size=6),
    st.sampled_from(["\n", "\r\n", "\r"]), st.lists(st.integers(1, 9), min_size=1, max_size=40), st.booleans(),
)  # fmt: skip
def test_events_do_not_depend_on_how_they_are_cut(events: list[str], newline: str, sizes: list[int], has_space: bool) -> None:
    lines: list[str] = [": a comment", ""]
    for number, data in enumerate(events):
        lines += [f"event: kind{number}", *(f"data:{' ' if has_space else ''}{part}" for part in data.split("\n")), ""]
    left = newline.join([*lines, ""]).encode()
    parser, found = EventParser(), []
    for size in itertools.cycle(sizes):
        if not left:
            break
        found += parser.feed(left[:size])
        left = left[size:]
    assert found == [data.encode() for data in events]


def test_events_that_are_not_ended_are_not_told() -> None:
    parser = EventParser()
    assert parser.feed(b"data: a\n") == []
    assert parser.feed(b"") == []
    assert parser.feed(b"data: b\n\ndata: c") == [b"a\nb"]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 400), min_size=1, max_size=30), st.booleans())
def test_an_answer_does_not_depend_on_how_it_is_cut(sizes: list[int], is_chunked: bool) -> None:
    events = stream_bytes(3, {"prompt_tokens": 11, "completion_tokens": 3})
    if is_chunked:
        data = head() + b"Transfer-Encoding: chunked\r\n\r\n" + b"".join(map(chunked, events)) + b"0\r\n\r\n"
    else:
        body = b"".join(events)
        data = head() + b"Content-Length: %d\r\n\r\n" % len(body) + body
    pieces = []
    for size in itertools.cycle(sizes):
        if not data:
            break
        pieces.append((0.001, data[:size]))
        data = data[size:]
    record = one_record(Answer(pieces))
    assert (record.outcome, record.status, record.code) == ("ok", 200, "")
    assert (record.num_prompt_tokens, record.num_output_tokens, len(record.chunk_times)) == (11, 3, 3)
    assert record.latency_s == pytest.approx(0.001 * len(pieces))


def test_an_answer_without_a_length_ends_with_its_connection() -> None:
    record = one_record(Answer([(0.0, head() + b"\r\n" + b"".join(stream_bytes(2)))], cuts=True))
    assert (record.outcome, record.num_output_tokens) == ("ok", 2)


# Every way to end


@pytest.mark.parametrize(
    ("answer", "shapes", "outcome", "status", "code"),
    [
        (stream(2, 0.1, 0.1), CHAT, "ok", 200, ""),
        (whole(VECTORS), EMBEDDINGS, "ok", 200, ""),
        (error(429, "overloaded", {"Retry-After": "2.5"}), CHAT, "refused", 429, "overloaded"),
        (error(503, "draining"), CHAT, "refused", 503, "draining"),
        (error(400, "invalid_input"), CHAT, "error", 400, "invalid_input"),
        (whole(b"<html>", 502), CHAT, "error", 502, ""),
        (whole({"data": [1], "usage": None}), EMBEDDINGS, "error", 200, "missing_vectors"),
        (whole(b"{"), EMBEDDINGS, "error", 200, "malformed_answer"),
        (Answer([(0.0, head() + b"Content-Length: 0\r\n\r\n")]), CHAT, "error", 200, "incomplete_stream"),
        (Answer([(0.0, head() + b"Content-Length: 10\r\n\r\n")], cuts=True), CHAT, "disconnected", 200, "cut_off"),
        (Answer([], cuts=True), CHAT, "disconnected", 0, "cut_off"),
        (Answer([(0.0, b"SSH-2.0-OpenSSH\r\n")], cuts=True), CHAT, "disconnected", 0, "cut_off"),
        (Answer([], hangs=True), CHAT, "timeout", 0, "timeout"),
        (Answer([(0.0, head() + b"Content-Length: 999\r\n\r\n" + token())], hangs=True), CHAT, "timeout", 200, "timeout"),
    ],
)  # fmt: skip
def test_every_end_has_its_name(answer: Answer, shapes: tuple[Shape, ...], outcome: str, status: int, code: str) -> None:
    record = one_record(answer, shapes)
    assert (record.outcome, record.status, record.code) == (outcome, status, code)
    assert record.retry_after_s == (2.5 if status == 429 else None)
    if outcome == "timeout":
        assert record.latency_s == pytest.approx(50.0)


@pytest.mark.parametrize(
    ("events", "code"),
    [
        ([token(), event("{not json"), *stream_bytes(1)], "malformed_chunk"),
        ([token(), event({"choices": 3}), *stream_bytes(1)], "malformed_chunk"),
        ([token(), event({"error": {"message": "engine died", "code": "stopped"}}), event("[DONE]")], "stopped"),
        ([token(), event({"error": "engine died"}), event("[DONE]")], "error_in_stream"),
        ([token(), token()], "incomplete_stream"),
    ],
)
def test_a_stream_that_goes_wrong_is_an_error(events: list[bytes], code: str) -> None:
    body = b"".join(events)
    record = one_record(Answer([(0.0, head() + b"Content-Length: %d\r\n\r\n" % len(body) + body)]))
    assert (record.outcome, record.status, record.code) == ("error", 200, code)


def test_a_server_that_is_not_there() -> None:
    async def test(server: FakeServer, pool: Pool) -> Run:
        nowhere = Pool(Address.parse(f"{pool.address.url}-not"), clock=pool.clock)
        return await Driver(nowhere, MANNER, Load(CHAT, concurrency=2, count=3)).run()

    run = with_server(lambda asked: whole({}), test)
    assert [(record.outcome, record.code, record.status) for record in run.records] == [("disconnected", "unreachable", 0)] * 3


@pytest.mark.parametrize(
    ("body", "code"),
    [(b"", ""), (b"[1]", ""), (b'{"error": "text"}', ""), (b'{"error": {"code": null, "type": "t"}}', "t"),
     (b'{"code": "c"}', "c"), (b'{"error": {"code": 7}}', "")],
)  # fmt: skip
def test_codes_are_found_where_servers_put_them(body: bytes, code: str) -> None:
    assert error_code(body) == code


# Times


def test_latencies_are_those_of_the_server() -> None:
    run, _ = drive(lambda asked: stream(4, 0.25, 0.1), Load(CHAT, concurrency=2, count=10))
    figures = measure(run, Limits())
    for percent in (50, 90, 95, 99):
        assert figures[f"ttft_p{percent}_ms"] == pytest.approx(250)
        assert figures[f"inter_token_p{percent}_ms"] == pytest.approx(100)
        assert figures[f"per_token_p{percent}_ms"] == pytest.approx(100)
        assert figures[f"e2e_p{percent}_ms"] == pytest.approx(550)
    assert figures["window_s"] == pytest.approx(5 * 0.55)
    assert figures["requests_s"] == pytest.approx(2 / 0.55)
    assert figures["tokens_s"] == pytest.approx(8 / 0.55)
    assert figures["mean_in_flight"] == pytest.approx(2)
    assert figures["little_ratio"] == pytest.approx(1)
    assert figures["num_ok"] == figures["num_requests"] == 10
    assert figures["client_lag_p99_ms"] == pytest.approx(0)


def test_a_chunk_may_carry_several_tokens() -> None:
    record = one_record(stream(4, 0.1, 0.1, {"prompt_tokens": 9, "completion_tokens": 13}))
    run = Run(Load(CHAT, concurrency=1, count=1), record.sent_s, record.ended_s, [record])
    assert measure(run, Limits())["per_token_p50_ms"] == pytest.approx(300 / 12)
    assert record.num_output_tokens == 13


def test_a_closed_loop_keeps_its_number_and_warm_up_is_left_out() -> None:
    def script(asked: Asked) -> Answer:
        return whole(VECTORS, delay_s=1.0 if asked.number < 6 else 0.1)

    run, server = drive(script, Load(EMBEDDINGS, concurrency=3, count=9, num_warmup=6))
    assert server.most_running == 3
    assert len(server.asked) == 15
    assert len(run.records) == 9
    assert measure(run, Limits())["e2e_p99_ms"] == pytest.approx(100)
    assert len({json.dumps(asked.body) for asked in server.asked}) == 15  # no prompt comes twice: caches would answer it


def test_a_closed_loop_ends_with_its_duration() -> None:
    run, _ = drive(lambda asked: whole(VECTORS, delay_s=0.3), Load(EMBEDDINGS, concurrency=2, duration_s=1.0))
    assert len(run.records) == 8  # sent at 0, 0.3, 0.6 and 0.9
    figures = measure(run, Limits())
    assert figures["requests_s"] == pytest.approx(6)  # the last two ended outside
    assert figures["num_ok"] == 8


@pytest.mark.parametrize(
    ("answer", "pause_s"),
    [(error(429, "busy", {"Retry-After": "0.5"}), 0.5), (error(429, "busy", {"Retry-After": "60"}), 1.0),
     (error(503, "draining"), 0.1), (error(500, "internal_error"), 0.1)],
)  # fmt: skip
def test_a_closed_loop_does_not_flood_a_server_that_refuses(answer: Answer, pause_s: float) -> None:
    run, _ = drive(lambda asked: answer, Load(CHAT, concurrency=2, duration_s=10.0))
    assert len(run.records) == pytest.approx(2 * 10 / pause_s, abs=2)


@pytest.mark.parametrize("max_in_flight", [0, 1, 3])
def test_latencies_of_an_open_loop_count_from_when_requests_were_meant_to_be_sent(max_in_flight: int) -> None:
    """A server that takes one at a time: by Lindley's recursion, wherever the queue stands."""
    service_s, rate = 0.1, 12.0

    async def test(server: FakeServer, pool: Pool) -> Run:
        load = Load(EMBEDDINGS, rate=rate, duration_s=20.0, seed="s", max_in_flight=max_in_flight)
        return await Driver(pool, MANNER, load).run()

    turn: list[asyncio.Lock] = []

    async def script(asked: Asked) -> Answer:
        if not turn:
            turn.append(asyncio.Lock())
        async with turn[0]:
            await asyncio.sleep(service_s)
        return whole(VECTORS)

    run = with_server(script, test)
    free_at, expected = 0.0, []
    for at in arrivals(rate, "s", duration_s=20.0):
        begins = max(at - TIMER_S, free_at)
        free_at = begins + service_s
        expected.append(free_at - at)
    records = sorted(run.records, key=lambda record: record.index)
    assert len(records) == len(expected) > 200
    assert max(expected) > 2.0  # the queue grew
    for record, latency_s in zip(records, expected, strict=True):
        assert record.latency_s == pytest.approx(latency_s, abs=2 * TIMER_S)
    if max_in_flight:
        assert max(number for _, number in run.in_flight) == max_in_flight
        assert max(record.sent_s - record.intended_s for record in records) > 1.5
    figures = measure(run, Limits())
    assert figures["requests_s"] == pytest.approx(10, rel=0.05)
    if not max_in_flight:
        assert figures["little_ratio"] < 0.9  # what waits at the end of the window: no steady state


def test_random_behaviour_is_accounted_for() -> None:
    """200 requests to a server that does anything at all: each has exactly one end."""
    ways = [
        stream(3, 0.05, 0.01), error(429, "busy", {"Retry-After": "1"}), error(500, "internal_error"), Answer([], cuts=True),
        Answer([], hangs=True), Answer([(0.2, head() + b"Content-Length: 50\r\n\r\n" + token())], cuts=True),
    ]  # fmt: skip
    chance = random.Random(3)
    load = Load(CHAT, rate=40.0, count=200, timeout_s=0.5, seed="x")
    run, server = drive(lambda asked: chance.choice(ways), load)
    figures = measure(run, Limits())
    assert sorted(record.index for record in run.records) == list(range(200))
    assert sum(figures[f"num_{outcome}"] for outcome in OUTCOMES) == 200 == len(server.asked) - run.num_resent
    assert all(figures[f"num_{outcome}"] > 0 for outcome in OUTCOMES if outcome != "left")
    assert figures["num_refused_with_retry_after"] == figures["num_refused"]
    assert run.in_flight[-1][1] == 0
    assert figures["little_ratio"] == pytest.approx(1)
    point = Point("s", "x", load.title)
    point.add(run, Limits())
    assert sum(point.errors.values()) == 200 - figures["num_ok"]
    assert point.errors["429 busy"] == figures["num_refused"]


def test_leavers_hang_up_at_random_moments_and_the_server_sees_it() -> None:
    load = Load(CHAT, concurrency=10, count=60, hang_up_within_s=0.8, seed="l")
    run, server = drive(lambda asked: stream(4, 0.2, 0.1), load)  # half a second each
    left = [record for record in run.records if record.outcome == "left"]
    well = [record for record in run.records if record.outcome == "ok"]
    assert len(left) + len(well) == 60
    assert len(left) > 20
    assert len(well) > 5
    assert len({round(record.latency_s, 6) for record in left}) == len(left)
    assert all(record.latency_s < 0.8 for record in left)
    assert sum(len(record.chunk_times) > 0 for record in left) > 5  # in the middle of a stream too
    assert server.num_cut_short == len(left)


# Connections


def test_connections_are_kept_and_left_in_time() -> None:
    _, server = drive(lambda asked: whole(VECTORS, delay_s=0.1), Load(EMBEDDINGS, concurrency=3, count=30))
    assert server.num_connections == 3
    closing = {"Connection": "close"}
    _, server = drive(lambda asked: whole(VECTORS, headers=closing), Load(EMBEDDINGS, concurrency=3, count=30))
    assert server.num_connections == 30
    _, server = drive(lambda asked: whole(VECTORS), Load(EMBEDDINGS, rate=0.01 / IDLE_S, count=5))
    assert server.num_connections == 5  # all were idle for long: the server may be closing them right now


def test_a_server_that_closes_what_it_promised_to_keep_costs_no_answer() -> None:
    """As llama.cpp's does behind a stream. A request that a new connection loses, or that has some answer, is lost."""
    run, server = drive(lambda asked: replace(stream(3, 0.1, 0.1), cuts=True), Load(CHAT, concurrency=3, count=30))
    assert [record.outcome for record in run.records] == ["ok"] * 30
    assert len(server.asked) == server.num_connections == 30
    assert 0 < run.num_resent < 30
    run, server = drive(lambda asked: Answer(cuts=True), Load(CHAT, concurrency=1, count=5))
    assert [record.code for record in run.records] == ["cut_off"] * 5
    assert len(server.asked) == 5
    cut = Answer([(0.0, head() + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(token()))], cuts=True)
    run, server = drive(lambda asked: cut if asked.number % 2 else stream(3, 0.1, 0.1), Load(CHAT, concurrency=1, count=6))
    assert [record.outcome for record in run.records] == ["ok", "disconnected"] * 3
    assert len(server.asked) == 6


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:8000", ("127.0.0.1", 8000, "", False, "127.0.0.1:8000")),
        ("http://host/v1/", ("host", 80, "", False, "host")),
        ("https://example.org/models/v1", ("example.org", 443, "/models", True, "example.org")),
        ("http://[::1]:8080", ("::1", 8080, "", False, "[::1]:8080")),
    ],
)
def test_addresses(url: str, expected: tuple[Any, ...]) -> None:
    found = Address.parse(url)
    assert (found.host, found.port, found.prefix, found.is_secure, found.host_header) == expected


@pytest.mark.parametrize("url", ["", "unix:", "127.0.0.1:8000", "ftp://x", "http://", "http://x:port", "http://x:99999"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(InvalidOptionError, match="address of a server"):
        Address.parse(url)


def test_a_key_is_sent_and_paths_have_their_prefix() -> None:
    sent = Pool(Address.parse("http://h:1/base/v1"), api_key="k").request_bytes("POST", "/v1/x", b"{}").decode()
    assert sent.startswith("POST /base/v1/x HTTP/1.1\r\nHost: h:1\r\nAuthorization: Bearer k\r\n")
    assert sent.endswith("Content-Length: 2\r\n\r\n{}")


# Figures of runs that are made up


def made_run(latencies_s: list[float], load: Load, **more: Any) -> Run:
    """Requests that were sent a second apart."""
    records = [
        Record(index, "chat", float(index), float(index), index + latency_s / 2, index + latency_s, "ok", 200, **more)
        for index, latency_s in enumerate(latencies_s)
    ]
    for record in records:
        record.chunk_times.append(record.first_s)
        record.num_output_tokens = 1
    return Run(load, 0.0, max(record.ended_s for record in records), records)


def test_goodput_counts_what_keeps_both_limits() -> None:
    run = made_run([0.2, 0.4, 0.6, 0.8], Load(CHAT, concurrency=1, duration_s=10.0))
    assert measure(run, Limits())["goodput_s"] == pytest.approx(0.4)
    assert measure(run, Limits(latency_s=0.5))["goodput_s"] == pytest.approx(0.2)
    assert measure(run, Limits(ttft_s=0.35))["goodput_s"] == pytest.approx(0.3)
    assert measure(run, Limits(ttft_s=0.15, latency_s=0.7))["good_share"] == pytest.approx(0.25)
    run.records[0].outcome = "error"
    assert measure(run, Limits(latency_s=0.5))["goodput_s"] == pytest.approx(0.1)


def test_embeddings_have_no_first_token_to_be_late() -> None:
    run, _ = drive(lambda asked: whole(VECTORS, delay_s=0.1), Load(EMBEDDINGS, concurrency=1, count=4))
    figures = measure(run, Limits(ttft_s=0.001, latency_s=0.2))
    assert figures["good_share"] == 1
    assert math.isnan(figures["ttft_p50_ms"])


def test_answers_that_are_shorter_than_asked_are_counted() -> None:
    run, _ = drive(lambda asked: stream(4 if asked.number % 2 else 3, 0.1, 0.1), Load(CHAT, concurrency=1, count=6))
    assert measure(run, Limits())["num_short"] == 3


@given(st.lists(st.floats(0.01, 30), min_size=1, max_size=40))
def test_a_timeline_has_every_end_once(latencies_s: list[float]) -> None:
    run = made_run(latencies_s, Load(CHAT, concurrency=1, count=1))
    found = timeline(run)
    step_s = max((run.end_s - run.start_s) / 120, 0.05)
    assert sum(found["finished_s"]) * step_s == pytest.approx(len(latencies_s))
    assert len({len(values) for values in found.values()}) == 1
    assert not any(found["refused_s"]) and not any(found["failed_s"])


def test_memory_is_compared_over_quarters() -> None:
    run = made_run([0.5], Load(CHAT, concurrency=1, count=1))
    run.samples = [(float(at), 100.0 + at) for at in range(8)]
    run.cached, run.processes = [0.0] * 8, {"process 1": [float(50 + at) for at in range(8)], "process 2": [50.0] * 8}
    figures = measure(run, Limits())
    assert (figures["memory_early_bytes"], figures["memory_late_bytes"]) == (100, 106)
    assert figures["memory_growth"] == pytest.approx(0.06)
    assert figures["process 1, MB/min"] == pytest.approx(60e-6)
    assert figures["process 2, MB/min"] == 0
    run.cached = [float(at) for at in range(8)]  # all of what grew is KV
    figures = measure(run, Limits())
    assert (figures["memory_growth"], figures["kv_late_bytes"]) == (0, 7)
    run.samples = [(0.0, 0.0)] * 8
    assert "memory_growth" not in measure(run, Limits())


def test_rounds_have_a_middle_and_a_spread() -> None:
    point = Point("s", "x", "l", rounds=[{"a": 3.0}, {"a": 1.0}, {"a": 2.0, "b": math.nan}])
    summary = point.summary("a")
    assert summary is not None
    assert (summary.median, summary.low, summary.high, summary.rounds) == (2, 1, 3, 3)
    assert point.summary("b") is None is point.median("c")
    assert json.dumps(point.as_dict(), allow_nan=False)


@pytest.mark.parametrize(
    "wrong",
    [{"count": 1}, {"concurrency": 1, "rate": 1.0, "count": 1}, {"rate": 1.0}, {"concurrency": 1}, {"rate": -1.0, "count": 1}],
)
def test_a_load_is_of_one_kind_and_ends(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidOptionError):
        Load(CHAT, **wrong)
