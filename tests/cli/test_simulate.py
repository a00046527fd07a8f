"""`archerfish simulate`."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from archerfish.cli.main import main

SHORT = ["simulate", "--replicas", "2", "--rate", "20", "--seconds", "2", "--turns", "1"]


def test_table_json_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "plot.svg"
    assert main([*SHORT, "--plot", str(picture)]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("random", "round-robin", "least-loaded", "cache-aware", "hit rate"))
    drawn = ElementTree.parse(picture).getroot()
    assert len(drawn.findall(".//{*}polyline")) == 8
    assert main([*SHORT, "--policy", "cache-aware", "--fail", "1:1:1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found["policies"]) == ["cache-aware"]
    assert found["policies"]["cache-aware"]["lost"] >= 0 and found["best hit rate"] > 0.5


def test_trace_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace"
    path.write_text('{"arrival_s": 0, "parts": [["a", 3000]], "output_tokens": 3}\n')
    assert main(["simulate", "--trace", str(path), "--preset", "cpu-135m", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)["policies"]["cache-aware"]
    assert figures["first token p50"] == pytest.approx(3000 * 2.3e-3, rel=0.05)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--policy", "cache-awar"], "Did you mean 'cache-aware'?"),
        (["--preset", "h200"], "h200-8b"),
        (["--fail", "3"], "--fail 30:1:20"),
        (["--fail", "-1:1:1"], "AT:COUNT:DOWN"),
        (["--scale", "4:2"], "LEAST"),
        (["--scale", "x"], "LEAST:MOST"),
        (["--replicas", "0"], "at least 1"),
        (["--kv-tokens", "300"], "--kv-tokens"),
        (["--rate", "0.001"], "No request comes"),
        (["--trace", "/no/such/file"], "cannot be read"),
    ],
)
def test_wrong_options_are_refused_with_a_hint(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [one.replace("-1:", "x:") for one in options]
    assert main([*SHORT, *flags]) not in (0, 1)
    assert message in capsys.readouterr().err
