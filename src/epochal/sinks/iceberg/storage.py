"""The table's file system, as far as pyiceberg's FileIO does not show it: listing and syncing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pyarrow.fs as pafs
from pyiceberg.io import FileIO
from pyiceberg.io.pyarrow import PyArrowFileIO

from epochal.errors import Misconfigured
from epochal.kit.disk import make_folder, sync

_AT_ONCE = 16
A = TypeVar("A")
B = TypeVar("B")


@dataclass(frozen=True, slots=True)
class Listed:
    name: str
    age_s: float | None


class Storage:
    """Files by their full locations, as the table's metadata names them."""

    def __init__(self, io: FileIO) -> None:
        self.io = io

    def put(self, location: str, content: bytes = b"") -> None:
        """Write a small file, durably."""
        self.make_room(location)
        with self.io.new_output(location).create(overwrite=True) as stream:
            stream.write(content)
        self.settle(location)

    def exists(self, location: str) -> bool:
        files, path = self._opened(location)
        return bool(files.get_file_info(path).type == pafs.FileType.File)

    def missing(self, locations: Sequence[str]) -> list[str]:
        found = at_once(self.exists, locations)
        return [where for where, is_there in zip(locations, found, strict=True) if not is_there]

    def delete(self, locations: Iterable[str]) -> None:
        """Remove files; those that are gone already are no error."""
        at_once(self._delete, list(locations))

    def names(self, folder: str) -> list[Listed]:
        """The files directly in a folder; none where there is no folder."""
        now_s = time.time()
        return [
            Listed(name=info.base_name, age_s=_age_s(info, now_s))
            for _, info in self._infos(folder, is_deep=False)
        ]

    def below(self, folder: str) -> list[str]:
        """The locations of all files below a folder."""
        return [location for location, _ in self._infos(folder, is_deep=True)]

    def remove_folder(self, folder: str) -> None:
        """Remove a folder where folders are real and this one is empty; object stores have none."""
        path = self._local(folder)
        if path is None:
            return
        inner = [one for one in path.rglob("*") if one.is_dir()] if path.is_dir() else []
        for one in [*sorted(inner, reverse=True), path]:
            with suppress(OSError):
                one.rmdir()

    def make_room(self, location: str) -> None:
        """Make the folder that a file needs: a local disk has folders, an object store has none."""
        path = self._local(location)
        if path is not None:
            make_folder(path.parent)

    def settle(self, location: str) -> None:
        """Make a written file outlive a power cut: object stores do so before they answer."""
        path = self._local(location)
        if path is not None:
            sync(path)
            sync(path.parent)

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

    def _local(self, location: str) -> Path | None:
        if "://" in location and not location.startswith("file://"):
            return None
        files, path = self._opened(location)
        is_local = isinstance(files, pafs.LocalFileSystem) or "local" in files.type_name
        return Path(path) if is_local else None


def at_once(do: Callable[[A], B], each: Sequence[A]) -> list[B]:
    """Do the same to many files: on an object store each call is a round trip."""
    if len(each) < 2:
        return [do(one) for one in each]
    with ThreadPoolExecutor(min(_AT_ONCE, len(each)), thread_name_prefix="epochal-iceberg") as pool:
        return list(pool.map(do, each))


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


def _age_s(info: Any, now_s: float) -> float | None:
    if info.mtime is None:
        return None
    return max(0.0, now_s - float(info.mtime.timestamp()))
