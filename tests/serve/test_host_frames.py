"""EngineHost and plain sockets: the documented client, unsolicited frames, and frames that are no messages."""

from __future__ import annotations

import asyncio
import re
import sys
import types
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq

from archerfish.serve import wire
from tests.serve.hosting import GREEDY, Raw, WordEncoder, add_encoder, add_llm, make_host, stats, talking, until_free, whole

pytestmark = pytest.mark.anyio
DOCUMENT = Path(__file__).parents[2] / "docs" / "wire.md"


async def test_documented_python_client_gets_a_streamed_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    codec = types.ModuleType("msgpack")
    codec.packb, codec.unpackb = msgspec.msgpack.encode, msgspec.msgpack.decode  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "msgpack", codec)
    host = make_host(tmp_path, open_address="tcp://127.0.0.1:*")
    add_llm(host, tmp_path, has_text=True)
    script = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)[0]
    async with talking(host) as client:
        _, expected = await whole(client, prompt="Once upon a time", params={"max_tokens": 16, "seed": 3})
        address = host.open_address
        code = script.replace("tcp://127.0.0.1:5555", address).replace('"max_tokens": 16', '"max_tokens": 16, "seed": 3')
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
            wire.GenerationRequest(request_id="2", messages=[{"role": "user", "content": "a"}], template_options={"tools": []}),
            wire.GenerationRequest(request_id="3", prompt="text", params={"logit_bias": {"1": 2}, "stop": ["a"], "n": 2}),
            wire.EmbedRequest(request_id="4", texts=["a", [1, 2]], normalize=True),
            wire.ScoreRequest(request_id="5", query="q", documents=["d"]),
            wire.ExplainRequest(request_id="6", token_ids=[1]), wire.Configure(request_id="7", options={"max_queue_size": 9}),
            wire.Cancel(request_id="1"), wire.Query(request_id="8", about="models"), wire.Ping(request_id="9", probe=""),
        )
    ]  # fmt: skip
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
    host = make_host(tmp_path)
    add_llm(host, tmp_path, has_text=True, max_num_batched_tokens=64, max_model_len=64)
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
