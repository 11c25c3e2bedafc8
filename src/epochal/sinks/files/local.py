"""
The back end of a Files sink on a local or shared file system.

An attempt writes below `_epochal/prepared/<handle>` under the final names; a commit renames. That
folder is the attempt's marker. A file that is moved without a manifest is of a decided epoch whose
commit was cut short; the repeat finishes it, since a source that is gone and a destination that is
there mean: done.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO

import pyarrow as pa

from epochal.errors import InvariantBroken, Misconfigured, PreparedLost
from epochal.kit.disk import make_folder, sync
from epochal.kit.marked_files import at_once
from epochal.sinks.files import layout
from epochal.sinks.files.backend import files_of
from epochal.terms import (
    Ability,
    EpochNumber,
    Handle,
    Identity,
    InDoubt,
    Json,
    Receipt,
    handle_prefix,
)


def put_if_absent(path: Path, content: bytes, *, scratch: Path) -> bool:
    """
    Create a file with this content, durable on return: False where the name is taken.

    `scratch` begins the name under which it is written first, on the same file system. A killed
    process leaves that behind, and the owner of the prefix may remove it at any time.
    """
    make_folder(scratch.parent)
    make_folder(path.parent)
    hidden = scratch.with_name(f"{scratch.name}{secrets.token_hex(8)}")
    try:
        with hidden.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        is_mine = _link(hidden, path)
    finally:
        with suppress(OSError):
            hidden.unlink()
    # Also where it was taken: a file that is reported to exist must not vanish in a power cut.
    sync(path.parent)
    return is_mine


def _link(hidden: Path, path: Path) -> bool:
    try:
        path.hardlink_to(hidden)
    except FileExistsError:
        return False
    return True


def read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def names(folder: Path) -> list[str]:
    """The names in a folder; none where there is no such folder."""
    try:
        return os.listdir(folder)  # noqa: PTH208 (names are all that is wanted, of many files)
    except FileNotFoundError:
        return []


def remove_empty(folder: Path) -> None:
    """Remove a folder and the folders in it, as far as there is no file in them."""
    for inner, _, _ in os.walk(folder, topdown=False):
        with suppress(OSError):
            Path(inner).rmdir()


_SCRATCH_AGE_S = 600.0
"""Writing a manifest takes milliseconds: what is this old was left by a killed process."""
_TOO_FEW_FOR_THREADS = 8

_on_disk = partial(at_once, at_least=_TOO_FEW_FOR_THREADS)


class LocalStore:
    """Small files below a folder; `scratch` is the key that begins those without a name yet."""

    def __init__(self, root: Path, *, scratch: str = f"{layout.SCRATCH}/-") -> None:
        self._root = root
        self._scratch = root / scratch

    @property
    def root(self) -> str:
        return str(self._root)

    @property
    def scratch(self) -> Path:
        return self._scratch

    def path(self, key: str = "") -> Path:
        return self._root / key

    def read(self, key: str) -> bytes | None:
        return read(self.path(key))

    def put_if_absent(self, key: str, content: bytes) -> bool:
        return put_if_absent(self.path(key), content, scratch=self._scratch)

    def names(self, folder: str) -> list[str]:
        return names(self.path(folder))

    def remove(self, key: str) -> None:
        self.path(key).unlink(missing_ok=True)

    def remove_empty(self, folder: str) -> None:
        remove_empty(self.path(folder))

    def open_to_read(self, key: str) -> IO[bytes]:
        return self.path(key).open("rb")


class LocalAttempt:
    """`_epochal/prepared/<handle>`: files under their final names, not in their place."""

    held_bytes = 0

    def __init__(self, store: LocalStore, handle: Handle) -> None:
        self.store = store
        self._path = store.path(layout.prepared(handle))

    def create(self, relative: str) -> pa.NativeFile:
        path = self._path / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        return pa.OSFile(str(path), "wb")

    def seal(self, relatives: Sequence[str]) -> list[dict[str, Json]]:
        """Make all files durable, with every folder up to the root."""
        paths = [self._path / relative for relative in relatives]
        _on_disk(sync, paths)
        _on_disk(sync, _folders_of(relatives, self._path))
        for folder in (layout.PREPARED, layout.OURS, ""):
            sync(self.store.path(folder))
        return [
            {"path": relative, "bytes": path.stat().st_size}
            for relative, path in zip(relatives, paths, strict=True)
        ]

    def discard(self) -> None:
        _discard(self._path)


class LocalStaging:
    """Prepared folders as the driver sees them."""

    trusts_rehearsal = False

    def __init__(self, store: LocalStore, identity: Identity) -> None:
        self.store = store
        self._prefix = handle_prefix(identity.uid)

    def check(self) -> Sequence[Ability]:
        """Show that files can be created, named once, and moved in one step below the root."""
        root, waiting = self.store.path(), self.store.path(layout.PREPARED)
        try:
            for folder in (root, waiting, self.store.path(layout.SCRATCH)):
                make_folder(folder)
            probe = self.store.scratch.with_name(f"{self.store.scratch.name}probe")
            put_if_absent(probe, b"", scratch=self.store.scratch)
            probe.unlink(missing_ok=True)
        except OSError as error:
            raise Misconfigured(
                f"Files can't write below {root}: {error.strerror} ({error.filename})",
                "the folder must be one that the driver and every executor can write to, on a file "
                "system with hard links and atomic renames (a local disk, NFS; not a mounted "
                "bucket)",
            ) from error
        _require_one_file_system(root, waiting)
        return [
            Ability(
                name="atomic moves",
                granted=True,
                because=f"{root} is one file system with hard links",
            )
        ]

    def rehearse(self, receipts: Sequence[Receipt]) -> None:
        """See every file from here: executors may have written to a disk of their own."""
        for receipt in receipts:
            for file, (source, target) in zip(files_of(receipt), self._moves(receipt), strict=True):
                _check_prepared(source, target, file.bytes)

    def publish(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> bool:  # noqa: ARG002
        moves = [move for receipt in receipts for move in self._moves(receipt)]
        paths = [file.path for receipt in receipts for file in files_of(receipt)]
        folders = _folders_of(paths, self.store.path())
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
        moved = _on_disk(_move_one, moves)
        # All of them, not only new ones: a killed commit may have made some, and synced none.
        _on_disk(sync, folders)
        return all(moved)

    def is_published(self, receipt: Receipt) -> bool:
        return any(target.exists() for _, target in self._moves(receipt))

    def is_prepared(self, receipt: Receipt) -> bool:
        moves = self._moves(receipt)
        is_there = self._prepared(receipt).is_dir()
        return is_there and (not moves or any(source.exists() for source, _ in moves))

    def discard(self, receipt: Receipt) -> None:
        _discard(self._prepared(receipt))

    def clear(self, receipts: Sequence[Receipt]) -> None:
        for receipt in receipts:
            remove_empty(self._prepared(receipt))

    def listed(self) -> Sequence[InDoubt]:
        mine = (name for name in self.store.names(layout.PREPARED) if name.startswith(self._prefix))
        return [found for name in sorted(mine) if (found := self._found(name)) is not None]

    def clear_listed(self, found: InDoubt) -> None:
        self.store.remove_empty(f"{layout.PREPARED}/{found.name}")

    def remove_old_scratch(self) -> None:
        scratch = self.store.scratch
        for name in names(scratch.parent):
            path = scratch.with_name(name)
            with suppress(FileNotFoundError):
                is_old = time.time() - path.stat().st_mtime > _SCRATCH_AGE_S
                if name.startswith(scratch.name) and is_old:
                    path.unlink()

    def _found(self, name: str) -> InDoubt | None:
        try:
            changed_s = self.store.path(f"{layout.PREPARED}/{name}").stat().st_mtime
        except FileNotFoundError:
            return None
        return InDoubt(
            name=name, handle=Handle.parse(name), age_s=max(0.0, time.time() - changed_s)
        )

    def _prepared(self, receipt: Receipt) -> Path:
        return self.store.path(layout.prepared(receipt.handle))

    def _moves(self, receipt: Receipt) -> list[tuple[Path, Path]]:
        prepared = self._prepared(receipt)
        return [
            (prepared / file.path, self.store.path(layout.require_inside(file.path)))
            for file in files_of(receipt)
        ]

    def require_prepared(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        gone = [receipt for receipt in receipts if self._is_lost(receipt)]
        self._require_none_half_moved(epoch, gone)
        lost = tuple(str(receipt.handle) for receipt in gone)
        if lost:
            raise PreparedLost(
                f"epoch {epoch}: files of {len(lost)} of {len(receipts)} receipts are neither in "
                f"{self.store.path(layout.PREPARED)} nor in their place below {self.store.root}, "
                "and no manifest proves them committed",
                "somebody removed them: files below _epochal/ belong to the pipeline",
                handles=lost,
            )

    def _require_none_half_moved(self, epoch: EpochNumber, gone: Sequence[Receipt]) -> None:
        """Written again, rows whose files are in their place already would be there twice."""
        moves = [
            move for receipt in gone if self.is_published(receipt) for move in self._moves(receipt)
        ]
        if moves:
            missing = [str(target) for source, target in moves if not _is_there(source, target)]
            shown = [str(target) for _, target in moves if target.exists()]
            raise half_published(epoch, missing, shown)

    def _is_lost(self, receipt: Receipt) -> bool:
        return not all(_is_there(source, target) for source, target in self._moves(receipt))


def half_published(
    epoch: EpochNumber, missing: Sequence[str], shown: Sequence[str]
) -> InvariantBroken:
    return InvariantBroken(
        f"epoch {epoch} was being committed, and of its files somebody removed {list(missing)} "
        f"while {list(shown)}, of the same tasks, are in their place",
        "put the missing files back and start again; or, if they are lost for good, remove those "
        "in their place too: the epoch's rows are then written again",
    )


def _folders_of(relatives: Iterable[str], top: Path) -> list[Path]:
    """Every folder, from `top` down, that holds one of these files or leads to it."""
    inner = {parent for relative in relatives for parent in Path(relative).parents}
    return sorted(top / folder for folder in inner)


def _discard(path: Path) -> None:
    """Remove a prepared folder, which another driver may be removing at the same time."""
    while path.is_symlink() or path.exists():
        with suppress(FileNotFoundError):
            shutil.rmtree(path)


def _require_one_file_system(root: Path, waiting: Path) -> None:
    if root.stat().st_dev != waiting.stat().st_dev:
        raise Misconfigured(
            f"{waiting} is on another file system than {root}: a file can't be moved between them "
            "in one step",
            "remove the mount or the link at _epochal, so that both are on one file system",
        )


def _check_prepared(source: Path, target: Path, size: int) -> None:
    """Refuse, while it can be refused, a file that the driver could not move (I3)."""
    try:
        found = source.stat()
    except FileNotFoundError as error:
        raise Misconfigured(
            f"a task has written {source}, and the driver does not see it",
            "the folder must be one and the same for the driver and every executor: a shared "
            "mount, or one machine (local[*])",
        ) from error
    if found.st_size != size:
        raise Misconfigured(
            f"{source} has {found.st_size} bytes, and its task wrote {size}",
            "something else writes below _epochal/, or the shared mount shows stale sizes",
        )
    if target.parent.exists() and target.parent.stat().st_dev != found.st_dev:
        raise Misconfigured(
            f"{target.parent} is on another file system than {source}: a file can't be moved "
            "between them in one step",
            "a folder below the root is a mount of its own: bring it into the root's file system",
        )


def _is_there(source: Path, target: Path) -> bool:
    # In this order: of a file that another driver moves meanwhile, one of the two is seen.
    return source.exists() or target.exists()


def _move_one(move: tuple[Path, Path]) -> bool:
    """Move one file: True where this call did it, False where it was in its place already."""
    source, target = move
    try:
        source.rename(target)
    except FileNotFoundError:
        if not target.exists():
            raise
        return False
    return True
