"""Loads hostile cases in a process of their own: `python -m tests.hostile.child BASES CASES`, CASES a JSON list.

A line of JSON on stdout begins a case, another one says how it ended.
"""

from __future__ import annotations

import faulthandler
import json
import os
import resource
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from archerfish import ArrowEngine, HubConfig, LLMEngine, SamplingParams
from archerfish.config import EmbedConfig, EngineConfig
from archerfish.errors import ArcherfishError
from tests.hostile.files import make_case

MEMORY_BYTES = 4 << 30  # address space of a child
DUMP_S = 20.0  # of a case, until the stacks of a hang are printed
GREEDY = SamplingParams(max_tokens=3, temperature=0.0)


def load_case(kind: str, number: int, bases: Path, where: Path) -> None:
    """Load the files of a case; if they load, generate a few tokens or embed a text."""
    if kind == "abort":  # a crash, which the parent must report
        os.abort()
    model = make_case(kind, number, bases, where)
    hub = HubConfig(cache_dir=str(where / "cache"), offline=True)
    if model.name in ("bert", "bert.gguf"):
        embedder = ArrowEngine(EmbedConfig(model=str(model), dtype="float32", num_threads=1), hub=hub)
        embedder.encode_batch(["hello world", "a" * 100])
        return
    options: dict[str, Any] = {"load_format": "dummy"} if model.name in ("dummy", "rwkv", "moe") else {}
    if model.name == "adapter":
        options, model = {"load_format": "dummy", "enable_lora": True, "lora_modules": f"one={model}"}, bases / "dummy"
    options |= {"memory_budget_gib": 0.02} if model.name == "rwkv" else {"max_cache_tokens": 256}
    config = EngineConfig(model=str(model), dtype="float32", num_threads=1, max_num_seqs=2, **options)
    with LLMEngine(config, hub=hub) as engine:
        if kind == "template":
            engine.chat([{"role": "user", "content": "hello"}], GREEDY)
        engine.generate(["the cat", "a" * 100] if engine.tokenizer else [[3, 4]], GREEDY)


def main() -> None:
    bases, cases = Path(sys.argv[1]), json.loads(sys.argv[2])
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    for kind, number in cases:
        lines.write(json.dumps({"begins": True}) + "\n")
        started, outcome = time.process_time(), "loaded"
        faulthandler.dump_traceback_later(DUMP_S)
        with tempfile.TemporaryDirectory() as where:
            try:
                load_case(kind, number, bases, Path(where))
            except ArcherfishError as error:
                outcome = "refused" if error.message.strip() else "an error without a message"
            except BaseException:
                outcome = traceback.format_exc()
        lines.write(json.dumps({"outcome": outcome, "seconds": time.process_time() - started}) + "\n")


if __name__ == "__main__":
    main()
