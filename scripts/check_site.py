"""Checks that the pages of a built site ask no other host for anything: `python -m scripts.check_site DIRECTORY`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path

LOADED = {
    "script": "src",
    "link": "href",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "video": "src",
    "audio": "src",
}
NOT_LOADED = {"canonical", "prev", "next", "alternate"}  # relations of <link>


class Page(HTMLParser):
    """Addresses on other hosts from which a page loads something."""

    def __init__(self) -> None:
        super().__init__()
        self.foreign: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        address = given.get(LOADED.get(tag, ""), "") or ""
        if address.startswith(("http:", "https:", "//")) and given.get("rel") not in NOT_LOADED:
            self.foreign.append(address)


def main(argv: Sequence[str] | None = None) -> int:
    [directory] = sys.argv[1:] if argv is None else argv
    paths, is_clean = sorted(Path(directory).rglob("*.html")), True
    for path in paths:
        page = Page()
        page.feed(path.read_text(encoding="utf-8"))
        for address in page.foreign:
            is_clean = False
            sys.stderr.write(f"{path} loads {address}\n")
    print(f"{len(paths)} pages, {'none' if is_clean else 'some'} of which loads anything from another host")
    return 0 if is_clean and paths else 1


if __name__ == "__main__":
    sys.exit(main())
