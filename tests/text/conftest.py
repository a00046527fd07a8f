"""The tokenizer of SmolLM2, and a tiny engine whose tokenizer has every byte."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from archerfish import LLMEngine
from archerfish.text.text_tokenizer import TextTokenizer
from tests.engine.tiny_llama import save_tiny_llama, tiny_config
from tests.text.tiny_tokenizers import END, ROWS, byte_level, smollm2_directory


@pytest.fixture(scope="session")
def smollm2() -> TextTokenizer:
    return TextTokenizer(smollm2_directory())


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("byte-level")
    byte_level(root)
    return save_tiny_llama(root, vocab_size=ROWS, eos_token_id=END)


@pytest.fixture(scope="module")
def engine(directory: Path) -> Iterator[LLMEngine]:
    with LLMEngine(tiny_config(directory)) as engine:
        yield engine
