"""What must be true of a folder and of the columns before the first row is written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from epochal.errors import Misconfigured
from epochal.sinks.files import disk
from epochal.sinks.files.formats import check_types
from epochal.sinks.files.layout import Layout
from epochal.sinks.files.partitions import check_columns
from epochal.terms import Ability


def check_place(layout: Layout, *, scratch: Path) -> Ability:
    """See that files can be made, named at most once, and moved in one step below the root."""
    try:
        for folder in (layout.root, layout.all_prepared, layout.scratch):
            disk.make_folder(folder)
        probe = scratch.with_name(f"{scratch.name}probe")
        disk.put_if_absent(probe, b"", scratch=scratch)
        probe.unlink(missing_ok=True)
    except OSError as error:
        raise Misconfigured(
            f"Files can't write below {layout.root}: {error.strerror} ({error.filename})",
            "the folder must be one that the driver and every executor can write to, on a file "
            "system with hard links and atomic renames (a local disk, NFS; not a mounted bucket)",
        ) from error
    _require_one_file_system(layout)
    return Ability(
        name="atomic moves",
        granted=True,
        because=f"{layout.root} is one file system with hard links",
    )


def _require_one_file_system(layout: Layout) -> None:
    if layout.root.stat().st_dev != layout.all_prepared.stat().st_dev:
        raise Misconfigured(
            f"{layout.all_prepared} is on another file system than {layout.root}: a file can't be "
            "moved between them in one step",
            "remove the mount or the link at _epochal, so that both are on one file system",
        )


def check_prepared(source: Path, target: Path, size: int) -> None:
    """Refuse, while it can be refused, a file that the driver could not move (I3)."""
    try:
        found = source.stat()
    except FileNotFoundError as error:
        raise Misconfigured(
            f"a task has written {source}, and the driver does not see it",
            "the folder must be one and the same for the driver and every executor: a shared "
            "mount, or one machine (local[*])",
        ) from error
    if found.st_size != size:
        raise Misconfigured(
            f"{source} has {found.st_size} bytes, and its task wrote {size}",
            "something else writes below _epochal/, or the shared mount shows stale sizes",
        )
    if target.parent.exists() and target.parent.stat().st_dev != found.st_dev:
        raise Misconfigured(
            f"{target.parent} is on another file system than {source}: a file can't be moved "
            "between them in one step",
            "a folder below the root is a mount of its own: bring it into the root's file system",
        )


def check_schema(schema: pa.Schema, form: str, partition_by: Sequence[str]) -> None:
    """Refuse columns that can't be written, with the column's name."""
    if not schema.names:
        raise Misconfigured("the rows have no columns", "select at least one")
    twice = [name for name, count in Counter(schema.names).items() if count > 1]
    if twice:
        raise Misconfigured(
            f"columns {twice} appear more than once", 'rename one: select=["a", "b as other"]'
        )
    check_columns(schema, partition_by)
    check_types(pa.schema([column for column in schema if column.name not in partition_by]), form)
