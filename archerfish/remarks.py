"""Remarks about what was asked for and is ignored or done otherwise: said, not refused.

In Python and on the command line a remark is a warning of the logger `archerfish`. Over HTTP, `serve/http.py` puts the
remarks of a request into the header `x-archerfish-remark`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

logger = logging.getLogger("archerfish")
_said: set[str] = set()  # options


def remark_blocks(weights: str, name: str, quant_types: set[str]) -> None:
    """Say that the option `weights` has no effect on a model whose matrices stay in the blocks that they are stored
    in."""
    if quant_types and weights != "auto":
        stated = ", ".join(sorted(quant_types))
        remark(
            "weights",
            f"weights={weights} leaves the matrices of {name} that are quantised already as they are ({stated}).",
        )


def remark_widened(name: str, config: Mapping[str, Any], quant_types: set[str]) -> None:
    """Say that a quantised model takes the memory of a plain one, since its matrices have no form that is multiplied
    with."""
    if config.get("quantization_config") and not quant_types:
        text = "groups of inputs that do not follow one another (desc_act), or 8 bits with zero points"
        remark(
            "quantization", f"The weights of {name} are widened, and take the memory of plain ones: they have {text}."
        )


def remark(option: str, text: str) -> None:
    """Log a warning about an option, unless this process has logged one about it already."""
    if option not in _said:
        _said.add(option)
        logger.warning("%s", text)
