"""Trying again what a server marks as transient."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from epochal.contract import Limits
from epochal.errors import TryAgain

T = TypeVar("T")


def insist(attempt: Callable[[], T], limits: Limits) -> T:
    """Whole transactions only: a new one has no memory of the old."""
    for wait_ms in limits.retry_backoff_ms:
        try:
            return attempt()
        except TryAgain:
            time.sleep(wait_ms / 1000)
    return attempt()
