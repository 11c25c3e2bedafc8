"""Trying again what a server marks as transient, or an earlier driver holds up."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from epochal.contract import Limits
from epochal.errors import TryAgain

T = TypeVar("T")
HOLDER_WAIT_S = 2.0
"""How long to wait for another driver's open transaction before it is looked for and ended."""


def insist(attempt: Callable[[], T], limits: Limits) -> T:
    """Whole transactions only: a new one has no memory of the old."""
    for wait_ms in limits.retry_backoff_ms:
        try:
            return attempt()
        except TryAgain:
            time.sleep(wait_ms / 1000)
    return attempt()
