"""Counts lines of code by folder, and fails when there are too many: `make lines`.

A line of code is a line that is not blank, not a comment and not part of a docstring. The code is formatted by
`ruff format`, so no limit is met by packing. The limits only fall.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

MAX_PACKAGE_LINES = 49_075
MAX_TEST_LINES = 43_330
LONG_FILE_LINES = 700  # a warning above: blank lines, comments and docstrings included

ROOT = Path(__file__).parents[1]
PACKAGE, TESTS = "archerfish", "tests"
NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def count_code_lines(source: str) -> int:
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NOT_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstring_lines(source))


def docstring_lines(source: str) -> set[int]:
    lines: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if ast.get_docstring(node, clean=False) is not None:
            first = node.body[0]
            lines.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return lines


def count_folder(folder: Path) -> tuple[Counter[str], Counter[str]]:
    """Lines of code and number of files of each folder directly below `folder`; its own files count under its own
    name."""
    lines: Counter[str] = Counter()
    files: Counter[str] = Counter()
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).parts
        name = f"{folder.name}/{parts[0]}" if len(parts) > 1 else folder.name
        lines[name] += count_code_lines(path.read_text(encoding="utf-8"))
        files[name] += 1
    return lines, files


def long_files(folder: Path) -> list[str]:
    found = []
    for path in sorted(folder.rglob("*.py")):
        num_lines = len(path.read_text(encoding="utf-8").splitlines())
        if num_lines > LONG_FILE_LINES:
            found.append(f"{path.relative_to(folder.parent)} has {num_lines} lines: is it one subject?")
    return found


def main(root: Path = ROOT) -> int:
    problems = []
    for warning in long_files(root / PACKAGE):
        print(warning, file=sys.stderr)
    for name, limit in ((PACKAGE, MAX_PACKAGE_LINES), (TESTS, MAX_TEST_LINES)):
        lines, files = count_folder(root / name)
        for folder in sorted(lines):
            print(f"{folder:24} {lines[folder]:7,} lines {files[folder]:5} files")
        total = sum(lines.values())
        print(f"{name + ' in all':24} {total:7,} lines {sum(files.values()):5} files (limit: {limit:,} lines)\n")
        if total > limit:
            problems.append(f"{name} has {total:,} lines of code; the limit is {limit:,}.")
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
