"""Finds the epoch logs below a root: every folder that holds records of a log."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from epochal.config.resolve_target import log_at
from epochal.contract import EpochLog
from epochal.logs import open_log
from epochal.logs.names import first_line, record_number
from epochal.logs.objects import open_store, sorted_error

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_DEPTH_MAX = 6
_NEVER_A_LOG = frozenset(
    {"offsets", "commits", "sources", "state", "_spark_metadata", "history", "_epochal"}
)
"""Folders that may hold many files and never a log: Spark's, histories, manifests of sinks."""


_DATABASES = ("sqlite:", "postgres:", "postgresql:")


def found_log(root: str, place: str) -> EpochLog:
    """Reopen a log that was found below a root. For a database, by the root, which has the user."""
    return log_at(root) if root.startswith(_DATABASES) else open_log(place)


def find_logs(root: str) -> Iterator[EpochLog]:
    """Yield every epoch log below a folder or a prefix, in the order of names."""
    if root.startswith(_DATABASES):
        yield log_at(root)
    elif "://" in root and not root.startswith("file:"):
        # Raises, with a hint, for a location that no command can reach.
        open_log(root).close()
        for place in _find_objects(root.rstrip("/")):
            yield open_log(place)
    else:
        local = Path(root.removeprefix("file://")).absolute()
        for folder in _find_folders(local, 0):
            yield open_log(folder)


def _find_folders(folder: Path, depth: int) -> Iterator[Path]:
    try:
        with os.scandir(folder) as listed:
            entries = sorted(listed, key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return
    if any(record_number(entry.name) is not None for entry in entries):
        yield folder
        return
    if depth == _DEPTH_MAX:
        return
    for entry in entries:
        if _may_hold_logs(entry.name) and entry.is_dir(follow_symlinks=False):
            yield from _find_folders(folder / entry.name, depth + 1)


def _find_objects(root: str) -> Iterator[str]:
    store = open_store(root)
    for prefix in _object_folders(store, "", 0):
        yield f"{root}/{prefix}" if prefix else root


def _object_folders(store: ObjectStore, prefix: str, depth: int) -> Iterator[str]:
    import obstore  # noqa: PLC0415  only where a root is in a store
    from obstore.exceptions import BaseError  # noqa: PLC0415  the same

    try:
        listed = obstore.list_with_delimiter(store, prefix or None)
    except (BaseError, OSError) as error:
        raise sorted_error(error, f"cannot list checkpoints: {first_line(str(error))}") from None
    names = [entry["path"].rpartition("/")[2] for entry in listed["objects"]]
    if any(record_number(name) is not None for name in names):
        yield prefix
        return
    if depth == _DEPTH_MAX:
        return
    for folder in sorted(listed["common_prefixes"]):
        if _may_hold_logs(folder.rstrip("/").rpartition("/")[2]):
            yield from _object_folders(store, folder.rstrip("/"), depth + 1)


def _may_hold_logs(name: str) -> bool:
    return name not in _NEVER_A_LOG and not name.startswith(".")
