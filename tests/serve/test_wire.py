"""Encoding and decoding of messages."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from archerfish.errors import InputTooLargeError, OverloadedError
from archerfish.serve import wire

TEXT = st.text(st.characters(codec="utf-8"), max_size=20)
IDS = st.lists(st.integers(0, 2**32 - 1), max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | TEXT | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3), max_leaves=8,
)


@settings(max_examples=50)
@given(TEXT, st.none() | TEXT, st.none() | IDS, st.dictionaries(TEXT, VALUES, max_size=3), st.booleans(), TEXT)
def test_request_survives_encoding(
    request_id: str, prompt: str | None, ids: list[int] | None, params: dict[str, Any], is_streamed: bool, tenant: str
) -> None:
    sent = wire.GenerationRequest(
        request_id=request_id, prompt=prompt, token_ids=ids, params=params, stream=is_streamed, tenant=tenant
    )
    assert wire.decode_request(wire.encode(sent)) == sent


LOGPROBS = st.lists(st.tuples(st.integers(0, 99), st.floats(-9, 0), st.integers(1, 9), st.just([(1, -0.5)])), max_size=3)


@given(TEXT, IDS, LOGPROBS)
def test_answers_survive_encoding_alone_and_in_a_bundle(request_id: str, ids: list[int], logprobs: Any) -> None:
    chunk = wire.Chunk(request_id=request_id, token_ids=ids, logprobs=logprobs)
    failed = wire.Failed(request_id="b", code="c", message="m", retry_after_s=1.5)
    bundle = wire.Bundle(request_id="", answers=[chunk, failed, wire.Generated(request_id="d")])
    assert wire.decode_answer(wire.encode(bundle)) == bundle
    assert wire.decode_answer(wire.encode(chunk)) == chunk


@given(st.binary(max_size=64))
def test_random_bytes_raise_only_wire_errors(payload: bytes) -> None:
    for decode in (wire.decode_request, wire.decode_answer):
        with contextlib.suppress(wire.WireError):
            decode(payload)
    assert isinstance(wire.request_id_of(payload), str)


def test_unknown_fields_are_ignored_and_missing_ones_have_defaults() -> None:
    written = msgspec.msgpack.encode({"type": "generate", "v": 1, "request_id": "7", "invented_later": [1]})
    assert wire.decode_request(written) == wire.GenerationRequest(v=1, request_id="7")


@pytest.mark.parametrize(
    "change", [{"v": 2}, {"v": 0}, {"type": "nonsense"}, {"token_ids": "text"}, {"priority": 1.5}, {"params": {1: 2}}]
)
def test_request_id_of_a_refused_message_can_be_read(change: dict[str, Any]) -> None:
    written = msgspec.msgpack.encode({"type": "generate", "v": 1, "request_id": "7", **change})
    with pytest.raises(wire.WireError):
        wire.decode_request(written)
    assert wire.request_id_of(written) == "7"


def test_request_id_that_is_no_string_is_ignored() -> None:
    assert wire.request_id_of(msgspec.msgpack.encode({"type": "ping", "request_id": 7})) == ""


def test_deep_nesting_is_refused() -> None:
    nested = b"\x91" * 5000 + b"\xc0"
    head = msgspec.msgpack.encode("params")
    with pytest.raises(wire.WireError):
        wire.decode_request(b"\x81" + head + nested)


def test_details_of_foreign_errors_stay_hidden() -> None:
    told = wire.Failed.of("1", OverloadedError("The queue is full.", hint="Wait."), 3.0)
    assert (told.status, told.code, told.retry_after_s) == (429, "overloaded", 3.0)
    assert (told.message, told.hint) == ("The queue is full.", "Wait.")
    assert wire.Failed.of("1", InputTooLargeError("Long.")).status == 413
    told = wire.Failed.of("1", RuntimeError("the password is 1234"))
    assert told.status == 500
    assert "1234" not in repr(told)
