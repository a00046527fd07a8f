"""The shape of the code: imports point down only, models know no torch, importing costs little."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import archerfish
from tests.store.models import convert, write_model

ROOT = Path(archerfish.__file__).parent
# From the bottom up; packages of one row do not import each other.
LAYERS = [
    {"errors", "config", "types", "background", "params", "remarks", "sizes", "step", "sequence"},
    {"observe", "util"},
    {"kernels"},
    {"layers"},
    {"cache", "models", "store"},
    {"sched", "runtime", "route"},
    {"text"},
    {"engine"},
    {"compat"},
    {"serve"},
    {"deploy"},
    {"bench", "simulate"},
    {"cli"},
    {"__main__"},
]
HEIGHT = {name: height for height, names in enumerate(LAYERS) for name in names}
# What these may import of ours, and nothing else.
EXTRA_RULES: dict[str, set[str]] = {
    "config": {"errors"},
    "background": set(),
    "observe": {"types"},
    "params": {"errors", "remarks"},
    "remarks": set(),
    "sizes": {"errors"},
    "step": {"params"},
    "sequence": {"errors", "params", "step"},
}
TORCH_FREE = {"models", "layers", "cache", "sched", "route", "simulate", "config", "types", "errors", "observe"}
WEB = {"fastapi", "starlette", "uvicorn", "uvloop", "pydantic", "prometheus_client", "msgspec", "zmq"}


def modules() -> list[Path]:
    return sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


@cache
def imports(path: Path) -> tuple[set[str], set[str]]:
    """Modules that one imports, also inside of functions; and without what it imports for types alone, with their
    names."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    every: set[str] = set()
    needed: set[str] = set()
    for node in ast.walk(tree):
        found: set[str] = set()
        if isinstance(node, ast.Import):
            found = {alias.name for alias in node.names}
            every |= found
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            every.add(str(node.module))
            found = {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
        if id(node) not in for_types:
            needed |= found
    return every, needed


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    mine = path.relative_to(ROOT).parts[0].removesuffix(".py")
    allowed = EXTRA_RULES.get(mine)
    for name in imports(path)[0]:
        top, *rest = name.split(".")
        if top == "archerfish" and rest and rest[0] != mine:
            is_below = HEIGHT[rest[0]] < HEIGHT[mine] if allowed is None else rest[0] in allowed
            assert is_below, f"{mine} must not import {name}"
        assert top != "torch" or mine not in TORCH_FREE
        assert top not in WEB or mine in ("serve", "deploy")
        assert top != "ray" or mine == "deploy"


def test_no_circular_imports() -> None:
    names = {".".join(("archerfish", *path.relative_to(ROOT).with_suffix("").parts)): path for path in modules()}
    needed = {name: imports(path)[1] & names.keys() - {name} for name, path in names.items()}
    while free := [name for name, others in needed.items() if not others & needed.keys()]:
        for name in free:
            del needed[name]
    assert not needed, f"These are in a circle of imports, or import one: {sorted(needed)}"


@pytest.mark.parametrize(
    "code",
    [
        "import archerfish.config; archerfish.OptimizationConfig(cache_size_mb=1)",
        "from archerfish.cli.main import main; main(['--help']); main(['embed', '--help'])",
        "from archerfish.store import WeightLoader, ensure_converted\n"
        "WeightLoader(ensure_converted(Path(sys.argv[1]), dtype='float16')).get_buffers('scale')",
    ],
    ids=["import", "help", "open"],
)
def test_heavy_packages_are_imported_when_needed(code: str, tmp_path: Path) -> None:
    heavy = {"torch", "numpy", "pyarrow", "tokenizers", "rich", "gguf", "filelock", *WEB}
    whole = f"import sys; from pathlib import Path\n{code}\nprint({heavy!r} & sys.modules.keys(), file=sys.stderr)"
    converted = convert(write_model(tmp_path / "source"), tmp_path / "converted").directory
    done = subprocess.run([sys.executable, "-c", whole, converted], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "set()\n")


def test_package_is_found_beside_a_folder_of_its_name(tmp_path: Path) -> None:
    """As in the folder above a clone. Red: an editable install without `package-dir` in pyproject.toml."""
    (tmp_path / "archerfish" / "docs").mkdir(parents=True)
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    code = [sys.executable, "-c", "from archerfish import ArcherfishError, SamplingParams"]
    subprocess.run(code, cwd=tmp_path, env=plain, check=True)


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
