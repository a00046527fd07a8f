"""Tenants through the whole stack: none can detect another, and each has its limits.

All answers to one tenant are compared with those of a service that no other tenant has used, without times and random
ids.
"""

from __future__ import annotations

import asyncio
import json
import re
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from archerfish.serve.tenants import Tenants, add_key

from .client import PASS, WORDS, error_of, host_with, serving
from .fake_backend import TEMPLATE
from .hosting import FakeClock, WordEncoder, add_encoder, add_llm, hold, make_host

pytestmark = pytest.mark.anyio
PROMPT = "the same words of two tenants, long enough for several blocks of the cache: 0123456789 0123456789"
GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 12, "ignore_eos": True}
STREAMED: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
COMPLETION = {**GREEDY, "prompt": PROMPT, "logprobs": 2}
CHAT = {**GREEDY, "messages": [{"role": "user", "content": PROMPT}]}
MESSAGE = {"model": "tiny", "max_tokens": 12, "temperature": 0, "messages": CHAT["messages"]}
REQUESTS: list[tuple[str, str, dict[str, Any] | None]] = [
    ("POST", "/v1/cache/explain", {"model": "tiny", "prompt": PROMPT}),
    ("POST", "/v1/completions", COMPLETION),
    ("POST", "/v1/cache/explain", {"model": "tiny", "prompt": PROMPT}),
    ("POST", "/v1/completions", COMPLETION),
    ("POST", "/v1/completions", {**COMPLETION, "prompt": PROMPT + "!", **STREAMED}),
    ("POST", "/v1/chat/completions", CHAT),
    ("POST", "/v1/chat/completions", {**CHAT, **STREAMED}),
    ("POST", "/v1/responses", {"model": "tiny", "input": PROMPT, "max_output_tokens": 16, "temperature": 0}),
    ("POST", "/v1/messages", MESSAGE),
    ("POST", "/v1/messages/count_tokens", {"model": "tiny", "messages": CHAT["messages"]}),
    ("POST", "/v1/embeddings", {"model": WORDS, "input": [PROMPT, "other"]}),
    ("POST", "/v1/rerank", {"model": WORDS, "query": PROMPT, "documents": [PROMPT, "other"]}),
    ("POST", "/similarity", {"model": WORDS, "source": PROMPT, "sentences": [PROMPT, "other"]}),
    ("POST", "/tokenize", {"model": "tiny", "prompt": PROMPT}),
    ("POST", "/detokenize", {"model": "tiny", "tokens": [5, 6]}),
    ("POST", "/v1/completions", {**COMPLETION, "max_tokens": 100_000}),
    ("POST", "/v1/completions", {**COMPLETION, "model": "other"}),
    *(("GET", path, None) for path in ("/v1/cache/view", "/v1/models", "/v1/models/tiny", "/health", "/ready", "/")),
    *(("GET", path, None) for path in ("/metrics", "/stats", "/admin/optimization")),
]
# What differs from run to run with nobody else there: times, and what is drawn at random.
VARYING = re.compile(
    r'"(?:id|created|created_at|completed_at|seconds|item_id|tokens_per_second|age_s|ended_s_ago|(?:queue|prefill|decode)_ms'
    r'|(?:ttft|inter_token)_p\d+_s)":\s*(?:"[^"]*"|[\d.e+-]+)|(?:chatcmpl|cmpl|resp|msg)[-_][0-9a-f]+'
)
VARYING_HEADERS = ("date", "x-request-id")
EVERYONE = ("alice", "bob", "operator")
Seen = list[tuple[str, int, dict[str, str], str]]


def usage_of(seen: Seen, number: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(re.sub(r"~,?", "", seen[number][3]))["usage"]
    return found


async def look(client: httpx.AsyncClient, key: str) -> Seen:
    """Everything that a tenant can see."""
    seen: Seen = []
    for method, path, body in REQUESTS:
        answer = await client.request(method, path, json=body, headers={"Authorization": f"Bearer {key}"})
        headers = {name: value for name, value in answer.headers.items() if name not in VARYING_HEADERS}
        if '"seconds"' in answer.text or '"age_s"' in answer.text:
            del headers["content-length"]
        seen.append((f"{method} {path}", answer.status_code, headers, VARYING.sub("~", answer.text)))
    return seen


@dataclass
class Run:
    """What each caller saw, and the tokens and blocks that the cache holds at the end."""

    seen: dict[str, Seen] = field(default_factory=dict)
    held: tuple[int, int] = (0, 0)


class Stack:
    """A service of two tenants; results of `run` are kept."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.keys_file = directory, directory / "keys.toml"
        self.runs: dict[str, Run] = {}
        limits = {"requests_per_minute": 1000.0, "tokens_per_minute": 1e6}
        self.keys = {name: add_key(self.keys_file, name, **limits) for name in ("alice", "bob")}
        self.keys["operator"] = add_key(self.keys_file, "operator", is_operator=True)

    async def run(self, *callers: str, **options: Any) -> Run:
        """The answers to these callers of a fresh service."""
        name = f"{callers} {options}"
        if name not in self.runs:
            self.runs[name] = await self._run(callers, options)
        return self.runs[name]

    async def _run(self, callers: tuple[str, ...], options: dict[str, Any]) -> Run:
        found = Run()
        with tempfile.TemporaryDirectory() as place:
            host = make_host(Path(place), front_end_pass=PASS, api_keys_file=str(self.keys_file))
            engine = add_llm(host, self.directory, has_text=True, max_len=192)
            (self.directory / "tiny" / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
            add_encoder(host, WordEncoder(WORDS))

            async with serving(host, tenants=Tenants.from_file(self.keys_file), **options) as client:
                for caller in callers:
                    found.seen[caller] = await look(client, self.keys[caller])
                blocks = engine.scheduler.blocks
                found.held = engine.cache_stats().total_cached, blocks.num_total - blocks.num_free
        return found


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Stack:
    return Stack(tmp_path_factory.mktemp("stack"))


@pytest.mark.parametrize("options", [{}, {"result_cache_mib": 1}], ids=["plain", "with a result cache"])
async def test_answers_do_not_depend_on_other_tenants(stack: Stack, options: dict[str, Any]) -> None:
    alone = (await stack.run("bob", **options)).seen["bob"]
    both = (await stack.run(*EVERYONE, **options)).seen
    for expected, found in zip(alone, both["bob"], strict=True):
        assert found == expected
    for first, second in zip(both["alice"], both["bob"], strict=True):  # and equal answers to equal questions
        assert [second[0], second[1], second[3].replace("'bob'", "'alice'")] == [first[0], first[1], first[3]]
    assert {path: status for path, status, _, _ in alone if status >= 400} == {
        "POST /v1/completions": 404,
        "GET /metrics": 403,
        "GET /stats": 403,
        "GET /admin/optimization": 403,
    }


async def test_tenants_share_no_blocks(stack: Stack) -> None:
    one, three = await stack.run("bob"), await stack.run(*EVERYONE)
    assert one.held[0] > 0
    assert three.held == tuple(3 * number for number in one.held)
    cached = [usage_of(one.seen["bob"], number)["prompt_tokens_details"]["cached_tokens"] for number in (1, 3)]
    assert cached[0] == 0 < cached[1]  # the test would see a shared block, for it sees one's own


async def test_operator_figures_include_all_tenants(stack: Stack) -> None:
    """The figures differ, so the test above could detect a leak."""
    alone, both = (await stack.run("operator")).seen, (await stack.run(*EVERYONE)).seen
    places = [place for place, (_, path, _) in enumerate(REQUESTS) if path in ("/metrics", "/stats")]
    for place in places:
        assert alone["operator"][place][1] == both["operator"][place][1] == 200
        assert alone["operator"][place][3] != both["operator"][place][3]
        is_by_tenant = REQUESTS[place][1] == "/metrics"  # which only operators may read
        assert bool(re.search("alice|bob", both["operator"][place][3])) is is_by_tenant


async def test_view_shows_only_the_own_prefixes_and_requests(stack: Stack) -> None:
    """The operator is told of the blocks of others; nobody of their prompts, and tenants not even whether there are
    any."""
    runs = {one: await stack.run(one) for one in ("bob", "operator")} | {"all": await stack.run(*EVERYONE)}
    place = next(place for place, (_, path, _) in enumerate(REQUESTS) if path == "/v1/cache/view")

    def view(run: str, caller: str) -> dict[str, Any]:
        text = re.sub(r"~,?", "", runs[run].seen[caller][place][3])
        [found] = json.loads(re.sub(r",(?=[}\]])", "", text))["replicas"]
        return dict(found)

    for caller in ("bob", "operator"):
        alone, both = view(caller, caller), view("all", caller)
        assert alone["nodes"] == both["nodes"] and alone["num_nodes"] > 3
        assert alone["requests"] == both["requests"] and {one["reason"] for one in both["requests"]} >= {
            "never_seen",
            "full",
        }
    assert {kind for kind, _ in view("all", "bob")["blocks"]["runs"]} == {"cached", "hidden"}
    cached = dict(view("operator", "operator")["blocks"]["runs"])["cached"]
    blocks = dict(view("all", "operator")["blocks"]["runs"])
    assert blocks["cached"] == cached and blocks["others"] == 2 * cached  # the others asked the same before
    assert view("all", "operator")["cached_tokens"] == 3 * view("operator", "operator")["cached_tokens"]


# Limits and deadlines of requests that generate nothing


PAIRS = "fake/pairs"


@asynccontextmanager
async def limited(
    directory: Path, encoder: WordEncoder | None = None, **limits: float
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a tenant with limits, of a service of a generation model, an embedding model and a cross-encoder."""
    keys = directory / "keys.toml"
    key = add_key(keys, "alice", **limits)
    encoders = encoder or WordEncoder(WORDS), WordEncoder(PAIRS, is_cross_encoder=True)
    host = host_with(directory, *encoders, api_keys_file=str(keys), clock=FakeClock())
    add_llm(host, directory, has_text=True)
    async with serving(host, tenants=Tenants.from_file(keys)) as client:
        client.headers["Authorization"] = f"Bearer {key}"
        yield client


ROUTES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/embeddings", {"model": WORDS, "input": "some words"}),
    ("/v1/rerank", {"model": PAIRS, "query": "a", "documents": ["b c"]}),
    ("/v1/rerank", {"model": WORDS, "query": "a", "documents": ["b c"]}),
    ("/similarity", {"model": WORDS, "source": "a", "sentences": ["b"]}),
    ("/tokenize", {"model": "tiny", "prompt": "some words"}),
    ("/detokenize", {"model": "tiny", "tokens": [5, 6]}),
    ("/v1/cache/explain", {"model": "tiny", "prompt": "some words"}),
]


@pytest.mark.parametrize(("route", "body"), ROUTES, ids=lambda value: value if isinstance(value, str) else "")
async def test_requests_are_counted_on_every_route(tmp_path: Path, route: str, body: dict[str, Any]) -> None:
    async with limited(tmp_path, requests_per_minute=2) as client:
        for _ in range(2):
            assert (await client.post(route, json=body)).status_code == 200
        refused = await client.post(route, json=body)
        assert (refused.status_code, error_of(refused)["code"]) == (429, "rate_limit_exceeded")
        assert refused.headers["retry-after"] == "30"


async def test_tokens_of_texts_are_corrected_after_tokenisation(tmp_path: Path) -> None:
    async with limited(tmp_path, tokens_per_minute=100) as client:
        body = {"model": WORDS, "input": " ".join(["extraordinarily"] * 10)}  # 10 tokens, estimated as 40
        for _ in range(7):
            answer = await client.post("/v1/embeddings", json=body)
            assert (answer.status_code, answer.json()["usage"]["total_tokens"]) == (200, 10)
        refused = await client.post("/v1/embeddings", json=body)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "6")


async def test_tokens_that_a_front_end_counts_are_set_right(tmp_path: Path) -> None:
    async with limited(tmp_path, tokens_per_minute=200) as client:
        prompt = "some words, of which this tokenizer makes a token of each byte or so"
        count = (await client.post("/tokenize", json={"model": "tiny", "prompt": prompt})).json()["count"]
        assert count > len(prompt) // 4
        left = 200 - count
        ids = {"model": "tiny", "tokens": [5] * (left + 1)}
        refused = await client.post("/detokenize", json=ids)
        assert refused.status_code == 429, refused.text
        assert (await client.post("/detokenize", json={**ids, "tokens": [5] * left})).status_code == 200


async def test_texts_over_a_limit_are_not_tokenised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = WordEncoder(WORDS)
    async with limited(tmp_path, encoder, tokens_per_minute=100) as client:
        tokenized: list[Any] = []
        monkeypatch.setattr(encoder, "tokenize", lambda texts, **_: [*map(tokenized.append, texts)][:0])
        answer = await client.post("/v1/embeddings", json={"model": WORDS, "input": "word " * 1000})
        assert (answer.status_code, error_of(answer)["code"]) == (413, "request_over_limit")
        assert not tokenized


async def test_late_texts_are_not_computed(tmp_path: Path) -> None:
    """A job takes five seconds, as the first shows: one deadline has passed then, one would pass before the next job
    ends."""
    clock, encoder = FakeClock(), WordEncoder(WORDS)
    host = host_with(tmp_path, encoder, clock=clock)

    async with serving(host) as client:
        first = await hold(encoder, client.post("/v1/embeddings", json={"input": "first"}))
        rest = [
            asyncio.create_task(client.post("/v1/embeddings", json={"input": word, "deadline_s": deadline_s}))
            for word, deadline_s in (("second", 4.0), ("third", 5.5), ("fourth", 60.0))
        ]
        hosted: Any = host.models.loaded[0]
        while len(hosted._queue) < 3:
            await asyncio.sleep(0)
        clock.now += 5.0
        encoder.gate.set()
        answers = [await answer for answer in (first, *rest)]
        assert [answer.status_code for answer in answers] == [200, 503, 503, 200]
        for answer in answers[1:3]:
            assert error_of(answer)["code"] == "deadline_unreachable"
            assert int(answer.headers["retry-after"]) >= 1
        assert encoder.jobs == [["first"], ["fourth"]]
        assert hosted.controller.num_places == 0
