"""Which files make room for an epoch that replaces partitions."""

from __future__ import annotations

from collections.abc import Sequence

from pyiceberg.manifest import DataFile
from pyiceberg.table import Table

from epochal.errors import Misconfigured


def replaced(table: Table, branch: str, files: Sequence[DataFile], *, place: str) -> list[DataFile]:
    """The table's files in the partitions of these ones; all, where the table has no partitions."""
    snapshot = table.metadata.snapshot_by_name(branch)
    if snapshot is None:
        return []
    spec_ids = {file.spec_id for file in files}
    wanted = {(file.spec_id, repr(file.partition)) for file in files}
    gone = []
    for manifest in snapshot.manifests(table.io):
        for entry in manifest.fetch_manifest_entry(table.io, discard_deleted=True):
            file = entry.data_file
            if file.content != 0:
                continue
            if file.spec_id not in spec_ids:
                raise Misconfigured(
                    f"{place} still has files of partition spec {file.spec_id}, and partitions of "
                    f"spec {sorted(spec_ids)} can't be compared with them",
                    "rewrite the older files first (rewrite_data_files)",
                )
            if (file.spec_id, repr(file.partition)) in wanted:
                gone.append(file)
    return gone
