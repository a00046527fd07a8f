"""The catalog: the served models, their names, and the tokenizer and chat template of each."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from archerfish.config import ServeConfig
from archerfish.params import SamplingParams
from archerfish.serve.app import create_app
from archerfish.serve.catalog import LONG_TEXT, REFRESH_S, Catalog, ContextLengthError, ModelCard, ModelText
from archerfish.serve.client import RemoteError
from archerfish.serve.errors import InvalidParameterError
from archerfish.serve.wire import Query, UnservedModelError
from archerfish.text.chat_template import PLAIN_STOPS, ChatTemplate
from archerfish.text.text_tokenizer import TextTokenizer
from archerfish.text.world_tokenizer import WorldTokenizer
from tests.engine.tiny_rwkv import save_tiny_rwkv

from .fake_backend import LIMIT_S, MODEL, FakeBackend, client_of, model_directory
from .hosting import FakeClock

pytestmark = pytest.mark.anyio

WRITER = {
    "id": "lab/writer",
    "kind": "generation",
    "max_length": 100,
    "directory": "/models/writer",
    "aliases": ["/m/pen/"],
}
VECTORS = {"id": "lab/vectors", "kind": "embedding", "max_length": 64, "dimension": 8, "is_loaded": True}
PAIRS = {"id": "lab/pairs", "kind": "cross-encoder", "max_length": 64}


def backend_of(*cards: dict[str, Any]) -> FakeBackend:
    backend = FakeBackend()
    backend.cards = list(cards)
    return backend


def test_card_ignores_unknown_members() -> None:
    card = msgspec.convert({**WRITER, "vocab_size": 9, "is_loaded": True}, ModelCard)
    assert card == ModelCard("lab/writer", "generation", 100, 0, "/models/writer", ("/m/pen/",), 9)


async def test_models_are_found_by_all_names() -> None:
    catalog = Catalog(backend_of(WRITER, {**VECTORS, "aliases": ["/home/ann/.cache/lab-vectors-float32-1a2b"]}))
    for name in ("lab/writer", "writer", "/m/pen/", "pen"):
        assert (await catalog.find(name)).id == "lab/writer"
    with pytest.raises(UnservedModelError, match=r"'writr' is not served here.*Did you mean 'lab/writer'\?") as caught:
        await catalog.find("writr")
    assert caught.value.param == "model"
    with pytest.raises(UnservedModelError) as caught:
        await catalog.find("gpt-4")
    assert caught.value.hint == "Known: lab/vectors, lab/writer."


async def test_built_in_models_have_their_hub_names_too() -> None:
    writer = {**WRITER, "id": "HuggingFaceTB/SmolLM2-135M-Instruct"}
    catalog = Catalog(backend_of({**VECTORS, "id": "all-minilm-l6-v2"}, writer))
    for name in ("sentence-transformers/all-MiniLM-L6-v2", "all-MiniLM-L6-v2", "all-minilm-l6-v2"):
        assert (await catalog.find(name)).id == "all-minilm-l6-v2"
    assert (await catalog.find("smollm2-135m-instruct")).kind == "generation"


async def test_served_names_are_listed() -> None:
    names = {"id": "gpt-4o", "aliases": ["small", "/m/pen"], "served_names": ["small"]}
    catalog = Catalog(backend_of({**WRITER, **names}, VECTORS))
    shown = [(model.id, model.root) for model in await catalog.listed()]
    assert shown == [("gpt-4o", msgspec.UNSET), ("small", "gpt-4o"), ("lab/vectors", msgspec.UNSET)]
    with pytest.raises(UnservedModelError) as caught:
        await catalog.find("other-one")
    assert caught.value.hint == "Known: gpt-4o, lab/vectors, small."


@pytest.mark.parametrize(
    ("route", "body", "first"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}, MODEL),
        ("/v1/completions", {"prompt": "a"}, MODEL),
        ("/v1/embeddings", {"input": "a"}, "lab/vectors"),
    ],
)
async def test_unknown_names_can_be_accepted(route: str, body: dict[str, Any], first: str) -> None:
    app = create_app(FakeBackend(), ServeConfig(accept_any_model=True))
    async with client_of(app) as client:
        answer = await client.post(route, json={**body, "model": "gpt-4\u00f6\n"})
        assert answer.status_code == 200 and answer.json()["model"] == first
        assert answer.headers["x-archerfish-remark"].startswith("the model 'gpt-4\\xf6\\n' is not served here")
        known = await client.post(route, json={**body, "model": first})
        assert "x-archerfish-remark" not in known.headers
        assert (await client.get("/v1/models/gpt-4")).status_code == 404
        assert (await client.patch("/admin/optimization?model=gpt-4", json={})).status_code == 404
    async with client_of(create_app(FakeBackend())) as client:
        assert (await client.post(route, json={**body, "model": "gpt-4"})).status_code == 404


async def test_find_without_name_gives_the_first_model() -> None:
    catalog = Catalog(backend_of(WRITER, VECTORS, {**VECTORS, "id": "lab/more"}, PAIRS))
    assert (await catalog.find(None, "generation")).id == "lab/writer"
    assert (await catalog.find(None, "embedding")).id == "lab/vectors"
    assert (await catalog.find(None, "cross-encoder", "embedding")).id == "lab/pairs"
    assert (await catalog.find("more", "cross-encoder", "embedding")).id == "lab/more"
    with pytest.raises(InvalidParameterError, match="'writer' does not serve this route"):
        await catalog.find("writer", "embedding")
    with pytest.raises(InvalidParameterError, match="No cross-encoder or embedding model is served here"):
        await Catalog(backend_of(WRITER)).find(None, "cross-encoder", "embedding")


async def test_unknown_name_refreshes_the_catalog() -> None:
    backend, clock = backend_of(WRITER), FakeClock()
    catalog = Catalog(backend, "pass", clock=clock)
    for _ in range(3):
        await catalog.cards()
        await catalog.find("writer")
    assert backend.asked == [Query(request_id="", about="models", credentials="pass")]
    backend.cards = [WRITER, VECTORS]
    for _ in range(3):
        with pytest.raises(UnservedModelError):
            await catalog.find("vectors")
    assert len(backend.asked) == 1
    clock.now += REFRESH_S
    assert (await catalog.find("vectors")).dimension == 8
    for _ in range(3):
        with pytest.raises(UnservedModelError):
            await catalog.find("nothing")
    assert len(backend.asked) == 2


async def test_catalog_asks_again_after_an_error() -> None:
    backend = backend_of(WRITER)
    backend.ask_error = RemoteError("gone", status=503, retry_after_s=3.0)
    catalog = Catalog(backend)
    for _ in range(2):
        with pytest.raises(RemoteError):
            await catalog.find(None, "generation")
    backend.ask_error = None
    assert (await catalog.find(None, "generation")).id == "lab/writer"
    backend.ask_error = RemoteError("gone", status=503)
    assert (await catalog.find(None, "generation")).id == "lab/writer"


names = st.text("ab/", min_size=1, max_size=5)  # few letters, so that names and parts of them collide


@given(st.lists(names, min_size=1, max_size=4, unique=True), st.lists(names, max_size=3))
def test_own_name_wins_over_aliases(ids: list[str], aliases: list[str]) -> None:
    async def main() -> None:
        cards = [{**PAIRS, "id": name, "aliases": aliases} for name in ids]
        catalog = Catalog(backend_of(*cards))
        for name in ids:
            assert (await catalog.find(name)).id == name

    asyncio.run(main())


# Tokenizers and templates


async def test_second_request_waits_for_the_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second request must not use the length of the longest token before the vocabulary is read."""
    is_reading, may_go_on = threading.Event(), threading.Event()
    read = TextTokenizer.id_to_token

    def slowly(tokenizer: TextTokenizer, token_id: int) -> str | None:
        is_reading.set()
        assert may_go_on.wait(LIMIT_S)
        return read(tokenizer, token_id)

    monkeypatch.setattr(TextTokenizer, "id_to_token", slowly)
    catalog, card = Catalog(FakeBackend()), ModelCard("lab/writer", "generation", 100, directory=str(model_directory()))
    first = asyncio.create_task(catalog.text_of(card))
    assert await asyncio.to_thread(is_reading.wait, LIMIT_S)
    second: asyncio.Task[Any] = asyncio.create_task(catalog.text_of(card))
    await asyncio.sleep(0)
    assert not second.done()
    may_go_on.set()
    text = await second
    assert text is await first
    assert len(await text.encode("<|start|>" * 99, "prompt", is_answered=True)) == 99
    with pytest.raises(ContextLengthError, match="at least 100"):
        await text.encode("<|start|>" * 100, "prompt", is_answered=True)


async def test_rwkv_chat_template(tmp_path: Path) -> None:
    """Tokenizer and template follow from the configuration; answers end where the next message would begin."""
    card = ModelCard("rwkv", "generation", 100, directory=str(save_tiny_rwkv(tmp_path, vocab_size=65536)))
    text = ModelText(card)
    ids = await text.encode([{"role": "user", "content": "Hi"}], "messages")
    assert WorldTokenizer().decode(ids) == "User: Hi\n\nAssistant:"
    assert text.template.get().stopping(SamplingParams(stop=["x"])).stop == ("x", *PLAIN_STOPS)
    assert text.token(256)[1] == [255]


LONG = "a" * (LONG_TEXT + 1)
TOOL = {"type": "function", "function": {"name": "f", "description": LONG, "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ({"content": LONG}, {}),
        ({"content": "a"}, {"tools": [TOOL]}),
        ({"content": "a"}, {"documents": [{"text": LONG}]}),
        (
            {"content": "", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": LONG}}}]},
            {},
        ),
    ],
)
async def test_long_conversation_is_tokenised_in_a_thread(
    message: dict[str, Any], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []
    encode = ChatTemplate.encode

    def noted(self: ChatTemplate, *args: Any, **kwargs: Any) -> list[int]:
        threads.append(threading.current_thread())
        return encode(self, *args, **kwargs)

    monkeypatch.setattr(ChatTemplate, "encode", noted)
    text = ModelText(ModelCard("lab/writer", "generation", 100, directory=str(model_directory())))
    for shown, extra in (({"content": "a"}, {}), ({"content": "a"}, {}), (message, options)):
        await text.encode([{"role": "assistant", **shown}], "messages", extra)
    assert [thread is threading.main_thread() for thread in threads] == [
        False,
        True,
        False,
    ]  # the first reads the template
