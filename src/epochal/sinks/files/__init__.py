"""Files in a folder: parquet, JSON lines or CSV, each one whole or not there at all."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from epochal.sinks.files.sink import Files

if TYPE_CHECKING:
    from epochal.sinks.files.reader import read_epochs

__all__ = ["Files", "read_epochs"]


def __getattr__(name: str) -> Any:
    """Load the reader on first use: Arrow's datasets load pandas, which no task needs."""
    if name != "read_epochs":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module("epochal.sinks.files.reader").read_epochs
