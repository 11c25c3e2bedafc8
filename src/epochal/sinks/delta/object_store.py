"""An object store as a file system of Arrow's, with the storage options that deltalake takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.fs as pa_fs
from deltalake.fs import DeltaStorageHandler


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
