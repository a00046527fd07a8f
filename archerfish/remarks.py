"""Remarks about what was asked for and is ignored or done otherwise: said, not refused.

In Python and on the command line a remark is a warning of the logger `archerfish`. Over HTTP, `serve/http.py` puts the
remarks of a request into the header `x-archerfish-remark`.
"""

from __future__ import annotations

import logging

logger = logging.getLogger("archerfish")
_said: set[str] = set()  # options


def remark_blocks(weights: str, name: str, quant_types: set[str]) -> None:
    """Say that the option `weights` has no effect on a model whose matrices stay in the blocks that they are stored in."""
    if quant_types and weights != "auto":
        stated = ", ".join(sorted(quant_types))
        remark("weights", f"weights={weights} leaves {name} as it is: it is quantised already ({stated}).")


def remark(option: str, text: str) -> None:
    """Log a warning about an option, unless this process has logged one about it already."""
    if option not in _said:
        _said.add(option)
        logger.warning("%s", text)
