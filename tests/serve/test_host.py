"""EngineHost: requests over a socket, from several clients, of all kinds, also bad ones."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from archerfish.errors import InvalidInputError
from archerfish.params import SamplingParams
from archerfish.sched.masks import PendingMask
from archerfish.serve import wire
from archerfish.serve.client import AsyncClient
from archerfish.serve.tenants import add_key
from tests.cache.invariants import check_cache
from tests.engine.tiny_llama import prompts

from .hosting import (
    ENDLESS,
    GREEDY,
    LONG,
    Raw,
    WordEncoder,
    failure,
    llm_host,
    make_host,
    stats,
    talking,
    until_free,
    whole,
)

pytestmark = pytest.mark.anyio

# Generation


async def test_concurrent_answers_equal_those_of_the_engine(tmp_path: Path) -> None:
    """Three clients use the same request ids; every second answer is streamed."""
    host, engine = llm_host(tmp_path)
    many = prompts(24)
    expected = [output.token_ids for output in engine.generate(many, SamplingParams(**GREEDY))]
    async with talking(host) as first, AsyncClient(host.address) as second, AsyncClient(host.address) as third:
        answers = await asyncio.gather(
            *(
                whole(client, request_id=str(i // 3), token_ids=prompt, stream=i % 2 == 0)
                for i, (client, prompt) in enumerate(zip([first, second, third] * 8, many, strict=True))
            )
        )
    for i, (prompt, (chunks, last)) in enumerate(zip(many, answers, strict=True)):
        streamed = [token for chunk in chunks for token in chunk.token_ids]
        assert (streamed, last.outputs[0].token_ids) == ((expected[i], []) if i % 2 == 0 else ([], expected[i]))
        assert (last.num_prompt_tokens, last.num_output_tokens) == (len(prompt), 8)
        assert last.outputs[0].finish_reason == "length"
        assert last.prompt_token_ids is None
        assert last.metrics["ttft_ms"] >= 0


async def test_text_prompt_gets_a_text_answer(tmp_path: Path) -> None:
    host, engine = llm_host(tmp_path, has_text=True)
    expected = engine.generate("the cats", SamplingParams(**GREEDY))[0]
    async with talking(host) as client:
        chunks, last = await whole(client, prompt="the cats", stream=True)
        assert "".join(chunk.text for chunk in chunks) == expected.text
        assert last.prompt_token_ids == expected.prompt_token_ids
        _, last = await whole(client, prompt="the cats")
        assert last.outputs[0].text == expected.text
        _, last = await whole(client, prompt="the cats", wants_ids=True)
        assert (last.outputs[0].text, last.outputs[0].token_ids) == ("", expected.token_ids)


async def test_limit_of_output_tokens_lowers_max_tokens_with_a_remark(tmp_path: Path) -> None:
    host = make_host(tmp_path, llm={}, admission={"max_output_tokens": 6})
    async with talking(host) as client:
        for asked, n, num_tokens, is_remarked in (
            (50, 1, 6, True),
            (50, 2, 6, True),
            (6, 1, 6, False),
            (None, 1, 6, False),
        ):
            params = {"max_tokens": asked, "n": n, "ignore_eos": True}
            _, last = await whole(client, token_ids=[5, 6], params=params, stream=n == 2)
            said = [f"max_tokens was lowered from 50 to {6 // n}, the limit of this server"]
            assert (last.num_output_tokens, last.remarks) == (num_tokens, said if is_remarked else [])
        message = wire.GenerationRequest(request_id="x", token_ids=[5], params={"n": 7})
        assert (await failure(client, message)).code == "input_too_large"


@pytest.mark.parametrize("wants_ids", [False, True])
async def test_stop_string_is_the_stop_reason(tmp_path: Path, wants_ids: bool) -> None:
    host, engine = llm_host(tmp_path, has_text=True)
    plain = engine.generate("the cats", SamplingParams(**{**LONG, "max_tokens": 40}))[0]
    stop = plain.text[4:7]
    expected = engine.generate("the cats", SamplingParams(**{**LONG, "max_tokens": 40, "stop": stop}))[0]
    assert expected.outputs[0].stop_reason == stop
    async with talking(host) as client:
        params = {**LONG, "max_tokens": 40, "stop": stop}
        chunks, last = await whole(client, prompt="the cats", stream=True, params=params, wants_ids=wants_ids)
        assert "".join(chunk.text for chunk in chunks) == ("" if wants_ids else expected.text)
        assert (chunks[-1].finish_reason, chunks[-1].stop_reason) == ("stop", stop)
        assert (last.outputs[0].finish_reason, last.outputs[0].stop_reason) == ("stop", stop)
        assert [token for chunk in chunks for token in chunk.token_ids] == expected.token_ids
        await until_free(client)


async def test_several_sequences_with_logprobs(tmp_path: Path) -> None:
    host = make_host(tmp_path, llm={})
    async with talking(host) as client:
        params: dict[str, Any] = {"n": 3, "max_tokens": 5, "temperature": 1.0, "seed": 5, "ignore_eos": True}
        params |= {"logprobs": 2, "prompt_logprobs": 1}
        chunks, last = await whole(client, token_ids=[5, 6, 7], stream=True, params=params)
        assert sorted(output.index for output in last.outputs) == [0, 1, 2]
        for output in last.outputs:
            told = [one for chunk in chunks if chunk.index == output.index for one in chunk.logprobs or []]
            assert len(told) == 5
            assert output.cumulative_logprob == pytest.approx(sum(one[1] for one in told))
            assert all(len(one[3]) == 2 for one in told)
        assert last.prompt_logprobs is not None
        assert [one[0] for one in last.prompt_logprobs] == [6, 7]
        _, again = await whole(client, token_ids=[5, 6, 7], params=params)
        assert [output.token_ids for output in again.outputs] == [
            [token for chunk in chunks if chunk.index == i for token in chunk.token_ids] for i in range(3)
        ]


async def test_messages_are_rendered_with_the_chat_template(tmp_path: Path) -> None:
    host, engine = llm_host(tmp_path, has_text=True)
    (tmp_path / "tiny" / "chat_template.jinja").write_text("{{ messages[0]['content'] }}{% if loud %} cats{% endif %}")
    messages = [{"role": "user", "content": "the cat"}]
    async with talking(host) as client:
        _, last = await whole(client, messages=messages, template_options={"loud": True})
        assert last.prompt_token_ids == engine.render_chat(messages, loud=True)
        for name in ("tokenizer", "messages"):
            error = await failure(
                client, wire.GenerationRequest(request_id="", messages=messages, template_options={name: 1})
            )
            assert error.status == 400


# Cancellation and stopping


async def test_closing_a_stream_frees_its_blocks(tmp_path: Path) -> None:
    host, engine = llm_host(tmp_path, max_len=4096)
    async with talking(host) as client:
        for _ in range(3):
            request = wire.GenerationRequest(request_id="", token_ids=prompts(1)[0], params=ENDLESS, stream=True)
            stream = client.generate(request)
            async for _ in stream:
                break
            await stream.aclose()
        found = await until_free(client)
        assert found["models"]["tiny"]["aborted_requests"] == 3
        assert found["host"]["live_requests"] == 1  # the query itself
    check_cache(engine.scheduler.cache, [])


async def test_request_cancelled_before_tokenizing_never_runs(tmp_path: Path) -> None:
    host = make_host(tmp_path, llm={"has_text": True})
    gate = threading.Event()
    for _ in range(2):
        host.reader.submit(gate.wait)
    async with talking(host) as client:
        raw = Raw(host.config.address)
        raw.send_message(wire.GenerationRequest(request_id="1", prompt="the cat", params=LONG))
        raw.send_message(wire.Cancel(request_id="1"))
        raw.send_message(wire.Cancel(request_id="never there"))
        raw.send_message(wire.Ping(request_id="2"))
        assert raw.receive() == wire.Pong(v=1, request_id="2")
        gate.set()
        await whole(client, prompt="the cat")  # the same threads have read this one after it
        found = await until_free(client)
        assert found["models"]["tiny"]["total_requests"] == 1
        raw.close()


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_disconnected_client_frees_its_blocks(tmp_path: Path, is_streamed: bool) -> None:
    host, engine = llm_host(tmp_path, max_len=4096, max_cache_tokens=16384)
    async with talking(host) as client:
        raw = Raw(host.config.address)
        for number, prompt in enumerate(prompts(4)):
            fields: dict[str, Any] = {"token_ids": prompt, "params": ENDLESS, "stream": is_streamed}
            raw.send_message(wire.GenerationRequest(request_id=str(number), **fields))
        while (await stats(client))["models"]["tiny"]["num_running"] < 4:
            pass
        raw.close()
        while not (await stats(client))["host"]["lost_clients"]:
            pass
        found = await until_free(client)
        assert found["models"]["tiny"]["aborted_requests"] == 4
    check_cache(engine.scheduler.cache, [])


async def test_slow_grammars_do_not_delay_other_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host, engine = llm_host(tmp_path, WordEncoder(), has_text=True)
    may_end = threading.Event()

    def compile_slowly(grammar: Any) -> Any:
        assert may_end.wait(60)
        raise InvalidInputError("The grammar is not valid.")

    monkeypatch.setattr(engine.grammars, "compile", compile_slowly)
    async with talking(host) as client:
        grammar = {"grammar": {"kind": "regex", "value": "a+"}}
        request = wire.GenerationRequest(request_id="", prompt="a", params=grammar)
        slow = [asyncio.create_task(failure(client, request)) for _ in range(9)]
        _, last = await whole(client, prompt="the cats")
        assert last.num_output_tokens == 8
        await client.ask(wire.EmbedRequest(request_id="", texts=["a"]))
        may_end.set()
        assert {error.status for error in await asyncio.gather(*slow)} == {400}


async def test_loop_wakes_when_a_mask_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise each token of a tool call or a schema takes as long as the loop sleeps."""
    fill = PendingMask._fill

    def fill_slowly(*args: Any) -> None:
        time.sleep(0.05)  # so that the loop sleeps by then
        fill(*args)

    monkeypatch.setattr(PendingMask, "_fill", fill_slowly)
    monkeypatch.setattr("archerfish.serve.host.IDLE_POLL_MS", 1_000_000)
    host, _ = llm_host(tmp_path, has_text=True)
    async with talking(host) as client, asyncio.timeout(30):
        _, last = await whole(
            client, prompt="a", params={"grammar": {"kind": "regex", "value": "abc"}, "max_tokens": 8}
        )
    assert last.outputs[0].text == "abc"


async def test_stop_finishes_running_requests(tmp_path: Path) -> None:
    host = make_host(tmp_path, llm={"max_len": 4096})
    async with talking(host) as client:
        stream = client.generate(wire.GenerationRequest(request_id="", token_ids=[5, 6], params=LONG, stream=True))
        await anext(stream)
        host.stop()
        error = await failure(client, wire.GenerationRequest(request_id="", token_ids=[5, 6]))
        assert (error.status, error.code) == (503, "stopped")
        assert error.retry_after_s is not None
        parts = [part async for part in stream]
        assert isinstance(parts[-1], wire.Generated)
        assert parts[-1].num_output_tokens == 200


# Errors


BAD_REQUESTS: list[tuple[Any, int]] = [
    (wire.GenerationRequest(request_id="", model="nobody", token_ids=[1]), 404),
    (wire.GenerationRequest(request_id="", model="words", token_ids=[1]), 400),
    (wire.GenerationRequest(request_id=""), 400),
    (wire.GenerationRequest(request_id="", token_ids=[1], prompt="x"), 400),
    (wire.GenerationRequest(request_id="", prompt="no tokenizer here"), 400),
    (wire.GenerationRequest(request_id="", messages=[{"role": "user", "content": "no template here"}]), 400),
    (wire.GenerationRequest(request_id="", token_ids=[]), 400),
    (wire.GenerationRequest(request_id="", token_ids=[96]), 400),
    (wire.GenerationRequest(request_id="", token_ids=[1] * 300), 413),
    (wire.GenerationRequest(request_id="", token_ids=[1], params={"temperatur": 1}), 400),
    (wire.GenerationRequest(request_id="", token_ids=[1], params={"temperature": "hot"}), 400),
    (wire.GenerationRequest(request_id="", token_ids=[1], deadline_s=-1.0), 400),
    (wire.GenerationRequest(request_id="", token_ids=[1], tenant="alice"), 403),
    (wire.EmbedRequest(request_id="", model="tiny", texts=["a"]), 400),
    (wire.EmbedRequest(request_id="", model="words", texts=["unreadable"]), 400),
    (wire.EmbedRequest(request_id="", model="pairs", texts=["a"]), 400),
    (wire.ClassifyRequest(request_id="", model="tiny", texts=["a"]), 400),
    (wire.ExplainRequest(request_id="", model="words", token_ids=[1]), 400),
    (wire.ExplainRequest(request_id="", model="tiny"), 400),
    (wire.Query(request_id="", about="secrets"), 400),
    (wire.Configure(request_id="", model="tiny", options={"model": "other"}), 400),
    (wire.Configure(request_id="", model="tiny", options={"max_queue_size": 0}), 400),
    (wire.Configure(request_id="", model="words", options={"max_queue_texts": "many"}), 400),
    (wire.Ping(request_id="", probe="nobody"), 404),
]


async def test_bad_requests_fail_with_the_right_status(tmp_path: Path) -> None:
    host = make_host(tmp_path, WordEncoder(), WordEncoder("pairs", is_cross_encoder=True), llm={})
    async with talking(host) as client:
        for message, status in BAD_REQUESTS:
            error = await failure(client, message)
            assert (error.status, error.message != "") == (status, True), message
            assert (await stats(client))["host"]["live_requests"] == 1


async def test_unknown_model_error_lists_only_visible_models(tmp_path: Path) -> None:
    host = make_host(tmp_path, WordEncoder())
    host.models.entries[-1].aliases = ("/home/ann/.cache/words-float32-1a2b",)
    async with talking(host) as client:
        error = await failure(client, wire.EmbedRequest(request_id="", model="wrods", texts=["a"]))
        assert (error.code, error.param) == ("model_not_found", "model")
        assert "'words'" in error.hint
        assert (
            await failure(client, wire.EmbedRequest(request_id="", model="gpt-4", texts=["a"]))
        ).hint == "Known: words."


async def test_host_refuses_a_request_id_in_use(tmp_path: Path) -> None:
    encoder = WordEncoder()
    host = make_host(tmp_path, encoder)
    async with talking(host):
        raw = Raw(host.config.address)
        encoder.gate.clear()
        raw.send_message(wire.EmbedRequest(request_id="1", texts=["a"]))
        raw.send_message(wire.EmbedRequest(request_id="1", texts=["b"]))
        refused = raw.receive()
        assert isinstance(refused, wire.Failed)
        assert (refused.request_id, refused.status) == ("1", 400)
        encoder.gate.set()
        assert isinstance(raw.receive(), wire.Vectors)
        raw.send_message(wire.EmbedRequest(request_id="1", texts=["c"]))
        assert isinstance(raw.receive(), wire.Vectors)
        raw.close()
    assert encoder.jobs == [["a"], ["c"]]


async def test_full_queue_error_has_retry_after(tmp_path: Path) -> None:
    encoder = WordEncoder()
    host = make_host(tmp_path, encoder, llm={"max_queue_size": 2, "max_num_seqs": 1})
    async with talking(host) as client:
        encoder.gate.clear()
        embed = asyncio.create_task(client.ask(wire.EmbedRequest(request_id="", texts=["a"])))
        assert await asyncio.to_thread(encoder.entered.acquire)
        texts = [asyncio.create_task(whole(client, token_ids=[5], params=LONG)) for _ in range(2)]
        while True:  # until one text is in its first step, behind the vectors, and one waits: neither has a token yet
            found = (await stats(client))["models"]["tiny"]
            if found["num_running"] and found["queue_size"]:
                break
        error = await failure(client, wire.GenerationRequest(request_id="", token_ids=[7], params=LONG))
        assert (error.status, error.code) == (503, "overloaded")
        assert error.retry_after_s is not None and error.retry_after_s >= 1
        encoder.gate.set()
        for text in texts:
            text.cancel()
        await embed
        await until_free(client)


async def test_failing_step_fails_only_its_own_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host, engine = llm_host(tmp_path)
    forward = engine.runner._forward

    def break_once(*_: Any) -> Any:
        monkeypatch.setattr(engine.runner, "_forward", forward)
        raise RuntimeError("the secret is 1234")

    async with talking(host) as client:
        monkeypatch.setattr(engine.runner, "_forward", break_once)
        error = await failure(client, wire.GenerationRequest(request_id="", token_ids=[5, 6]))
        assert error.status == 500
        assert "1234" not in str(error)
        await whole(client, token_ids=[5, 6])
        await until_free(client)


# Tenants


async def test_tenants_share_no_cached_tokens(tmp_path: Path) -> None:
    host = make_host(tmp_path, front_end_pass="the pass", llm={})
    prompt = prompts(1, least=50)[0]
    async with talking(host) as client:

        async def ask(**fields: Any) -> wire.Generated:
            return (await whole(client, token_ids=prompt, **fields))[1]

        async def matched(**fields: Any) -> int:
            report = await client.ask(wire.ExplainRequest(request_id="", token_ids=prompt, **fields))
            assert isinstance(report, wire.Report)
            found: int = report.values["num_matched"]
            return found

        first = await ask(credentials="key a")
        for other in ({"credentials": "key b"}, {}, {"credentials": "the pass", "tenant": "c"}):
            assert await matched(**other) == 0
            answer = await ask(**other)
            assert answer.num_cached_tokens == 0
            assert answer.outputs == first.outputs
        assert await matched(credentials="key a") > 40
        assert (await ask(credentials="key a")).num_cached_tokens > 40
        assert (await ask(credentials="the pass", tenant="c")).num_cached_tokens > 40


async def test_only_front_ends_may_read_statistics(tmp_path: Path) -> None:
    host = make_host(tmp_path, front_end_pass="the pass", llm={})
    async with talking(host) as client:
        for credentials in ("", "the pas", "the pass "):
            for message in (
                wire.Query(request_id="", about="stats", credentials=credentials),
                wire.Query(request_id="", about="metrics", credentials=credentials),
                wire.Configure(request_id="", options={}, credentials=credentials),
                wire.GenerationRequest(request_id="", token_ids=[1], tenant="alice", credentials=credentials),
                wire.ExplainRequest(request_id="", token_ids=[1], tenant="alice", credentials=credentials),
            ):
                assert (await failure(client, message)).status == 403
        await client.ask(wire.Query(request_id="", about="models"))
        await stats(client, credentials="the pass")


# Limits


async def test_token_limits_of_a_tenant_are_enforced(tmp_path: Path) -> None:
    """Tokens are settled when a request ends, and a cancelled request gives its reservation back."""
    file = tmp_path / "keys.toml"
    key = add_key(file, "alice", tokens_per_minute=100)
    host = make_host(tmp_path, api_keys_file=str(file), llm={})
    async with talking(host) as client:
        big = wire.GenerationRequest(
            request_id="", token_ids=[5] * 40, params={**GREEDY, "max_tokens": 50}, credentials=key
        )
        assert (await failure(client, replace(big, credentials="another"))).status == 401
        stream = client.generate(replace(big, stream=True))
        await anext(stream)
        error = await failure(client, big)
        assert (error.status, error.code) == (429, "rate_limit_exceeded")
        await stream.aclose()
        small = replace(big, token_ids=[6], params=GREEDY)
        async for part in client.generate(small):
            assert isinstance(part, wire.Generated)
        await until_free(client)
