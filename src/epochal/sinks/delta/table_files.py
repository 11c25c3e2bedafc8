"""
The files of a Delta table, on a local disk or in an object store, and what lies beside its log.

    <table>/day=2026-01-31/<handle>-00000.snappy.parquet    a data file, in no version yet or in one
    <table>/_epochal/prepared/<handle>                      a marker: this attempt is in doubt
    <table>/_epochal/staged/<handle>-00000.snappy.parquet   rows that a merge will read
    <table>/_epochal/jobs/<handle>/…                        what a job of Spark's own writer writes
    <table>/<handle>/day=2026-01-31/part-….snappy.parquet   in a store: a data file of such a job

Once an attempt is prepared its marker lists its files, so that an abort need not walk through the
table. VACUUM passes over folders that begin with an underscore.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.fs as pa_fs

from epochal.errors import InvariantBroken, Misconfigured, TryAgain, not_installed
from epochal.kit.marked_files import Markers, at_once
from epochal.storage import Entry
from epochal.storage.local import disk_errors, sync
from epochal.storage.urls import first_line, path_in_file_url
from epochal.terms import JOB_PARTITION, Handle, Receipt

PREPARED = "_epochal/prepared"
STAGED = "_epochal/staged"
JOBS = "_epochal/jobs"

Stamp = tuple[int, int | None]
"""A file's size and when it was written."""


class TableFiles:
    """The files of one table, by their paths relative to it."""

    def __init__(self, uri: str, options: Mapping[str, str]) -> None:
        self.uri = uri
        self.options = dict(options)
        self.local = local_folder(uri)
        self._fs = _file_system(self.local, uri, self.options)
        self._small = SmallFiles(self._fs, self.local)
        self.markers = Markers(self._small, PREPARED)

    # Data files

    def errors(self) -> AbstractContextManager[None]:
        """Turns what writing to a disk raises into one of our errors."""
        return nullcontext() if self.local is None else disk_errors("write to", self.uri)

    def create(self, relative: str) -> pa.NativeFile:
        if self.local is None:
            return self._fs.open_output_stream(relative)
        path = self.local / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        return pa.OSFile(str(path), "wb")

    def open(self, relative: str) -> pa.NativeFile:
        return self._fs.open_input_file(self._path(relative))

    def sizes(self, relatives: Sequence[str]) -> list[int | None]:
        """The size of each file; None where there is none."""
        found = self._fs.get_file_info([self._path(relative) for relative in relatives])
        return [one.size if one.is_file else None for one in found]

    def stamp(self, relative: str) -> Stamp | None:
        """What changes when a file is written again; None where there is none."""
        (found,) = self._fs.get_file_info([self._path(relative)])
        return (found.size, found.mtime_ns) if found.is_file else None

    def delete(self, relatives: Iterable[str]) -> None:
        """Delete files; one that is gone already is no error."""
        for relative in relatives:
            with suppress(FileNotFoundError):
                self._fs.delete_file(self._path(relative))

    def make_durable(self, relatives: Sequence[str]) -> None:
        """Sync files of a local disk with every folder above them; object stores have done so."""
        if self.local is None:
            return
        paths = [self.local / relative for relative in relatives]
        folders = {parent for path in paths for parent in path.parents if self._is_inside(parent)}
        # The names in a folder may be synced before what they name: all of it before a receipt.
        at_once(sync, (*paths, *sorted(folders)))

    def staged(self) -> list[str]:
        """The files that merges read, of any attempt."""
        return [f"{STAGED}/{entry.name}" for entry in self._small.entries(STAGED)]

    # What an attempt has written

    def seal(self, handle: Handle, relatives: Sequence[str]) -> list[int]:
        """
        Make all files of an attempt durable, and see that nobody cleared them away meanwhile;
        returns their sizes.
        """
        if not relatives:
            return []
        self.make_durable(relatives)
        marker, *sizes = self.sizes([f"{PREPARED}/{handle}", *relatives])
        if marker is None or None in sizes:
            self.delete(relatives)
            raise TryAgain(f"{handle} was aborted while it was still writing")
        self.mark_prepared(handle, relatives)
        return [size for size in sizes if size is not None]

    def mark_prepared(self, handle: Handle, relatives: Sequence[str]) -> None:
        """Put an attempt's marker again, with the list of its files."""
        self.markers.put(handle, json.dumps({"files": relatives}).encode())

    def files_of_attempt(self, handle: Handle) -> list[str]:
        """Every file of an attempt, by its marker; by a walk where it was never prepared."""
        try:
            listed = json.loads(self.markers.read(handle) or b"{}").get("files")
        except ValueError:
            listed = None
        if listed is not None:
            return [require_ours(relative, handle) for relative in listed]
        is_job_in_store = self.local is None and handle.partition == JOB_PARTITION
        top = str(handle) if is_job_in_store else ""
        found = [
            self._relative(one.path)
            for selector in (self._selector(top, is_deep=True), self._selector(STAGED))
            for one in self._fs.get_file_info(selector)
            if one.is_file
        ]
        return sorted({path for path in found if is_written_by(handle, path)})

    def _selector(self, folder: str, *, is_deep: bool = False) -> pa_fs.FileSelector:
        return pa_fs.FileSelector(self._path(folder), allow_not_found=True, recursive=is_deep)

    def _is_inside(self, folder: Path) -> bool:
        return self.local is not None and (folder == self.local or self.local in folder.parents)

    def _path(self, relative: str) -> str:
        return relative if self.local is None else str(self.local / relative)

    def _relative(self, path: str) -> str:
        return path if self.local is None else str(Path(path).relative_to(self.local))


class SmallFiles:
    """
    Markers, through the table's own file system: an object store needs deltalake's credentials.

    On a disk they are not synced, as a `Store` would: that costs three times the rest of a small
    prepare, and files whose marker a power cut takes are VACUUM's, like all that no version names.
    """

    def __init__(self, files: pa_fs.FileSystem, local: Path | None) -> None:
        self._has_folders = local is not None
        self._fs = files if local is None else pa_fs.SubTreeFileSystem(str(local), files)

    def put(self, key: str, content: bytes) -> None:
        if self._has_folders:
            self._fs.create_dir(key.rpartition("/")[0])
        with self._fs.open_output_stream(key) as stream:
            stream.write(content)

    def read(self, key: str) -> bytes | None:
        try:
            with self._fs.open_input_file(key) as stream:
                return bytes(stream.read())
        except FileNotFoundError:
            return None

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            with suppress(FileNotFoundError):
                self._fs.delete_file(key)

    def entries(self, folder: str) -> Sequence[Entry]:
        now = time.time()
        selector = pa_fs.FileSelector(folder, allow_not_found=True)
        found = [one for one in self._fs.get_file_info(selector) if one.is_file]
        return [
            Entry(
                name=one.base_name,
                size=one.size,
                modified_at=now if one.mtime_ns is None else one.mtime_ns / 1e9,
            )
            for one in sorted(found, key=lambda one: str(one.base_name))
        ]


def files_of(receipt: Receipt) -> Sequence[Mapping[str, Any]]:
    """The files that a receipt names, each as its writer described it."""
    return cast("Sequence[Mapping[str, Any]]", receipt.token.get("files", ()))


def handle_in(relative: str) -> Handle | None:
    """The attempt that wrote a file, by its path; None where no writer of ours did."""
    by_name = Handle.parse(_name_of(relative).rpartition("-")[0])
    return by_name or Handle.parse(relative.partition("/")[0])


def require_ours(relative: str, handle: Handle) -> str:
    """A file's path, if this attempt can have written it: nothing else is ever removed."""
    if not is_written_by(handle, relative) or ".." in relative.split("/") or relative[:1] == "/":
        raise InvariantBroken(f"{handle} names the file {relative!r}, which no writer of ours does")
    return relative


def is_written_by(handle: Handle, relative: str) -> bool:
    """Whether this attempt's writer gives files such paths."""
    return _name_of(relative).startswith(f"{handle}-") or relative.startswith(f"{handle}/")


def local_folder(uri: str) -> Path | None:
    """The folder that a path or a file: URL names; None for an object store."""
    parts = urlsplit(uri)
    if parts.scheme == "file":
        return Path(path_in_file_url(uri))
    return None if "://" in uri else Path(uri)


def _name_of(relative: str) -> str:
    return relative.rpartition("/")[2]


def _file_system(local: Path | None, uri: str, options: Mapping[str, str]) -> pa_fs.FileSystem:
    if local is not None:
        return pa_fs.LocalFileSystem()
    try:
        # Only here: tasks on a local disk do without deltalake.
        from epochal.sinks.delta.object_store import object_store  # noqa: PLC0415
    except ImportError as error:
        raise not_installed("the Delta sink", error.name, "delta") from error
    try:
        return object_store(uri, options)
    except Exception as error:
        raise Misconfigured(
            f"Delta: {uri} can't be reached: {first_line(str(error))}",
            "s3://bucket/table, gs://…, abfss://… or a folder; storage_options take the names that "
            "deltalake knows: AWS_REGION, AWS_ENDPOINT_URL, …",
        ) from error
