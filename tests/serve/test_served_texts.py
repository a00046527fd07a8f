"""The text side of a served model."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from archerfish.engine.text_tokenizer import TextTokenizer
from archerfish.serve.catalog import ModelCard
from archerfish.serve.served_texts import ContextLengthError, ServedTexts

from .fake_backend import model_directory

LIMIT_S = 20


def test_nobody_uses_a_model_whose_files_are_half_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who comes while the first reads the vocabulary must not take its longest token for one of a single letter."""
    is_reading, may_go_on = threading.Event(), threading.Event()
    read = TextTokenizer.id_to_token

    def slowly(tokenizer: TextTokenizer, token_id: int) -> str | None:
        is_reading.set()
        assert may_go_on.wait(LIMIT_S)
        return read(tokenizer, token_id)

    async def main() -> None:
        texts, card = ServedTexts(), ModelCard("lab/writer", "generation", 100, directory=str(model_directory()))
        first = asyncio.create_task(texts.of(card))
        assert await asyncio.to_thread(is_reading.wait, LIMIT_S)
        second: asyncio.Task[Any] = asyncio.create_task(texts.of(card))
        await asyncio.sleep(0)
        assert not second.done()
        may_go_on.set()
        text = await second
        assert text is await first
        text.check_size(100 * len("<|start|>") - len("<|start|>"), "prompt")
        with pytest.raises(ContextLengthError):
            text.check_size(100 * len("<|start|>"), "prompt")

    monkeypatch.setattr(TextTokenizer, "id_to_token", slowly)
    asyncio.run(main())
