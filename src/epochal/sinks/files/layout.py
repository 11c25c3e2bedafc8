"""
Where things are below the root.

    <root>/day=2026-01-31/epochal-<handle>-00000.snappy.parquet    what readers see
    <root>/_epochal/prepared/<handle>/day=2026-01-31/…             prepared, under the same names
    <root>/_epochal/epochs/<uid>-s<tag>/<thousand>/<epoch>.json    manifests: the ledger
    <root>/_epochal/epochs/<uid>-s<tag>/<thousand>.jsonl           a thousand of them, folded
    <root>/_epochal/schemas/<digest>.arrow                         the columns that manifests cite
    <root>/_epochal/scratch/                                       files that have no name yet

Readers of folders (Spark, pandas, pyarrow) pass over names that begin with an underscore.
A file's final name carries its handle, so it never meets another one, and a move that is repeated
finds itself done.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from os import PathLike, fspath
from os.path import normpath
from pathlib import Path
from urllib.parse import unquote, urlsplit

from epochal.errors import InvariantBroken, Misconfigured
from epochal.terms import EpochNumber, Handle, SinkTag, Uid, handle_prefix

EPOCHS_PER_BUCKET = 1000
_OURS = "_epochal"


def local_path(place: str | PathLike[str]) -> Path:
    """The absolute local path that a path or a file: URL names."""
    url = fspath(place)
    parts = urlsplit(url) if "://" in url or url.startswith("file:") else None
    if parts is None:
        if not url:
            raise Misconfigured("Files needs a folder, and the path is empty")
        return Path(normpath(Path(url).absolute()))
    if parts.scheme != "file":
        raise Misconfigured(
            f"Files({url!r}): {parts.scheme}:// is not a scheme this release writes to",
            "give a local or mounted folder, as a path or as file:///path",
        )
    if parts.netloc not in ("", "localhost"):
        raise Misconfigured(
            f"Files({url!r}): a file URL with the host {parts.netloc!r}",
            f"file:///{parts.netloc}{parts.path}",
        )
    return Path(normpath(unquote(parts.path)))


@dataclass(frozen=True, slots=True)
class Layout:
    """All paths below one root. Nothing here touches the disk."""

    root: Path

    @property
    def ours(self) -> Path:
        return self.root / _OURS

    @property
    def all_prepared(self) -> Path:
        return self.ours / "prepared"

    @property
    def all_epochs(self) -> Path:
        return self.ours / "epochs"

    @property
    def scratch(self) -> Path:
        return self.ours / "scratch"

    @property
    def spark_log(self) -> Path:
        return self.root / "_spark_metadata"

    def prepared(self, handle: Handle) -> Path:
        return self.all_prepared / str(handle)

    def life(self, uid: Uid, tag: SinkTag) -> Path:
        return self.all_epochs / f"{uid}-s{tag}"

    def scratch_of(self, uid: Uid, tag: SinkTag) -> Path:
        """How every scratch file of this pipeline's sink begins."""
        return self.scratch / f"{handle_prefix(uid)}s{tag}-"

    def schema(self, digest: str) -> Path:
        return self.ours / "schemas" / f"{digest}.arrow"

    def visible(self, relative: str) -> Path:
        return self.root / require_inside(relative)


def bucket_of(epoch: EpochNumber) -> int:
    return epoch // EPOCHS_PER_BUCKET


def folders_of(relatives: Iterable[str], top: Path) -> list[Path]:
    """Every folder, from `top` down, that holds one of these files or leads to it."""
    inner = {parent for relative in relatives for parent in Path(relative).parents}
    return sorted(top / folder for folder in inner)


def require_inside(relative: str) -> str:
    """A path from a receipt, if it stays below the root and out of our own folder."""
    parts = relative.split("/")
    if any(part in ("", ".", "..") for part in parts) or parts[0].startswith(("_", ".")):
        raise InvariantBroken(
            f"a receipt names the file {relative!r}, which no writer of ours does"
        )
    return relative
