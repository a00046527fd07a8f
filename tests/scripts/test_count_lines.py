"""The counter of code lines that `make test` runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import count_lines

SOURCE = '''"""A docstring
of two lines."""

# A comment.
import os  # with a comment


def add(
    left: int,
    right: int,
) -> int:
    """Docstring."""
    text = """a value,
    not a docstring"""
    return left + right + len(text)
'''


def test_blank_lines_comments_and_docstrings_do_not_count() -> None:
    assert count_lines.count_code_lines(SOURCE) == 8


def test_too_many_lines_fail_and_a_long_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in ("archerfish/store", "tests"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "module.py").write_text(SOURCE)
    assert count_lines.main(tmp_path) == 0
    assert "archerfish/store               8 lines     1 files" in capsys.readouterr().out
    monkeypatch.setattr(count_lines, "MAX_TEST_LINES", 7)
    monkeypatch.setattr(count_lines, "LONG_FILE_LINES", 14)
    assert count_lines.main(tmp_path) == 1
    problems = capsys.readouterr().err
    assert "tests has 8 lines of code; the limit is 7." in problems
    assert "archerfish/store/module.py has 15 lines: is it one subject?" in problems
