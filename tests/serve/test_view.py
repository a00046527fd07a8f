"""GET /v1/cache/view over real hosts: a tiny Llama, an RWKV-7, two replicas."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from archerfish.engine.outputs import RequestMetrics
from archerfish.serve.history import MAX_REQUESTS, History
from archerfish.serve.tenants import add_key
from archerfish.serve.wire import Query
from tests.engine.tiny_rwkv import save_tiny_rwkv

from .client import PASS, error_of, host_with, serving
from .hosting import GREEDY, LONG, WordEncoder, add_llm, failure, llm_host, talking

pytestmark = pytest.mark.anyio
RWKV: dict[str, Any] = {"load_format": "dummy", "dtype": "float32", "memory_budget_gib": 0.05, "block_size": 16}
PROMPT = "the same words of a prompt, long enough for several blocks of the cache: 0123456789 0123456789"


async def view_of(client: httpx.AsyncClient, **query: str) -> dict[str, Any]:
    answer = await client.get("/v1/cache/view", params=query)
    assert answer.status_code == 200, answer.text
    [found] = answer.json()["replicas"]
    assert sum(count for _, count in found["blocks"]["runs"]) == found["blocks"]["total"]
    return dict(found)


async def view_with(client: httpx.AsyncClient, wanted: Any) -> dict[str, Any]:
    """The first view for which something holds: views are kept for a moment."""
    while not wanted(found := await view_of(client)):
        await asyncio.sleep(0.01)
    return found


def kinds(view: dict[str, Any]) -> dict[str, int]:
    found: dict[str, int] = {}
    for kind, count in view["blocks"]["runs"]:
        found[kind] = found.get(kind, 0) + count
    return found


async def test_view_shows_blocks_nodes_and_why_requests_hit(tmp_path: Path) -> None:
    host = host_with(tmp_path, llm={"has_text": True})
    body = {"prompt": PROMPT, **GREEDY}
    async with serving(host) as client:
        empty = await view_of(client)
        assert kinds(empty) == {"free": empty["blocks"]["total"]}
        assert empty["requests"] == empty["nodes"] == [] and empty["ttft_p50_s"] is None
        first = (await client.post("/v1/completions", json=body)).json()
        second = (await client.post("/v1/completions", json=body)).json()
        view = await view_with(client, lambda view: len(view["requests"]) == 2)
        newer, older = view["requests"]
        for shown, answer in ((older, first), (newer, second)):
            usage = answer["usage"]
            assert (
                shown["prompt_tokens"] == usage["prompt_tokens"]
                and shown["output_tokens"] == usage["completion_tokens"]
            )
            assert shown["cached_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]
            assert shown["finish_reason"] == answer["choices"][0]["finish_reason"]
        assert older["reason"] == "never_seen" and "have not been seen" in older["why"]
        assert (
            newer["reason"] == "full" and newer["why"] == f"All {newer['prompt_tokens']:,} tokens came from the cache."
        )
        assert min(older["queue_ms"], older["prefill_ms"], older["decode_ms"]) >= 0 < older["decode_ms"]
        assert kinds(view)["cached"] > 0 and "running" not in kinds(view)
        node = view["nodes"][0]
        assert PROMPT.startswith(node["text"].removeprefix("<s>").strip()) and len(node["text"]) > 20
        assert node["hits"] == 1 and view["num_nodes"] == len(view["nodes"]) > 0
        assert view["ttft_p50_s"] <= view["ttft_p99_s"] and view["inter_token_p50_s"] > 0
        assert view["cached_tokens"] == newer["cached_tokens"]
        assert view["cached_tokens"] + view["computed_tokens"] == 2 * newer["prompt_tokens"]
        assert (await view_of(client, model="tiny"))["requests"][0]["why"] == newer["why"]


async def test_view_shows_running_requests(tmp_path: Path) -> None:
    host = host_with(tmp_path, llm={"has_text": True, "max_len": 4096})
    async with serving(host) as client:
        body = {"prompt": PROMPT, **LONG, "max_tokens": 3000}
        tasks = [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(3)]
        view = await view_with(client, lambda view: view["num_running"] == 3 and view["inter_token_p99_s"])
        assert kinds(view)["running"] > 0 and view["kv_usage"] > 0
        assert any(node["locks"] for node in view["nodes"])
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        view = await view_with(client, lambda view: not view["num_running"] and len(view["requests"]) == 3)
        assert {one["finish_reason"] for one in view["requests"]} == {"abort"}
        assert "running" not in kinds(view) and view["kv_usage"] == 0


async def test_states_of_recurrent_models_are_shown(tmp_path: Path) -> None:
    host = host_with(tmp_path)
    (tmp_path / "tiny").mkdir()
    save_tiny_rwkv(tmp_path / "tiny")
    add_llm(host, tmp_path, **RWKV)
    async with serving(host) as client:
        body = {"prompt": [*range(1, 60)], **GREEDY}
        for _ in range(2):
            assert (await client.post("/v1/completions", json=body)).status_code == 200
        view = await view_with(client, lambda view: len(view["requests"]) == 2)
        assert kinds(view)["cached"] > 0 and view["blocks"]["block_tokens"] > 1
        assert view["requests"][0]["reason"] and view["nodes"][0]["text"] == ""


async def test_errors_of_view(tmp_path: Path) -> None:
    host = host_with(tmp_path, WordEncoder("words"), llm={})
    async with serving(host) as client:
        for name, status in (("words", 400), ("other", 404)):
            answer = await client.get("/v1/cache/view", params={"model": name})
            assert answer.status_code == status and error_of(answer)["param"] == "model"


async def test_view_over_the_wire_needs_no_operator(tmp_path: Path) -> None:
    """A client that is no front end sees what is its own: its key is its tenant."""
    host, _ = llm_host(tmp_path)
    async with talking(host) as client:
        host.models.entries[0].hosted, hosted = None, host.models.entries[0].hosted
        assert "is not loaded" in (await failure(client, Query(request_id="", about="view"))).message
        host.models.entries[0].hosted = hosted
        answer: Any = await client.ask(Query(request_id="", about="view", credentials="a key"))
        assert dict(answer.values["blocks"]["runs"]) == {"hidden": answer.values["blocks"]["total"]}
        refused = await failure(client, Query(request_id="", about="view", tenant="alice", credentials="a key"))
        assert refused.code == "not_allowed"


async def test_only_known_operators_see_all(tmp_path: Path) -> None:
    """A name that a front end sends, and that the file of keys has no longer, is nobody's."""
    keys = tmp_path / "keys.toml"
    for name, is_operator in (("alice", False), ("boss", True)):
        add_key(keys, name, is_operator=is_operator)
    host = host_with(tmp_path, llm={}, api_keys_file=str(keys))
    async with talking(host) as client:
        for name, kind in (("boss", "free"), ("alice", "hidden"), ("gone", "hidden"), ("", "hidden")):
            answer: Any = await client.ask(Query(request_id="", about="view", tenant=name, credentials=PASS))
            assert list(dict(answer.values["blocks"]["runs"])) == [kind], name


def test_requests_are_bounded_and_mixed_figures_are_nobodys() -> None:
    now = [50.0]
    history = History(lambda: now[0])
    result: Any = SimpleNamespace(metrics=RequestMetrics(), hit=None, num_cached_tokens=0, finish_reason="deadline")
    for number in range(2 * MAX_REQUESTS):
        now[0] += 1
        history.ended("alice", result)
        history.recent["alice" if number % 2 else "other"].gaps(now[0], 0.01 if number % 2 else 10.0)
    shown = history.requests("alice")
    assert len(shown) == MAX_REQUESTS and [one["ended_s_ago"] for one in shown[:3]] == [0, 1, 2]
    assert (shown[0]["reason"], shown[0]["why"], shown[0]["finish_reason"]) == ("", "", "deadline")
    assert history.requests("bob") == []
    p99 = "inter_token_p99_s"
    assert history.figures("alice", sees_all=False)[p99] == pytest.approx(0.01, rel=0.03)
    assert history.figures("other", sees_all=False)[p99] is None is history.figures("bob", sees_all=False)[p99]
    assert history.figures("alice", sees_all=True)[p99] == pytest.approx(10, rel=0.03)
