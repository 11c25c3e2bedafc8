"""A store as a file system of Arrow's, for datasets: read only, by the store's own credentials."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.fs as pa_fs

from epochal.sinks.files.local import LocalStore
from epochal.sinks.files.places import Store


def filesystem(store: Store) -> tuple[pa_fs.FileSystem, str]:
    """The file system, and the path of the store's root in it."""
    if isinstance(store, LocalStore):
        return pa_fs.LocalFileSystem(), store.root
    return pa_fs.PyFileSystem(_Handler(store)), store.root


class _Handler(pa_fs.FileSystemHandler):  # type: ignore[misc] # Arrow has no types
    """What a dataset of known files asks: to open them."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def get_type_name(self) -> str:
        return "epochal"

    def normalize_path(self, path: str) -> str:
        return path

    def open_input_file(self, path: str) -> pa.NativeFile:
        key = path.removeprefix(f"{self._store.root}/")
        return pa.PythonFile(self._store.open_to_read(key), mode="r")

    def open_input_stream(self, path: str) -> pa.NativeFile:
        return self.open_input_file(path)

    def get_file_info(self, paths: list[str]) -> list[pa_fs.FileInfo]:
        return [pa_fs.FileInfo(path, pa_fs.FileType.File) for path in paths]

    def _refuse(self, *what: Any) -> Any:
        raise OSError(f"{what}: what lies in a store is only read here")

    create_dir = delete_dir = delete_dir_contents = delete_root_dir_contents = _refuse
    delete_file = move = copy_file = open_output_stream = open_append_stream = _refuse
    get_file_info_selector = _refuse
