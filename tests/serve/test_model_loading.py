"""Models that are loaded when they are asked for or in idle time, and unloaded for room; and what is known of them
before."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from archerfish.cli.commands import make_parser
from archerfish.cli.main import find_command
from archerfish.cli.serve import take_models
from archerfish.config import EmbedConfig, EngineConfig, HubConfig, ServeConfig
from archerfish.errors import CorruptFileError, InvalidOptionError, ModelNotFoundError, UnknownOptionError
from archerfish.kernels import room
from archerfish.kernels.machine import Memory
from archerfish.serve import run
from archerfish.serve.client import AsyncClient
from archerfish.serve.hosted_encoder import MAX_INLINE_SIZE
from archerfish.serve.hosted_llm import HostedLLM
from archerfish.serve.model_tables import ModelConfig, read_models
from archerfish.serve.models import describe
from archerfish.serve.processes import ModelSpec
from archerfish.serve.wire import EmbedRequest, GenerationRequest, Ping, Vectors
from archerfish.text.tokenizer import TokenizedText
from tests.engine.test_token_ids import change, shift_ids
from tests.text.tiny_tokenizers import save_text_llama

from .client import PASS, error_of, serving
from .hosting import (
    LIMIT_S,
    FakeClock,
    ThreadHost,
    WordEncoder,
    add_encoder,
    cards,
    failure,
    make_host,
    stats,
    talking,
    whole,
)

pytestmark = pytest.mark.anyio


def tiny_spec(directory: Path) -> ModelSpec:
    if not directory.exists():
        save_text_llama(directory, 512)
    engine = {
        "model": str(directory),
        "dtype": "float32",
        "load_format": "dummy",
        "max_cache_tokens": 1024,
        "num_threads": 1,
    }
    return ModelSpec(kind="generation", options=engine, loads="demand")


async def loaded(client: AsyncClient) -> str:
    return "".join(name for name, card in (await cards(client)).items() if card["is_loaded"])


def limit(host: ThreadHost, monkeypatch: pytest.MonkeyPatch, num_bytes: int, each: int = 10) -> None:
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
        assert (after["max_length"], after["vocab_size"], after["directory"]) == (512, 288, str(tmp_path / "tiny"))
        assert not after["has_chat_template"]
    [entry] = host.models.entries
    assert describe(spec, HubConfig())[1] == entry.num_bytes > 0


async def test_story_model_is_loaded_on_demand(tmp_path: Path) -> None:
    engine = EngineConfig(num_threads=1, lora_modules="mine=/a")
    story = run.models_of(ServeConfig(kinds="generation"), engine, EmbedConfig())[-1]
    assert not story.options["enable_lora"] and not story.options["lora_modules"], "its adapters are the other model's"
    with pytest.raises(InvalidOptionError, match="'bar' is the name of a model"):
        config = ServeConfig(kinds="generation", served_model_name="foo,bar")
        run.models_of(config, engine.replace(lora_modules="bar=/a"), EmbedConfig())
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
        assert sorted(name for name, card in (await cards(client)).items() if card["is_loaded"]) == [
            "story-rwkv7",
            "tiny",
        ]


def test_missing_model_fails_the_start(tmp_path: Path) -> None:
    spec = ModelSpec(kind="generation", options={"model": str(tmp_path / "none")}, loads="demand")
    host = make_host(tmp_path, models=(spec,), hub={"offline": True})
    with pytest.raises(ModelNotFoundError):
        host.load_models()
    host.stop(0)


def test_a_tokenizer_with_ids_beyond_the_table_fails_the_start(tmp_path: Path) -> None:
    spec = ModelSpec(kind="generation", options=tiny_spec(tmp_path / "tiny").options)
    change(tmp_path / "tiny", shift_ids(49_152))
    host = make_host(tmp_path, models=(spec,))
    with pytest.raises(CorruptFileError, match="token ids up to 49,421, but the model's table has 288 rows"):
        host.load_models()
    host.stop(0)


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
        await client.ask(
            EmbedRequest(request_id="", model="c", texts=["x"])
        )  # asked for, it takes the place of another
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
        read = asyncio.create_task(
            failure(client, EmbedRequest(request_id="", model="words", texts=["x"], deadline_s=10.0))
        )
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
        def tokenize(self, texts: Sequence[Any], *, prompt_name: str | None = None) -> list[TokenizedText]:
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


async def test_model_for_which_memory_is_short_unloads_another_or_is_refused_with_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = make_host(tmp_path, models=tuple(tiny_spec(tmp_path / name) for name in "ab"))
    host.load_models()  # models that do not fit now may be loaded later
    free = 1 << 34
    monkeypatch.setattr(room, "memory", lambda: Memory(1 << 34, 1000 if len(host.models.loaded) else free))
    async with talking(host) as client:
        await whole(client, model="a", token_ids=[5, 6])
        await whole(client, model="b", token_ids=[5, 6])
        assert host.models.num_unloaded == 1
        free = 1000
        refused = await failure(client, GenerationRequest(request_id="", model="a", token_ids=[5, 6]))
        assert (refused.status, refused.code) == (507, "out_of_memory")
        assert "a needs" in str(refused) and "for weights" in str(refused)


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


# Several models, named by flags or by the TOML file


TOML = """
[engine]
max_num_seqs = 4
max_cache_tokens = 2048
dtype = "float32"
load_format = "dummy"
[[models]]
model = "{directory}/first"
max_num_seqs = 2
[[models]]
model = "{directory}/second"
loads = "demand"
[[models]]
model = "{directory}/third"
loads = "idle"
"""


async def test_models_of_the_configuration_file_are_served(tmp_path: Path) -> None:
    for directory in ("first", "second", "third"):
        tiny_spec(tmp_path / directory)
    config_file = tmp_path / "config.toml"
    config_file.write_text(TOML.format(directory=tmp_path))
    engine = EngineConfig(max_num_seqs=4, max_cache_tokens=2048, dtype="float32", load_format="dummy")
    specs = run.models_of(ServeConfig(kinds="generation"), engine, EmbedConfig(), read_models(config_file))
    host = make_host(tmp_path, front_end_pass=PASS, models=specs, hub={"offline": True})
    host.load_models()
    assert [entry.hosted is not None for entry in host.models.entries] == [True, False, False]

    async with serving(host) as client:
        listed = (await client.get("/v1/models")).json()["data"]
        assert [(model["id"], model["max_length"]) for model in listed] == [
            (n, 512) for n in ("first", "second", "third")
        ]
        for name in ("first", "second", "third", None):
            body: dict[str, Any] = {"prompt": "a b", "max_tokens": 3, "temperature": 0} | (
                {"model": name} if name else {}
            )
            answer = await client.post("/v1/completions", json=body)
            assert (answer.status_code, answer.json()["model"]) == (200, name or "first"), answer.text
        unknown = await client.post("/v1/completions", json={"model": "fourth", "prompt": "a"})
        assert unknown.status_code == 404 and "first" in error_of(unknown)["message"]
    engines = [entry.hosted.engine for entry in host.models.entries if isinstance(entry.hosted, HostedLLM)]
    assert [engine.config.max_num_seqs for engine in engines] == [2, 4, 4]


def test_repeated_flags_name_more_models(tmp_path: Path) -> None:
    config_file = tmp_path / "config.toml"
    config_file.write_text('[[models]]\nmodel = "pairs"\nkind = "cross-encoder"\nnum_threads = 2\n')
    flags = ["--model", "a", "--model", "b", "--embed-model", "c", "--config", str(config_file)]
    parser = make_parser(find_command(["serve"])[0])
    arguments = parser.parse(flags)
    models = take_models(arguments)
    assert models == [
        ModelConfig(model="b"),
        ModelConfig(model="pairs", kind="cross-encoder", options={"num_threads": 2}),
    ]
    specs = run.models_of(ServeConfig(), EngineConfig(model="a"), EmbedConfig(model="c"), models)
    assert [(spec.model, spec.kind) for spec in specs] == [
        ("a", "generation"),
        ("c", "embedding"),
        ("b", "generation"),
        ("pairs", "cross-encoder"),
    ]
    assert specs[3].options["num_threads"] == 2
    default = str(EngineConfig.model)
    models = take_models(parser.parse(["--model", default, "--model", "b"]))
    specs = run.models_of(ServeConfig(kinds="generation"), EngineConfig(), EmbedConfig(), models)
    assert [spec.model for spec in specs] == [default, "b"]  # named, it is not replaced


def test_listed_models_replace_the_default_of_their_kind() -> None:
    specs = run.models_of(ServeConfig(), EngineConfig(), EmbedConfig(), [ModelConfig(model="own", loads="idle")])
    assert [(spec.model, spec.loads) for spec in specs] == [(EmbedConfig.model, "start"), ("own", "idle")]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("models = 3", InvalidOptionError),
        ("[[models]]\nkind = 'generation'", InvalidOptionError),
        ("[[models]]\nmodel = 'a'\nkind = 'poem'", InvalidOptionError),
        ("[[models]]\nmodel = 'a'\nlods = 'idle'", UnknownOptionError),
        ("[[models]]\nmodel = 'a'\nloads = 'never'", InvalidOptionError),
    ],
)
def test_faulty_tables_are_refused(tmp_path: Path, text: str, error: type[Exception]) -> None:
    config_file = tmp_path / "config.toml"
    config_file.write_text(text)
    with pytest.raises(error):
        read_models(config_file)


def test_a_draft_model_is_for_the_model_of_engine_alone() -> None:
    """Others have another vocabulary, unless they name a draft model themselves."""
    own = {"speculation": "draft", "draft_model": "e"}
    models = [ModelConfig(model="a"), ModelConfig(model="b", options=own)]
    usual = EngineConfig(speculation="draft", draft_model="d")
    for engine, listed, expected in ((usual, [], ["d", ""]), (usual.replace(model="m"), models, ["d", "", "e"])):
        specs = run.models_of(ServeConfig(kinds="generation"), engine, EmbedConfig(), listed)
        assert [spec.options["draft_model"] for spec in specs] == expected
