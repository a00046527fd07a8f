"""`python -m archerfish.cli.reference` writes docs/options.md; with --check it tells whether the file is up to date."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from archerfish.config import reference_page

PAGE = Path(__file__).parents[2] / "docs" / "options.md"


def main(argv: Sequence[str] | None = None, page: Path = PAGE) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments not in ([], ["--check"]):
        sys.stderr.write("usage: python -m archerfish.cli.reference [--check]\n")
        return 2
    text = reference_page()
    if arguments:
        is_same = page.is_file() and page.read_text(encoding="utf-8") == text
        if not is_same:
            sys.stderr.write(f"{page.name} is out of date: run `python -m archerfish.cli.reference`.\n")
        return 0 if is_same else 1
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
