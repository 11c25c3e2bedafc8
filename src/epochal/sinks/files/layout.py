"""
The layout of a Files sink: keys with `/`, the same on a disk and in a bucket.

The root has what readers see and not one file more. All that is not for them lies beside it, in
`<root>.epochal`: to hide it by an underscore or a dot below the root hides it from Spark, pandas
and pyarrow, and neither from globs nor from duckdb and polars.

    orders/day=2026-01-31/<handle>-00000.snappy.parquet    what readers see

    orders.epochal/<handle>/day=2026-01-31/…               prepared on a disk, under the same names
    orders.epochal/data/<handle>/day=2026-01-31/…          with uploads="manifest": there for good
    orders.epochal/in-doubt/<handle>                       a marker of it until a manifest names it
    orders.epochal/epochs/<uid>-s<tag>/<thousand>/<epoch>.manifest   the ledger
    orders.epochal/epochs/<uid>-s<tag>/<thousand>.manifests          a thousand of them, folded
    orders.epochal/epochs/<uid>-s<tag>/<thousand>/<epoch>.showing    whose files are being moved
    orders.epochal/schemas/<digest>.arrow                  the columns that manifests cite
    orders.epochal/scratch/                                files that have no name yet, and probes

Both are on one file system, so that a file is moved from one to the other in one step. A file's
final name carries its handle, so it never meets another file, and a repeated move finds that it is
done.
"""

from __future__ import annotations

from epochal.errors import InvariantBroken
from epochal.terms import EpochNumber, Handle, SinkTag, Uid, handle_prefix

EPOCHS_PER_BUCKET = 1000
BESIDE = ".epochal"
"""What the root's name is followed by in the name of the folder beside it."""
DATA = "data"
IN_DOUBT = "in-doubt"
EPOCHS = "epochs"
SCRATCH = "scratch"
SPARK_LOG = "_spark_metadata"


def beside(root: str) -> str:
    """The folder beside a root, which holds all that is not for readers."""
    return f"{root}{BESIDE}"


def prepared(handle: Handle) -> str:
    return str(handle)


def data(handle: Handle) -> str:
    return f"{DATA}/{handle}"


def is_data(path: str) -> bool:
    """Whether a file of a manifest lies beside the root for good, and not below it."""
    return path.startswith(f"{DATA}/")


def ledger_of(uid: Uid, tag: SinkTag) -> str:
    return f"{EPOCHS}/{uid}-s{tag}"


def scratch_of(uid: Uid, tag: SinkTag) -> str:
    """How every scratch file of this pipeline's sink begins."""
    return f"{SCRATCH}/{handle_prefix(uid)}s{tag}-"


def schema(digest: str) -> str:
    return f"schemas/{digest}.arrow"


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
    """A path from a receipt, if it stays below the root."""
    parts = relative.split("/")
    if any(part in ("", ".", "..") for part in parts) or parts[0].startswith(("_", ".")):
        raise InvariantBroken(
            f"a receipt names the file {relative!r}, which no writer of ours does"
        )
    return relative
