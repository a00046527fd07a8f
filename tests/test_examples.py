"""The programs of examples/, run as users run them, with the built-in models."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
# What each prints; red if a name, a parameter or a figure that it uses is gone.
QUICK = {
    "batch": r"Lily went to the river and saw.*first token after \d+ ms.*At the end Lily was (happy|sad)",
    "streams": r"Tim was a little .*Sue was a little .*Max was a little ",
    "rwkv_states": r"0 of (\d+) tokens were known.*128 of \d+ tokens were known",
}
SLOW = {
    "quantise": r"7\.\d MB, 0\.5\d of the source\n, there was a little girl.*\n, there was a",
    "sentence_transformers_users": r"^0\.\d+ A kitten is a young cat\.",
}
SERVED = {
    "chat": r"> What is the capital of France\?\n.*Paris.*> And of Italy\?\n.*Rome",
    "search": r"baby cat called\? -> A kitten.*hunts with water\? -> The archerfish",
    "rerank": r"^0\.\d+ The archerfish spits",
    "structured_output": r'"city": "Paris.*"population": \d+,.*"continent": "Europe"',
    "tools": r"^get_weather\(\{'city': '.+'\}\)\n.*21 degrees",
    "cache": r"before: \d of \d+ tokens.*system prompt: \d\d+ of \d+ tokens",
}
PLAIN = {name: value for name, value in os.environ.items() if not name.startswith("ARCHERFISH_")}
PLAIN["ARCHERFISH_ENGINE_DEVICE"] = PLAIN["ARCHERFISH_EMBED_DEVICE"] = "cpu"


def check(name: str, expected: str, *arguments: str) -> None:
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=PLAIN, timeout=300)
    assert done.returncode == 0, done.stderr
    assert re.search(expected, done.stdout, re.DOTALL), done.stdout


@pytest.mark.parametrize("name", QUICK)
def test_quick_examples(name: str) -> None:
    check(name, QUICK[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_slow_examples(name: str) -> None:
    check(name, SLOW[name])


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """A server of the built-in models, as `archerfish serve` starts it."""
    command = [sys.executable, "-m", "archerfish", "serve", "--port", "0", "--host", "127.0.0.1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=PLAIN) as process:
        assert process.stdout is not None
        found = None
        for line in process.stdout:
            found = re.search(r"http://127\.0\.0\.1:\d+", line)
            if found:
                break
        try:
            assert found is not None
            yield found[0]
        finally:
            process.terminate()


@pytest.mark.slow
@pytest.mark.parametrize("name", SERVED)
def test_examples_with_a_server(name: str, server: str) -> None:
    check(name, SERVED[name], server)


@pytest.mark.slow
def test_notebook(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARCHERFISH_ENGINE_DEVICE", "cpu")
    cells = json.loads((EXAMPLES / "tour.ipynb").read_text(encoding="utf-8"))["cells"]
    names: dict[str, object] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []  # a notebook is kept without what one machine printed
            exec("".join(cell["source"]), names)
    shown = capsys.readouterr().out
    assert (
        "little girl named Lily" in shown
        and "128 of 149 tokens came from the cache" in shown
        and "a kitten  1.00" in shown
    )


def test_every_example_is_run_and_listed() -> None:
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    assert names == QUICK.keys() | SLOW.keys() | SERVED.keys()
    listed = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    page = (EXAMPLES.parent / "docs" / "examples.md").read_text(encoding="utf-8")
    assert all(f"[{name}.py]({name}.py)" in listed and f'"examples/{name}.py"' in page for name in names)
