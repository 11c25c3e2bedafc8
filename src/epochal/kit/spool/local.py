"""A spool in a local or mounted folder: synced before it counts, renamed when it is whole."""

from __future__ import annotations

import os
import secrets
import time
from contextlib import suppress
from pathlib import Path

import pyarrow as pa

from epochal.kit.disk import make_folder, sync
from epochal.kit.spool.places import UNFINISHED, Entry

_SCRATCH_AGE_S = 600.0
"""A small file takes milliseconds: a scratch this old was left by a killed process."""


class LocalOutlet:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._hidden = path.with_name(path.name + UNFINISHED)
        make_folder(path.parent)
        self._file = self._hidden.open("wb")

    def write(self, piece: bytes | memoryview | pa.Buffer) -> None:
        self._file.write(piece)

    def finish(self) -> None:
        # Through the open file: had a sweep unlinked it, the rename below fails, as it must.
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._hidden.rename(self._path)
        sync(self._path.parent)

    def discard(self) -> None:
        self._file.close()
        for path in (self._hidden, self._path):
            path.unlink(missing_ok=True)


class LocalPlace:
    def __init__(self, root: Path) -> None:
        self._root = root

    @property
    def told(self) -> str:
        return str(self._root)

    def create(self, name: str) -> LocalOutlet:
        return LocalOutlet(self._root / name)

    def put(self, name: str, content: bytes) -> None:
        path = self._root / name
        make_folder(path.parent)
        scratch = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        try:
            with scratch.open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            scratch.rename(path)
        finally:
            scratch.unlink(missing_ok=True)
        sync(path.parent)

    def read(self, name: str) -> bytes | None:
        try:
            return (self._root / name).read_bytes()
        except FileNotFoundError:
            return None

    def open(self, name: str) -> pa.NativeFile | None:
        try:
            return pa.OSFile(str(self._root / name), "rb")
        except FileNotFoundError:
            return None

    def has(self, name: str) -> bool:
        return (self._root / name).is_file()

    def files(self, folder: str) -> list[Entry]:
        now, listed = time.time(), []
        try:
            # By path: on a network file system a fresh open is what asks the server again.
            with os.scandir(self._root / folder) as found:
                for one in found:
                    with suppress(FileNotFoundError):
                        if one.is_file(follow_symlinks=False):
                            age_s = max(0.0, now - one.stat().st_mtime)
                            listed.append(Entry(name=one.name, age_s=age_s))
        except FileNotFoundError:
            return []
        self._remove_old_scratch(folder, listed)
        return [entry for entry in listed if not entry.name.startswith(".")]

    def folders(self, folder: str) -> list[str]:
        try:
            with os.scandir(self._root / folder) as found:
                return sorted(one.name for one in found if one.is_dir(follow_symlinks=False))
        except FileNotFoundError:
            return []

    def remove(self, names: list[str]) -> None:
        for name in names:
            (self._root / name).unlink(missing_ok=True)

    def remove_folder(self, folder: str) -> None:
        with suppress(FileNotFoundError):
            for path in (self._root / folder).iterdir():
                path.unlink(missing_ok=True)
        # What another driver adds meanwhile stays, and the folder with it.
        with suppress(OSError):
            (self._root / folder).rmdir()

    def _remove_old_scratch(self, folder: str, listed: list[Entry]) -> None:
        for entry in listed:
            if entry.name.startswith(".") and entry.age_s > _SCRATCH_AGE_S:
                (self._root / folder / entry.name).unlink(missing_ok=True)
