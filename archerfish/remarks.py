"""Remarks: what was accepted without having an effect is said once in the log."""

from __future__ import annotations

import logging
from functools import lru_cache

logger = logging.getLogger("archerfish")


@lru_cache(maxsize=1024)
def remark(text: str) -> None:
    """Log a sentence the first time that it is given."""
    logger.warning("%s", text)
