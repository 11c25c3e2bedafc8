"""
The layout below the root of a Files sink: keys with `/`, the same on a disk and in a bucket.

    day=2026-01-31/epochal-<handle>-00000.snappy.parquet    what readers see
    _epochal/prepared/<handle>/day=2026-01-31/…             prepared on a disk, under the same names
    _epochal/data/<handle>/day=2026-01-31/…                 with uploads="manifest": there for good
    _epochal/epochs/<uid>-s<tag>/<thousand>/<epoch>.json    manifests: the ledger
    _epochal/epochs/<uid>-s<tag>/<thousand>.jsonl           a thousand of them, folded
    _epochal/epochs/<uid>-s<tag>/<thousand>/<epoch>.showing whose files of it come to their place
    _epochal/schemas/<digest>.arrow                         the columns that manifests cite
    _epochal/scratch/                                       files that have no name yet, and probes

Readers of folders (Spark, pandas, pyarrow) pass over names that begin with an underscore.
A file's final name carries its handle, so it never meets another file, and a repeated move finds
that it is done.
"""

from __future__ import annotations

from epochal.errors import InvariantBroken
from epochal.terms import EpochNumber, Handle, SinkTag, Uid, handle_prefix

EPOCHS_PER_BUCKET = 1000
OURS = "_epochal"
PREPARED = f"{OURS}/prepared"
DATA = f"{OURS}/data"
EPOCHS = f"{OURS}/epochs"
SCRATCH = f"{OURS}/scratch"
SPARK_LOG = "_spark_metadata"


def prepared(handle: Handle) -> str:
    return f"{PREPARED}/{handle}"


def data(handle: Handle) -> str:
    return f"{DATA}/{handle}"


def ledger_of(uid: Uid, tag: SinkTag) -> str:
    return f"{EPOCHS}/{uid}-s{tag}"


def scratch_of(uid: Uid, tag: SinkTag) -> str:
    """How every scratch file of this pipeline's sink begins."""
    return f"{SCRATCH}/{handle_prefix(uid)}s{tag}-"


def schema(digest: str) -> str:
    return f"{OURS}/schemas/{digest}.arrow"


def bucket_of(epoch: EpochNumber) -> int:
    return epoch // EPOCHS_PER_BUCKET


def file_name(handle: Handle, number: int, suffix: str) -> str:
    return f"{handle}-{number:05d}{suffix}"


def handle_in(key: str) -> Handle | None:
    """The handle in a file's name, or None where the name is not one of ours."""
    stem = name_of(key).partition(".")[0]
    return Handle.parse(stem.rpartition("-")[0])


def name_of(key: str) -> str:
    return key.rpartition("/")[2]


def require_inside(relative: str) -> str:
    """A path from a receipt, if it stays below the root and out of our own folder."""
    parts = relative.split("/")
    if any(part in ("", ".", "..") for part in parts) or parts[0].startswith(("_", ".")):
        raise InvariantBroken(
            f"a receipt names the file {relative!r}, which no writer of ours does"
        )
    return relative
