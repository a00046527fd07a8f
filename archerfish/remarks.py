"""Remarks: what is accepted from other libraries' users and has no effect is said in the log, once for each option."""

from __future__ import annotations

import logging

logger = logging.getLogger("archerfish")
_said: set[str] = set()


def remark(option: str, text: str) -> None:
    """Log a warning about an option, unless this process has logged one about it already."""
    if option not in _said:
        _said.add(option)
        logger.warning("%s", text)
