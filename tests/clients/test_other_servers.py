"""The packages of Ollama, Cohere and Hugging Face against a real socket."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from archerfish.serve.wire import GenerationRequest
from tests.serve.client import WORDS, app_of, running, words_host
from tests.serve.fake_backend import MODEL, FakeBackend, fake_app
from tests.serve.hosting import WordEncoder

pytestmark = pytest.mark.client
HI = [{"role": "user", "content": "Hi"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
TEXTS = ["one two", "three"]
ROWS = np.stack([WordEncoder.vector(text) for text in TEXTS])


def reply(request: GenerationRequest) -> str:
    return CALL if b"weather" in bytes(i for i in request.token_ids or [] if i < 256) else "Hello there"


@pytest.fixture(scope="module")
def writer() -> Iterator[str]:
    with running(fake_app(FakeBackend(reply))) as served:
        yield served.url


@pytest.fixture(scope="module")
def words() -> Iterator[str]:
    with words_host() as host, host, running(app_of(host)) as served:
        yield served.url


def weather(city: str) -> str:
    """The weather now.

    Args:
        city: its name
    """
    return f"It rains in {city}."


def test_ollama_writes(writer: str) -> None:
    ollama = pytest.importorskip("ollama")
    client = ollama.Client(writer)
    assert (
        client.chat(f"{MODEL}:latest", HI, options={"temperature": 0, "num_ctx": 64}).message.content == "Hello there"
    )
    parts: list[Any] = list(client.chat(MODEL, HI, stream=True))
    assert "".join(part.message.content for part in parts) == "Hello there"
    assert (parts[-1].done_reason, parts[-1].eval_count) == ("stop", 12)
    assert client.generate(MODEL, "Hi", options={"num_predict": 5}).response == "Hello"
    assert "".join(part.response for part in client.generate(MODEL, "Hi", stream=True)) == "Hello there"
    [call] = client.chat(MODEL, HI, tools=[weather]).message.tool_calls
    assert (call.function.name, call.function.arguments) == ("weather", {"city": "Rome"})
    with pytest.raises(ollama.ResponseError, match="'nobody' is not served here") as caught:
        client.chat("nobody", HI)
    assert caught.value.status_code == 404


def test_ollama_describes_models(writer: str) -> None:
    client = pytest.importorskip("ollama").Client(writer)
    assert client.list().models[0].model == MODEL and client.ps().models[0].context_length == 1000
    assert client.show(MODEL).capabilities == ["completion", "tools"]


def test_ollama_embeds(words: str) -> None:
    client = pytest.importorskip("ollama").Client(words)
    np.testing.assert_allclose(client.embed(WORDS, TEXTS).embeddings, ROWS, rtol=1e-6)
    np.testing.assert_allclose(client.embeddings(WORDS, TEXTS[1]).embedding, ROWS[1], rtol=1e-6)


def test_cohere(words: str) -> None:
    cohere = pytest.importorskip("cohere")
    for client in (cohere.Client("key", base_url=words), cohere.ClientV2("key", base_url=words)):
        [best] = client.rerank(model=WORDS, query="three", documents=TEXTS, top_n=1).results
        assert best.index == 1 and best.relevance_score == pytest.approx(1, abs=1e-6)
        options = {"model": WORDS, "texts": TEXTS, "input_type": "search_query"}
        found = client.embed(**options, embedding_types=["float", "ubinary"]).embeddings
        np.testing.assert_allclose(found.float_, ROWS, rtol=1e-6)
        assert len(found.ubinary) == 2
        with pytest.raises(cohere.NotFoundError, match="not served here"):
            client.embed(**{**options, "model": "nobody"}, embedding_types=["float"])
    np.testing.assert_allclose(cohere.Client("key", base_url=words).embed(**options).embeddings, ROWS, rtol=1e-6)


def test_hugging_face_embeds(words: str) -> None:
    hub = pytest.importorskip("huggingface_hub")
    for client in (hub.InferenceClient(base_url=words), hub.InferenceClient(model=f"{words}/embed")):
        np.testing.assert_allclose(client.feature_extraction(TEXTS, normalize=True), ROWS, rtol=1e-6)
    with pytest.raises(hub.errors.HfHubHTTPError, match="inputs"):
        client.feature_extraction([])
