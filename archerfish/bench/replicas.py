"""`archerfish bench replicas`: paced engine processes behind one router, and what the router and the digests cost.

Throughput of N replicas against one; the share of prompt tokens found in the cache, by policy, when many requests share
prefixes that one replica cannot hold, against one engine with the memory of all; microseconds of the router for a
request; bytes of digests while routers catch up with a large tree that changes.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack, aclosing, asynccontextmanager
from random import Random
from typing import Any

from archerfish.bench.report import Found, Measurement
from archerfish.cache.digest import DIGEST_TOKENS, PathHash, PrefixDigest
from archerfish.config import EngineConfig
from archerfish.errors import refuse_unknown
from archerfish.observe.summary import percentile
from archerfish.route.router import ReplicaLoad, Router
from archerfish.sequence import NO_NAMESPACE, pack_tokens
from archerfish.serve.client import AsyncClient
from archerfish.serve.loads import LoadReports
from archerfish.serve.processes import HostConfig, KeptProcess, ModelSpec, engine_process, stop_all
from archerfish.serve.replicas import replica_name
from archerfish.serve.routing import RoutedBackend
from archerfish.serve.wire import Generated, GenerationRequest
from archerfish.store.names import STORY_MODEL

Prompts = list[list[int]]
NUM_REPLICAS, LONG_STEPS = (2, 8), (0.04, 20e-6)  # seconds of a step, and of each of its tokens
PER_REPLICA = 8
PROMPT_TOKENS = 64
OUTPUT_TOKENS = 32
NUM_ROUNDS = 3  # requests at once, and how often
# Shared prefixes: together two and a half times what a replica holds, and less than four of them hold.
NUM_GROUPS = 40
PREFIX_TOKENS = 512
SUFFIX_TOKENS = 64
ANSWER_TOKENS = 8
NUM_SHARED = 800
AT_ONCE = 16
CACHE_TOKENS = 8192
NUM_SHARING = 4
STEPS = (0.01, 50e-6)  # about a model of 8B on an H200
BLOCK = 64
ROUTED = 64
ROUTED_TOKENS = 1024
NUM_ROUTED = 2000
NUM_NODES = 100_000
CHANGES_PER_S = 500
NUM_ROUTERS = 2
POLLS_PER_S = 4


class Replicas:
    """Paced engine processes that serve."""

    def __init__(
        self, stack: ExitStack, count: int, pace: tuple[float, float], cache_tokens: int = CACHE_TOKENS
    ) -> None:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="archerfish-"))
        self.secret = secrets.token_urlsafe(16)
        options = EngineConfig(
            model=STORY_MODEL,
            max_model_len=4096,
            block_size=BLOCK,
            max_cache_tokens=cache_tokens,
            num_threads=1,
            max_num_seqs=64,
        )
        spec = ModelSpec(kind="generation", options={name: getattr(options, name) for name in options.names()})
        command = (sys.executable, "-m", "archerfish.bench.paced", *map(str, pace))
        self.processes: list[KeptProcess] = []
        stack.callback(stop_all, self.processes)
        for number in range(count):
            config = HostConfig(
                name=replica_name(number),
                address=f"ipc://{directory}/{number}",
                models=(spec,),
                front_end_pass=self.secret,
                routing_secret=self.secret,
                grace_s=1.0,
            )
            self.processes.append(engine_process(config, command=command))
            self.processes[-1].start()
        self.addresses = [process.wait()["address"] for process in self.processes]

    @asynccontextmanager
    async def backend(self, policy: str = "cache-aware") -> AsyncIterator[RoutedBackend]:
        """A backend to which all replicas have reported."""
        backend = RoutedBackend(Router(self.secret.encode(), policy=policy), credentials=self.secret)
        async with AsyncExitStack() as stack:
            stack.push_async_callback(backend.close)
            for number, address in enumerate(self.addresses):
                backend.add(replica_name(number), AsyncClient(address))
            while len(backend.ready()) < len(self.addresses):
                await asyncio.sleep(0.05)
            yield backend

    def send(
        self, prompts: Prompts, at_once: int, num_output: int, *, policy: str = "cache-aware", tenant: str = ""
    ) -> list[Generated]:
        """The answers. tenant: of a namespace of its own, so that nothing is cached before."""

        async def send() -> list[Generated]:
            found: list[Generated] = []
            left = iter(list(enumerate(prompts)))

            async def worker() -> None:
                for number, prompt in left:
                    params: dict[str, Any] = {"max_tokens": num_output, "ignore_eos": True, "temperature": 0.0}
                    request = GenerationRequest(
                        request_id=f"r{number}",
                        model=STORY_MODEL,
                        token_ids=prompt,
                        params=params,
                        wants_ids=True,
                        credentials=self.secret,
                        tenant=tenant,
                    )
                    async with aclosing(backend.generate(request)) as parts:
                        found.extend([part async for part in parts if isinstance(part, Generated)])

            async with self.backend(policy) as backend:
                await asyncio.gather(*(worker() for _ in range(at_once)))
            return found

        return asyncio.run(send())


def random_prompt(rng: Random, length: int) -> list[int]:
    return rng.choices(range(1, 256), k=length)


def throughput(count: int, rounds: int) -> Found:
    """Output tokens a second of some replicas, whose processes take turns with those of one."""
    rng, at_once = Random(count), PER_REPLICA * count
    with ExitStack() as stack:
        replicas, one = Replicas(stack, count, LONG_STEPS), Replicas(stack, 1, LONG_STEPS)
        for number in range(rounds + 1):
            rates = []
            for served, num_at_once in ((replicas, at_once), (one, PER_REPLICA)):
                prompts = [random_prompt(rng, PROMPT_TOKENS) for _ in range(NUM_ROUNDS * num_at_once)]
                began = time.perf_counter()
                answers = served.send(prompts, num_at_once, OUTPUT_TOKENS)
                rates.append(sum(answer.num_output_tokens for answer in answers) / (time.perf_counter() - began))
            if number:  # the first round warms up
                yield Measurement(f"{count} replicas: output, tokens/s", rates[0])
                yield Measurement(f"{count} replicas: throughput / that of one", rates[0] / rates[1])


def shared_prefixes(rounds: int) -> Found:
    """The share of prompt tokens that were cached, in the second half of the requests."""
    with ExitStack() as stack:
        four, big = Replicas(stack, NUM_SHARING, STEPS), Replicas(stack, 1, STEPS, NUM_SHARING * CACHE_TOKENS)
        for number in range(rounds):
            rng = Random(number)
            prefixes = [random_prompt(rng, PREFIX_TOKENS) for _ in range(NUM_GROUPS)]
            prompts = [[*rng.choice(prefixes), *random_prompt(rng, SUFFIX_TOKENS)] for _ in range(NUM_SHARED)]
            best = 0.0
            for name, served, policy in (
                ("one cache", big, "cache-aware"),
                ("cache-aware", four, "cache-aware"),
                ("least-loaded", four, "least-loaded"),
                ("round-robin", four, "round-robin"),
            ):
                answers = served.send(prompts, AT_ONCE, ANSWER_TOKENS, policy=policy, tenant=f"{number} {name}")
                answers = answers[NUM_SHARED // 2 :]
                rate = sum(one.num_cached_tokens for one in answers) / sum(one.num_prompt_tokens for one in answers)
                best = best or rate
                yield Measurement(f"shared prefixes, {name}: hit rate", rate)
                ttft_ms = percentile([one.metrics["ttft_ms"] for one in answers], 0.5)
                yield Measurement(f"shared prefixes, {name}: first token p50, ms", ttft_ms)
                if served is four:
                    yield Measurement(f"shared prefixes, {name}: hits / those of one cache", rate / best)


def router_cost(rounds: int) -> Iterator[Measurement]:
    """Choosing one of 64 replicas for a prompt of 1,024 tokens of which several have a part, and counting it."""
    for number in range(rounds):
        rng = Random(number)
        router = Router(b"secret")
        path_hash = PathHash()
        prompts = [random_prompt(rng, ROUTED_TOKENS) for _ in range(256)]
        for i in range(ROUTED):
            digest = PrefixDigest(b"secret")
            for prompt in rng.sample(prompts, 64):
                tokens, length = pack_tokens(prompt), rng.randrange(DIGEST_TOKENS, ROUTED_TOKENS)
                digest.add(path_hash.prefixes(0, 0, tokens.tobytes(), 0, length), "model", NO_NAMESPACE)
            load = ReplicaLoad(
                prompt_token_s=1e-4, step_s=rng.random() / 100, waiting_tokens={"a": 100}, max_running=64
            )
            router.report(router.add(replica_name(i)), {"model": load}, digest.changes(0, 1 << 20)[1], begins_anew=True)
        times = []
        for _ in range(NUM_ROUTED):
            prompt = rng.choice(prompts)
            began = time.perf_counter()
            route = router.choose("model", pack_tokens(prompt))
            assert route is not None
            router.sent(route)
            router.ended(route)
            times.append(1e6 * (time.perf_counter() - began))
        yield Measurement("router, 64 replicas: a request p50, us", percentile(times, 0.5))
        yield Measurement("router, 64 replicas: a request p99, us", percentile(times, 0.99))


def digest_bytes() -> Iterator[Measurement]:
    """What a replica with a large tree sends to a router, while routers that know nothing catch up and prefixes come
    and go."""
    now = 0.0
    rng = Random(0)
    digest = PrefixDigest(b"secret")
    path_hash = PathHash()
    tokens = pack_tokens(rng.choices(range(1 << 16), k=DIGEST_TOKENS * NUM_NODES))
    digest.add(path_hash.prefixes(0, 0, tokens.tobytes(), 0, len(tokens)), "model", NO_NAMESPACE)
    reports = LoadReports(digest, lambda: now)
    since = [0] * NUM_ROUTERS
    in_second = list[int]()
    caught_up_s = 0.0
    while len(in_second) < 60:
        num_bytes = [0] * NUM_ROUTERS
        for _ in range(POLLS_PER_S):
            new = pack_tokens(rng.choices(range(1 << 16), k=DIGEST_TOKENS * CHANGES_PER_S // POLLS_PER_S))
            digest.add(path_hash.prefixes(0, 0, new.tobytes(), 0, len(new)), "model", NO_NAMESPACE)
            for router in range(NUM_ROUTERS):
                report = reports.report(since[router], (), str(router), is_stopping=False)
                since[router] = report["version"]
                num_bytes[router] += len(report["changes"])
            now += 1 / POLLS_PER_S
        in_second.append(max(num_bytes))
        if not caught_up_s and max(since) - min(since) == 0 and digest.changes(since[0], 8)[1] == b"":
            caught_up_s = now
    yield Measurement("digest of 100,000 nodes: most bytes in a second to a router", max(in_second))
    yield Measurement("digest of 100,000 nodes: bytes in a second to a router that knows it", in_second[-1])
    yield Measurement("digest of 100,000 nodes: until two routers know it, s", caught_up_s)


PARTS = ("router", "digest", "prefixes", "throughput")


def measure(options: Namespace) -> Found:
    wanted = options.only.split(",") if options.only else PARTS
    refuse_unknown(wanted, PARTS, "part")
    if "router" in wanted:
        yield from router_cost(options.rounds)
    if "digest" in wanted:
        yield from digest_bytes()
    if "prefixes" in wanted:
        yield from shared_prefixes(options.rounds)
    if "throughput" in wanted:
        for count in NUM_REPLICAS:
            yield from throughput(count, options.rounds)
