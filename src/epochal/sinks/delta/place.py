"""
Where a table's files are, and what is written beside its log.

    <table>/day=2026-01-31/<handle>-00000.snappy.parquet    a data file, in no version yet or in one
    <table>/_epochal/prepared/<handle>                      a note: this attempt is in doubt
    <table>/_epochal/staged/<handle>-00000.snappy.parquet   rows that a merge will read

A note is put before an attempt's first file, and taken away after the commit or after the last file
is removed: to list what is in doubt, nobody walks through the table (I5, I6). VACUUM passes over
folders that begin with an underscore.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.fs as pa_fs

from epochal.errors import InvariantBroken, Misconfigured
from epochal.kit.disk import make_folder, sync
from epochal.terms import Handle

NOTES = "_epochal/prepared"
STAGED = "_epochal/staged"

Stamp = tuple[int, int | None]
"""A file's size and when it was written."""


@dataclass(frozen=True, slots=True)
class Note:
    """That an attempt has begun, and, once it is prepared, where its files are."""

    name: str
    age_s: float | None


class Place:
    """The files of one table, on a local disk or in an object store."""

    def __init__(self, uri: str, options: Mapping[str, str]) -> None:
        self.uri = uri
        self.options = dict(options)
        self.local = local_folder(uri)
        self._fs = _file_system(self.local, uri, self.options)

    # Data files

    def create(self, relative: str) -> pa.NativeFile:
        if self.local is None:
            return self._fs.open_output_stream(relative)
        path = self.local / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        return pa.OSFile(str(path), "wb")

    def open(self, relative: str) -> pa.NativeFile:
        return self._fs.open_input_file(self._at(relative))

    def sizes(self, relatives: Sequence[str]) -> list[int | None]:
        """How large each file is; None where there is none."""
        found = self._fs.get_file_info([self._at(relative) for relative in relatives])
        return [one.size if one.is_file else None for one in found]

    def stamp(self, relative: str) -> Stamp | None:
        """By what a file is known not to have been written again; None where there is none."""
        (found,) = self._fs.get_file_info([self._at(relative)])
        return (found.size, found.mtime_ns) if found.is_file else None

    def remove(self, relatives: Sequence[str]) -> None:
        """Remove files; those that are gone already are no error."""
        for relative in relatives:
            with suppress(FileNotFoundError):
                self._fs.delete_file(self._at(relative))

    def make_durable(self, relatives: Sequence[str]) -> None:
        """An object store has done that already; a disk is told to, with every folder above."""
        if self.local is None:
            return
        paths = [self.local / relative for relative in relatives]
        folders = {parent for path in paths for parent in path.parents if self._is_inside(parent)}
        for path in (*paths, *sorted(folders)):
            sync(path)

    def named(self, handle: Handle) -> list[str]:
        """Every file of an attempt that never came to say where they are: a walk, and rare."""
        found = []
        for folder in ("", STAGED):
            selector = pa_fs.FileSelector(
                self._at(folder), allow_not_found=True, recursive=folder == ""
            )
            found += [self._relative(one.path) for one in self._fs.get_file_info(selector)]
        return sorted({path for path in found if path.rpartition("/")[2].startswith(f"{handle}-")})

    def staged(self) -> list[str]:
        """What lies where merges read from, whoever put it there."""
        selector = pa_fs.FileSelector(self._at(STAGED), allow_not_found=True)
        found = self._fs.get_file_info(selector)
        return sorted(self._relative(one.path) for one in found if one.is_file)

    # Notes

    def put_note(self, handle: Handle, files: Sequence[str] | None = None) -> None:
        written = json.dumps({"files": files}).encode()
        if self.local is not None:
            make_folder(self.local / NOTES)
            (self.local / note_path(handle)).write_bytes(written)
            return
        with self._fs.open_output_stream(note_path(handle)) as stream:
            stream.write(written)

    def has_note(self, handle: Handle) -> bool:
        return self.sizes([note_path(handle)]) != [None]

    def noted_files(self, handle: Handle) -> Sequence[str] | None:
        """The files of an attempt; None where it never came to say."""
        try:
            with self.open(note_path(handle)) as stream:
                files = json.loads(stream.read())["files"]
        except (FileNotFoundError, ValueError, KeyError):
            return None
        return None if files is None else [require_ours(file, handle) for file in files]

    def remove_note(self, handle: Handle) -> None:
        self.remove([note_path(handle)])

    def notes(self) -> list[Note]:
        selector = pa_fs.FileSelector(self._at(NOTES), allow_not_found=True)
        now_ns = time.time_ns()
        return [
            Note(
                name=one.path.rpartition("/")[2],
                age_s=None if one.mtime_ns is None else max(0.0, (now_ns - one.mtime_ns) / 1e9),
            )
            for one in self._fs.get_file_info(selector)
            if one.is_file
        ]

    def _is_inside(self, folder: Path) -> bool:
        return self.local is not None and (folder == self.local or self.local in folder.parents)

    def _at(self, relative: str) -> str:
        return relative if self.local is None else str(self.local / relative)

    def _relative(self, path: str) -> str:
        return path if self.local is None else str(Path(path).relative_to(self.local))


def note_path(handle: Handle) -> str:
    return f"{NOTES}/{handle}"


def handle_in(relative: str) -> Handle | None:
    """The attempt that wrote a file, by its name; None where no writer of ours did."""
    return Handle.parse(relative.rpartition("/")[2].rpartition("-")[0])


def require_ours(relative: str, handle: Handle) -> str:
    """A file's name, if it is one that this attempt has written: nothing else is ever removed."""
    name = relative.rpartition("/")[2]
    if not name.startswith(f"{handle}-") or ".." in relative.split("/") or relative[:1] == "/":
        raise InvariantBroken(f"{handle} names the file {relative!r}, which no writer of ours does")
    return relative


def local_folder(uri: str) -> Path | None:
    """The folder that a path or a file: URL names; None for an object store."""
    parts = urlsplit(uri)
    if "://" not in uri:
        return Path(uri)
    return Path(unquote(parts.path)) if parts.scheme == "file" else None


def _file_system(local: Path | None, uri: str, options: Mapping[str, str]) -> pa_fs.FileSystem:
    if local is not None:
        return pa_fs.LocalFileSystem()
    try:
        from epochal.sinks.delta.objects import object_store  # noqa: PLC0415  disks do without
    except ImportError as error:
        raise not_installed(error) from error
    try:
        return object_store(uri, options)
    except Exception as error:
        raise Misconfigured(
            f"Delta: {uri} can't be reached: {error}",
            "storage_options take the names that deltalake knows: AWS_REGION, AWS_ENDPOINT_URL, …",
        ) from error


def not_installed(error: ImportError) -> Misconfigured:
    return Misconfigured(
        f"the Delta sink needs a package that is not installed: {error.name}",
        "pip install 'epochal[delta]'",
    )
