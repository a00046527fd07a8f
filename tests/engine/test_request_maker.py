"""Prompts that are lists of token ids, and answers that are longer than what fits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from archerfish import LLMEngine, SamplingParams, remarks
from archerfish.engine.request_maker import is_token_ids, read_token_ids
from archerfish.errors import InputTooLargeError, InvalidInputError
from tests.engine.tiny_llama import check_memory, save_tiny_llama, tiny_config


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [([1, 2], True), ((5,), True), ([], False), ("12", False), (b"12", False), ([[1, 2]], False), (["a"], False),
     ([True], False), (7, False), (None, False)],
)  # fmt: skip
def test_a_list_is_known_by_its_first(prompt: object, expected: bool) -> None:
    assert is_token_ids(prompt) is expected


@pytest.mark.parametrize(
    ("prompt", "message"),
    [([3, -1], "Token id -1 is outside"), ([3, 10], "Token id 10 is outside"),
     ([3, 1 << 70], "is outside of the vocabulary of 10"), ([3, "a"], "list of token ids"),
     ([3, 1.5], "list of token ids"), ([3, None], "list of token ids")],
)  # fmt: skip
def test_wrong_ids_are_named(prompt: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        read_token_ids(prompt, 10)


def test_max_tokens_is_lowered_to_what_model_and_memory_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(remarks, "_said", set())
    save_tiny_llama(tmp_path, max_position_embeddings=128)
    for max_cache_tokens, longest in ((4096, 128), (64, 64)):
        with LLMEngine(tiny_config(tmp_path, max_cache_tokens=max_cache_tokens)) as engine:
            for max_tokens in (1000, longest - 20):
                [output] = engine.generate([[5] * 20], SamplingParams(max_tokens=max_tokens, ignore_eos=True))
                assert len(output.token_ids) == longest - 20 and output.finish_reason == "length"
            with pytest.raises(InputTooLargeError, match=rf"{longest}\b"):
                engine.generate([[5] * longest])
            check_memory(engine)
    [warning] = caplog.messages
    assert "max_tokens is 1,000; 108 fit after a prompt of 20" in warning
