"""An object store as a file system of Arrow's, with the storage options that deltalake takes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import pyarrow as pa
import pyarrow.fs as pa_fs
from deltalake.fs import DeltaStorageHandler

from epochal.storage import Entry


class _AsBytes:
    """A stream for Arrow, which writes its own buffers: deltalake's streams take only bytes."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, data: Any) -> int:
        given = data if isinstance(data, bytes) else memoryview(data).tobytes()
        self._stream.write(given)
        return len(given)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Handler(DeltaStorageHandler):
    def open_output_stream(self, path: str, metadata: dict[str, str] | None = None) -> Any:
        stream = self._handler.open_output_stream(path, metadata)
        return pa.PythonFile(_AsBytes(stream), mode="w")


def object_store(uri: str, options: Mapping[str, str]) -> pa_fs.FileSystem:
    return pa_fs.PyFileSystem(_Handler(uri, dict(options)))


class SmallObjects:
    """Markers in an object store, with the credentials that deltalake itself was given."""

    def __init__(self, files: pa_fs.FileSystem) -> None:
        self._fs = files

    def put(self, key: str, content: bytes) -> None:
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
