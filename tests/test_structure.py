"""The shape of the code: imports point down only, models know no torch, importing costs little."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import archerfish

ROOT = Path(archerfish.__file__).parent
# From the bottom up; packages of one row do not import each other.
LAYERS = [
    {"errors", "config", "types", "background", "params", "step", "sequence"},
    {"observe"},
    {"kernels"},
    {"layers"},
    {"cache", "models", "store"},
    {"sched", "runtime"},
    {"text"},
    {"engine"},
    {"compat"},
    {"serve", "deploy"},
    {"bench"},
    {"cli"},
    {"__main__"},
]
HEIGHT = {name: height for height, names in enumerate(LAYERS) for name in names}
# What these may import of ours, and nothing else.
EXTRA_RULES: dict[str, set[str]] = {
    "config": {"errors"}, "background": set(), "observe": {"types"}, "params": {"errors"}, "step": {"params"},
    "sequence": {"errors", "params", "step"},
}
WEB = {"fastapi", "starlette", "uvicorn", "uvloop", "pydantic", "prometheus_client"}


def modules() -> list[Path]:
    return sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


@cache
def imports(path: Path) -> list[str]:
    return list(read_imports(path))


def read_imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield str(node.module)


def package_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    mine = package_of(path)
    for name in imports(path):
        top, _, rest = name.partition(".")
        if top != "archerfish" or not rest:
            continue
        other = rest.split(".")[0]
        if other == mine:
            continue
        allowed = EXTRA_RULES.get(mine)
        assert other in allowed if allowed is not None else HEIGHT[other] < HEIGHT[mine], f"{mine} must not import {name}"


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_outside_packages_by_layer(path: Path) -> None:
    mine = package_of(path)
    tops = {name.partition(".")[0] for name in imports(path)}
    if mine in {"models", "layers", "cache", "sched", "config", "types", "errors", "observe"}:
        assert "torch" not in tops
    if mine not in {"serve", "deploy"}:
        assert not tops & WEB


def needed_modules(path: Path) -> set[str]:
    """Modules of ours that one imports to run, also inside of functions: not what it needs for types alone."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    only_types = [
        set(map(id, ast.walk(node))) for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    ]  # fmt: skip
    found: set[str] = set()
    for node in ast.walk(tree):
        if any(id(node) in nodes for nodes in only_types):
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_no_circular_imports() -> None:
    names = {".".join(("archerfish", *path.relative_to(ROOT).with_suffix("").parts)): path for path in modules()}
    needed = {name: needed_modules(path) & names.keys() - {name} for name, path in names.items()}
    while free := [name for name, others in needed.items() if not others & needed.keys()]:
        for name in free:
            del needed[name]
    assert not needed, f"These are in a circle of imports, or import one: {sorted(needed)}"


def test_import_loads_no_heavy_packages() -> None:
    heavy = ["torch", "numpy", "pyarrow", "tokenizers", "rich", "fastapi"]
    code = f"import sys, archerfish, archerfish.config; print([m for m in {heavy!r} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_seed_names_are_public() -> None:
    parts = (
        "AdaptiveCache BenchmarkConfig BufferPool CacheKey FastSampler InferenceRequest LogitsCache LogitsView MetricEvent "
        "MetricsCollector OptimizationConfig PerformanceMonitor PerformanceTarget PoolStats PrefetchConfig RealTimeMonitor "
        "RegressionDetector RwkvSampler SamplingConfig SamplingMetrics StreamingInference TestCase"
    )
    assert set(parts.split()) <= set(archerfish.__all__)


def test_public_names_can_be_imported() -> None:
    assert sorted(archerfish.__all__) == sorted(archerfish._HOME)
    for name in archerfish.__all__:
        assert getattr(archerfish, name).__name__ == name
    with pytest.raises(AttributeError, match="ArrowEngin"):
        archerfish.ArrowEngin  # noqa: B018
