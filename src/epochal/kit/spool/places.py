"""Where a spool is kept: a few verbs over names, durable on return, never half of anything.

Names are relative, with slashes, and plain ASCII. A plain path (or file:) is a local or mounted
folder that driver and executors reach under the same path; any other scheme is an object store.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol
from urllib.parse import unquote, urlsplit

from epochal.errors import Misconfigured
from epochal.logs.names import without_secrets

if TYPE_CHECKING:
    import pyarrow as pa

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")
_OBJECT_STORES = frozenset({"abfs", "abfss", "az", "gs", "s3", "s3a"})
_FOLDER = "epochal/spool"
UNFINISHED = ".part"
"""How the name of a file ends that is being written, on places that show such files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Something a place lists: its name within the listed folder, and how old it is."""

    name: str
    age_s: float


class Outlet(Protocol):
    """A file in the making. Nobody sees it under its own name before `finish` returns."""

    def write(self, piece: bytes | memoryview | pa.Buffer) -> None: ...

    def finish(self) -> None:
        """Whole, durable and under its name."""

    def discard(self) -> None:
        """Give it up. A killed process never gets here; what it leaves is listed or expires."""


class Place(Protocol):
    """One root. Usable from any thread; every verb may be repeated."""

    @property
    def told(self) -> str:
        """For messages and descriptions. Never a secret."""

    def create(self, name: str) -> Outlet: ...

    def put(self, name: str, content: bytes) -> None:
        """Write a small file whole and durable, in the place of one that may be there."""

    def read(self, name: str) -> bytes | None: ...

    def open(self, name: str) -> pa.NativeFile | None:
        """For reading from front to back; None where it is not there."""

    def has(self, name: str) -> bool: ...

    def files(self, folder: str) -> list[Entry]:
        """What lies directly in a folder, unfinished files too; nothing where there is none."""

    def folders(self, folder: str) -> list[str]: ...

    def remove(self, names: list[str]) -> None:
        """Those that are gone already are no error."""

    def remove_folder(self, folder: str) -> None:
        """Remove the files that lie directly in a folder, and the folder where that is a thing."""


def spool_url(sink: str, spool: str | os.PathLike[str] | None) -> str:
    """The spool's URL as it travels with a sink: absolute, and refused where it is missing."""
    if not spool:
        raise Misconfigured(
            f"{sink} needs spool=…: where rows wait between their epoch's decision and delivery",
            'a folder that driver and all executors share (spool="/mnt/shared/spool"; on one '
            'machine any folder), or an object store (spool="s3://bucket/spool")',
        )
    text = os.fspath(spool)
    if _SCHEME.match(text) is None:
        return os.path.normpath(Path(text).absolute())
    parts = urlsplit(text)
    if parts.scheme != "file":
        return text
    if parts.netloc not in ("", "localhost"):
        raise Misconfigured(
            f"{sink}: the spool's URL names the machine {parts.netloc!r}",
            f"file:///{parts.netloc}{parts.path}",
        )
    return os.path.normpath(unquote(parts.path))


def spool_below(sink: str, location: str) -> str:
    """The spool inside a pipeline's own place; refused where that has no room for files."""
    if location.startswith("/") or location.partition(":")[0] in _OBJECT_STORES:
        return f"{location}/{_FOLDER}"
    raise Misconfigured(
        f"{sink}: {without_secrets(location)} is neither a folder nor in an object store",
        'name a place that driver and executors share: spool="s3://bucket/spool", or a folder',
    )


def open_place(url: str) -> Place:
    """The place at what `spool_url` gave. Opening creates nothing."""
    if _SCHEME.match(url) is None:
        from epochal.kit.spool.local import LocalPlace  # noqa: PLC0415  one of the two is needed

        return LocalPlace(Path(url))
    from epochal.kit.spool.objects import ObjectPlace  # noqa: PLC0415  loads an object-store client

    return ObjectPlace(url)
