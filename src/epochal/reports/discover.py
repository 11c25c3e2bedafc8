"""Discovery of epoch logs below a root: every folder that holds records of a log."""

from __future__ import annotations

from collections.abc import Iterator

from epochal.config.resolve_target import names_pipeline, open_target
from epochal.coordinator.journal import EpochLog
from epochal.errors import Misconfigured
from epochal.logs import open_log, record_number
from epochal.storage import Store, open_store
from epochal.storage.urls import login_of

_DEPTH_MAX = 6
_NEVER_A_LOG = frozenset(
    {
        "offsets",
        "commits",
        "sources",
        "state",
        "_spark_metadata",
        "history",
        "standby",
        "lease",
        "_epochal",
    }
)
"""Folders that may hold many files and never a log: Spark's, histories, markers of sinks."""
_BESIDE_ROWS = ".epochal"
"""How the name of a folder ends that has manifests and prepared files of a sink."""


_DATABASES = ("sqlite:", "postgres:", "postgresql:")


def found_log(root: str, place: str) -> EpochLog:
    """Reopen a log that was found below a root, with the user that the root's URL has."""
    if _is_one_log(root):
        return open_target(root).require_log()
    return open_log(_as_user_of(root, place))


def _is_one_log(root: str) -> bool:
    """Whether nothing can be below it: a database, or a pipeline as other commands name it."""
    return root.startswith(_DATABASES) or names_pipeline(root)


def _as_user_of(root: str, place: str) -> str:
    """The location of a store shows no user, and its URL may need one."""
    login = login_of(root)
    return place.replace("://", f"://{login}", 1) if login else place


def find_logs(root: str) -> Iterator[EpochLog]:
    """Yield every epoch log below a folder or a prefix, in the order of names."""
    if _is_one_log(root):
        yield open_target(root).require_log()
        return
    store = open_store(root)
    for folder in _find(store, "", 0):
        place = f"{store.location}/{folder}" if folder else store.location
        yield open_log(_as_user_of(root, place))


def _find(store: Store, folder: str, depth: int) -> Iterator[str]:
    try:
        names = store.names(folder)
    except Misconfigured:
        if not folder:
            raise
        return  # a folder that may not be read holds no log for this user
    if any(record_number(name) is not None for name in names):
        yield folder
    elif depth < _DEPTH_MAX:
        for name in store.folders(folder):
            if not (name in _NEVER_A_LOG or name.startswith(".") or name.endswith(_BESIDE_ROWS)):
                yield from _find(store, f"{folder}/{name}" if folder else name, depth + 1)
