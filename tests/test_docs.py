"""The pages: code runs, examples of formulas are recomputed, links of the README lead somewhere, generated pages are
new."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from archerfish import SamplingParams
from archerfish.cache import eviction
from archerfish.cli.doctor import measure
from archerfish.config import HubConfig
from archerfish.kernels.recurrent import StateShape
from archerfish.models.adapter import KVShape, model_class
from archerfish.models.config import Config
from archerfish.sched import policy
from archerfish.simulate.pace import kv_bytes
from scripts import reference_pages

ROOT = Path(__file__).parents[1]
FORMULAS = (ROOT / "docs" / "formulas.md").read_text(encoding="utf-8")


def shows(number: int, *texts: str) -> None:
    """The example has these texts."""
    example = FORMULAS.partition(f"**Example {number}.**")[2].partition("\n\n")[0]
    for text in texts:
        assert text in example, text


def shape_of(name: str) -> tuple[KVShape | StateShape, int]:
    found = measure(name, HubConfig())
    config = Config(found.config)
    return model_class(config).memory_shape(config), found.num_parameters


def test_memory_of_contexts() -> None:
    shape, num_parameters = shape_of("smollm2-135m-instruct")
    assert isinstance(shape, KVShape)
    token_bytes = shape.bytes_per_block(1, 2)
    assert token_bytes == kv_bytes(1, 30, 3, 64)
    int8_bytes = shape.bytes_per_block(1, 1) + 4 * 2 * shape.num_layers * shape.num_kv_heads
    shows(1, f"{token_bytes:,} bytes a token", f"{65536 * token_bytes / 1e9:.2f} GB", f"{num_parameters / 1e6:.1f} M")
    shows(1, f"{2 * num_parameters / 1e9:.2f} GB", f"{7e9 * 2 / 1e9:.0f} GB", f"{int8_bytes:,} bytes a token")
    state, _ = shape_of("story-rwkv7")
    assert isinstance(state, StateShape)
    state_bytes = state.bytes_per_block(1, 4)
    shows(2, f"{state.num_layers} layers, {state.num_heads} heads of {state.head_dim}", f"{state_bytes:,} bytes")
    shows(2, f"{state_bytes / token_bytes:.1f} tokens")


def test_latency_and_littles_law() -> None:
    queue = 50.0
    network = 5.0
    decode = (101 - 1) * 20.0
    prefill, cold = (1200 - 1000) / 2000 * 1000, 1200 / 2000 * 1000
    total = queue + prefill + decode + network
    shows(3, f"{queue:.0f} + {prefill:.0f} + {decode:,.0f} + {network:.0f} = {total:,.0f} ms")
    shows(3, f"after {queue + prefill + network:.0f} ms")
    shows(3, f"Without the cache: {total - prefill + cold:,.0f} ms")
    at_once = 8 * total / 1000
    shows(
        4, f"{total / 1000:.3f} s", f"{at_once:.2f} at once", f"{at_once * 1301 * kv_bytes(1, 30, 3, 64) / 1e9:.2f} GB"
    )
    assert at_once > 16


def test_bounds_of_decode_and_prompts() -> None:
    bandwidth = 4.26e12
    weights = 16.1e9
    batch = 128
    one_s, many_s = weights / bandwidth, (weights + batch * 3000 * kv_bytes(1, 32, 8, 128)) / bandwidth
    shows(5, f"{1000 * one_s:.2f} ms", f"{1 / one_s:.0f} tokens/s", f"{1000 * many_s:.1f} ms")
    shows(5, f"{batch / many_s:,.0f} tokens/s", f"{batch / many_s * one_s:.0f} times")
    assert "255.5" in (ROOT / "docs" / "performance.md").read_text(encoding="utf-8") and 1 / one_s > 255.5
    shows(6, f"T > {990e12 * 2 / (2 * bandwidth):.0f}")


def test_speculation_and_availability() -> None:
    a, k = 0.7, 4
    tokens = sum(a**i for i in range(k + 1))
    assert tokens == pytest.approx((1 - a ** (k + 1)) / (1 - a))
    shows(7, f"{tokens:.2f} tokens a step", f"less than {tokens:.2f} plain steps")
    shows(8, f"{0.001 * 365 * 24:.2f} hours", f"{100 * 0.01**2:.2f} %", f"{0.01**2 * 365 * 24:.2f} hours")


def test_policies_of_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (policy, eviction):
        monkeypatch.setattr(module, "_POLICIES", dict(module._POLICIES))
    page = (ROOT / "docs" / "add-a-policy.md").read_text(encoding="utf-8")
    code = "\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL))
    found: dict[str, Any] = {}
    exec(compile(code.replace('story-rwkv7", ', 'story-rwkv7", memory_budget_gib=0.01, '), str(page), "exec"), found)
    llm, order = found["llm"], list[int]()
    with llm, found["scanner"] as scanner:
        params = SamplingParams(max_tokens=2, temperature=0)
        llm.generate(["many words " * 9, "few", "some words"], params, on_result=lambda place, _: order.append(place))
        assert order == [1, 2, 0]  # red if the key is not asked for
        for number in range(40):
            assert scanner.generate([f"{number} " * 70], params)[0].text
        assert scanner.cache_stats().evictions > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["quick-start", "quick-start-zh", "embed", "convert", "from-vllm", "sentence-transformers"]
)
def test_python_of_pages_runs(name: str, tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    subprocess.run([sys.executable, "-c", "\n".join(blocks)], cwd=tmp_path, check=True)


@pytest.mark.parametrize("name", ["README.md", "README_zh.md", "CONTRIBUTING.md"])
def test_links_lead_to_files(name: str) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / name).read_text(encoding="utf-8"))
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_generated_pages_are_up_to_date(tmp_path: Path) -> None:
    assert reference_pages.main(["--check"]) == 0, f"run `{reference_pages.COMMAND}`"
    assert reference_pages.main(["--check"], tmp_path) == 1
