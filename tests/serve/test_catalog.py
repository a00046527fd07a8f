"""The catalog: which models there are, under which names, and when the engine process is asked again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from archerfish.serve.catalog import REFRESH_S, Catalog, ModelCard
from archerfish.serve.client import Answer, Part, Question, RemoteError
from archerfish.serve.errors import InvalidParameterError, UnservedModelError
from archerfish.serve.wire import GenerationRequest, Query, Report

from .hosting import FakeClock

pytestmark = pytest.mark.anyio

WRITER = {"id": "lab/writer", "kind": "generation", "max_length": 100, "directory": "/models/writer", "aliases": ["/m/pen/"]}
VECTORS = {"id": "lab/vectors", "kind": "embedding", "max_length": 64, "dimension": 8, "is_loaded": True}
PAIRS = {"id": "lab/pairs", "kind": "cross-encoder", "max_length": 64}


class Models:
    """A backend that knows its models and nothing else."""

    def __init__(self, *cards: dict[str, Any]) -> None:
        self.cards = list(cards)
        self.asked: list[Query] = []
        self.error: RemoteError | None = None

    def generate(self, request: GenerationRequest) -> AsyncGenerator[Part, None]:
        raise NotImplementedError

    def end_sequence(self, request_id: str, index: int) -> None:
        raise NotImplementedError

    async def ask(self, message: Question) -> Answer:
        assert isinstance(message, Query)
        self.asked.append(message)
        if self.error is not None:
            raise self.error
        return Report(request_id=message.request_id, values={"models": self.cards})


def test_card_ignores_unknown_members() -> None:
    card = msgspec.convert({**WRITER, "vocab_size": 9, "is_loaded": True}, ModelCard)
    assert card == ModelCard("lab/writer", "generation", 100, 0, "/models/writer", ("/m/pen/",), 9)


async def test_models_are_found_by_all_names() -> None:
    catalog = Catalog(Models(WRITER, VECTORS))
    for name in ("lab/writer", "writer", "/m/pen/", "pen"):
        assert (await catalog.find(name)).id == "lab/writer"
    with pytest.raises(UnservedModelError, match=r"'lab/wirter' is not served here.*Did you mean") as caught:
        await catalog.find("lab/wirter")
    assert caught.value.param == "model"


async def test_unknown_model_error_lists_only_visible_models() -> None:
    cards = [WRITER, {**VECTORS, "aliases": ["/home/ann/.cache/lab-vectors-float32-1a2b"]}]
    with pytest.raises(UnservedModelError) as caught:
        await Catalog(Models(*cards)).find("gpt-4")
    assert caught.value.hint == "Known: lab/vectors, lab/writer."
    with pytest.raises(UnservedModelError, match=r"Did you mean 'lab/writer'\?"):
        await Catalog(Models(*cards)).find("writr")


async def test_find_without_name_gives_the_first_model() -> None:
    catalog = Catalog(Models(WRITER, VECTORS, {**VECTORS, "id": "lab/more"}, PAIRS))
    assert (await catalog.find(None, "generation")).id == "lab/writer"
    assert (await catalog.find(None, "embedding")).id == "lab/vectors"
    assert (await catalog.find(None, "cross-encoder", "embedding")).id == "lab/pairs"
    assert (await catalog.find("more", "cross-encoder", "embedding")).id == "lab/more"
    with pytest.raises(InvalidParameterError, match="'writer' does not serve this route"):
        await catalog.find("writer", "embedding")
    with pytest.raises(InvalidParameterError, match="No cross-encoder or embedding model is served here"):
        await Catalog(Models(WRITER)).find(None, "cross-encoder", "embedding")


async def test_unknown_name_refreshes_the_catalog() -> None:
    backend, clock = Models(WRITER), FakeClock()
    catalog = Catalog(backend, "pass", clock=clock)
    for _ in range(3):
        await catalog.cards()
        await catalog.find("writer")
    assert [question.credentials for question in backend.asked] == ["pass"]
    backend.cards.append(VECTORS)
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
    backend = Models(WRITER)
    backend.error = RemoteError("gone", status=503, retry_after_s=3.0)
    catalog = Catalog(backend)
    for _ in range(2):
        with pytest.raises(RemoteError):
            await catalog.find(None, "generation")
    backend.error = None
    assert (await catalog.find(None, "generation")).id == "lab/writer"
    backend.error = RemoteError("gone", status=503)
    assert (await catalog.find(None, "generation")).id == "lab/writer"


@pytest.mark.parametrize(("values", "kind"), [(WRITER, "generation"), (VECTORS, "embedding"), (PAIRS, "cross-encoder")])
def test_described_model_shows_no_paths(values: dict[str, Any], kind: str) -> None:
    catalog = Catalog(Models())
    shown = msgspec.to_builtins(catalog.describe(msgspec.convert(values, ModelCard)))
    assert set(shown) - {"dimension"} == {"id", "object", "created", "owned_by", "kind", "max_length"}
    assert (shown["id"], shown["kind"], shown["created"]) == (values["id"], kind, catalog.started_at)
    assert ("dimension" in shown) == (kind == "embedding")


names = st.text("ab/", min_size=1, max_size=5)  # few letters, so that names and parts of them collide


@given(st.lists(names, min_size=1, max_size=4, unique=True), st.lists(names, max_size=3))
def test_own_name_wins_over_aliases(ids: list[str], aliases: list[str]) -> None:
    async def main() -> None:
        cards = [{**PAIRS, "id": name, "aliases": aliases} for name in ids]
        catalog = Catalog(Models(*cards))
        for name in ids:
            assert (await catalog.find(name)).id == name

    asyncio.run(main())
