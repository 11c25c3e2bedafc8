"""An epoch log in a local folder: one file a record.

A record is written whole under a hidden name, synced, and then given its own name by a hard link,
which fails where that name exists. So a slot is filled at most once and never with a torn record,
among any number of processes, and after SIGKILL as after a power cut.

The folder is synced also where the slot was taken: a name that somebody else linked a moment ago is
reported as taken only once it can't vanish again. That makes a put the moment from which everything
listed before it is durable, and every driver puts its claim before it acts on what it has read.

Nothing is created before the first put, so tools that only look leave no trace.
"""

from __future__ import annotations

import errno
import os
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from epochal.errors import EpochalError, Misconfigured, OutcomeUnknown, TryAgain
from epochal.logs.names import record_name, record_number

_LEFTOVER_AGE_S = 3600.0
_LEFTOVER_SUFFIX = ".tmp"
_FULL = {errno.ENOSPC, errno.EDQUOT}
_NO_HARD_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS}
_FOR_A_PERSON = {
    errno.EACCES,
    errno.EEXIST,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.ENOTDIR,
    errno.EPERM,
    errno.EROFS,
}


class FilesLog:
    """Records as files of one folder on a disk that has hard links. Usable from any thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute()
        self._is_ready = False

    @property
    def place(self) -> str:
        return str(self._folder)

    def put_if_absent(self, number: int, record: bytes) -> bool:
        try:
            self._make_ready()
            hidden = self._write_hidden(number, record)
        except OSError as error:
            raise self._sorted(error, "write to") from error
        try:
            is_mine = self._link(hidden, self._folder / record_name(number))
        finally:
            with suppress(OSError):
                hidden.unlink()
        try:
            _sync_folder(self._folder)
        except OSError as error:
            raise OutcomeUnknown(
                f"record {number} is in {self.place}, but may not last: syncing the folder failed "
                f"({error.strerror})"
            ) from error
        return is_mine

    def numbers(self) -> Sequence[int]:
        # By path, not by a folder kept open: on a network file system a fresh open is what asks
        # the server again, and a listing must show what other machines have put.
        try:
            names = os.listdir(self._folder)  # noqa: PTH208  names only, and errors at once
        except FileNotFoundError:
            return []
        except OSError as error:
            raise self._sorted(error, "list") from error
        return sorted(number for name in names if (number := record_number(name)) is not None)

    def read(self, number: int) -> bytes | None:
        try:
            return (self._folder / record_name(number)).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._sorted(error, "read from") from error

    def delete(self, numbers: Sequence[int]) -> None:
        # Not synced: a deleted record that comes back after a power cut is below the newest anyway.
        try:
            for number in numbers:
                (self._folder / record_name(number)).unlink(missing_ok=True)
        except OSError as error:
            raise self._sorted(error, "delete from") from error

    def close(self) -> None:
        """Nothing is kept open."""

    def _make_ready(self) -> None:
        if self._is_ready:
            return
        _make_folder(self._folder)
        self._remove_leftovers()
        self._is_ready = True

    def _remove_leftovers(self) -> None:
        """Remove what killed writers left. A living one that is this slow finds out and retries."""
        oldest = time.time() - _LEFTOVER_AGE_S
        for file in self._folder.glob(f".*{_LEFTOVER_SUFFIX}"):
            with suppress(OSError):
                if file.stat().st_mtime < oldest:
                    file.unlink()

    def _write_hidden(self, number: int, record: bytes) -> Path:
        hidden = self._folder / f".{number}.{secrets.token_hex(8)}{_LEFTOVER_SUFFIX}"
        try:
            with hidden.open("xb", buffering=0) as file:
                _write_all(file.fileno(), record)
                os.fsync(file.fileno())
        except OSError:
            with suppress(OSError):
                hidden.unlink()
            raise
        return hidden

    def _link(self, hidden: Path, visible: Path) -> bool:
        try:
            os.link(hidden, visible)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno in _NO_HARD_LINKS:
                raise Misconfigured(
                    f"the file system of {self.place} has no hard links: {error.strerror}",
                    hint="keep the epoch log on another disk, or in a database: sqlite:///path",
                ) from error
            raise self._sorted(error, "write to") from error
        return True

    def _sorted(self, error: OSError, verb: str) -> EpochalError:
        """The same error, by what the caller may do next; a put sorted here left nothing."""
        fact = f"cannot {verb} the epoch log {self.place}: {error.strerror}"
        if error.errno in _FULL:
            return TryAgain(fact, hint="free some space; nothing was written")
        if error.errno in _FOR_A_PERSON:
            return Misconfigured(fact, hint="the driver's user must be able to write this folder")
        return TryAgain(fact)


def _write_all(descriptor: int, record: bytes) -> None:
    """Write all of it: one `write` may stop half-way, at a full disk for instance."""
    rest = memoryview(record)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _make_folder(folder: Path) -> None:
    """Create a folder with all its parents, each one durable in the one above it."""
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
