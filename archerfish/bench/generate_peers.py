"""What else is installed that generates text, on the same weights and the same work."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Sequence
from typing import Any

from archerfish.bench.generate import Job, LatencyPeer, Peer
from archerfish.config import EngineConfig, HubConfig
from archerfish.engine.llm_loading import ModelFacts, read_facts
from archerfish.types import no_progress


def find_peers(config: EngineConfig) -> tuple[dict[str, Peer], dict[str, LatencyPeer]]:
    """Peers that this machine has, by name, for throughput and for latency."""
    throughput: dict[str, Peer] = {}
    latency: dict[str, LatencyPeer] = {}
    facts = read_facts(config, HubConfig(), no_progress)
    if importlib.util.find_spec("transformers") is not None:
        model = TransformersPeer(facts)
        throughput["transformers generate()"] = model.throughput
        latency["transformers"] = model.moments
    return throughput, latency


class TransformersPeer:
    """transformers' own model and generate(), with our converted weights in our type."""

    def __init__(self, facts: ModelFacts) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        from archerfish.store.loader import WeightLoader

        values = dict(facts.config.values)
        self.torch: Any = torch
        config = AutoConfig.for_model(values.pop("model_type"), **values)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, facts.dtype))  # type: ignore[no-untyped-call]
        weights = {name: tensor.clone() for name, tensor in WeightLoader(facts.directory).load_weights().items()}
        weights = {name: tensor.to(getattr(torch, facts.dtype)) for name, tensor in weights.items()}
        model.to_empty(device="cpu")
        missing, _ = model.load_state_dict(weights, strict=False)
        model.tie_weights()
        assert all("lm_head" in name for name in missing), missing
        self._rebuild_rotary(model)
        self.model: Any = model.eval()

    def _rebuild_rotary(self, model: Any) -> None:
        """to_empty leaves buffers unset; the rotary one is made anew from the configuration."""
        model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config)

    def throughput(self, jobs: Sequence[Job], batch: int) -> float:
        """Left-padded batches, each run to its longest output."""
        torch = self.torch
        started = time.perf_counter()
        for first in range(0, len(jobs), batch):
            group = jobs[first : first + batch]
            width = max(len(job.prompt) for job in group)
            longest = max(job.num_output for job in group)
            ids = torch.zeros((len(group), width), dtype=torch.int64)
            mask = torch.zeros((len(group), width), dtype=torch.int64)
            for row, job in enumerate(group):
                ids[row, width - len(job.prompt) :] = torch.tensor(job.prompt)
                mask[row, width - len(job.prompt) :] = 1
            self._generate(ids, longest, attention_mask=mask)
        return sum(job.num_output for job in jobs) / (time.perf_counter() - started)

    def moments(self, prompt: list[int], num_output: int) -> list[float]:
        torch = self.torch
        found: list[float] = []
        started = time.perf_counter()

        class Clock:
            def put(self, value: Any) -> None:
                found.append(time.perf_counter() - started)

            def end(self) -> None:
                pass

        mask = torch.ones((1, len(prompt)), dtype=torch.int64)
        self._generate(torch.tensor([prompt]), num_output, attention_mask=mask, streamer=Clock())
        return found[1:]  # the first put is the prompt

    def _generate(self, ids: Any, num_output: int, **options: Any) -> None:
        with self.torch.inference_mode():
            self.model.generate(
                ids, max_new_tokens=num_output, min_new_tokens=num_output, do_sample=False, pad_token_id=0, eos_token_id=None,
                **options,
            )
