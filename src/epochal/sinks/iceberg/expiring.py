"""Keeping a table's history short: old snapshots of this sink, and the files only they used."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pyiceberg.table import Table

from epochal.sinks.iceberg.storage import Storage
from epochal.terms import Identity

logger = logging.getLogger("epochal")


@dataclass(frozen=True, slots=True)
class Expired:
    snapshot_id: int
    manifest_list: str


def is_of(summary: Any, identity: Identity) -> bool:
    """Whether a snapshot was made by this sink of this pipeline, in this life of it."""
    if summary is None:
        return False
    told = summary.additional_properties
    return (told.get("epochal.uid"), told.get("epochal.sink")) == (identity.uid, identity.sink)


def expired(table: Table, identity: Identity, *, kept: int) -> list[Expired]:
    """
    This sink's own snapshots but the newest `kept`; never one that a branch or a tag names.

    Snapshots of others are not ours to expire.
    """
    named = {ref.snapshot_id for ref in table.refs().values()}
    mine = [one for one in table.snapshots() if is_of(one.summary, identity)]
    mine.sort(key=lambda one: (one.sequence_number or 0, one.timestamp_ms))
    old = mine[: len(mine) - kept] if kept else mine
    # The branch's head is named until the new snapshot takes its place, in the same commit.
    return [
        Expired(one.snapshot_id, one.manifest_list) for one in old if one.snapshot_id not in named
    ]


def clear_up(table: Table, gone: Sequence[Expired]) -> None:
    """Remove the manifest lists: each belongs to one snapshot alone. A courtesy, so never fatal."""
    try:
        Storage(table.io).delete(one.manifest_list for one in gone)
    except OSError as error:
        logger.warning("%s: manifest lists of expired snapshots are left: %s", table.name(), error)
