"""How events are sent, whatever they contain."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from archerfish.serve.client import AsyncClient
from archerfish.serve.errors import ClientGoneError
from archerfish.serve.sse import KEEP_ALIVE, EventStream, Outbox
from archerfish.serve.wire import Chunk, GenerationRequest

from .fake_backend import FakeBackend, events, ids, post
from .hosting import add_llm, make_host, talk

LIMIT_S = 20


class Reader:
    """The client of an ASGI app: reads what it sends, slowly on request, and may disconnect."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.gone = asyncio.Event()
        self.reads = asyncio.Event()
        self.reads.set()
        self.request = Request({"type": "http"}, self.receive)

    async def receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)
        await self.reads.wait()

    @property
    def bodies(self) -> list[bytes]:
        return [message["body"] for message in self.sent if message["type"] == "http.response.body"]

    async def read(self, stream: EventStream) -> None:
        await stream({"type": "http"}, self.receive, self.send)


def run(test: Callable[[Reader], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(LIMIT_S):
            await test(Reader())
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


def write_error(error: Exception) -> bytes:
    return f"error {error}".encode()


def test_waiting_events_are_sent_in_one_write() -> None:
    async def produce(outbox: Outbox) -> None:
        for number in range(3):
            outbox.put(b"%d" % number)
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    async def test(reader: Reader) -> None:
        await reader.read(await EventStream(produce, write_error).start(reader.request))
        assert reader.bodies == [b"012", b""]
        assert [message.get("more_body") for message in reader.sent] == [None, True, False]

    run(test)


def test_error_is_raised_before_and_written_after_the_first_event() -> None:
    async def fails_first(outbox: Outbox) -> None:
        raise ValueError("no")

    async def fails_later(outbox: Outbox) -> None:
        outbox.put(b"a")
        raise ValueError("no")

    async def test(reader: Reader) -> None:
        with pytest.raises(ValueError, match="no"):
            await EventStream(fails_first, write_error).start(reader.request)
        await reader.read(await EventStream(fails_later, write_error).start(reader.request))
        assert b"".join(reader.bodies) == b"aerror no"

    run(test)


def test_disconnect_before_the_first_event_cancels() -> None:
    was_cancelled = asyncio.Event()

    async def waits(outbox: Outbox) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            was_cancelled.set()

    async def test(reader: Reader) -> None:
        reader.gone.set()
        with pytest.raises(ClientGoneError):
            await EventStream(waits, write_error).start(reader.request)
        assert was_cancelled.is_set()

    run(test)


def test_slow_reader_makes_the_producer_wait() -> None:
    produced: list[int] = []

    async def produce(outbox: Outbox) -> None:
        for number in range(100):
            outbox.put(b"x" * 10)
            produced.append(number)
            if outbox.is_full:
                await outbox.wait_for_room()

    async def test(reader: Reader) -> None:
        reader.reads.clear()
        stream = await EventStream(produce, write_error, max_waiting_bytes=50).start(reader.request)
        reading = asyncio.create_task(reader.read(stream))
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(produced) == 6
        reader.reads.set()
        await reading
        assert b"".join(reader.bodies) == b"x" * 1000

    run(test)


def test_quiet_stream_sends_comments() -> None:
    async def test(reader: Reader) -> None:
        async def produce(outbox: Outbox) -> None:
            while reader.bodies.count(KEEP_ALIVE) < 3:
                await asyncio.sleep(0)
            outbox.put(b"event")
            raise ValueError("late")

        stream = await EventStream(produce, write_error, keep_alive_s=0.002).start(reader.request)
        await reader.read(stream)
        assert reader.bodies.count(KEEP_ALIVE) >= 3
        assert [body for body in reader.bodies if body not in (KEEP_ALIVE, b"")] == [b"eventerror late"]

    run(test)


def test_error_after_a_comment_is_an_event() -> None:
    async def test(reader: Reader) -> None:
        async def produce(outbox: Outbox) -> None:
            while KEEP_ALIVE not in reader.bodies:
                await asyncio.sleep(0)
            raise ValueError("refused")

        stream = EventStream(produce, write_error, keep_alive_s=0.002)
        await reader.read(await stream.start(reader.request))
        assert reader.sent[0]["status"] == 200
        assert b"".join(reader.bodies).replace(KEEP_ALIVE, b"") == b"error refused"

    run(test)


def test_disconnect_during_a_stream_cancels() -> None:
    is_cancelled = False

    async def produce(outbox: Outbox) -> None:
        nonlocal is_cancelled
        outbox.put(b"a")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            is_cancelled = True
            raise

    async def test(reader: Reader) -> None:
        stream = await EventStream(produce, write_error).start(reader.request)
        reading = asyncio.create_task(reader.read(stream))
        while not reader.bodies:
            await asyncio.sleep(0)
        reader.gone.set()
        await reading
        assert is_cancelled

    run(test)


@pytest.mark.no_cover
@given(
    text=st.text("ab é", min_size=1, max_size=30), stop=st.lists(st.text("ab é", min_size=1, max_size=3), max_size=2),
    size=st.integers(1, 8), stream=st.booleans(),
)  # fmt: skip
def test_text_and_usage_do_not_depend_on_chunk_sizes(text: str, stop: list[str], size: int, stream: bool) -> None:
    ends = {word: place for word in stop if (place := text.find(word)) >= 0}
    first = min(ends, key=lambda word: (ends[word] + len(word), -len(word)), default="")
    shown = text[: ends[first]] if ends else text
    num_tokens = len(ids(text[: ends[first] + len(first)])) if ends else len(ids(text)) + 1
    backend = FakeBackend(text)
    backend.tokens_per_chunk = size
    body: dict[str, Any] = {"prompt": "p", "stop": stop, "max_tokens": None, "stream": stream}
    body |= {"stream_options": {"include_usage": True}} if stream else {}
    answer = post(backend, "/v1/completions", body)
    if stream:
        chunks = events(answer)
        written, usage = "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]), chunks[-1]["usage"]
        reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]]
        assert reasons == [None] * (len(reasons) - 1) + ["stop"]
    else:
        written, usage = answer.json()["choices"][0]["text"], answer.json()["usage"]
    assert (written, usage["completion_tokens"], usage["prompt_tokens"]) == (shown, num_tokens, 1)


def test_several_producers_wait_for_room() -> None:
    async def main() -> None:
        outbox = Outbox(max_bytes=10)
        num_written = 0

        async def produce() -> None:
            nonlocal num_written
            for _ in range(3):
                outbox.put(b"x" * 11)
                num_written += 11
                await outbox.wait_for_room()

        async with asyncio.timeout(LIMIT_S):
            producers = asyncio.gather(*(produce() for _ in range(5)))
            num_read = 0
            while not producers.done() or outbox.is_full:
                if outbox.is_full:
                    num_read += len(outbox.take())
                await asyncio.sleep(0)
            await producers
        assert num_read == num_written == 5 * 3 * 11

    asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_stopped_choice_is_ended_in_the_engine(stream: bool) -> None:
    backend = FakeBackend(lambda request: "one two three")
    body = {"prompt": "a", "n": 2, "stop": [" 1"], "max_tokens": 50, "stream": stream}
    assert post(backend, "/v1/completions", body).status_code == 200
    [request] = backend.requests
    assert backend.ended == [(request.request_id, 1)]
    for num in (1, 2):
        backend = FakeBackend("one two three")
        post(backend, "/v1/completions", {**body, "n": num, "stop": ["two"]})
        [request] = backend.requests
        assert backend.ended == [(request.request_id, index) for index in range(num)]


def test_ended_sequence_takes_no_more_steps(tmp_path: Path) -> None:
    host = make_host(tmp_path)
    engine = add_llm(host, tmp_path, max_len=4096)
    params = {"n": 2, "max_tokens": 300, "temperature": 1.0, "seed": 3, "ignore_eos": True}

    async def test(client: AsyncClient) -> None:
        num_tokens = [0, 0]
        request = GenerationRequest(request_id="r", token_ids=[5, 6, 7], params=params, stream=True, wants_ids=True)
        async for part in client.generate(request):
            if isinstance(part, Chunk):
                num_tokens[part.index] += len(part.token_ids)
                if part.index == 0 and num_tokens[0] == 3:
                    client.end_sequence("r", 0)
                    client.end_sequence("r", 0)
                    client.end_sequence("r", 9)
                    client.end_sequence("unknown", 0)
            else:
                reasons = {output.index: output.finish_reason for output in part.outputs}
        assert reasons == {0: "stop", 1: "length"}
        assert num_tokens[1] == 300
        assert num_tokens[0] < 300

    talk(host, test)
    assert engine.scheduler.stats().num_running == 0
