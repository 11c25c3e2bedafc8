"""A spool in an object store: S3, Google Cloud Storage, Azure and what speaks as they do.

An object appears whole or not at all. Rows that don't fit one request go up in parts; what a killed
task sent of such an upload is invisible, and the bucket's rule for incomplete uploads removes it.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime

import obstore
import pyarrow as pa
from obstore.exceptions import BaseError

from epochal.kit.spool.places import Entry
from epochal.logs.names import first_line, without_secrets
from epochal.logs.objects import open_store, sorted_error

_PART_BYTES = 8 * 1024 * 1024


class ObjectOutlet:
    def __init__(self, place: ObjectPlace, name: str) -> None:
        self._place = place
        with place.sorting("write to"):
            self._upload = obstore.open_writer(place.store, name, buffer_size=_PART_BYTES)

    def write(self, piece: bytes | memoryview | pa.Buffer) -> None:
        with self._place.sorting("write to"):
            self._upload.write(bytes(piece))

    def finish(self) -> None:
        with self._place.sorting("write to"):
            self._upload.close()

    def discard(self) -> None:
        """Not closed, the upload is never completed."""


class ObjectPlace:
    def __init__(self, url: str) -> None:
        self.store = open_store(url)
        self._told = without_secrets(url)
        self._has_answered = False

    @property
    def told(self) -> str:
        return self._told

    def create(self, name: str) -> ObjectOutlet:
        return ObjectOutlet(self, name)

    def put(self, name: str, content: bytes) -> None:
        with self.sorting("write to"):
            obstore.put(self.store, name, content)

    def read(self, name: str) -> bytes | None:
        with self.sorting("read from"):
            try:
                return bytes(obstore.get(self.store, name).bytes())
            except FileNotFoundError:
                return None

    def open(self, name: str) -> pa.NativeFile | None:
        with self.sorting("read from"):
            try:
                reader = obstore.open_reader(self.store, name, buffer_size=_PART_BYTES)
            except FileNotFoundError:
                return None
        return pa.PythonFile(_Readable(self, reader), mode="r")

    def has(self, name: str) -> bool:
        with self.sorting("read from"):
            try:
                obstore.head(self.store, name)
            except FileNotFoundError:
                return False
        return True

    def files(self, folder: str) -> list[Entry]:
        with self.sorting("list"):
            found = obstore.list_with_delimiter(self.store, folder)["objects"]
        now = datetime.now(UTC)
        return [
            Entry(
                name=one["path"].rpartition("/")[2],
                age_s=max(0.0, (now - one["last_modified"]).total_seconds()),
            )
            for one in found
        ]

    def folders(self, folder: str) -> list[str]:
        with self.sorting("list"):
            found = obstore.list_with_delimiter(self.store, folder)["common_prefixes"]
        return sorted(prefix.rstrip("/").rpartition("/")[2] for prefix in found)

    def remove(self, names: list[str]) -> None:
        # One by one: some stores stop a list at the first name that is gone already.
        with self.sorting("delete from"):
            for name in names:
                with suppress(FileNotFoundError):
                    obstore.delete(self.store, name)

    def remove_folder(self, folder: str) -> None:
        self.remove([f"{folder}/{entry.name}" for entry in self.files(folder)])

    @contextmanager
    def sorting(self, verb: str) -> Iterator[None]:
        try:
            yield
        except (BaseError, OSError) as error:
            fact = f"cannot {verb} the spool {self._told}: {first_line(str(error))}"
            raise sorted_error(error, fact, has_answered=self._has_answered) from None
        self._has_answered = True


class _Readable(io.RawIOBase):
    """What Arrow expects of a Python file, over what the object store's client gives."""

    def __init__(self, place: ObjectPlace, reader: obstore.ReadableFile) -> None:
        self._place = place
        self._reader = reader

    def readable(self) -> bool:
        return True

    def read(self, size: int | None = -1) -> bytes:
        """As many bytes as asked for: the client stops at the edge of its own buffer."""
        with self._place.sorting("read from"):
            if size is None or size < 0:
                return bytes(self._reader.read(None))
            pieces = []
            while size and (piece := bytes(self._reader.read(size))):
                pieces.append(piece)
                size -= len(piece)
            return b"".join(pieces)
