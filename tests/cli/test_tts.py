"""`archerfish tts` with a tiny random model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from archerfish.cli.main import main
from archerfish.engine.tts import VOCAB_SIZE
from tests.engine.tiny_rwkv import save_tiny_rwkv


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    """Of the engine."""
    directory = tmp_path / "speaker"
    directory.mkdir()
    save_tiny_rwkv(directory, vocab_size=VOCAB_SIZE, hidden_size=32)
    return ["--model", str(directory), "--load-format", "dummy", "--dtype", "float32", "--memory-budget-gib", "0.05",
            "--num-threads", "1"]  # fmt: skip


def lines_of(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_texts_to_tokens(flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tts", "Hello", "你好", *flags, "--seed", "3", "--max-tokens", "5", "--emotion", "sad"]) == 0
    first, second = lines_of(capsys)
    assert (first["text"], second["text"]) == ("Hello", "你好")
    assert len(first["global_tokens"]) == 32 and len(first["semantic_tokens"]) == 5
    assert (first["finish_reason"], first["seconds"]) == ("length", 0.1)
    voice = tmp_path / "voice.jsonl"
    voice.write_text(json.dumps(first) + "\n", encoding="utf-8")
    assert main(["tts", "Hello", *flags, "--reference", str(voice), "--max-tokens", "2"]) == 0
    (spoken,) = lines_of(capsys)
    assert spoken["global_tokens"] == first["global_tokens"] and len(spoken["semantic_tokens"]) == 2


def test_wrong_arguments_are_refused_before_loading(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text('{"text": "a"}\n')
    for arguments, said in (
        (["--emotion", "hapy"], "Did you mean 'HAPPY'?"), (["--max-tokens", "0"], "at least 1"),
        (["--emotionn", "x"], "--emotion"),
        (["--reference", str(tmp_path / "none")], "does not exist"), (["--reference", str(other)], "does not begin with"),
        (["--reference", str(tmp_path)], "cannot be read"),
    ):  # fmt: skip
        assert main(["tts", "Hello", "--model", "/nowhere", *arguments]) in (2, 3), arguments
        assert said in capsys.readouterr().err


def test_jsonl_lines_have_own_voices_and_errors(flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = tmp_path / "texts.jsonl"
    voice = {"ref_global_tokens": list(range(32)), "ref_semantic_tokens": [5]}
    long = {"text": "word " * 5000}
    entries = [{"text": "a"}, {"text": "a", **voice}, {"text": "a", "emotion": "SADD"}, {"text": " "}, long]
    texts.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
    assert main(["tts", "--input", str(texts), *flags, "--seed", "1", "--max-tokens", "3"]) == 1
    plain, given, wrong, empty, too_long = lines_of(capsys)
    assert given["global_tokens"] == list(range(32)) != plain["global_tokens"] and len(given["semantic_tokens"]) == 3
    assert "Did you mean 'SAD'?" in wrong["error"] and "text is empty" in empty["error"]
    assert "leaves room for 0" in too_long["error"] and too_long["finish_reason"] == "error"
    texts.write_text("[1]\n", encoding="utf-8")
    assert main(["tts", "--input", str(texts), *flags]) == 2
    assert "Line 1 of" in capsys.readouterr().err
