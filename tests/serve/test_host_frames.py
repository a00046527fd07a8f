"""EngineHost: frames that are no messages, or no good ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from archerfish.serve import wire
from archerfish.serve.client import AsyncClient
from archerfish.serve.wire import (
    Cancel,
    Configure,
    EmbedRequest,
    ExplainRequest,
    Failed,
    GenerationRequest,
    Ping,
    Pong,
    Query,
    ScoreRequest,
)
from tests.serve.hosting import (
    GREEDY,
    Raw,
    WordEncoder,
    add_encoder,
    add_llm,
    make_host,
    talk,
    until_free,
    whole,
)


def test_what_is_no_message_is_answered_with_an_error(tmp_path: Path) -> None:
    host = make_host(tmp_path)

    async def test(client: AsyncClient) -> None:
        raw = Raw(host.config.address)
        for frames in ([b"", b"nonsense"], [b"nonsense"], [b""], [b"", b"", b""], [b"x", wire.encode(Ping(request_id="1"))]):
            raw.send(*frames)
            answer = raw.receive()
            assert isinstance(answer, Failed)
            assert (answer.request_id, answer.code, answer.status) == ("", "undecodable_message", 400)
        payload = wire._encoder.encode({"type": "generate", "v": 99, "request_id": "7"})
        raw.send(b"", payload)
        assert raw.receive().request_id == "7"
        raw.send_message(Ping(request_id="1"))
        assert raw.receive() == Pong(v=1, request_id="1")
        raw.close()

    talk(host, test)


def fuzzed(count: int, seed: int) -> list[list[bytes]]:
    """Messages with bytes changed, cut out and put in, and frames of no sense at all."""
    rng = np.random.default_rng(seed)
    good = [
        wire.encode(message)
        for message in (
            GenerationRequest(request_id="1", token_ids=[1, 2], params={"max_tokens": 2}, stream=True),
            GenerationRequest(request_id="2", messages=[{"role": "user", "content": "a"}], template_options={"tools": []}),
            GenerationRequest(request_id="3", prompt="text", params={"logit_bias": {"1": 2}, "stop": ["a"], "n": 2, "seed": 3}),
            EmbedRequest(request_id="4", texts=["a", [1, 2]], normalize=True),
            ScoreRequest(request_id="5", query="q", documents=["d"]),
            ExplainRequest(request_id="6", token_ids=[1]), Configure(request_id="7", options={"max_queue_size": 9}),
            Cancel(request_id="1"), Query(request_id="8", about="models"), Ping(request_id="9", probe=""),
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


def run_fuzz(tmp_path: Path, count: int) -> None:
    host = make_host(tmp_path)
    add_llm(host, tmp_path, has_text=True, max_num_batched_tokens=64, max_model_len=64)
    (tmp_path / "tiny" / "chat_template.jinja").write_text("{{ messages[0]['content'] }}{{ tools }}")
    add_encoder(host, WordEncoder())
    statuses: set[int] = set()

    async def test(client: AsyncClient) -> None:
        raw = Raw(host.config.address)
        for number, frames in enumerate(fuzzed(count, seed=count)):
            raw.send(*frames)
            if number % 200 == 199:
                raw.send_message(Ping(request_id=f"mark {number}"))
                while (answer := raw.receive()) != Pong(v=1, request_id=f"mark {number}"):
                    if isinstance(answer, Failed):
                        statuses.add(answer.status)
        raw.close()
        await until_free(client)
        assert (await whole(client, token_ids=[5, 6], params=GREEDY))[1].num_output_tokens == 8

    talk(host, test)
    assert 400 in statuses
    assert 500 not in statuses


def test_fuzzed_frames_never_end_the_host(tmp_path: Path) -> None:
    run_fuzz(tmp_path, 1000)


@pytest.mark.slow
def test_many_fuzzed_frames_never_end_the_host(tmp_path: Path) -> None:
    run_fuzz(tmp_path, 100_000)
