"""The counts of an LLMEngine, for monitors and servers."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from archerfish.engine.llm_engine import LLMEngine


def engine_counts(engine: LLMEngine) -> dict[str, Any]:
    """Counts since the engine was made and its current state, by the names of `observe.collector`."""
    scheduler = engine.scheduler
    counted, cached, logits = scheduler.stats(), engine.cache_stats(), engine.logits_cache.get_stats()
    blocks = scheduler.blocks
    num_used = blocks.num_total - blocks.num_free - scheduler.cache.num_evictable
    return {
        **asdict(engine.engine_stats()), "cache": asdict(cached), "num_prompt_tokens": cached.hits + cached.misses,
        "refused_requests": counted.refused_requests, "num_preemptions": counted.num_preemptions,
        "num_steps": counted.num_steps, "num_running": counted.num_running, "num_waiting": counted.num_waiting,
        "prefill_tokens_computed": counted.prefill_tokens_computed, "cached_logits_used": counted.cached_logits_used,
        "logits_cache_hits": logits.hits, "logits_cache_misses": logits.misses,
        "num_blocks": blocks.num_total, "num_blocks_in_use": num_used, "kv_usage": num_used / blocks.num_total,
        "kv_bytes_held": (blocks.num_total - blocks.num_free) * (engine.facts.memory.num_bytes / blocks.num_total),
    }  # fmt: skip
