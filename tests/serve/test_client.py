"""AsyncClient and Client against a scripted engine process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from archerfish.errors import InvalidInputError, InvalidOptionError, StoppedError
from archerfish.serve import wire
from archerfish.serve.client import AsyncClient, Client, RemoteError

from .hosting import Scripted

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("no_task_is_left")]
Start = Callable[[Callable[[Any], Any]], Scripted]


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/socket"


@pytest.fixture
def start(address: str) -> Iterator[Start]:
    """Starts scripted engine processes, which die at the end of the test."""
    engines: list[Scripted] = []

    def made(act: Any) -> Scripted:
        engines.append(Scripted(address, act))
        return engines[-1]

    yield made
    for engine in engines:
        engine.die()


def echo(message: Any) -> list[wire.Message]:
    if isinstance(message, wire.GenerationRequest):
        parts: list[Any] = [wire.Chunk(request_id=message.request_id, text=char) for char in message.prompt or ""]
        return [*parts, wire.Generated(request_id=message.request_id, num_output_tokens=len(parts))]
    return [wire.Pong(request_id=message.request_id)] if isinstance(message, wire.Ping) else []


async def texts_of(client: AsyncClient, prompt: str, request_id: str = "") -> str:
    parts = [
        part
        async for part in client.generate(wire.GenerationRequest(request_id=request_id, prompt=prompt, stream=True))
    ]
    assert isinstance(parts[-1], wire.Generated)
    return "".join(part.text for part in parts if isinstance(part, wire.Chunk))


async def test_each_request_gets_its_own_answers(address: str, start: Start) -> None:
    engine = start(echo)
    async with AsyncClient(address) as client:
        words = ["one", "two", "three"] * 10
        assert await asyncio.gather(*(texts_of(client, word) for word in words)) == words
        assert [message.prompt for message in engine.received] == words  # sent in order
        assert isinstance(await client.ask(wire.Ping(request_id="mine")), wire.Pong)
        assert engine.received[-1].request_id == "mine"


async def test_bundles_are_split_and_unknown_answers_ignored(address: str, start: Start) -> None:
    held: list[str] = []

    def act(message: Any) -> list[wire.Message]:
        held.append(message.request_id)
        if len(held) < 3:
            return [wire.Pong(request_id=""), wire.Chunk(request_id="nobody's")]
        first, second, third = held
        return [
            wire.Bundle(
                request_id="",
                answers=[
                    wire.Chunk(request_id=first, text="a"),
                    wire.Chunk(request_id=second, text="b"),
                    wire.Generated(request_id=first),
                    wire.Failed(request_id=third, code="broken", message="no", status=418),
                ],
            ),
            wire.Bundle(
                request_id="", answers=[wire.Chunk(request_id=second, text="c"), wire.Generated(request_id=second)]
            ),
        ]

    engine = start(act)
    async with AsyncClient(address) as client:
        asking = [texts_of(client, "", str(number)) for number in range(3)]
        first, second, third = await asyncio.gather(*asking, return_exceptions=True)
        assert (first, second) == ("a", "bc")
        assert isinstance(third, RemoteError)
        assert (third.status, third.code) == (418, "broken")
        assert all(message.takes_bundles for message in engine.received)


async def test_failed_answer_is_raised_with_all_its_fields(address: str, start: Start) -> None:
    def act(message: Any) -> list[wire.Message]:
        told: dict[str, Any] = {
            "code": "c",
            "message": "m",
            "status": 429,
            "hint": "h",
            "param": "p",
            "retry_after_s": 2.5,
        }
        return [wire.Failed(request_id=message.request_id, **told)]

    engine = start(act)
    async with AsyncClient(address) as client:
        with pytest.raises(RemoteError) as caught:
            await client.ask(wire.EmbedRequest(request_id="", texts=[]))
        error = caught.value
        assert (error.code, error.message, error.status, error.hint, error.param, error.retry_after_s) == (
            "c",
            "m",
            429,
            "h",
            "p",
            2.5,
        )
        with pytest.raises(RemoteError):
            await texts_of(client, "x")
        await asyncio.to_thread(engine.has_received.acquire)
    assert not any(isinstance(message, wire.Cancel) for message in engine.received)


@pytest.mark.parametrize("way", ["leave", "cancel", "ask", "timeout"])
async def test_leaving_cancels_the_request(address: str, start: Start, way: str) -> None:
    def act(message: Any) -> list[wire.Message]:
        return (
            [wire.Chunk(request_id=message.request_id, text="a")] if isinstance(message, wire.GenerationRequest) else []
        )

    engine = start(act)
    async with AsyncClient(address) as client:
        if way == "leave":
            stream = client.generate(wire.GenerationRequest(request_id="7", stream=True))
            async for _ in stream:
                break
            await stream.aclose()
        elif way == "timeout":
            with pytest.raises(RemoteError, match="has not answered"):
                await client.ask(wire.Query(request_id="7"), timeout_s=0.2)
        else:
            work: Any = client.ask(wire.Query(request_id="7")) if way == "ask" else texts_of(client, "", "7")
            task = asyncio.create_task(work)
            await asyncio.to_thread(engine.has_received.acquire)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            engine.has_received.release()
        for _ in range(2):  # what was never sent is never received
            assert await asyncio.to_thread(engine.has_received.acquire, timeout=60)
        assert engine.received[-1] == wire.Cancel(v=1, request_id="7")


async def test_client_refuses_a_request_id_in_use(address: str, start: Start) -> None:
    engine = start(lambda message: [wire.Pong(request_id="7")] if isinstance(message, wire.Ping) else [])
    async with AsyncClient(address) as client:
        message = wire.Query(request_id="7")
        task = asyncio.create_task(client.ask(message))
        await asyncio.to_thread(engine.has_received.acquire)
        with pytest.raises(InvalidInputError, match="live request"):
            await client.ask(wire.Query(request_id="7"))
        assert message == wire.Query(request_id="7")
        pinging = asyncio.create_task(client.ask(wire.Ping(request_id="8")))
        assert await task == wire.Pong(v=1, request_id="7")  # which the second one with this name has not taken away
        pinging.cancel()
        await asyncio.gather(pinging, return_exceptions=True)


async def test_dead_engine_fails_requests_and_the_next_is_found(address: str, start: Start) -> None:
    engine = start(lambda message: [wire.Chunk(request_id=message.request_id)] if message.request_id == "s" else [])
    async with AsyncClient(address, retry_after_s=4.0) as client:
        stream = client.generate(wire.GenerationRequest(request_id="s", stream=True))
        await anext(stream)
        asking = [asyncio.create_task(client.ask(wire.Query(request_id=""))) for _ in range(5)]
        for _ in range(6):
            await asyncio.to_thread(engine.has_received.acquire)
        await asyncio.to_thread(engine.die)
        answers = await asyncio.gather(*asking, anext(stream), return_exceptions=True)
        for answer in answers:
            assert isinstance(answer, RemoteError)
            assert (answer.status, answer.retry_after_s) == (503, 4.0)
        with pytest.raises(RemoteError, match="is not there"):
            await client.ask(wire.Ping(request_id=""))
        engine = start(echo)
        while not client.is_connected:
            await asyncio.sleep(0)
        assert await texts_of(client, "again") == "again"
        assert [message.request_id for message in engine.received] == ["#6"]  # nothing of before has been sent again


async def test_answers_received_before_the_disconnect_are_kept(address: str, start: Start) -> None:
    engine = start(lambda message: [wire.Report(request_id=message.request_id, values={"a": 1})])
    async with AsyncClient(address) as client:
        await client.ask(wire.Query(request_id=""))
        task = asyncio.create_task(client.ask(wire.Query(request_id="")))
        await asyncio.sleep(0)
        engine.has_received.acquire()
        engine.has_received.acquire()
        engine.die()  # all of this before the event loop looks at the socket
        assert await task == wire.Report(v=1, request_id="#1", values={"a": 1})


async def test_first_request_times_out_without_an_engine(address: str) -> None:
    async with AsyncClient(address, connect_s=0.05) as client:
        with pytest.raises(RemoteError, match="Nothing answers") as caught:
            await client.ask(wire.Ping(request_id=""))
        assert caught.value.status == 503
        assert not client._answers


async def test_first_request_waits_for_the_engine(address: str, start: Start) -> None:
    async with AsyncClient(address) as client:
        task = asyncio.create_task(client.ask(wire.Ping(request_id="")))
        await asyncio.sleep(0)
        start(echo)
        assert isinstance(await task, wire.Pong)


async def test_unknown_answer_type_is_an_error(address: str, start: Start) -> None:
    class Nonsense(wire.Message, tag="nonsense"):
        pass

    start(lambda message: [Nonsense(request_id=message.request_id)])
    async with AsyncClient(address) as client:
        with pytest.raises(RemoteError, match="no message of the protocol"):
            await client.ask(wire.Ping(request_id=""))


async def test_closing_fails_waiting_requests(address: str, start: Start) -> None:
    engine = start(lambda message: [])
    client = AsyncClient(address)
    task = asyncio.create_task(client.ask(wire.Query(request_id="")))
    await asyncio.to_thread(engine.has_received.acquire)
    await client.close()
    with pytest.raises(RemoteError, match="closed"):
        await task
    with pytest.raises(StoppedError):
        await client.ask(wire.Ping(request_id=""))
    await client.close()


async def test_bad_options_are_refused(address: str) -> None:
    with pytest.raises(InvalidOptionError, match="server_key"):
        AsyncClient(address, own_keys=("a", "b"))
    for wrong in ("nonsense", "http://a"):
        with pytest.raises(InvalidOptionError, match="no address"):
            await AsyncClient(wrong).ask(wire.Ping(request_id=""))
    with pytest.raises(InvalidOptionError, match="no CURVE key"):
        await AsyncClient(address, server_key="short").ask(wire.Ping(request_id=""))


def test_client_without_an_event_loop(address: str, start: Start) -> None:
    start(lambda message: echo(message) or [wire.Vectors(request_id=message.request_id, num_rows=2)])
    with Client(address) as client:
        parts = list(client.generate(wire.GenerationRequest(request_id="", prompt="abc", stream=True)))
        assert [part.text for part in parts if isinstance(part, wire.Chunk)] == ["a", "b", "c"]
        answer = client.ask(wire.EmbedRequest(request_id="", texts=["a"]))
        assert isinstance(answer, wire.Vectors)
        assert answer.num_rows == 2
        found: list[str] = []

        def read(word: str) -> None:
            parts = client.generate(wire.GenerationRequest(request_id="", prompt=word, stream=True))
            found.append("".join(part.text for part in parts if isinstance(part, wire.Chunk)))

        threads = [threading.Thread(target=read, args=(word,)) for word in ("one", "two", "three")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert sorted(found) == ["one", "three", "two"]
    client.close()


def test_closing_the_iterator_of_the_client_cancels(address: str, start: Start) -> None:
    def act(message: Any) -> list[wire.Message]:
        return [wire.Chunk(request_id=message.request_id)] if isinstance(message, wire.GenerationRequest) else []

    engine = start(act)
    with Client(address) as client:
        stream = client.generate(wire.GenerationRequest(request_id="7", stream=True))
        next(stream)
        stream.close()
        for _ in range(2):
            assert engine.has_received.acquire(timeout=30)
        assert engine.received[-1] == wire.Cancel(v=1, request_id="7")
