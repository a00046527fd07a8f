"""How events leave, whatever they say."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from archerfish.serve.errors import ClientGoneError
from archerfish.serve.sse import EventStream, Outbox, StalledReaderError

from .fake_backend import FakeBackend, events, ids, post

LIMIT_S = 20


class Reader:
    """The other side of an ASGI app: takes what it sends, slowly if asked to, and may go."""

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


def tell(error: Exception) -> bytes:
    return f"error {error}".encode()


def test_what_is_there_goes_out_in_one_write() -> None:
    async def produce(outbox: Outbox) -> None:
        for number in range(3):
            outbox.put(b"%d" % number)
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    async def test(reader: Reader) -> None:
        await reader.read(await EventStream(produce, tell).start(reader.request))
        assert reader.bodies == [b"012", b""]
        assert [message.get("more_body") for message in reader.sent] == [None, True, False]

    run(test)


def test_an_error_before_the_first_event_is_raised_and_a_later_one_told() -> None:
    async def fails_first(outbox: Outbox) -> None:
        raise ValueError("no")

    async def fails_later(outbox: Outbox) -> None:
        outbox.put(b"a")
        raise ValueError("no")

    async def test(reader: Reader) -> None:
        with pytest.raises(ValueError, match="no"):
            await EventStream(fails_first, tell).start(reader.request)
        await reader.read(await EventStream(fails_later, tell).start(reader.request))
        assert b"".join(reader.bodies) == b"aerror no"

    run(test)


def test_who_goes_before_the_first_event_cancels() -> None:
    was_cancelled = asyncio.Event()

    async def waits(outbox: Outbox) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            was_cancelled.set()

    async def test(reader: Reader) -> None:
        reader.gone.set()
        with pytest.raises(ClientGoneError):
            await EventStream(waits, tell).start(reader.request)
        assert was_cancelled.is_set()

    run(test)


def test_a_slow_reader_makes_the_producer_wait() -> None:
    produced: list[int] = []

    async def produce(outbox: Outbox) -> None:
        for number in range(100):
            outbox.put(b"x" * 10)
            produced.append(number)
            if outbox.is_full:
                await outbox.room()

    async def test(reader: Reader) -> None:
        reader.reads.clear()
        stream = await EventStream(produce, tell, Outbox(max_bytes=50)).start(reader.request)
        reading = asyncio.create_task(reader.read(stream))
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(produced) == 6
        reader.reads.set()
        await reading
        assert b"".join(reader.bodies) == b"x" * 1000

    run(test)


def test_a_reader_that_has_stopped_is_given_up() -> None:
    ended: list[BaseException] = []

    async def produce(outbox: Outbox) -> None:
        try:
            while True:
                outbox.put(b"x")
                await outbox.room()
                await asyncio.sleep(0)
        except BaseException as error:
            ended.append(error)
            raise

    async def test(reader: Reader) -> None:
        reader.reads.clear()
        stream = await EventStream(produce, tell, Outbox(max_bytes=5, stall_s=0.01)).start(reader.request)
        await reader.read(stream)  # returns though nothing is read
        assert [type(error) for error in ended] == [StalledReaderError]
        assert all(message.get("more_body") is not False for message in reader.sent)

    run(test)


def test_who_goes_in_the_middle_cancels() -> None:
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
        stream = await EventStream(produce, tell).start(reader.request)
        reading = asyncio.create_task(reader.read(stream))
        while not reader.bodies:
            await asyncio.sleep(0)
        reader.gone.set()
        await reading
        assert is_cancelled

    run(test)


@given(
    text=st.text("ab é", min_size=1, max_size=30), stop=st.lists(st.text("ab é", min_size=1, max_size=3), max_size=2),
    size=st.integers(1, 8), stream=st.booleans(),
)  # fmt: skip
def test_text_and_usage_do_not_depend_on_how_tokens_come(text: str, stop: list[str], size: int, stream: bool) -> None:
    ends = {word: place for word in stop if (place := text.find(word)) >= 0}
    first = min(ends, key=lambda word: (ends[word] + len(word), -len(word)), default="")
    shown = text[: ends[first]] if ends else text
    num_tokens = len(ids(text[: ends[first] + len(first)])) if ends else len(ids(text)) + 1
    backend = FakeBackend(text)
    backend.tokens_per_chunk = size
    body = {"prompt": "p", "stop": stop, "max_tokens": None, "stream": stream, "stream_options": {"include_usage": True}}
    answer = post(backend, "/v1/completions", body)
    if stream:
        chunks = events(answer)
        written, usage = "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]), chunks[-1]["usage"]
        reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]]
        assert reasons == [None] * (len(reasons) - 1) + ["stop"]
    else:
        written, usage = answer.json()["choices"][0]["text"], answer.json()["usage"]
    assert (written, usage["completion_tokens"], usage["prompt_tokens"]) == (shown, num_tokens, 1)
