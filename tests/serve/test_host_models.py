"""EngineHost with several models: vectors, health checks, metrics, options, loading, addresses and keys."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from archerfish.errors import InvalidOptionError, MachineError
from archerfish.observe.metrics import ENDS
from archerfish.params import SamplingParams
from archerfish.serve import wire
from archerfish.serve.client import AsyncClient
from archerfish.serve.compute import Lane
from archerfish.serve.hosted_encoder import MIN_JOB_TOKENS, HostedEncoder
from archerfish.serve.metrics import read_metrics
from archerfish.serve.models import ENCODERS, GENERATION, Hosted, ModelEntry
from archerfish.serve.processes import BEAT_S
from archerfish.serve.tenants import Tenants, add_key
from archerfish.serve.wire import Charge, Configure, EmbedRequest, GenerationRequest, Ping, Pong, Query, Vectors
from tests.cache.invariants import check_cache
from tests.engine.tiny_llama import prompts

from .hosting import (
    LONG,
    FakeClock,
    WordEncoder,
    add_llm,
    failure,
    hold,
    llm_host,
    make_host,
    report_of,
    stats,
    talking,
    whole,
)

pytestmark = pytest.mark.anyio

# Vectors


async def test_empty_lists_have_no_rows(tmp_path: Path) -> None:
    host = make_host(tmp_path, WordEncoder())
    async with talking(host) as client:
        answer = await client.ask(EmbedRequest(request_id="", texts=[]))
        assert isinstance(answer, Vectors)
        assert (answer.num_rows, answer.data) == (0, b"")


async def test_short_requests_pass_long_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for bound in ("MIN_JOB_TOKENS", "MAX_JOB_TOKENS"):
        monkeypatch.setattr(f"archerfish.serve.hosted_encoder.{bound}", 4)
    encoder = WordEncoder()
    host = make_host(tmp_path, encoder)
    async with talking(host) as client:
        first = await hold(encoder, client.ask(EmbedRequest(request_id="", texts=["first"])))
        long = asyncio.create_task(client.ask(EmbedRequest(request_id="", texts=[f"long{i}" for i in range(9)])))
        await reached(client, "words", 10)
        short = asyncio.create_task(client.ask(EmbedRequest(request_id="", texts=["short0", "short1"])))
        await reached(client, "words", 12)
        await client.ask(Ping(request_id=""))
        encoder.gate.set()
        answers = await asyncio.gather(first, short, long)
        rows = [np.frombuffer(answer.data, "<f4").reshape(-1, 8) for answer in answers if isinstance(answer, Vectors)]
        np.testing.assert_array_equal(rows[1], [WordEncoder.vector("short0"), WordEncoder.vector("short1")])
        np.testing.assert_array_equal(rows[2], [WordEncoder.vector(f"long{i}") for i in range(9)])
    assert encoder.jobs[0] == ["first"]
    assert set(encoder.jobs[1]) == {"long0", "short0", "long1", "short1"}


async def reached(client: AsyncClient, model: str, num_texts: int) -> None:
    """Wait until so many texts are queued."""
    while (await stats(client))["models"][model]["queue_texts"] < num_texts:
        pass


async def test_embeddings_and_generation_alternate(tmp_path: Path) -> None:
    encoder = WordEncoder()
    host = make_host(tmp_path, encoder, llm={})
    order: list[str] = []
    words, tiny = sorted(host.compute.lanes, key=lambda lane: lane.name, reverse=True)
    chatting = threading.Event()

    def until_chat_submits() -> None:
        """A job of the burst lasts longer than the loop needs to submit the chat's next step, however busy the machine
        is."""
        with host.compute.changed:
            host.compute.changed.wait_for(lambda: tiny.waiting or not chatting.is_set(), timeout=60)

    def stop_waiting() -> None:
        with host.compute.changed:
            chatting.clear()
            host.compute.changed.notify_all()

    spy_on(tiny, order)
    spy_on(words, order, until_chat_submits)
    async with talking(host) as client:
        blocker = await hold(encoder, client.ask(EmbedRequest(request_id="", texts=["first"])))
        hosted = next(one for one in host.models.loaded if isinstance(one, HostedEncoder))
        hosted.job_tokens = MIN_JOB_TOKENS
        hosted._choose_job_tokens = lambda: None  # type: ignore[method-assign]
        texts: list[str | list[int]] = [f"{i} " * MIN_JOB_TOKENS for i in range(200)]  # a job each
        burst = asyncio.create_task(client.ask(EmbedRequest(request_id="", texts=texts)))
        await reached(client, "words", 201)
        chat = asyncio.create_task(whole(client, token_ids=[5, 6], params={**LONG, "max_tokens": 100}))
        chat.add_done_callback(lambda _: stop_waiting())
        while (await stats(client))["models"]["tiny"]["total_requests"] < 1:
            pass
        order.clear()
        chatting.set()
        encoder.gate.set()
        await asyncio.gather(blocker, burst, chat)
    steps = [place for place, name in enumerate(order) if name == "tiny"]
    assert len(steps) >= 100
    assert order.count("words") == 200
    # The burst delays each step of the chat by one job at most, and goes on meanwhile.
    assert max(later - earlier for earlier, later in itertools.pairwise(steps)) == 2
    assert steps[-1] < 250


def spy_on(lane: Any, order: list[str], before: Callable[[], None] = lambda: None) -> None:
    """Note the order in which jobs of a lane begin, and call `before` at the start of each."""
    submit = lane.submit

    def noting(work: Any, *args: Any, **kwargs: Any) -> Any:
        def run() -> Any:
            order.append(lane.name)
            before()
            return work(*args, **kwargs)

        return submit(run)

    lane.submit = noting


# Health


async def test_probe_makes_a_real_step_unless_one_is_recent(tmp_path: Path) -> None:
    clock = FakeClock()
    encoder = WordEncoder()
    host = make_host(tmp_path, encoder, clock=clock, llm={})
    async with talking(host) as client:

        async def num_steps() -> int:
            found: int = (await stats(client))["models"]["tiny"]["num_steps"]
            return found

        clock.now += 5
        assert isinstance(await client.ask(Ping(request_id="")), Pong)
        assert await num_steps() == 0
        assert isinstance(await client.ask(Ping(request_id="", probe="")), Pong)
        assert (await num_steps(), encoder.jobs) == (1, [["health"]])
        clock.now += 0.5
        await client.ask(Ping(request_id="", probe=""))
        assert (await num_steps(), len(encoder.jobs)) == (1, 1)
        clock.now += 1
        await client.ask(Ping(request_id="", probe="tiny"))
        assert (await num_steps(), len(encoder.jobs)) == (2, 1)


# Figures and options


async def test_sequence_ended_by_the_client_counts_as_stopped(tmp_path: Path) -> None:
    host, engine = llm_host(tmp_path, max_len=4096)
    params = {"max_tokens": 3000, "temperature": 0.0, "ignore_eos": True}
    async with talking(host) as client:
        for number in range(2):
            parts = client.generate(
                GenerationRequest(request_id=str(number), token_ids=[5, 6, 7], params=params, stream=True)
            )
            await anext(parts)
            if number:
                client.end_sequence(str(number), 0)
            await parts.aclose()
        metrics = read_metrics(await report_of(client, Query(request_id="", about="metrics")))
        [ended] = [metric for metric in metrics if metric.name == ENDS]
        assert [(one.labels, one.value) for one in ended.samples()] == [
            (("tiny", "", "abort"), 1),
            (("tiny", "", "stop"), 1),
        ]
    assert engine.scheduler.stats().aborted_requests == 1
    assert engine.scheduler.stats().num_running == 0


async def test_refusals_at_the_limits_of_a_tenant_are_counted(tmp_path: Path) -> None:
    """Front ends of several replicas ask for them apart from any model."""
    keys_file = tmp_path / "keys.toml"
    add_key(keys_file, "alice", requests_per_minute=1)
    host = make_host(tmp_path, api_keys_file=str(keys_file), front_end_pass="pass")
    async with talking(host) as client:
        charge = Charge(request_id="", credentials="pass", tenant="alice", num_tokens=1)
        await client.ask(charge)
        assert (await failure(client, charge)).code == "rate_limit_exceeded"
    [refused] = host.figures.counters["archerfish_refused_requests"].samples()
    assert (refused.labels, refused.value) == (("", "alice", "rate_limit_exceeded"), 1)


async def test_options_change_while_requests_run(tmp_path: Path) -> None:
    host, engine = llm_host(tmp_path, WordEncoder())
    prompt = prompts(1, least=40)[0]
    expected = engine.generate([prompt], SamplingParams(**LONG))[0].token_ids
    async with talking(host) as client:
        running = asyncio.create_task(whole(client, token_ids=prompt, params=LONG))
        changes: list[dict[str, Any]] = [
            {"max_queue_size": 7, "logits_cache_mib": 0},
            {"enable_prefix_caching": False},
            {"max_num_batched_tokens": 40},
            {"enable_prefix_caching": True, "logits_cache_mib": 3, "logits_cache_ttl_s": 5.0},
        ]
        for options in changes:
            values = await report_of(client, Configure(request_id="", model="tiny", options=options))
            assert values | options == values
        error = await failure(client, Configure(request_id="", model="tiny", options={"max_num_batched_tokens": 3}))
        assert error.status == 400
        assert (await running)[1].outputs[0].token_ids == expected
        values = await report_of(client, Configure(request_id="", model="words", options={"latency_budget_ms": 20}))
        assert values["latency_budget_ms"] == 20
    assert engine.scheduler.max_queue_size == 7
    check_cache(engine.scheduler.cache, [])


async def test_fair_share_weights_follow_the_file_of_keys(tmp_path: Path) -> None:
    keys_file, clock = tmp_path / "keys.toml", FakeClock()
    add_key(keys_file, "alice", weight=2.0)
    host = make_host(tmp_path, api_keys_file=str(keys_file), front_end_pass="pass", clock=clock)
    policy: Any = add_llm(host, tmp_path, scheduling_policy="fair-share").scheduler.policy
    assert policy.weights == {"alice": 2.0}
    add_key(keys_file, "bob", weight=3.0)
    host.callers.tenants = Tenants.from_file(keys_file)
    async with talking(host) as client:
        await client.ask(Ping(request_id=""))
        clock.now += BEAT_S
        for _ in range(2):
            await client.ask(Ping(request_id=""))
        assert policy.weights == {"alice": 2.0, "bob": 3.0}


# Loading


async def test_failed_load_fails_the_request(tmp_path: Path) -> None:
    host = make_host(tmp_path, WordEncoder())

    def load(_: Any) -> Any:
        raise OSError("the disk is on fire")

    host.models.add(ModelEntry("gone", "embedding", load, "demand"))
    async with talking(host) as client:
        for _ in range(2):
            error = await failure(client, EmbedRequest(request_id="", model="gone", texts=["x"]))
            assert error.status == 503
            assert "fire" not in str(error)
        await client.ask(EmbedRequest(request_id="", model="words", texts=["x"]))


# Addresses and keys


OUTSIDE = ("tcp://0.0.0.0:5555", "tcp://*:5555", "tcp://[::]:5555", "tcp://192.0.2.1:5555", "tcp://example.org:1")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        *(({"address": address}, "CURVE") for address in OUTSIDE),
        ({"address": "nonsense"}, "no address"),
        ({"address": "http://a"}, "no address"),
        ({"client_keys": ("x",)}, "key"),
    ],
)
def test_bad_addresses_and_keys_are_refused(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidOptionError, match=said):
        make_host(tmp_path, **options)


def keys() -> tuple[str, str]:
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


async def test_open_address_admits_only_known_clients(tmp_path: Path) -> None:
    server = keys()
    friend = keys()
    stranger = keys()
    host = make_host(
        tmp_path, WordEncoder(), open_address="tcp://127.0.0.1:*", secret_key=server[1], client_keys=(friend[0],)
    )
    with host:
        address = host.open_address
        async with asyncio.timeout(60):
            async with AsyncClient(host.address) as client:  # front ends need no keys
                assert isinstance(await client.ask(EmbedRequest(request_id="", texts=["a"])), Vectors)
            async with AsyncClient(address, server_key=server[0], own_keys=friend) as client:
                assert isinstance(await client.ask(EmbedRequest(request_id="", texts=["a"])), Vectors)
                assert (await failure(client, Query(request_id=""))).status == 403  # statistics are for front ends
            async with AsyncClient(address, server_key=server[0], own_keys=stranger) as client:
                assert (await failure(client, Ping(request_id=""))).status == 403
            for wrong in ({}, {"server_key": stranger[0], "own_keys": friend}):
                async with AsyncClient(address, connect_s=0.3, **wrong) as client:  # type: ignore[arg-type]
                    assert (await failure(client, Ping(request_id=""))).status in (403, 503)


def test_taken_address_is_an_error(tmp_path: Path) -> None:
    first = make_host(tmp_path, address="tcp://127.0.0.1:*")
    with first:
        second = make_host(tmp_path, address=first.address)
        with pytest.raises(MachineError, match="Cannot listen"):
            second.open()
        second.stop(0)


def test_model_is_found_by_its_names_or_its_kind(tmp_path: Path) -> None:
    def never(lane: Lane) -> Hosted:
        raise AssertionError("not to be loaded")

    table = make_host(tmp_path).models
    with pytest.raises(wire.UnservedModelError, match="No generation model"):
        table.find("", GENERATION)
    models = (("words", "embedding"), ("lab/writer", "generation"), ("writer", "generation"))
    table.entries += [ModelEntry(name, kind, never) for name, kind in models]
    assert table.find("writer", GENERATION).name == "writer"  # not the short name of another
    assert [table.find("", kinds).name for kinds in (GENERATION, ENCODERS)] == ["lab/writer", "words"]
