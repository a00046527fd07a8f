"""Models that are loaded when they are asked for or in idle time, and unloaded for room; and what is known of them before."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from archerfish.config import EmbedConfig, EngineConfig, HubConfig, ServeConfig
from archerfish.errors import ModelNotFoundError
from archerfish.serve.client import AsyncClient
from archerfish.serve.host import EngineHost
from archerfish.serve.hosted_encoder import MAX_INLINE_SIZE
from archerfish.serve.hosted_llm import HostedLLM
from archerfish.serve.models import describe
from archerfish.serve.processes import ModelSpec
from archerfish.serve.run import models_of
from archerfish.serve.wire import EmbedRequest, Ping, Vectors
from archerfish.text.tokenizer import TokenizedText
from tests.engine.tiny_llama import save_tiny_llama
from tests.text.tiny_tokenizers import byte_fallback

from .client import PASS, app_of, client_of
from .hosting import LIMIT_S, FakeClock, WordEncoder, add_encoder, cards, failure, make_host, stats, talking, whole

pytestmark = pytest.mark.anyio


def tiny_spec(directory: Path) -> ModelSpec:
    if not directory.exists():
        directory.mkdir()
        save_tiny_llama(directory, vocab_size=288, max_position_embeddings=512)
        byte_fallback(directory)
    engine = {"model": str(directory), "dtype": "float32", "load_format": "dummy", "max_cache_tokens": 1024, "num_threads": 1}
    return ModelSpec(kind="generation", options=engine, loads="demand")


async def loaded(client: AsyncClient) -> str:
    return "".join(name for name, card in (await cards(client)).items() if card["is_loaded"])


def limit(host: EngineHost, monkeypatch: pytest.MonkeyPatch, num_bytes: int, each: int = 10) -> None:
    monkeypatch.setattr("archerfish.serve.models.num_bytes_of", lambda hosted: each)
    monkeypatch.setattr(host.models, "_memory_bytes", num_bytes)


# What is known before


async def test_card_is_complete_before_and_after_loading(tmp_path: Path) -> None:
    spec = tiny_spec(tmp_path / "tiny")
    host = make_host(tmp_path, models=(spec,))
    host.load_models()
    async with talking(host) as client:
        before = (await cards(client))["tiny"]
        assert not before["is_loaded"]
        await whole(client, model="tiny", token_ids=[5, 6])
        after = (await cards(client))["tiny"]
        assert after["is_loaded"]
        same = ("id", "kind", "max_length", "max_prompt_bytes", "vocab_size", "is_tts", "directory", "device", "dtype")
        assert [before[name] for name in same] == [after[name] for name in same]
        assert (after["max_length"], after["directory"]) == (512, str(tmp_path / "tiny"))
    [entry] = host.models.entries
    assert describe(spec, HubConfig())[1] == entry.num_bytes > 0


async def test_story_model_is_loaded_on_demand(tmp_path: Path) -> None:
    story = models_of(ServeConfig(kinds="generation"), EngineConfig(num_threads=1), EmbedConfig())[-1]
    host = make_host(tmp_path, models=(tiny_spec(tmp_path / "tiny"), story))
    host.load_models()
    params = {"max_tokens": 12, "temperature": 0.0}
    async with talking(host) as client:
        assert await loaded(client) == ""
        await whole(client, token_ids=[5, 6])
        assert await loaded(client) == "tiny"  # a request without a name is not for the one beside
        _, told = await whole(client, model="story-rwkv7", prompt="Once upon a time", params=params)
        assert told.outputs[0].text.startswith(", there was a little")
        chunks, _ = await whole(
            client, model="story-rwkv7", messages=[{"role": "user", "content": "cat"}], params=params, stream=True
        )
        assert len(chunks) > 3
        assert sorted(name for name, card in (await cards(client)).items() if card["is_loaded"]) == ["story-rwkv7", "tiny"]


def test_missing_model_fails_the_start(tmp_path: Path) -> None:
    spec = ModelSpec(kind="generation", options={"model": str(tmp_path / "none")}, loads="demand")
    host = make_host(tmp_path, models=(spec,), hub={"offline": True})
    with pytest.raises(ModelNotFoundError):
        host.load_models()
    host.stop(0)


def test_http_request_loads_its_model(tmp_path: Path) -> None:
    host = make_host(tmp_path, models=(tiny_spec(tmp_path / "tiny"),), front_end_pass=PASS)
    host.load_models()

    async def main() -> None:
        async with asyncio.timeout(LIMIT_S), client_of(app_of(host)) as client:
            models = (await client.get("/v1/models")).json()["data"]
            assert [(model["id"], model["max_length"]) for model in models] == [("tiny", 512)]
            body = {"model": "tiny", "prompt": "the cats", "max_tokens": 3, "temperature": 0, "ignore_eos": True}
            answer: httpx.Response = await client.post("/v1/completions", json=body)
            assert (answer.status_code, answer.json()["usage"]["completion_tokens"]) == (200, 3)

    with host:
        asyncio.run(main())


# When


async def test_idle_time_loads_the_most_requested_first(tmp_path: Path) -> None:
    host = make_host(tmp_path)
    order: list[str] = []
    for name, num_requests in (("a", 1), ("b", 5), ("c", 3), ("d", 0)):
        encoder = WordEncoder(name)
        add_encoder(host, encoder, loads="idle")
        entry = host.models.entries[-1]
        entry.num_requests = num_requests
        entry.load = noted(entry.load, lambda name=name: order.append(name))  # type: ignore[misc]
    async with talking(host) as client:
        while len(order) < 4:
            await client.ask(Ping(request_id=""))
    assert order == ["b", "c", "a", "d"]


def noted(load: Callable[[Any], Any], note: Callable[[], None]) -> Callable[[Any], Any]:
    def run(lane: Any) -> Any:
        note()
        return load(lane)

    return run


async def test_idle_time_loads_only_what_has_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = make_host(tmp_path)
    for name in "abc":
        add_encoder(host, WordEncoder(name), loads="idle")
        host.models.entries[-1].num_bytes = 10
    limit(host, monkeypatch, 25)
    async with talking(host) as client:
        while len(await loaded(client)) < 2:
            await client.ask(Ping(request_id=""))
        for _ in range(20):
            await client.ask(Ping(request_id=""))
            assert await loaded(client) == "ab"
        await client.ask(EmbedRequest(request_id="", model="c", texts=["x"]))  # asked for, it takes the place of another
        for _ in range(20):
            await client.ask(Ping(request_id=""))
            assert await loaded(client) == "bc"
    assert host.models.num_unloaded == 1


async def test_requests_that_wait_for_a_model_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("archerfish.serve.models.MAX_WAITING", 3)
    host, may_load = make_host(tmp_path), threading.Event()
    add_encoder(host, WordEncoder("slow"), loads="demand")
    [entry] = host.models.entries
    entry.load = noted(entry.load, lambda: assert_true(may_load.wait(LIMIT_S)))
    async with talking(host) as client:
        waiting = [asyncio.create_task(client.ask(EmbedRequest(request_id="", texts=[name]))) for name in "abc"]
        while len(entry.waiting) < 3:
            await asyncio.sleep(0)
        error = await failure(client, EmbedRequest(request_id="", texts=["d"]))
        assert (error.status, error.code) == (503, "overloaded")
        assert error.retry_after_s is not None
        waiting[0].cancel()
        await client.ask(Ping(request_id=""))  # by which the engine process knows that one has gone
        waiting.append(asyncio.create_task(client.ask(EmbedRequest(request_id="", texts=["e"]))))
        await client.ask(Ping(request_id=""))
        may_load.set()
        assert [isinstance(answer, Vectors) for answer in await asyncio.gather(*waiting[1:])] == [True] * 3
    assert entry.num_requests == 5


async def test_loading_time_counts_against_deadlines(tmp_path: Path) -> None:
    clock, may_load = FakeClock(), threading.Event()
    host = make_host(tmp_path, models=(tiny_spec(tmp_path / "tiny"),), clock=clock)
    host.load_models()
    encoder = WordEncoder("words")
    add_encoder(host, encoder, loads="demand")
    for entry in host.models.entries:
        entry.load = noted(entry.load, lambda: assert_true(may_load.wait(LIMIT_S)))
    async with talking(host) as client:
        written = asyncio.create_task(whole(client, model="tiny", token_ids=[5, 6], deadline_s=10.0))
        read = asyncio.create_task(failure(client, EmbedRequest(request_id="", model="words", texts=["x"], deadline_s=10.0)))
        while not all(entry.waiting for entry in host.models.entries):
            await asyncio.sleep(0)
        clock.now += 11
        may_load.set()
        assert (await written)[1].outputs[0].finish_reason == "deadline"
        error = await read
        assert error.code == "deadline_unreachable"
        assert encoder.jobs == []


def assert_true(value: bool) -> None:
    assert value


# Room


async def test_room_is_made_before_a_model_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = make_host(tmp_path)
    encoders = {name: WordEncoder(name) for name in "abc"}
    seen: list[tuple[str, list[str]]] = []

    def note(name: str) -> None:
        seen.append((name, [other for other, one in encoders.items() if one.is_closed]))

    for name, encoder in encoders.items():
        add_encoder(host, encoder, loads="demand")
        entry = host.models.entries[-1]
        entry.num_bytes = 10
        entry.load = noted(entry.load, lambda name=name: note(name))  # type: ignore[misc]
    limit(host, monkeypatch, 20)
    async with talking(host) as client:
        for name in "abac":
            await client.ask(EmbedRequest(request_id="", model=name, texts=["x"]))
    assert seen == [("a", []), ("b", []), ("c", ["b"])]


async def test_model_with_a_request_in_a_reader_thread_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = make_host(tmp_path)
    may_read, is_reading = threading.Event(), threading.Event()

    class Slow(WordEncoder):
        def tokenize(self, texts: Sequence[Any]) -> list[TokenizedText]:
            is_reading.set()
            assert may_read.wait(LIMIT_S)
            return super().tokenize(texts)

    slow, other = Slow("slow"), WordEncoder("other")
    for encoder in (slow, other):
        add_encoder(host, encoder, loads="demand")
    limit(host, monkeypatch, 10)
    async with talking(host) as client:
        long = "x" * (MAX_INLINE_SIZE + 1)
        waiting = asyncio.create_task(client.ask(EmbedRequest(request_id="", model="slow", texts=[long])))
        assert await asyncio.to_thread(is_reading.wait, LIMIT_S)
        await client.ask(EmbedRequest(request_id="", model="other", texts=["x"]))
        assert not slow.is_closed
        assert set((await stats(client))["models"]) == {"slow", "other"}
        may_read.set()
        assert isinstance(await waiting, Vectors)
        while await loaded(client) != "other":  # now that the first has nothing to do, and the other was used last
            await client.ask(Ping(request_id=""))
    assert slow.is_closed


async def test_unloaded_engine_is_freed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = make_host(tmp_path, models=tuple(tiny_spec(tmp_path / name) for name in "ab"))
    host.load_models()
    limit(host, monkeypatch, 10)
    engines: dict[str, weakref.ref[Any]] = {}
    async with talking(host) as client:
        for name in "abab":
            before = engines.get(name)
            assert before is None or before() is None
            await whole(client, model=name, token_ids=[5, 6])
            [entry] = [entry for entry in host.models.entries if entry.name == name]
            assert isinstance(entry.hosted, HostedLLM)
            engines[name] = weakref.ref(entry.hosted.engine)
            del entry
    assert host.models.num_unloaded == 3
    assert gc.isenabled()


async def test_single_model_may_exceed_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = make_host(tmp_path)
    encoder = WordEncoder()
    add_encoder(host, encoder, loads="demand")
    limit(host, monkeypatch, 5)
    async with talking(host) as client:
        for _ in range(5):
            await client.ask(EmbedRequest(request_id="", texts=["x"]))
            await client.ask(Ping(request_id=""))
    assert host.models.num_unloaded == 0
