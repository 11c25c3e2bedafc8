"""The few things that must be true of a disk: durable on return, and never half of a file."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path

from epochal.kit.disk import make_folder, sync

__all__ = ["make_folder", "names", "put_if_absent", "read", "remove_empty", "sync"]


def put_if_absent(path: Path, content: bytes, *, scratch: Path) -> bool:
    """
    Create a file with this content, durable on return: False where the name is taken.

    `scratch` begins the name under which it is written first, on the same file system. A killed
    process leaves that behind, and whoever owns the prefix may remove it at any time.
    """
    make_folder(scratch.parent)
    make_folder(path.parent)
    hidden = scratch.with_name(f"{scratch.name}{secrets.token_hex(8)}")
    try:
        with hidden.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        is_mine = _link(hidden, path)
    finally:
        with suppress(OSError):
            hidden.unlink()
    # Also where it was taken: what is reported as there must not vanish again.
    sync(path.parent)
    return is_mine


def _link(hidden: Path, path: Path) -> bool:
    try:
        path.hardlink_to(hidden)
    except FileExistsError:
        return False
    return True


def read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def names(folder: Path) -> list[str]:
    """What a folder holds; nothing where there is no such folder."""
    try:
        return os.listdir(folder)  # noqa: PTH208 (names are all that is wanted, of many files)
    except FileNotFoundError:
        return []


def remove_empty(folder: Path) -> None:
    """Remove a folder and the folders in it, as far as there is no file in them."""
    for inner, _, _ in os.walk(folder, topdown=False):
        with suppress(OSError):
            Path(inner).rmdir()
