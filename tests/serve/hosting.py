"""Engine hosts for tests: a host in a thread, with a tiny Llama and encoders without a model."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self, TypeVar, cast

import numpy as np
import pytest
import zmq

from archerfish.engine.llm_engine import LLMEngine
from archerfish.errors import InvalidInputError
from archerfish.serve import wire
from archerfish.serve.client import AsyncClient, RemoteError, open_socket
from archerfish.serve.compute import Lane
from archerfish.serve.host import EngineHost
from archerfish.serve.hosted_encoder import Array, HostedEncoder
from archerfish.serve.hosted_llm import HostedLLM
from archerfish.serve.models import Hosted, ModelEntry
from archerfish.serve.processes import HostConfig
from archerfish.serve.wire import Chunk, Generated, GenerationRequest, Message, Query, Report
from archerfish.text.tokenizer import TokenizedText
from tests.engine.fakes import word_vector
from tests.engine.tiny_llama import save_tiny_llama, tiny_config
from tests.text.tiny_tokenizers import save_text_llama

LIMIT_S = 60
T = TypeVar("T")
GREEDY: dict[str, Any] = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}
LONG: dict[str, Any] = {"max_tokens": 200, "temperature": 0.0, "ignore_eos": True}
ENDLESS = {**LONG, "max_tokens": 3000}  # for a model of max_len 4096


class FakeClock:
    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class WordEncoder:
    """Vectors that depend on words alone. `jobs` has the texts of every pass; a pass waits for `gate`; `poison` breaks
    one."""

    def __init__(self, name: str = "words", *, is_cross_encoder: bool = False) -> None:
        self.model_name, self.is_cross_encoder = name, is_cross_encoder
        self.jobs: list[list[str]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Semaphore(0)
        self.is_closed = False
        self.core = SimpleNamespace(ops=SimpleNamespace(compile_counts=dict), label_activation="softmax")
        self._words: list[str] = [""]

    def tokenize(self, texts: Sequence[Any], *, prompt_name: str | None = None) -> list[TokenizedText]:
        found = []
        for text in texts:
            if isinstance(text, str) and "unreadable" in text:
                raise InvalidInputError("A text is unreadable.")
            joined = text if isinstance(text, str) else " ".join(map(str, text))
            joined = f"{prompt_name} {joined}" if prompt_name else joined
            ids, most = [self._id(word) for word in joined.split()], self.get_max_seq_length()
            found.append(TokenizedText(np.array(ids[:most], np.int64), is_cut=len(ids) > most))
        return found

    def _id(self, word: str) -> int:
        if word not in self._words:
            self._words.append(word)
        return self._words.index(word)

    def compute(self, texts: Sequence[TokenizedText], normalize: bool | None = None, *, is_raw: bool = False) -> Array:
        job = [" ".join(self._words[i] for i in text.token_ids) for text in texts]
        self.jobs.append(job)
        self.entered.release()
        assert self.gate.wait(LIMIT_S)
        if any("poison" in text for text in job):
            raise RuntimeError("poisoned")
        if self.is_cross_encoder:
            return np.asarray([[len(text.token_ids)] for text in texts], np.float32)
        return np.stack([self.vector(text) for text in job])

    @staticmethod
    def vector(text: str) -> Array:
        total = np.sum([word_vector(word, 8) for word in text.split() or [""]], axis=0)
        return np.asarray(total / np.linalg.norm(total), np.float32)

    def get_embedding_dimension(self) -> int:
        return 8

    def get_max_seq_length(self) -> int:
        return 512

    def most_tokens(self, prompt_name: str | None = None) -> int:
        return 512

    def close(self) -> None:
        self.is_closed = True


class ThreadHost(EngineHost):
    """Runs in a thread of its own during a `with` block."""

    def __enter__(self) -> Self:
        self.open()
        self._thread = threading.Thread(target=self.run, name="archerfish-host", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop(0)
        self._thread.join()


def make_host(
    directory: Path,
    *encoders: WordEncoder,
    llm: dict[str, Any] | None = None,
    clock: Callable[[], float] = time.monotonic,
    **options: Any,
) -> ThreadHost:
    """A host at a socket in a directory. llm: options of `add_llm`, or None without one. options: those of
    HostConfig."""
    host = ThreadHost(HostConfig(**{"address": f"ipc://{directory}/socket", **options}), clock=clock)
    for encoder in encoders:
        add_encoder(host, encoder)
    if llm is not None:
        add_llm(host, directory, **llm)
    return host


def add_llm(
    host: ThreadHost, directory: Path, *, has_text: bool = False, max_len: int = 256, name: str = "tiny", **options: Any
) -> LLMEngine:
    """A tiny Llama; with text it has a vocabulary of words and bytes."""
    model = directory / name
    if not model.exists() and has_text:
        save_text_llama(model, max_len)
    elif not model.exists():
        model.mkdir()
        save_tiny_llama(model, max_position_embeddings=max_len)
    made: list[LLMEngine] = []

    def load(lane: Lane) -> Hosted:
        made.append(LLMEngine(tiny_config(model, **options), executor=lane, text_thread=host.writer))
        return HostedLLM(made[0], lane, host)

    host.models.add(ModelEntry(name, "generation", load))
    return made[0]


async def hold(encoder: WordEncoder, asking: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Start a request whose job does not end before the gate of the encoder is set."""
    encoder.gate.clear()
    task = asyncio.create_task(asking)
    assert await asyncio.to_thread(encoder.entered.acquire, timeout=LIMIT_S)
    return task


def llm_host(directory: Path, *encoders: WordEncoder, **options: Any) -> tuple[ThreadHost, LLMEngine]:
    """A host of a tiny Llama, and its engine. options: those of `add_llm`."""
    host = make_host(directory, *encoders)
    return host, add_llm(host, directory, **options)


def add_encoder(host: ThreadHost, encoder: WordEncoder, loads: str = "start") -> None:
    kind = "cross-encoder" if encoder.is_cross_encoder else "embedding"
    host.models.add(
        ModelEntry(encoder.model_name, kind, lambda lane: HostedEncoder(cast(Any, encoder), lane, host), loads)
    )


@asynccontextmanager
async def talking(host: ThreadHost) -> AsyncIterator[AsyncClient]:
    """A client of a host, which serves meanwhile."""
    with host:
        async with asyncio.timeout(LIMIT_S), AsyncClient(host.config.address) as client:
            yield client


async def whole(client: AsyncClient, **fields: Any) -> tuple[list[Chunk], Generated]:
    """All answers to a GenerationRequest."""
    parts = [
        part async for part in client.generate(GenerationRequest(**{"request_id": "", "params": GREEDY, **fields}))
    ]
    last = parts.pop()
    assert isinstance(last, Generated)
    return [part for part in parts if isinstance(part, Chunk)], last


async def report_of(client: AsyncClient, message: Any) -> dict[str, Any]:
    report = await client.ask(message)
    assert isinstance(report, Report)
    return report.values


async def stats(client: AsyncClient, **fields: Any) -> dict[str, Any]:
    return await report_of(client, Query(request_id="", about="stats", **fields))


async def cards(client: AsyncClient) -> dict[str, dict[str, Any]]:
    """What the host says of its models, by name."""
    return {card["id"]: card for card in (await report_of(client, Query(request_id="", about="models")))["models"]}


async def until_free(client: AsyncClient, model: str = "tiny") -> dict[str, Any]:
    """Stats, once no sequence holds a block any more."""
    while True:
        found = await stats(client)
        if not found["models"][model]["num_blocks_in_use"] and not found["models"][model]["concurrent_requests"]:
            return found


class Scripted:
    """An engine process of a thread: `act` gets every request and returns the answers to it, or None to die."""

    def __init__(self, address: str, act: Callable[[Any], list[Message] | None]) -> None:
        self.address, self.act = address, act
        self.received: list[Any] = []
        self.has_received = threading.Semaphore(0)
        self._stop = threading.Event()
        self._socket = open_socket(zmq.ROUTER)
        self._socket.bind(address)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            if not self._socket.poll(10):
                continue
            client, _, payload = self._socket.recv_multipart()
            self.received.append(wire.decode_request(payload))
            answers = self.act(self.received[-1])
            if answers is None:
                break
            for answer in answers:
                self._socket.send_multipart([client, b"", wire.encode(answer)])
            self.has_received.release()
        self._socket.close(1000)

    def die(self) -> None:
        self._stop.set()
        self._thread.join()


class Raw:
    """A plain socket."""

    def __init__(self, address: str, kind: int = zmq.DEALER) -> None:
        self.socket = open_socket(kind)
        self.socket.setsockopt(zmq.RCVTIMEO, LIMIT_S * 1000)
        self.socket.connect(address)

    def send(self, *frames: bytes) -> None:
        self.socket.send_multipart(frames)

    def send_message(self, message: Message) -> None:
        payload = wire.encode(message)
        self.send(*([payload] if self.socket.type == zmq.REQ else [b"", payload]))

    def receive(self) -> Any:
        return wire.decode_answer(self.socket.recv_multipart()[-1])

    def close(self) -> None:
        self.socket.close(0)


async def failure(client: AsyncClient, message: Any) -> RemoteError:
    with pytest.raises(RemoteError) as caught:
        if isinstance(message, GenerationRequest):
            async for _ in client.generate(message):
                pass
        else:
            await client.ask(message)
    return caught.value
