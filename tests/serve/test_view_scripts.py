"""What the scripts of the page's views of texts and of the engine compute, run by node if that is installed."""

from __future__ import annotations

import json
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest

NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="node is not installed")
WEB = Path(str(files("archerfish.serve") / "web"))
DOM = "globalThis.document = {createElementNS: () => ({}), getElementById: () => null};\n"
STORES = "globalThis.sessionStorage = globalThis.localStorage = {getItem: () => null};\n"


def run(script: str, given: Any, directory: Path) -> Any:
    """The value of an expression over the modules' functions and `given`."""
    assert NODE is not None
    for file in WEB.glob("*.js"):
        (directory / file.name).write_bytes(file.read_bytes())
    (directory / "package.json").write_text('{"type": "module"}')
    (directory / "run.js").write_text(
        DOM + STORES + "const charts = await import('./charts.js'), engine = await import('./engine.js');\n"
        f"const texts = await import('./texts.js'), given = {json.dumps(given)};\nconsole.log(JSON.stringify({script}));"
    )
    done = subprocess.run([NODE, "run.js"], cwd=directory, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_pca_is_that_of_a_decomposition(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    rows = rng.normal(size=(200, 12)) * [9, 6, 4, *[1] * 9] @ np.linalg.qr(rng.normal(size=(12, 12)))[0] + 5
    found = run("charts.pca(given, 3)", rows.tolist(), tmp_path)
    centered = rows - rows.mean(0)
    _, strengths, directions = np.linalg.svd(centered, full_matrices=False)
    expected = centered @ directions[:3].T
    points = np.array(found["points"])
    signs = np.sign((points * expected).sum(0))
    np.testing.assert_allclose(points * signs, expected, atol=1e-2)
    np.testing.assert_allclose(found["shares"], (strengths**2 / (strengths**2).sum())[:3], rtol=1e-4)
    few = "[charts.pca([[1, 1], [1, 1]], 3).points, charts.pca([[2], [4]], 2).points.map((one) => one.map(Math.abs))]"
    assert run(few, 0, tmp_path) == [[[0, 0, 0], [0, 0, 0]], [[1, 0], [1, 0]]]


def test_similarities_are_cosines(tmp_path: Path) -> None:
    rows = np.random.default_rng(1).normal(size=(5, 7))
    found = run("texts.similarities(given)", rows.tolist(), tmp_path)
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    np.testing.assert_allclose(found["rows"], unit @ unit.T, atol=1e-12)
    others = (unit @ unit.T)[~np.eye(5, dtype=bool)]
    assert [found["low"], found["high"]] == pytest.approx([others.min(), others.max()])


@pytest.mark.parametrize(
    ("script", "given", "expected"),
    [
        (
            "charts.cellsOf(given, 4)",
            [["running", 3], ["free", 6]],
            [{"running": 3, "free": 1}, {"free": 4}, {"free": 1}],
        ),
        ("charts.cellsOf(given, 1)", [["cached", 2]], [{"cached": 1}, {"cached": 1}]),
        ("given.map((total) => charts.cellSize(total, 2048))", [1, 2048, 2049, 9000, 1_000_000], [1, 1, 2, 8, 512]),
        ("charts.linePath(given, 30, 10)", [0, 1, None, 2], "M0.0 10.0L10.0 5.0M30.0 0.0"),
        ("charts.linePath(given, 30, 10, 4)", [0, 0], "M20.0 10.0L30.0 10.0"),
        (
            "given.map(charts.duration)",
            [None, 0.00012, 0.0123, 0.5, 3, 150, 9000],
            ["\N{EN DASH}", "0.12 ms", "12 ms", "500 ms", "3.00 s", "3 min", "3 h"],
        ),
        ("given.map(charts.ago)", [0, 9.94, 59.4, 61], ["0.0 s ago", "9.9 s ago", "59 s ago", "2 min ago"]),
        ("given.map(charts.percent)", [None, 0, 0.004, 0.5, 1], ["\N{EN DASH}", "0 %", "0.4 %", "50 %", "100 %"]),
        ("charts.linesOf(given, 2)", " a \r\n\n b\nc", ["a", "b"]),
        ("charts.batches(given, 2)", [1, 2, 3], [[1, 2], [3]]),
        ("given.map((one) => charts.scaled(...one))", [[5, 0, 10], [-1, 0, 10], [3, 3, 3]], [0.5, 0, 0.5]),
        ("engine.hitRate(given)", {"cached_tokens": 3, "computed_tokens": 1}, 0.75),
        ("engine.hitRate(given)", {"cached_tokens": 0, "computed_tokens": 0}, None),
    ],
)
def test_numbers(script: str, given: Any, expected: Any, tmp_path: Path) -> None:
    assert run(script, given, tmp_path) == expected


def test_nodes_are_listed_below_their_parents(tmp_path: Path) -> None:
    parents = [-1, 0, -1, 1, 0, 2]
    nodes = [{"parent": parent, "start": 0, "adapter": "", "text": f"n{i}"} for i, parent in enumerate(parents)]
    rows = run("engine.rowsOf(given)", nodes, tmp_path)
    assert [(row["node"]["text"], row["depth"], row["numShown"]) for row in rows] == [
        ("n0", 0, 2),
        ("n1", 1, 1),
        ("n3", 2, 0),
        ("n4", 1, 0),
        ("n2", 0, 1),
        ("n5", 1, 0),
    ]
    assert len({row["key"] for row in rows}) == len(rows)
