"""
The files of an Iceberg table: where they lie, and what pyiceberg's FileIO can't do with them.

    <data>/epochal/<handle>/00000.parquet    an attempt's data files, in no snapshot yet or in one
    <data>/epochal/in-doubt/<handle>         its marker
    <data>/epochal/jobs/<handle>/…           what a job of Spark's own writer writes

Once committed the files stay there: Iceberg knows files by their full names, and moving nothing is
what makes a commit cheap. So a folder alone does not show whether its files are committed; the
marker does (see `kit.marked_files`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.fs as pafs
from pyiceberg.io import FileIO
from pyiceberg.io.pyarrow import PyArrowFileIO

from epochal.errors import Misconfigured
from epochal.kit.marked_files import Markers, at_once
from epochal.storage import Entry
from epochal.storage.local import make_folder, sync
from epochal.terms import Handle

_FOLDER = "epochal"


@dataclass(frozen=True, slots=True)
class Layout:
    data_path: str
    """The table's data location, without a slash at its end."""

    def markers(self, files: TableFiles) -> Markers:
        return Markers(files, self.marker_folder)

    @property
    def marker_folder(self) -> str:
        return f"{self.data_path}/{_FOLDER}/in-doubt"

    @property
    def job_folder(self) -> str:
        return f"{self.data_path}/{_FOLDER}/jobs"

    def marker(self, handle: Handle) -> str:
        return f"{self.marker_folder}/{handle}"

    def folder(self, handle: Handle) -> str:
        return f"{self.data_path}/{_FOLDER}/{handle}"

    def file(self, handle: Handle, name: str) -> str:
        return f"{self.folder(handle)}/{name}"


def layout_around(folder: str) -> Layout:
    """The layout that an attempt's folder belongs to, wherever the table's data lies by now."""
    return Layout(folder.rsplit("/", 2)[0])


def layout_of(location: str, properties: dict[str, str]) -> Layout:
    """The layout of a table, by its location and the property that moves its data elsewhere."""
    return Layout((properties.get("write.data.path") or f"{location.rstrip('/')}/data").rstrip("/"))


class TableFiles:
    """Files by their full locations, as the table's metadata names them."""

    def __init__(self, io: FileIO) -> None:
        self.io = io

    def put(self, key: str, content: bytes) -> None:
        """Write a small file, durably."""
        self.make_folder_for(key)
        with self.io.new_output(key).create(overwrite=True) as stream:
            stream.write(content)
        self.make_durable(key)

    def read(self, key: str) -> bytes | None:
        files, path = self._opened(key)
        try:
            with files.open_input_stream(path) as stream:
                return bytes(stream.read())
        except FileNotFoundError:
            return None

    def sizes(self, locations: Sequence[str]) -> list[int | None]:
        """The size of each file; None where there is none."""
        return at_once(self._size, locations)

    def missing(self, locations: Sequence[str]) -> list[str]:
        found = self.sizes(locations)
        return [where for where, size in zip(locations, found, strict=True) if size is None]

    def delete(self, keys: Iterable[str]) -> None:
        """Delete files; one that is gone already is no error."""
        at_once(self._delete, keys)

    def entries(self, folder: str) -> Sequence[Entry]:
        """The files directly in a folder; none where there is no folder."""
        now = time.time()
        return [
            Entry(
                name=info.base_name,
                size=info.size or 0,
                modified_at=now if info.mtime is None else float(info.mtime.timestamp()),
            )
            for _, info in sorted(self._infos(folder, is_deep=False), key=lambda one: one[0])
        ]

    def below(self, folder: str) -> list[str]:
        """The locations of all files below a folder."""
        return [location for location, _ in self._infos(folder, is_deep=True)]

    def remove_folder(self, folder: str) -> None:
        """
        Remove a folder without files, where folders are real; and the empty object that Arrow puts
        in the place of one when it deletes the last file there.
        """
        path = self.local(folder)
        if path is None:
            files, key = self._opened(folder)
            if isinstance(files, pafs.S3FileSystem):
                with suppress(FileNotFoundError):
                    files.delete_dir(key)
            return
        inner = [one for one in path.rglob("*") if one.is_dir()] if path.is_dir() else []
        for one in [*sorted(inner, reverse=True), path]:
            with suppress(OSError):
                one.rmdir()

    def make_folder_for(self, location: str) -> None:
        """Make the folder of a file: a local disk has folders, an object store has none."""
        path = self.local(location)
        if path is not None:
            make_folder(path.parent)

    def make_durable(self, location: str) -> None:
        """Make a written file outlive a power cut: object stores do so before they answer."""
        path = self.local(location)
        if path is not None:
            sync(path)
            sync(path.parent)

    def _size(self, location: str) -> int | None:
        files, path = self._opened(location)
        found = files.get_file_info(path)
        return int(found.size or 0) if found.type == pafs.FileType.File else None

    def _delete(self, location: str) -> None:
        with suppress(FileNotFoundError):
            self.io.delete(location)

    def _infos(self, folder: str, *, is_deep: bool) -> Iterator[tuple[str, Any]]:
        files, path = self._opened(folder)
        selector = pafs.FileSelector(path, allow_not_found=True, recursive=is_deep)
        for info in files.get_file_info(selector):
            if info.type == pafs.FileType.File:
                yield folder + info.path[len(path) :], info

    def _opened(self, location: str) -> tuple[Any, str]:
        if isinstance(self.io, PyArrowFileIO):
            scheme, netloc, path = self.io.parse_location(location, self.io.properties)
            return self.io.fs_by_scheme(scheme, netloc), path.rstrip("/")
        return _through_fsspec(self.io, location)

    def local(self, location: str) -> Path | None:
        """The path of a location on a local disk; None of one elsewhere."""
        if "://" in location and not location.startswith("file://"):
            return None
        files, path = self._opened(location)
        is_local = isinstance(files, pafs.LocalFileSystem) or "local" in files.type_name
        return Path(path) if is_local else None


def handle_in(location: str) -> Handle | None:
    """The attempt that wrote a data file; None of a file that others wrote."""
    _, found, below = location.rpartition(f"/{_FOLDER}/")
    return Handle.parse(below.partition("/")[0]) if found else None


def discard(handle: Handle, *, files: TableFiles, layout: Layout) -> None:
    """
    Remove what an attempt left, whether it still writes or not. May be repeated.

    Its files, its marker, and its files again: what it wrote between the first listing and the
    removal of its marker goes too. A file that is even later is removed by the attempt itself,
    which looks for its marker when all is written.
    """
    folder = layout.folder(handle)
    files.delete(files.below(folder))
    files.delete([layout.marker(handle)])
    files.delete(files.below(folder))
    files.remove_folder(folder)


def _through_fsspec(io: FileIO, location: str) -> tuple[Any, str]:
    from pyiceberg.io.fsspec import FsspecFileIO  # noqa: PLC0415  only where fsspec is in use

    if not isinstance(io, FsspecFileIO):
        raise Misconfigured(
            f"the catalog opens files with {type(io).__name__}, which can't list a folder",
            "py-io-impl = pyiceberg.io.pyarrow.PyArrowFileIO or pyiceberg.io.fsspec.FsspecFileIO",
        )
    files = io.get_fs(location.split("://", 1)[0] if "://" in location else "file")
    handler = pafs.PyFileSystem(pafs.FSSpecHandler(files))
    return handler, str(files._strip_protocol(location)).rstrip("/")
