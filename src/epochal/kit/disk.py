"""What makes a local disk keep what it was given: shared by every sink that writes files."""

from __future__ import annotations

import os
from pathlib import Path


def make_folder(path: Path) -> None:
    """Create a folder with all its parents, each one durable in the one above it."""
    if path.is_dir():
        return
    make_folder(path.parent)
    path.mkdir(exist_ok=True)
    sync(path.parent)


def sync(path: Path) -> None:
    """Make a file's content, or a folder's names, outlive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
