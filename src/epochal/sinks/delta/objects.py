"""An object store as Arrow's file system, under the options that deltalake itself is given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.fs as pa_fs
from deltalake.fs import DeltaStorageHandler


class _AsBytes:
    """Arrow hands over its own buffers, and deltalake's streams take nothing but bytes."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, data: Any) -> int:
        given = data if isinstance(data, bytes) else memoryview(data).tobytes()
        self._stream.write(given)
        return len(given)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Storage(DeltaStorageHandler):
    def open_output_stream(self, path: str, metadata: dict[str, str] | None = None) -> Any:
        stream = self._handler.open_output_stream(path, metadata)
        return pa.PythonFile(_AsBytes(stream), mode="w")


def object_store(uri: str, options: Mapping[str, str]) -> pa_fs.FileSystem:
    return pa_fs.PyFileSystem(_Storage(uri, dict(options)))
