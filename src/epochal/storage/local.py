"""A store in a local or mounted folder: one file per key. The one module that calls fsync.

`put_if_absent` writes the content whole under a hidden name, syncs it, and then gives it its own
name by a hard link, which fails where that name exists. So a key is created at most once and never
with half of its content, among any number of processes, after SIGKILL as after a power cut.

The folder is synced also where the key exists already:

    process A    write, sync, link k          power cut: k may be gone, as its name is not on disk
    process B    link k: exists               must not report "k exists" before the name is durable
    process B    sync folder, return False    now it is, whichever of the two synced

So after a put has returned, everything that was listed before it is durable. Every driver puts its
claim into the epoch log before it acts on what it has read.
"""

from __future__ import annotations

import errno
import os
import pwd
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, TypeVar

from epochal.errors import EpochalError, Misconfigured, OutcomeUnknown, TryAgain
from epochal.storage.leases import FileLease
from epochal.storage.store import UNFINISHED, Entry, checked, gone

_Made = TypeVar("_Made")

_LEFTOVER_AGE_S = 3600.0
_SCRATCH_SUFFIX = ".tmp"
_CREATE_ATTEMPTS = 5
_OUTPUT_BUFFER_BYTES = 256 * 1024

_SPACE = "free some space, or raise the quota; nothing was written"
_SIZE = "this process may not write files of this size: look at `ulimit -f`"
_RIGHTS = "the user of this process must be able to read and write this folder"
_ERRORS: Mapping[int, tuple[type[EpochalError], str]] = {
    errno.ENOSPC: (TryAgain, _SPACE),
    errno.EDQUOT: (TryAgain, _SPACE),
    errno.EFBIG: (TryAgain, _SIZE),
    errno.EACCES: (Misconfigured, _RIGHTS),
    errno.EPERM: (Misconfigured, _RIGHTS),
    errno.EROFS: (Misconfigured, _RIGHTS),
    errno.EEXIST: (Misconfigured, "a file is where a folder must be"),
    errno.ENOTDIR: (Misconfigured, "a file is where a folder must be"),
    errno.EISDIR: (Misconfigured, "a folder is where a file must be"),
    errno.ELOOP: (Misconfigured, "links of this path lead to one another"),
    errno.ENAMETOOLONG: (Misconfigured, "a file system takes names of up to 255 bytes"),
}
"""What an error means for the caller; every other one is `TryAgain`."""
_NO_HARD_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS}


class LocalStore:
    """Keys as files below one folder of a disk that has hard links."""

    def __init__(self, root: Path, *, folder: str = "", is_private: bool = False) -> None:
        """
        `root` itself is never removed; `folder` below it holds the keys. `is_private`: what is put
        here is for this user, and for the group of a folder that one shares.
        """
        # Without symbolic links: a log is bound to its place, by whichever name that is given.
        self._root = Path(os.path.realpath(root))
        self._base = self._root / folder
        self._is_private = is_private
        self._is_swept = False

    @property
    def location(self) -> str:
        return str(self._base)

    def put(self, key: str, content: bytes) -> None:
        path = self._path(key)
        with self._errors("write", key):
            scratch = self._write_scratch(content)
            try:
                _in_folder(path, lambda: scratch.replace(path))
            except OSError:
                _remove(scratch)
                raise
        self._sync_name(path)

    def put_if_absent(self, key: str, content: bytes) -> bool:
        path = self._path(key)
        with self._errors("write", key):
            scratch = self._write_scratch(content)
            try:
                is_created = _in_folder(path, lambda: self._link(scratch, path))
            finally:
                _remove(scratch)
        self._sync_name(path)
        return is_created

    def read(self, key: str) -> bytes | None:
        with self._errors("read", key):
            try:
                return self._path(key).read_bytes()
            except FileNotFoundError:
                return None

    def read_range(self, key: str, start: int, end: int) -> bytes:
        with self._errors("read", key):
            try:
                with self._path(key).open("rb") as file:
                    file.seek(start)
                    return file.read(end - start)
            except FileNotFoundError:
                raise gone(self.location, key) from None

    def names(self, folder: str = "", after: str = "") -> Sequence[str]:
        found = (one for one in self._scan(folder) if one.name > after)
        return sorted(one.name for one in found if one.is_file() and one.name[0] != ".")

    def folders(self, folder: str = "") -> Sequence[str]:
        found = self._scan(folder)
        return sorted(one.name for one in found if one.is_dir(follow_symlinks=False))

    def entries(self, folder: str = "") -> Sequence[Entry]:
        keys = [f"{folder}/{name}" if folder else name for name in self.names(folder)]
        return [found for key in keys if (found := self.entry(key)) is not None]

    def entry(self, key: str) -> Entry | None:
        path = self._path(key)
        with self._errors("read", key):
            try:
                found = path.stat()
            except FileNotFoundError:
                return None
        return Entry(name=path.name, size=found.st_size, modified_at=found.st_mtime)

    def delete(self, keys: Sequence[str]) -> None:
        # Not synced: the owner of a key that comes back after a power cut deletes it again.
        paths = [self._path(key) for key in keys]
        with self._errors("delete", ", ".join(keys)):
            for path in paths:
                path.unlink(missing_ok=True)
        for folder in {path.parent for path in paths}:
            self._remove_empty(folder)

    def beside(self, name: str) -> LocalStore:
        folder = str((self._base / name).relative_to(self._root))
        return LocalStore(self._root, folder=folder, is_private=self._is_private)

    def lease(self) -> FileLease:
        """On one machine only."""
        return FileLease(self._base / ".lease")

    def close(self) -> None:
        """Nothing is kept open."""

    def create(self, key: str) -> LocalOutput:
        path = self._path(key)
        with self._errors("write", key):
            file = _created(path.with_name(path.name + UNFINISHED))
            # Rows, on their way to a target that has rights of its own.
            os.fchmod(file.fileno(), _private_mode(path.parent))
        return LocalOutput(self, key, path, file)

    def discard_unfinished(self, folder: str) -> None:
        """`names` lists them here: they are deleted like other keys."""

    def open(self, key: str) -> BinaryIO | None:
        with self._errors("read", key):
            try:
                return self._path(key).open("rb")
            except FileNotFoundError:
                return None

    def require_removable(self, key: str) -> None:
        """Raise where this user could not remove a file that another may have written."""
        folder = self._path(key).parent
        if not os.access(folder, os.W_OK | os.X_OK):
            owner, me = user_name(folder.stat().st_uid), user_name(os.geteuid())
            raise Misconfigured(
                f"{folder} belongs to {owner}, and this process, which runs as {me}, can't remove "
                "files there",
                f"run driver and executors as one user; or give {me} and {owner} a common group: "
                f"chgrp -R GROUP {self.location} and chmod -R g+rwXs on it",
            )

    def _path(self, key: str) -> Path:
        return self._base / checked(key)

    def _scan(self, folder: str) -> list[os.DirEntry[str]]:
        # By path, not by a folder kept open: on a network file system a fresh open is what asks
        # the server again, and a listing must show what other machines have put.
        with self._errors("list", folder):
            try:
                with os.scandir(self._base / folder) as found:
                    return list(found)
            except FileNotFoundError:
                return []

    def _write_scratch(self, content: bytes) -> Path:
        """
        A durable file without a name of its own, in the folder of all keys: in that of its key
        nobody may ever look for what a killed process left.
        """
        self._remove_leftovers()
        scratch = self._base / f".{secrets.token_hex(8)}{_SCRATCH_SUFFIX}"
        if self._is_private and not self._base.is_dir():
            make_folder(self._base.parent)
            make_private_folder(self._base)
        file = _created(scratch)
        try:
            with file:
                if self._is_private:
                    os.fchmod(file.fileno(), _private_mode(self._base))
                _write_all(file.fileno(), content)
                os.fsync(file.fileno())
        except OSError:
            _remove(scratch)
            raise
        return scratch

    def _link(self, scratch: Path, path: Path) -> bool:
        try:
            os.link(scratch, path)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno in _NO_HARD_LINKS:
                raise Misconfigured(
                    f"the file system of {self.location} has no hard links: {error.strerror}",
                    hint="use another disk, or a database: sqlite:///path",
                ) from error
            if error.errno in _ERRORS or isinstance(error, FileNotFoundError):
                raise
            # Of a network's file system: its server may have made the link, or may yet do so.
            raise OutcomeUnknown(f"{path} may be written, or not: {error.strerror}") from error
        return True

    def _sync_name(self, path: Path) -> None:
        try:
            sync(path.parent)
        except FileNotFoundError:
            pass  # somebody has deleted the key since, and its folder with it
        except OSError as error:
            raise OutcomeUnknown(
                f"{path} is written, but may not last: syncing its folder failed ({error.strerror})"
            ) from error

    def _remove_leftovers(self) -> None:
        """Remove scratch files of killed writers, once. A slow living one retries."""
        if self._is_swept:
            return
        self._is_swept = True
        oldest = time.time() - _LEFTOVER_AGE_S
        for file in self._base.glob(f".*{_SCRATCH_SUFFIX}"):
            with suppress(OSError):
                if file.stat().st_mtime < oldest:
                    file.unlink()

    def _remove_empty(self, folder: Path) -> None:
        with suppress(OSError):
            while folder != self._root:
                folder.rmdir()
                folder = folder.parent

    def _errors(self, verb: str, key: str) -> AbstractContextManager[None]:
        return disk_errors(verb, f"{self.location}/{key}" if key else self.location)


class LocalOutput:
    """A file in the making, beside its own name."""

    def __init__(self, store: LocalStore, key: str, path: Path, file: BinaryIO) -> None:
        self._store = store
        self._key = key
        self._path = path
        self._unfinished = path.with_name(path.name + UNFINISHED)
        self._file = file
        self._pieces: list[bytes] = []
        self._pieces_bytes = 0

    def write(self, piece: bytes | memoryview) -> None:
        self._pieces.append(bytes(piece))
        self._pieces_bytes += len(self._pieces[-1])
        if self._pieces_bytes >= _OUTPUT_BUFFER_BYTES:
            self._flush()

    def _flush(self) -> None:
        with self._store._errors("write", self._key):
            _write_all(self._file.fileno(), b"".join(self._pieces))
        self._pieces, self._pieces_bytes = [], 0

    def finish(self) -> None:
        self._flush()
        with self._store._errors("write", self._key):
            # Through the open file: where a sweep has unlinked it, the rename fails, as it must.
            os.fsync(self._file.fileno())
            self._file.close()
            self._unfinished.rename(self._path)
        self._store._sync_name(self._path)

    def discard(self) -> None:
        self._file.close()
        self._store.delete([self._key + UNFINISHED])


@contextmanager
def disk_errors(verb: str, place: str) -> Iterator[None]:
    """Raise what the table says of an error of the disk; nothing was done then."""
    try:
        yield
    except OSError as error:
        kind, hint = _meaning(error)
        raise kind(f"cannot {verb} {place}: {error.strerror or error}", hint) from error


def disk_hint(error: Exception) -> str:
    """What a person can do about an error of a disk that another library has raised."""
    return _meaning(error)[1] if isinstance(error, OSError) else ""


def _meaning(error: OSError) -> tuple[type[EpochalError], str]:
    return _ERRORS.get(error.errno or 0, (TryAgain, ""))


def make_folder(path: Path, *, is_durable: bool = True) -> None:
    """Create a folder with all its parents, each one durable in the one above it."""
    if path.is_dir():
        return
    make_folder(path.parent, is_durable=is_durable)
    try:
        path.mkdir()
        _share(path, 0o775)
    except FileExistsError:
        if path.exists() and not path.is_dir():
            raise
    if is_durable:
        sync(path.parent)


def make_private_folder(path: Path) -> None:
    """
    Create a folder, in one that exists, that no other user can look into.

    Where the folder above it is shared by a group, this one is, too: a task and its driver need not
    be one user.
    """
    path.mkdir(mode=0o700, exist_ok=True)
    _share(path, 0o770)


def create_private_file(path: Path) -> None:
    """Create an empty file that no other user can read, unless it is there."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(descriptor, _private_mode(path.parent))
    finally:
        os.close(descriptor)


def _private_mode(folder: Path) -> int:
    return 0o660 if is_shared(folder) else 0o600


def _share(path: Path, mode: int) -> None:
    """What is made in a shared folder is shared, too."""
    if is_shared(path.parent):
        path.chmod(mode | stat.S_ISGID)


def is_shared(folder: Path) -> bool:
    """Whether a folder has the mode g+ws, by which a group shares it."""
    shared = stat.S_IWGRP | stat.S_ISGID
    return folder.stat().st_mode & shared == shared


def user_name(uid: int) -> str:
    try:
        return f"{pwd.getpwuid(uid).pw_name} ({uid})"
    except KeyError:
        return f"user {uid}"


def sync(path: Path) -> None:
    """Make a file's content, or a folder's names, outlive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _created(path: Path) -> BinaryIO:
    return _in_folder(path, lambda: path.open("wb", buffering=0))


def _in_folder(path: Path, create: Callable[[], _Made]) -> _Made:
    """Create a name in its folder, which a delete elsewhere may remove between the two steps."""
    for _ in range(_CREATE_ATTEMPTS):
        with suppress(FileNotFoundError):
            make_folder(path.parent)
            return create()
    raise FileNotFoundError(errno.ENOENT, "its folder is removed again and again", str(path))


def _write_all(descriptor: int, content: bytes | memoryview) -> None:
    """Write all of it: one `write` may stop half-way, at a full disk for instance."""
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink()
