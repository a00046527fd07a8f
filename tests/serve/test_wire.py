"""Encoding and decoding of messages, and EngineHost with plain sockets and frames that are no messages."""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
import types
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from archerfish.errors import InputTooLargeError, TooManyRequestsError
from archerfish.serve import wire

from .hosting import GREEDY, Raw, WordEncoder, add_encoder, make_host, stats, talking, until_free, whole

pytestmark = pytest.mark.anyio
TEXT = st.text(st.characters(codec="utf-8"), max_size=20)
IDS = st.lists(st.integers(0, 2**32 - 1), max_size=8)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | TEXT
    | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
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


LOGPROBS = st.lists(
    st.tuples(st.integers(0, 99), st.floats(-9, 0), st.integers(1, 9), st.just([(1, -0.5)])), max_size=3
)


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


def test_unknown_and_missing_fields() -> None:
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
    told = wire.Failed.of("1", TooManyRequestsError("The queue is full.", hint="Wait."), 3.0)
    assert (told.status, told.code, told.retry_after_s) == (429, "too_many_requests", 3.0)
    assert (told.message, told.hint) == ("The queue is full.", "Wait.")
    assert wire.Failed.of("1", InputTooLargeError("Long.")).status == 413
    told = wire.Failed.of("1", RuntimeError("the password is 1234"))
    assert told.status == 500
    assert "1234" not in repr(told)


# EngineHost and plain sockets


DOCUMENT = Path(__file__).parents[2] / "docs" / "wire.md"


async def test_documented_python_client_gets_a_streamed_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    codec = types.ModuleType("msgpack")
    codec.packb, codec.unpackb = msgspec.msgpack.encode, msgspec.msgpack.decode  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "msgpack", codec)
    host = make_host(tmp_path, open_address="tcp://127.0.0.1:*", llm={"has_text": True})
    script = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)[0]
    async with talking(host) as client:
        _, expected = await whole(client, prompt="Once upon a time", params={"max_tokens": 16, "seed": 3})
        address = host.open_address
        code = script.replace("tcp://127.0.0.1:5555", address).replace(
            '"max_tokens": 16', '"max_tokens": 16, "seed": 3'
        )
        await asyncio.to_thread(exec, code, {})
        assert capsys.readouterr().out == expected.outputs[0].text


@pytest.mark.parametrize("kind", [zmq.REQ, zmq.DEALER])
async def test_first_frame_of_a_client_is_its_answer(tmp_path: Path, kind: int) -> None:
    """The host must not send other frames, even when it finds out which clients have disconnected."""
    host, encoder = make_host(tmp_path), WordEncoder()
    add_encoder(host, encoder)
    async with talking(host) as client:
        encoder.gate.clear()
        asking, leaving = Raw(host.config.address, kind), Raw(host.config.address)
        for raw in (asking, leaving):
            raw.send_message(wire.EmbedRequest(request_id="mine", texts=["a"]))
        while (await stats(client))["host"]["live_requests"] < 3:
            pass
        leaving.close()
        while not (await stats(client))["host"]["lost_clients"]:
            pass
        encoder.gate.set()
        answer = await asyncio.to_thread(asking.receive)
        assert isinstance(answer, wire.Vectors) and answer.request_id == "mine"
        asking.close()


async def test_frames_that_are_no_message_get_an_error(tmp_path: Path) -> None:
    host = make_host(tmp_path)
    async with talking(host):
        raw = Raw(host.config.address)
        ping = wire.encode(wire.Ping(request_id="1"))
        for frames in ([b"", b"nonsense"], [b"nonsense"], [b""], [b"", b"", b""], [b"x", ping]):
            raw.send(*frames)
            answer = raw.receive()
            assert isinstance(answer, wire.Failed)
            assert (answer.request_id, answer.code, answer.status) == ("", "undecodable_message", 400)
        payload = wire._encoder.encode({"type": "generate", "v": 99, "request_id": "7"})
        raw.send(b"", payload)
        assert raw.receive().request_id == "7"
        raw.send_message(wire.Ping(request_id="1"))
        assert raw.receive() == wire.Pong(v=1, request_id="1")
        raw.close()


def fuzzed(count: int, seed: int) -> list[list[bytes]]:
    """Messages with changed, removed and added bytes, and random frames."""
    rng = np.random.default_rng(seed)
    good = [
        wire.encode(message)
        for message in (
            wire.GenerationRequest(request_id="1", token_ids=[1, 2], params={"max_tokens": 2}, stream=True),
            wire.GenerationRequest(
                request_id="2", messages=[{"role": "user", "content": "a"}], template_options={"tools": []}
            ),
            wire.GenerationRequest(
                request_id="3", prompt="text", params={"logit_bias": {"1": 2}, "stop": ["a"], "n": 2}
            ),
            wire.EmbedRequest(request_id="4", texts=["a", [1, 2]], normalize=True),
            wire.ClassifyRequest(request_id="5", texts=["q", ("q", "d")]),
            wire.ExplainRequest(request_id="6", token_ids=[1]),
            wire.Configure(request_id="7", options={"max_queue_size": 9}),
            wire.Cancel(request_id="1"),
            wire.Query(request_id="8", about="models"),
            wire.Ping(request_id="9", probe=""),
        )
    ]
    made = []
    for _ in range(count):
        payload = bytearray(good[rng.integers(len(good))])
        for _ in range(rng.integers(1, 4)):
            place, kind = int(rng.integers(len(payload) + 1)), rng.integers(4)
            if kind == 0 and place < len(payload):
                payload[place] = int(rng.integers(256))
            elif kind == 1:
                del payload[place : place + int(rng.integers(1, 9))]
            elif kind == 2:
                payload[place:place] = rng.bytes(int(rng.integers(1, 9)))
            else:
                payload = bytearray(rng.bytes(int(rng.integers(40)))) if rng.integers(4) == 0 else payload
        frames = [b"", bytes(payload)]
        if rng.integers(20) == 0:
            frames = [rng.bytes(int(rng.integers(5))) for _ in range(rng.integers(1, 5))]
        made.append(frames)
    return made


@pytest.mark.parametrize("count", [1000, pytest.param(100_000, marks=pytest.mark.slow)])
async def test_fuzzed_frames_do_not_end_the_host(tmp_path: Path, count: int) -> None:
    host = make_host(tmp_path, llm={"has_text": True, "max_num_batched_tokens": 64, "max_model_len": 64})
    (tmp_path / "tiny" / "chat_template.jinja").write_text("{{ messages[0]['content'] }}{{ tools }}")
    add_encoder(host, WordEncoder())
    statuses: set[int] = set()
    async with talking(host) as client:
        raw = Raw(host.config.address)
        for number, frames in enumerate(fuzzed(count, seed=count)):
            raw.send(*frames)
            if number % 200 == 199:
                raw.send_message(wire.Ping(request_id=f"mark {number}"))
                while (answer := raw.receive()) != wire.Pong(v=1, request_id=f"mark {number}"):
                    if isinstance(answer, wire.Failed):
                        statuses.add(answer.status)
        raw.close()
        await until_free(client)
        assert (await whole(client, token_ids=[5, 6], params=GREEDY))[1].num_output_tokens == 8
    assert 400 in statuses
    assert 500 not in statuses
