"""The code of docs/parts.md, run as it stands there on a tiny random RWKV-7, and its table."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import archerfish
from archerfish.engine.tts import VOCAB_SIZE
from tests.engine.tiny_rwkv import save_tiny_rwkv

PAGE = Path(__file__).parents[2] / "docs" / "parts.md"
OPTIONS = 'load_format="dummy", dtype="float32", memory_budget_gib=0.05, max_num_seqs=8, num_threads=1'


def test_the_code_of_the_page_runs(tmp_path: Path) -> None:
    save_tiny_rwkv(tmp_path, vocab_size=VOCAB_SIZE, hidden_size=32)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    code = "\n".join(blocks).replace("max_prefetch=1)", f"max_prefetch=1), {OPTIONS}")
    code = code.replace('tts-model")', f'tts-model", {OPTIONS})').replace("path/to/an/rwkv7-tts-model", str(tmp_path))
    assert len(blocks) == 5 and code.count(OPTIONS) == 2
    found: dict[str, Any] = {}
    exec(compile(code, str(PAGE), "exec"), found)
    try:
        assert len(found["voice"].global_tokens) == 32 and found["again"].global_tokens == found["voice"].global_tokens
        assert [tokens.error for tokens in found["many"]] == [None, None] and found["outputs"][
            0
        ].finish_reason == "length"
        assert {"ttft_p50_ms", "inter_token_p99_ms", "generated_tok_s"} <= found["figures"].keys()
        assert found["sampling"].total_samples > 40 and found["pool"].cache_hits > 0
        assert 0 <= found["token"] < 4096 and found["sampler"].engine.config.logits_cache_mib == 32
    finally:
        found["sampler"].close()


def test_the_table_names_what_is_there() -> None:
    rows = [line.split("|") for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    assert len(rows) == 13
    for _, names, _, places, _ in rows:
        assert set(re.findall(r"`(\w+)`", names)) <= set(archerfish.__all__)
        assert all((PAGE.parents[1] / "archerfish" / place).exists() for place in re.findall(r"`([\w/.]+)`", places))
