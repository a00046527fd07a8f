"""Prompts that are lists of token ids."""

from __future__ import annotations

from typing import Any

import pytest

from archerfish.engine.request_maker import is_token_ids, read_token_ids
from archerfish.errors import InvalidInputError


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
