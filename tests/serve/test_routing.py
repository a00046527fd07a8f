"""RoutedBackend over replicas that answer as a test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any, cast

import httpx
import pytest
from starlette.applications import Starlette

from archerfish.observe.metrics import GivenMetric, Sample
from archerfish.route.router import Router
from archerfish.serve import routing, wire
from archerfish.serve.app import create_app
from archerfish.serve.client import Answer, Part, Question, RemoteError
from archerfish.serve.metrics import metric_values, read_metrics
from archerfish.serve.routing import MAX_TRIES, RoutedBackend
from archerfish.serve.tenants import Tenants, add_key

from .fake_backend import LIMIT_S, MODEL, TEXT, FakeBackend, error_of, events, until
from .hosting import FakeClock

GONE = RemoteError("It has gone.", code="unavailable", status=503, retry_after_s=1.0)
FULL = RemoteError("The queue is full.", code="overloaded", status=503, retry_after_s=3.0)


class FakeReplica(FakeBackend):
    """A client of a replica. Its reports are those of an idle one unless `is_stopping`, or `report_error` is raised
    instead."""

    def __init__(self, number: int, **options: Any) -> None:
        super().__init__(**options)
        self.is_connected = True
        self.is_stopping = False
        self.report_error: RemoteError | None = None
        self.started_at = float(number)
        self.loads: dict[str, Any] = {MODEL: {"prompt_token_s": 0.001}}
        self.metrics: dict[str, Any] = {}
        self.num_reports = 0
        self.askers: set[str] = set()
        self.is_closed = False

    async def generate(self, request: wire.GenerationRequest) -> AsyncGenerator[Part, None]:
        try:
            async with aclosing(super().generate(request)) as parts:
                async for part in parts:
                    yield part
        except RemoteError as error:
            self.is_stopping = self.is_stopping or error.is_lost
            raise

    async def ask(self, message: Question, timeout_s: float | None = None) -> Answer:
        if isinstance(message, wire.Charge) and self.ask_error is None:
            self.asked.append(message)
            return wire.Report(request_id="")
        if not (isinstance(message, wire.Query) and message.about == "load"):
            return await super().ask(message)
        await asyncio.sleep(0)
        self.num_reports += 1
        self.askers.add(message.source)
        if self.report_error is not None:
            raise self.report_error
        values = {"loads": self.loads, "is_stopping": self.is_stopping, "started_at": self.started_at}
        return wire.Report(request_id="", values=values)

    def _report(self, about: str) -> dict[str, Any]:
        if about in ("stats", "view"):
            return {"seen": self.started_at}
        return self.metrics if about == "metrics" else super()._report(about)

    async def close(self, reason: Any = None) -> None:
        self.is_closed = True


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"POLL_S": 0.001, "IDLE_POLL_S": 0.001, "MAX_REPORTS_PER_S": 10_000}.items():
        monkeypatch.setattr(routing, name, value)


@asynccontextmanager
async def routed(*replicas: FakeReplica, **options: Any) -> AsyncIterator[RoutedBackend]:
    """A backend that prefers the replicas in this order, when all of them have reported or failed to."""
    backend = RoutedBackend(Router(b"secret"), credentials="pass", **options)
    for number, replica in enumerate(replicas):
        if "model" not in replica.loads:
            replica.loads = {MODEL: {"prompt_token_s": 0.001, "step_s": 0.1 * number}}
        backend.add(f"replica-{number}", cast(Any, replica))
    async with asyncio.timeout(LIMIT_S):
        await until(lambda: all(replica.num_reports for replica in replicas))
        await reported(*replicas)
        try:
            yield backend
        finally:
            await backend.close()


async def reported(*replicas: FakeReplica) -> None:
    """Wait until a report that was asked for now has been taken over."""
    before = [replica.num_reports for replica in replicas]
    await until(lambda: all(replica.num_reports > n + 1 for replica, n in zip(replicas, before, strict=True)))


def request(**fields: Any) -> wire.GenerationRequest:
    given = {"request_id": "r", "model": MODEL, "token_ids": [1, 2, 3], "wants_ids": True, "stream": True, **fields}
    return wire.GenerationRequest(**given)


async def parts_of(backend: RoutedBackend, **fields: Any) -> list[Part]:
    return [part async for part in backend.generate(request(**fields))]


def three() -> list[FakeReplica]:
    return [FakeReplica(number) for number in range(3)]


def sent(*replicas: FakeReplica) -> list[int]:
    return [len(replica.requests) for replica in replicas]


# What is sent again


@pytest.mark.parametrize("error", [GONE, RemoteError("It stops.", code="stopped", status=503), FULL])
@pytest.mark.parametrize("stream", [True, False])
def test_request_goes_to_another_replica_before_anything_has_come(error: RemoteError, stream: bool) -> None:
    async def main() -> None:
        replicas = three()
        replicas[0].fails = {0: error}
        async with routed(*replicas) as backend:
            parts = await parts_of(backend, stream=stream)
            assert len([part for part in parts if isinstance(part, wire.Generated)]) == 1
            assert sent(*replicas) == [1, 1, 0]

    asyncio.run(main())


def test_lost_stream_is_not_sent_again_once_a_part_has_come() -> None:
    async def main() -> None:
        replicas = three()
        replicas[0].fails = {2: GONE}
        async with routed(*replicas) as backend:
            parts = backend.generate(request())
            found = [await anext(parts), await anext(parts)]
            with pytest.raises(RemoteError, match="gone"):
                await anext(parts)
            assert all(isinstance(part, wire.Chunk) for part in found) and sent(*replicas) == [1, 0, 0]
            assert all(one.replica.num_live == 0 for one in backend.connections.values())

    asyncio.run(main())


@pytest.mark.parametrize(
    ("code", "status"), [("invalid_input", 400), ("rate_limit_exceeded", 429), ("internal_error", 500)]
)
def test_errors_of_the_request_itself_are_final(code: str, status: int) -> None:
    async def main() -> None:
        replicas = three()
        replicas[0].fails = {0: RemoteError("No.", code=code, status=status)}
        async with routed(*replicas) as backend:
            with pytest.raises(RemoteError, match="No"):
                await parts_of(backend)
            assert sent(*replicas) == [1, 0, 0]

    asyncio.run(main())


def test_full_queues_are_tried_twice_and_lost_replicas_three_times() -> None:
    async def main() -> None:
        for error, expected in ((FULL, [1, 1, 0, 0]), (GONE, [1, 1, 1, 0])):
            replicas = [FakeReplica(number) for number in range(4)]
            for replica in replicas:
                replica.fails = {0: error}
            async with routed(*replicas) as backend:
                with pytest.raises(RemoteError) as caught:
                    await parts_of(backend)
                assert caught.value.code == error.code and caught.value.retry_after_s == error.retry_after_s
                assert sent(*replicas) == expected and sum(expected[:3]) <= MAX_TRIES

    asyncio.run(main())


def test_deadline_of_a_second_try_is_shorter() -> None:
    clock, replicas = FakeClock(), three()

    def pass_time(_: wire.GenerationRequest) -> str:
        clock.now += 4
        return ""

    async def main() -> None:
        replicas[0].reply, replicas[0].fails = pass_time, {0: GONE}
        async with routed(*replicas, clock=clock) as backend:
            await parts_of(backend, deadline_s=10.0)
        assert [replicas[i].requests[-1].deadline_s for i in (0, 1)] == [10.0, 6.0]

    asyncio.run(main())
    assert routing.within(request(deadline_s=10.0), 40.0).deadline_s == 0.001
    assert routing.within(request(deadline_s=-1.0), 4.0).deadline_s == -1.0  # which the engine refuses


def test_vectors_are_routed_and_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        replicas = three()

        async def generate(self: FakeReplica, message: Any) -> Any:
            self.asked.append(message)
            if self is replicas[0]:
                raise GONE
            yield wire.Vectors(request_id="v", num_rows=1)

        monkeypatch.setattr(FakeReplica, "generate", generate)
        async with routed(*replicas) as backend:
            for message in (
                wire.EmbedRequest(request_id="v", texts=["a", [1, 2]]),
                wire.ClassifyRequest(request_id="v", texts=[("a", "b")]),
            ):
                answer = await backend.ask(message)
                assert isinstance(answer, wire.Vectors)
            assert len(replicas[1].asked) == 2

    asyncio.run(main())


# Over HTTP


def posted(replicas: list[FakeReplica], body: dict[str, Any], path: str = TEXT) -> httpx.Response:
    async def main() -> httpx.Response:
        async with routed(*replicas) as backend:
            app: Starlette = create_app(backend, credentials="pass")
            async with asyncio.timeout(LIMIT_S), app.router.lifespan_context(app):
                transport = httpx.ASGITransport(app, raise_app_exceptions=False)
                async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                    return await client.post(path, json=body)

    return asyncio.run(main())


def test_whole_answer_starts_over_on_another_replica_though_parts_had_come() -> None:
    replicas = three()
    replicas[0].fails = {3: GONE}
    answer = posted(replicas, {"prompt": "Hi", "stop": ["zzz"], "n": 2})
    assert answer.status_code == 200, answer.text
    assert [choice["text"] for choice in answer.json()["choices"]] == ["Hello there", "Hello there 1"]
    assert answer.json()["usage"]["completion_tokens"] == len("Hello there") + len("Hello there 1") + 2
    assert sent(*replicas) == [1, 1, 0]


def test_streams_end_with_an_error_in_the_shape_of_the_api_or_start_over_unseen() -> None:
    replicas = three()
    replicas[0].fails = {3: GONE}
    found = events(posted(replicas, {"prompt": "Hi", "stream": True}))
    assert [set(one) == {"error"} for one in found] == [False] * 3 + [True]
    assert found[-1]["error"]["code"] == "unavailable"
    for number, body in ((0, {}), (3, {"stop": ["Hello you"]})):  # the text is held back: it may become a stop string
        replicas = three()
        replicas[0].fails = {number: GONE}
        found = events(posted(replicas, {"prompt": "Hi", "stream": True, **body}))
        assert "".join(one["choices"][0]["text"] for one in found) == "Hello there"
        assert sent(*replicas) == [1, 1, 0]


def test_no_replica_left_is_a_503_with_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    replicas = three()
    for replica in replicas:
        replica.fails = {0: GONE}
    answer = posted(replicas, {"prompt": "Hi", "model": MODEL})
    assert (answer.status_code, error_of(answer)["code"], answer.headers["retry-after"]) == (503, "unavailable", "1")
    assert posted(three(), {}, "/admin/restart").status_code == 400  # replicas that are not kept by this machine


# Which replicas take requests


def test_only_replicas_that_report_get_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        first, second, _ = replicas = three()
        async with routed(*replicas) as backend:
            first.is_stopping = True
            second.report_error = RemoteError("It has not answered within 2 s.", code="unavailable", status=503)
            await reported(*replicas)
            await parts_of(backend)
            assert sent(*replicas) == [0, 0, 1]
            assert [one.state for one in backend.connections.values()] == ["stopping", "late", "ready"]
            first.is_stopping, second.report_error = False, None
            await reported(*replicas)
            await parts_of(backend)
            assert sent(*replicas) == [1, 0, 1]
            assert len(first.askers | second.askers) == 1 and all(first.askers)  # replicas know their front ends apart

    asyncio.run(main())


def test_requests_wait_for_a_replica_and_fail_with_the_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        replica = FakeReplica(0)
        replica.is_connected, replica.report_error = False, GONE
        async with routed(replica) as backend:
            waiting = asyncio.create_task(parts_of(backend))
            await reported(replica)
            assert not waiting.done()
            replica.report_error = None
            assert (await waiting)[-1].request_id == "r"
            replica.report_error = GONE
            await reported(replica)
            monkeypatch.setattr(routing, "WAIT_S", 0.0)
            with pytest.raises(RemoteError, match="replica-0: It has gone") as caught:
                await parts_of(backend)
            assert (caught.value.status, caught.value.retry_after_s) == (503, 1.0)

    asyncio.run(main())


def test_removed_replica_ends_its_requests_and_a_closed_backend_fails_them() -> None:
    async def main() -> None:
        first, second = replicas = three()[:2]
        async with routed(*replicas) as backend:
            first.gate.clear()
            running = asyncio.create_task(parts_of(backend))
            await until(lambda: bool(first.requests))
            removing = asyncio.create_task(backend.remove("replica-0"))
            await until(lambda: "replica-0" not in backend.connections)
            await parts_of(backend, request_id="other")
            assert (sent(*replicas), first.is_closed) == ([1, 1], False)
            first.gate.set()
            await removing
            assert first.is_closed
            assert len(await running) > 1
        assert second.is_closed
        with pytest.raises(Exception, match="closed"):
            await parts_of(backend)

    asyncio.run(main())


def test_sequence_is_ended_where_it_runs() -> None:
    async def main() -> None:
        first, second = replicas = three()[:2]
        second.num_before_gate = 1
        second.gate.clear()
        first.fails = {0: GONE}
        async with routed(*replicas) as backend, aclosing(backend.generate(request())) as parts:
            await anext(parts)
            backend.end_sequence("r", 1)
            assert (first.ended, second.ended) == ([], [("r", 1)])
        backend.end_sequence("r", 1)  # over

    asyncio.run(main())


# Limits of tenants


def charges(replica: FakeReplica) -> list[wire.Charge]:
    return [one for one in replica.asked if isinstance(one, wire.Charge)]


def test_limits_are_counted_by_the_oldest_replica(tmp_path: Any) -> None:
    add_key(tmp_path / "keys", "acme", requests_per_minute=2, tokens_per_minute=1000)
    add_key(tmp_path / "keys", "free")
    tenants = Tenants.from_file(tmp_path / "keys")

    async def main() -> None:
        first, second = replicas = three()[:2]
        first.started_at = 9.0  # started again: the second one has counted for longer
        params = {"max_tokens": 20}
        async with routed(*replicas, tenants=tenants) as backend:
            await parts_of(backend, tenant="free", params=params)
            await parts_of(backend, tenant="acme", params=params)
            await until(lambda: len(charges(second)) == 2)
            taken, given_back = charges(second)
            assert (taken.tenant, taken.num_tokens, taken.credentials, taken.is_spent) == (
                "acme",
                3 + 20,
                "pass",
                False,
            )
            assert (given_back.num_tokens, given_back.num_requests) == (3 + 12 - (3 + 20), 0) and given_back.is_spent
            first.fails = second.fails = {0: FULL}
            with pytest.raises(RemoteError):
                await parts_of(backend, tenant="acme", params=params)
            await until(lambda: len(charges(second)) == 4)
            assert (charges(second)[-1].num_tokens, charges(second)[-1].num_requests) == (-23, -1)
            first.fails, second.fails = {0: GONE}, {}
            await parts_of(backend, tenant="acme", params=params)  # the second try has brought 12 tokens
            await until(lambda: len(charges(second)) == 6)
            assert (charges(second)[-1].num_tokens, charges(second)[-1].num_requests) == (15 - 23, 0)
            first.fails, first.is_stopping = {}, False
            second.ask_error = RemoteError("Too many.", code="rate_limit_exceeded", status=429)
            num_sent = sum(sent(*replicas))
            with pytest.raises(RemoteError, match="Too many"):
                await parts_of(backend, tenant="acme", params=params)
            assert sum(sent(*replicas)) == num_sent and not charges(first)
            second.ask_error, first.fails = GONE, {}
            await parts_of(backend, tenant="acme", params=params)  # the other one counts from now on
            assert charges(first)

    asyncio.run(main())


def test_request_that_reached_no_replica_is_given_back_whole(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red: a tenant that pays for a request which waited in vain, or whose client left before it was sent."""
    add_key(tmp_path / "keys", "acme", tokens_per_minute=1000)

    async def main() -> None:
        replica = FakeReplica(0)
        async with routed(replica, tenants=Tenants.from_file(tmp_path / "keys")) as backend:
            choosing = asyncio.Event()

            def choose_none(*_: Any, **__: Any) -> None:
                choosing.set()

            monkeypatch.setattr(backend.router, "choose", choose_none)
            waiting = asyncio.create_task(parts_of(backend, tenant="acme", params={"max_tokens": 20}))
            await choosing.wait()
            waiting.cancel()
            await until(lambda: len(charges(replica)) == 2)
            monkeypatch.setattr(routing, "WAIT_S", 0.0)
            with pytest.raises(RemoteError, match="No replica"):
                await parts_of(backend, tenant="acme", params={"max_tokens": 20})
            await until(lambda: len(charges(replica)) == 4)
            assert [(one.num_tokens, one.num_requests) for one in charges(replica)[1::2]] == [(-23, -1)] * 2
            assert sent(replica) == [0]

    asyncio.run(main())


# All replicas


def test_metrics_have_the_name_of_their_replica() -> None:
    """Red: a sum over replicas, which falls when one of them answers too late, as if it had been restarted."""

    async def main() -> None:
        replicas = three()[:2]
        for number, replica in enumerate(replicas, 1):
            given = (
                GivenMetric("counter", "done", "", ("model",), [Sample(("m",), float(number))]),
                GivenMetric("gauge", "running", "", ("model",), [Sample(("m",), float(number))]),
                GivenMetric("histogram", "seconds", "", (), [Sample((), 1.0, 2, ((0.1, number), (1.0, 2)))]),
            )
            replica.metrics = {metric.name: metric_values(metric) for metric in given}
        async with routed(*replicas) as backend:
            report = await backend.ask(wire.Query(request_id="", about="metrics", source="front"))
            assert isinstance(report, wire.Report)
            metrics = {metric.name: metric.samples() for metric in read_metrics(report.values)}
            found = {name: {sample.labels: sample for sample in samples} for name, samples in metrics.items()}
            for name in ("done", "running"):
                values = {labels: one.value for labels, one in found[name].items()}
                assert values == {("m", "replica-0"): 1, ("m", "replica-1"): 2}
            assert found["seconds"]["replica-1",] == Sample(("replica-1",), 1.0, 2, ((0.1, 2), (1.0, 2)))
            assert set(found["archerfish_replica_up"]) == {("replica-0",), ("replica-1",)}
        sources = [one.source for replica in replicas for one in replica.asked if isinstance(one, wire.Query)]
        assert sorted(sources) == ["", "", "front"]  # the front ends' own metrics are counted once

    asyncio.run(main())


def test_health_options_and_statistics_of_all_replicas() -> None:
    async def main() -> None:
        first, second, third = replicas = three()
        async with routed(*replicas) as backend:
            third.report_error = GONE
            await reported(*replicas)
            second.ask_error = RemoteError("It hangs.", status=503)
            pong = await backend.ask(wire.Ping(request_id="p", probe=""))
            assert isinstance(pong, wire.Pong) and set(pong.failing) == {"replica-1", "replica-2"}
            assert pong.failing["replica-2"] == "It has gone."
            assert isinstance(await backend.ask(wire.Ping(request_id="p")), wire.Pong)
            first.ask_error = second.ask_error
            with pytest.raises(RemoteError, match="hangs"):
                await backend.ask(wire.Ping(request_id="p", probe=""))
            first.ask_error = second.ask_error = None
            change = wire.Configure(request_id="c", options={"max_queue_size": 7})
            for third.report_error, second.ask_error, problem in (
                (GONE, None, "replica-2: It has gone"),
                (None, RemoteError("It hangs.", status=503), "replica-1: It hangs"),
            ):
                await reported(*replicas)
                with pytest.raises(RemoteError, match=f"Not all replicas took the change .{problem}") as caught:
                    await backend.ask(change)
                assert caught.value.status == 503
                assert isinstance(await backend.ask(wire.Configure(request_id="c")), wire.Report)  # only asks
            second.ask_error = None
            await backend.ask(change)
            assert {one.config.max_queue_size for one in replicas} == {7}
            third.report_error = GONE
            await reported(*replicas)
            first.ask_error = RemoteError("No.", code="invalid_option", status=400)
            with pytest.raises(RemoteError, match="No"):
                await backend.ask(wire.Configure(request_id="c", options={}))
            first.ask_error = None
            report = await backend.ask(wire.Query(request_id="", about="stats"))
            assert isinstance(report, wire.Report)
            states = {name: one["state"] for name, one in report.values["replicas"].items()}
            assert states == {"replica-0": "ready", "replica-1": "ready", "replica-2": "late"}
            assert report.values["replicas"]["replica-1"]["seen"] == 1.0

    asyncio.run(main())


def test_view_has_every_replica_that_answers() -> None:
    async def main() -> None:
        first, second, third = replicas = three()
        async with routed(*replicas) as backend:
            third.report_error = GONE
            await reported(*replicas)
            report = await backend.ask(wire.Query(request_id="", about="view", model=MODEL, tenant="acme"))
            assert isinstance(report, wire.Report)
            assert report.values == {"replicas": {"replica-0": {"seen": 0.0}, "replica-1": {"seen": 1.0}}}
            assert {getattr(one.asked[-1], "tenant", None) for one in (first, second)} == {"acme"}

    asyncio.run(main())


def test_replicas_have_time_to_read_an_adapter() -> None:
    limits: list[float | None] = []

    class Loading(FakeReplica):
        async def ask(self, message: Question, timeout_s: float | None = None) -> Answer:
            if not isinstance(message, wire.ChangeAdapter):
                return await super().ask(message, timeout_s)
            limits.append(timeout_s)
            return wire.Report(request_id="")

    async def main() -> None:
        async with routed(Loading(0), Loading(1)) as backend:
            await backend.ask(wire.ChangeAdapter(request_id="", name="one", action="load"))
            assert len(limits) == 2 and all(one and one > 10 * routing.ANSWER_S for one in limits)

    asyncio.run(main())


def test_explain_asks_the_replica_that_would_be_chosen_and_says_why() -> None:
    async def main() -> None:
        replicas = three()
        async with routed(*replicas) as backend:
            report = await backend.ask(
                wire.ExplainRequest(request_id="e", model=MODEL, token_ids=[1, 2], tenant="acme")
            )
            assert isinstance(report, wire.Report)
            assert report.values["replica"] == "replica-0" and report.values["num_tokens"] == 2
            assert report.values["routing"].startswith("replica-0 has about 0 of 2 tokens cached")
            assert report.values["cached_elsewhere"] == {"replica-1": 0, "replica-2": 0}

    asyncio.run(main())
