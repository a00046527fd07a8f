"""Measures what metrics cost a step of an engine process at 256 streams, which counts and does not count in turns.

    python -m scripts.measure_metrics [ROUNDS]

Its engine plans, commits, delivers and encodes as any other, but nothing is computed: every step gives the same token
at once.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np

from archerfish.config import EngineConfig
from archerfish.engine.llm_engine import LLMEngine
from archerfish.observe.metrics import MetricsCollector
from archerfish.serve import wire
from archerfish.serve.compute import Lane
from archerfish.serve.host import EngineHost
from archerfish.serve.hosted_llm import HostedLLM
from archerfish.serve.models import Hosted, ModelEntry
from archerfish.serve.processes import HostConfig
from archerfish.serve.wire import Chunk
from archerfish.step import StepInput, StepResult

STREAMS = 256
STEPS = 10
TURNS = 30
TOKEN = 7
ENGINE: dict[str, Any] = {
    "model": "story-rwkv7",
    "num_threads": 1,
    "max_num_seqs": STREAMS,
    "block_size": 64,
    "enable_prefix_caching": False,
    "max_cache_tokens": 2 * STREAMS * STEPS * TURNS,
}


class NoMetrics(MetricsCollector):
    """Counts nothing."""

    def gaps(self, *_: Any, **__: Any) -> None: ...

    def step(self, *_: Any) -> None: ...

    def first_token(self, *_: Any) -> None: ...


def send_uncounted(hosted: HostedLLM) -> None:
    """HostedLLM._send without looking at times between tokens."""
    now, answer = hosted.host.clock(), hosted.host.answer
    hosted._sent_at = now
    for batch in hosted.batches.values():
        deltas = batch[:]
        batch.clear()
        for generation, delta in deltas:
            admitted = generation.admitted
            request = generation.request
            message = generation.message
            is_plain = generation.last_token_at > 0.0 and admitted is not None and message.stream
            if is_plain and not request.is_over and delta.finish_reason is None and delta.logprobs is None:
                assert admitted is not None
                admitted.num_output_tokens += len(delta.token_ids)
                generation.last_token_at = now
                answer(request, Chunk(request_id=message.request_id, index=delta.index, token_ids=delta.token_ids))
            else:
                generation.send(delta, now)


class SilentHost(EngineHost):
    """Encodes its answers and sends them nowhere."""

    def _send(self, client: bytes, message: wire.Message) -> None:
        wire.encode(message)

    def load(self, config: EngineConfig) -> HostedLLM:
        def load(lane: Lane) -> Hosted:
            engine = LLMEngine(config, executor=lane)
            engine.runner.launch = launch  # type: ignore[method-assign]
            return HostedLLM(engine, lane, self)

        self.models.add(ModelEntry(config.model, "generation", load))
        [hosted] = self.models.loaded
        assert isinstance(hosted, HostedLLM)
        return hosted

    def begin(self) -> None:
        """Let STREAMS requests run, which end after TURNS turns."""
        params = {"max_tokens": STEPS * (TURNS + 2), "ignore_eos": True, "temperature": 0.0}
        for number in range(STREAMS):
            message = wire.GenerationRequest(
                request_id=str(number),
                token_ids=[number + 1] * 8,
                params=params,
                stream=True,
                wants_ids=True,
                takes_bundles=True,
            )
            self._receive(b"\0client", wire.encode(message))
        self.step_us(STEPS)

    def end(self) -> None:
        while any(hosted.has_work for hosted in self.models.loaded):
            self.step_us(1)

    def step_us(self, num_steps: int) -> list[float]:
        """Microseconds of steps."""
        found = []
        for _ in range(num_steps):
            began = time.perf_counter()
            for hosted in self.models.loaded:
                hosted.advance()
            self._flush()
            found.append(1e6 * (time.perf_counter() - began))
        return found


def launch(step: StepInput) -> Future[StepResult]:
    done: Future[StepResult] = Future()
    done.set_result(StepResult(np.full((len(step.rows), 1), TOKEN)))
    return done


def metrics_cost(config: EngineConfig, rounds: int) -> Iterator[tuple[float, float]]:
    """In each round the microseconds of a step with metrics, and the share that they add to one without: medians of
    turns."""
    with tempfile.TemporaryDirectory() as folder:
        host = SilentHost(HostConfig(address=f"ipc://{folder}/engine"))
        hosted = host.load(config)
        counting = host.figures
        not_counting = NoMetrics()
        send = hosted._send

        def step_us(counts: bool) -> float:
            host.figures = counting if counts else not_counting
            hosted._send = send if counts else partial(send_uncounted, hosted)  # type: ignore[method-assign]
            return statistics.median(host.step_us(STEPS))

        for _ in range(rounds):
            host.begin()
            turns = [
                {counts: step_us(counts) for counts in ((True, False), (False, True))[turn % 2]}
                for turn in range(TURNS)
            ]
            host.end()
            share = statistics.median(turn[True] / turn[False] for turn in turns) - 1
            yield statistics.median(turn[True] for turn in turns), share
        host.stop(0)
        host.run()  # closes what it has


def main() -> None:
    for step_us, share in metrics_cost(EngineConfig(**ENGINE), int(sys.argv[1]) if sys.argv[1:] else 5):
        print(f"a step of {STREAMS} streams: {step_us:.0f} us, of which metrics {share:.2%}")


if __name__ == "__main__":
    main()
