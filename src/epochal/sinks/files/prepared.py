"""The folder in which one attempt prepares its files."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pyarrow as pa

from epochal.sinks.files.disk import at_once, put_if_absent, sync
from epochal.sinks.files.layout import Layout, folders_of
from epochal.terms import Handle


class PreparedFolder:
    """`<root>/_epochal/prepared/<handle>`: files under their final names, not in their place."""

    def __init__(self, layout: Layout, handle: Handle) -> None:
        self._layout = layout
        self._handle = handle
        self._path = layout.prepared(handle)

    def create(self, relative: str) -> pa.NativeFile:
        path = self._path / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        return pa.OSFile(str(path), "wb")

    def seal(self, relatives: Sequence[str]) -> list[int]:
        """Make all files durable, with every folder up to the root; return their sizes in bytes."""
        paths = [self._path / relative for relative in relatives]
        at_once(sync, paths)
        at_once(sync, folders_of(relatives, self._path))
        for folder in (self._layout.all_prepared, self._layout.ours, self._layout.root):
            sync(folder)
        return [path.stat().st_size for path in paths]

    def keep_schema(self, schema: pa.Schema) -> str:
        """Keep the columns beside the files, once per schema: the digest is its name."""
        content = schema.serialize().to_pybytes()
        digest = hashlib.sha256(content).hexdigest()[:16]
        path = self._layout.schema(digest)
        if not path.exists():
            scratch = self._layout.scratch_of(self._handle.uid, self._handle.sink)
            put_if_absent(path, content, scratch=scratch)
        return digest

    def discard(self) -> None:
        discard(self._path)


def discard(path: Path) -> None:
    """Remove a prepared folder. It may be gone, or going: two drivers may clear up at a time."""
    while path.is_symlink() or path.exists():
        with suppress(FileNotFoundError):
            shutil.rmtree(path)


def load_schema(layout: Layout, digest: str) -> pa.Schema:
    with pa.OSFile(str(layout.schema(digest)), "rb") as file:
        return pa.ipc.read_schema(file)
