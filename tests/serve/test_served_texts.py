"""The tokenizer and chat template of a served model."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from archerfish.params import SamplingParams
from archerfish.serve.catalog import LONG_TEXT, Catalog, ContextLengthError, ModelCard, ModelText
from archerfish.text.chat_template import PLAIN_STOPS, ChatTemplate
from archerfish.text.text_tokenizer import TextTokenizer
from archerfish.text.world_tokenizer import WorldTokenizer
from tests.engine.tiny_rwkv import save_tiny_rwkv

from .fake_backend import FakeBackend, model_directory

pytestmark = pytest.mark.anyio
LIMIT_S = 20


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
        ({"content": LONG}, {}), ({"content": "a"}, {"tools": [TOOL]}), ({"content": "a"}, {"documents": [{"text": LONG}]}),
        ({"content": "", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": LONG}}}]}, {}),
    ],
)  # fmt: skip
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
    for given, extra in (({"content": "a"}, {}), ({"content": "a"}, {}), (message, options)):
        await text.encode([{"role": "assistant", **given}], "messages", extra)
    assert [thread is threading.main_thread() for thread in threads] == [False, True, False]  # the first reads the template
