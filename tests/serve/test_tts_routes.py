"""/v1/tts/tokens over an engine host with a tiny RWKV-7 model. The tokens must equal those of RwkvSampler."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from archerfish import LLMEngine, RwkvSampler, TTSRequest
from archerfish.config import ServeConfig
from archerfish.engine.tts import VOCAB_SIZE
from archerfish.params import SamplingParams
from archerfish.serve import hosted_llm
from archerfish.serve.app import create_app
from archerfish.serve.calls import EXAMPLES
from archerfish.serve.compute import Lane
from archerfish.serve.host import EngineHost
from archerfish.serve.hosted_llm import HostedLLM
from archerfish.serve.models import Hosted, ModelEntry
from tests.engine.test_tts import BAD, REFERENCE, VOICE
from tests.engine.tiny_rwkv import rwkv_config, save_tiny_rwkv

from .client import error_of, host_with, serving
from .fake_backend import FakeBackend, events, post

pytestmark = pytest.mark.anyio
ROUTE = "/v1/tts/tokens"
ANSWER = {"id", "object", "created", "model", "global_tokens", "semantic_tokens", "finish_reason", "usage"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tts") / "speaker"
    directory.mkdir()
    return save_tiny_rwkv(directory, vocab_size=VOCAB_SIZE, hidden_size=32, max_position_embeddings=2600)


def add_speaker(host: EngineHost, model: Path) -> None:
    def load(lane: Lane) -> Hosted:
        engine = LLMEngine(options(model), executor=lane, text_thread=host.writer)
        return HostedLLM(engine, lane, host)

    host.models.add(ModelEntry("speaker", "generation", load))


def options(model: Path) -> Any:
    return rwkv_config(model, load_format="dummy", max_cache_tokens=20_000)


async def test_tokens_equal_those_of_the_sampler(model: Path, tmp_path: Path) -> None:
    host = host_with(tmp_path, llm={})  # a text model, which comes first
    add_speaker(host, model)
    bodies: list[dict[str, Any]] = [
        {"text": "Hello there", "seed": 5, "max_tokens": 7},
        {"text": "你好", "seed": 6, "max_tokens": 4, "emotion": "happy", "top_k": 3, "temperature": 0.5, **REFERENCE},
    ]
    with RwkvSampler(options(model)) as sampler:
        expected = sampler.generate_tts_tokens_batch(bodies)

    async with serving(host) as client:
        answers = await asyncio.gather(*[client.post(ROUTE, json=body) for body in bodies])
        streams = await asyncio.gather(*[client.post(ROUTE, json={**body, "stream": True}) for body in bodies])
        for body, answer, stream, tokens in zip(bodies, answers, streams, expected, strict=True):
            shown = answer.json()
            assert answer.status_code == stream.status_code == 200 and set(shown) == ANSWER
            assert (shown["object"], shown["model"], shown["finish_reason"]) == ("tts.tokens", "speaker", "length")
            assert [shown["global_tokens"], shown["semantic_tokens"]] == list(tokens)
            num_drawn = body["max_tokens"] + (0 if "ref_global_tokens" in body else 33)
            assert shown["usage"]["completion_tokens"] == num_drawn
            assert shown["usage"]["prompt_tokens"] == tokens.num_prompt_tokens
            parts = events(stream)
            assert {event["object"] for event in parts} == {"tts.tokens.chunk"} and len(
                {event["id"] for event in parts}
            ) == 1
            assert [token for event in parts for token in event["global_tokens"]] == tokens.global_tokens
            assert [token for event in parts for token in event["semantic_tokens"]] == tokens.semantic_tokens
            assert [event["finish_reason"] for event in parts] == [None] * (len(parts) - 1) + ["length"]
            assert parts[-1]["usage"]["total_tokens"] == shown["usage"]["total_tokens"] and len(parts) >= num_drawn
            assert parts[0]["global_tokens"] == (VOICE if "ref_global_tokens" in body else [])


def test_stages_count_against_limits() -> None:
    stages = [{"num_tokens": 32, "first": 0, "end": 9}, {"num_tokens": 2048, "first": 0, "end": 9}]
    assert SamplingParams.of({"stages": stages, "max_tokens": 1}).max_tokens == 2080


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"foo": 1}, "foo", "Unknown parameter"),
    ({"emotoin": "SAD"}, "emotoin", "Did you mean 'emotion'?"),
    ({"speed": 3}, "speed", "speed must be a string, not 3."),
    ({"age": None}, "age", "age must be a string, not null."),
    ({"top_k": "5"}, "top_k", "a whole number, not '5'."),
    ({"seed": 1.0}, "seed", "a whole number, not 1.0."),
    ({"max_tokens": True}, "max_tokens", "a whole number, not a boolean."),
    ({"stream": 1}, "stream", "true or false, not 1."),
    ({"priority": None}, "priority", "a whole number, not null."),
    ({"model": 5}, "model", "string"),
    ({"text": "hm " * 1000, "max_tokens": 9}, "text", ""),
    ({"model": "bare"}, "model", ""),
    ({"priority": 2**40}, "priority", ""),
    ({"text": "long " * 3000}, "text", ""),
    ({"deadline_s": "1"}, "deadline_s", "number"),
    ({"deadline_s": -3}, "deadline_s", "at least 0"),
    ({**REFERENCE, "ref_semantic_tokens": {"a": 1}}, "ref_semantic_tokens", "an array, not an object"),
    (
        {**REFERENCE, "ref_semantic_tokens": ["1"]},
        "ref_semantic_tokens",
        "ref_semantic_tokens[0] must be a whole number",
    ),
]


def test_wrong_type_error_says_what_was_expected() -> None:
    for values, param, said in WRONG:
        answer = post(FakeBackend(), ROUTE, {"text": "a", **values})
        error = error_of(answer)
        statuses = (400, 413) if len(str(values.get("text"))) > 99 else (400,)
        assert answer.status_code in statuses and error["param"] == param and said in error["message"], (values, error)
    assert error_of(post(FakeBackend(), ROUTE, {"text": "a", "model": "nobody"}))["code"] == "model_not_found"


@pytest.mark.parametrize(("values", "said"), BAD)
def test_wrong_value_names_its_parameter(values: dict[str, Any], said: str) -> None:
    if any(value != value for value in values.values()):  # NaN is no JSON
        return
    answer = post(FakeBackend(), ROUTE, {"text": "Hello", **values})
    error = error_of(answer)
    assert answer.status_code == 400
    assert error["param"] in values or error["param"] in ("ref_global_tokens", "ref_semantic_tokens"), error
    if values.keys().isdisjoint(("text", "speed", "gender", "top_k", "ref_global_tokens", "ref_semantic_tokens")):
        assert said in error["message"] or "must be" in error["message"]


async def test_tts_service_takes_no_chats(model: Path, tmp_path: Path) -> None:
    host = host_with(tmp_path)
    add_speaker(host, model)

    async with serving(host) as client:
        [shown] = (await client.get("/v1/models")).json()["data"]
        assert (shown["id"], shown["kind"]) == ("speaker", "tts")
        body = next(body for _, _, path, body in EXAMPLES if path == ROUTE)
        assert (await client.post(ROUTE, json={**(body or {}), "max_tokens": 3})).status_code == 200
        refused = error_of(
            await client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "Hi"}]})
        )
        assert "POST /v1/tts/tokens" in refused["message"]


@pytest.mark.parametrize(
    ("vocab_size", "has_states", "has_tokenizer", "speaks"),
    [
        (VOCAB_SIZE, True, False, True),
        (65536, True, False, False),
        (151_936, False, False, False),
        (90_000, True, True, False),
    ],
)
def test_is_tts(vocab_size: int, has_states: bool, has_tokenizer: bool, speaks: bool) -> None:
    found = object() if has_tokenizer else None
    facts: Any = SimpleNamespace(vocab_size=vocab_size, has_states=has_states, find_tokenizer=lambda: found)
    assert hosted_llm.is_tts(facts) is speaks


def test_service_without_tts_model_gives_400() -> None:
    backend = FakeBackend()
    backend.vocab_size = 50_000
    answer = post(backend, ROUTE, {"text": "a"})
    assert answer.status_code == 400 and "No TTS model" in error_of(answer)["message"]


def test_request_to_the_engine() -> None:
    backend = FakeBackend("Hi", max_length=100)
    answer = post(backend, ROUTE, {"text": "Hello", "deadline_s": 3.5, "priority": 2, "seed": 9})
    assert answer.json()["semantic_tokens"] == [72, 105, 256] and answer.json()["finish_reason"] == "stop"
    (asked,) = backend.requests
    request = TTSRequest(text="Hello", seed=9)
    assert asked.token_ids == request.prompt() and (asked.deadline_s, asked.priority, asked.stream) == (3.5, 2, False)
    assert asked.params["stages"] == request.params(100 - len(request.prompt())).stages
    assert asked.params["max_tokens"] == 100 - len(request.prompt()) and asked.params["seed"] == 9


def test_limit_of_the_server_lowers_semantic_tokens() -> None:
    """The tokens of the voice count, and are kept."""
    backend = FakeBackend("Hi")

    def app(backend: FakeBackend) -> Any:
        return create_app(backend, ServeConfig(max_output_tokens=40), credentials="pass")

    for body, num_tokens, told in (
        ({"max_tokens": 50}, [32, 1, 7], "from 50 to 7"),
        ({"max_tokens": 7}, [32, 1, 7], ""),
        ({"max_tokens": 50, **REFERENCE}, [40], "from 50 to 40"),
    ):
        answer = post(backend, ROUTE, {"text": "Hello", **body}, app=app)
        assert answer.status_code == 200
        assert [stage.num_tokens for stage in backend.params()["stages"]] == num_tokens
        remark = f"max_tokens was lowered {told}, the limit of this server" if told else None
        assert answer.headers.get("x-archerfish-remark") == remark


def test_too_long_text_is_refused_before_tokenising(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = FakeBackend("Hi", max_length=400)
    backend.max_prompt_bytes = 20

    assert post(backend, ROUTE, {"text": "a" * 20}).status_code == 200
    monkeypatch.setattr(TTSRequest, "prompt", lambda request: pytest.fail("tokenised"))
    for text in ("a" * 21, "\N{LATIN SMALL LETTER SHARP S}" * 11):
        answer = post(backend, ROUTE, {"text": text})
        assert (answer.status_code, error_of(answer)["param"]) == (413, "text")
        assert "bytes; the limit is 20" in error_of(answer)["message"]
