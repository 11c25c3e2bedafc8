"""
The back end of a Files sink on a local or shared file system.

An attempt writes into `<root>.epochal/<handle>`, beside the root, under the final names; a commit
renames. That folder is the attempt's marker. A file that is moved without a manifest is of a
decided epoch whose commit was cut short; the repeat finishes it, since a source that is gone and a
destination that is there mean: done.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import pyarrow as pa

from epochal.errors import InvariantBroken, Misconfigured, PreparedLost
from epochal.kit.marked_files import at_once
from epochal.sinks.files import layout
from epochal.sinks.files.backend import Stores, files_of
from epochal.storage.local import LocalStore, make_folder, sync
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

_TOO_FEW_FOR_THREADS = 8

_PROBE = ".epochal-probe-"
_RIGHTS = (
    "the folder, and the one above it, must be writable for the driver and every executor, on a "
    "file system with hard links and atomic renames (a local disk, NFS; not a mounted bucket); "
    "where the one above it is not yours, write to a folder below this one"
)

_on_disk = partial(at_once, at_least=_TOO_FEW_FOR_THREADS)


def folder_beside(root: Path) -> Path:
    """
    `<root>.epochal`, which is on the root's file system.

    Without symbolic links: beside a link there may be another file system.
    """
    return Path(layout.beside(os.path.realpath(root)))


def stores_at(root: Path) -> Stores:
    return Stores(shown=LocalStore(root), ours=LocalStore(folder_beside(root)))


class LocalAttempt:
    """`<root>.epochal/<handle>`: files under their final names, not in their place."""

    held_bytes = 0

    def __init__(self, root: Path, handle: Handle) -> None:
        self._beside = folder_beside(root)
        self.ours = LocalStore(self._beside)
        self._path = self._beside / layout.prepared(handle)

    @property
    def folder(self) -> Path:
        return self._path

    def create(self, relative: str) -> pa.NativeFile:
        path = self._path / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        return pa.OSFile(str(path), "wb")

    def seal(self, relatives: Sequence[str]) -> list[dict[str, Json]]:
        """Make all files durable, with every folder above them that a task may have made."""
        paths = [self._path / relative for relative in relatives]
        _on_disk(sync, paths)
        _on_disk(sync, _folders_of(relatives, self._path))
        for folder in (self._beside, self._beside.parent):
            sync(folder)
        return [
            {"path": relative, "bytes": path.stat().st_size}
            for relative, path in zip(relatives, paths, strict=True)
        ]

    def discard(self) -> None:
        _discard(self._path)


class LocalStaging:
    """Prepared folders as the driver sees them."""

    trusts_rehearsal = False
    shows_by_manifest = False

    def __init__(self, root: Path, identity: Identity) -> None:
        self.stores = stores_at(root)
        self._root = Path(os.path.realpath(root))
        self._beside = folder_beside(root)
        self._identity = identity

    def check(self) -> Sequence[Ability]:
        """Show that files can be created, named once, and moved in one step to the root."""
        try:
            make_folder(self._root)
            self._require_same_file_system()
            make_folder(self._beside)
            self._try_put()
        except (OSError, Misconfigured) as error:
            reason = error.message if isinstance(error, Misconfigured) else str(error)
            hint = error.hint if isinstance(error, Misconfigured) else _RIGHTS
            raise Misconfigured(f"Files can't write to {self._root}: {reason}", hint) from error
        self._try_move()
        return [
            Ability(
                name="atomic moves",
                granted=True,
                because=f"{self._root} and {self._beside} are one file system with hard links",
            )
        ]

    def _require_same_file_system(self) -> None:
        """Before anything is made beside a mount point, which is the folder of somebody else."""
        for folder in (self._root.parent, self._beside):
            if folder.exists() and folder.stat().st_dev != self._root.stat().st_dev:
                raise self._not_one_file_system(folder)

    def _try_put(self) -> None:
        probe = f"{layout.scratch_of(self._identity.uid, self._identity.tag)}probe"
        self.stores.ours.put_if_absent(probe, b"")
        self.stores.ours.delete([probe])

    def _try_move(self) -> None:
        """By an empty folder: to a reader of the root it is nothing, also if it is left there."""
        for old in self._root.glob(f"{_PROBE}*"):
            _remove_empty(old)
        probe = f"{_PROBE}{secrets.token_hex(8)}"
        made, moved = self._beside / probe, self._root / probe
        try:
            made.mkdir()
            made.rename(moved)
        except OSError as error:
            if error.errno == errno.EXDEV:
                raise self._not_one_file_system(self._beside) from error
            raise Misconfigured(
                f"Files can't move files from {self._beside} to {self._root}: {error.strerror}",
                _RIGHTS,
            ) from error
        finally:
            for folder in (made, moved):
                _remove_empty(folder)

    def _not_one_file_system(self, folder: Path) -> Misconfigured:
        return Misconfigured(
            f"{folder} is on another file system than {self._root}: a file can't be moved between "
            "them in one step, and files are prepared beside the folder",
            f"where {self._root} is a mount point, write to a folder below it: "
            f"{self._root / 'folder'}",
        )

    def rehearse(self, receipts: Sequence[Receipt]) -> None:
        """See every file from here: executors may have written to a disk of their own."""
        for receipt in receipts:
            for file, (source, target) in zip(files_of(receipt), self._moves(receipt), strict=True):
                _check_prepared(source, target, file.bytes)

    def require_prepared(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        gone = [receipt for receipt in receipts if self._is_lost(receipt)]
        self._require_none_half_moved(epoch, gone)
        lost = tuple(str(receipt.handle) for receipt in gone)
        if lost:
            raise PreparedLost(
                f"epoch {epoch}: files of {len(lost)} of {len(receipts)} receipts are neither in "
                f"{self._beside} nor in their place below {self._root}, and no manifest proves "
                "them committed",
                f"somebody removed them: what is in {self._beside} belongs to the pipeline",
                handles=lost,
            )

    def publish(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> bool:  # noqa: ARG002
        moves = [move for receipt in receipts for move in self._moves(receipt)]
        paths = [file.path for receipt in receipts for file in files_of(receipt)]
        folders = _folders_of(paths, self._root)
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
            _discard(self._prepared(receipt))

    def listed(self) -> Sequence[InDoubt]:
        prefix = handle_prefix(self._identity.uid)
        listed = sorted(self._beside.glob(f"{prefix}*"))
        return [found for path in listed if (found := _found(path)) is not None]

    def clear_listed(self, found: InDoubt) -> None:
        _discard(self._beside / found.name)

    def engine_attempt(self, handle: Handle) -> LocalAttempt:
        return LocalAttempt(self._root, handle)

    def remove_old_scratch(self) -> None:
        """The store removes its own."""

    def _prepared(self, receipt: Receipt) -> Path:
        return self._beside / layout.prepared(receipt.handle)

    def _moves(self, receipt: Receipt) -> list[tuple[Path, Path]]:
        prepared = self._prepared(receipt)
        return [
            (prepared / file.path, self._root / layout.require_inside(file.path))
            for file in files_of(receipt)
        ]

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


def _found(path: Path) -> InDoubt | None:
    try:
        changed_s = path.stat().st_mtime
    except FileNotFoundError:
        return None
    age_s = max(0.0, time.time() - changed_s)
    return InDoubt(name=path.name, handle=Handle.parse(path.name), age_s=age_s)


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


def _remove_empty(folder: Path) -> None:
    """Remove a folder and the folders in it, as far as there is no file in them."""
    for inner, _, _ in os.walk(folder, topdown=False):
        with suppress(OSError):
            Path(inner).rmdir()


def _check_prepared(source: Path, target: Path, size: int) -> None:
    """Refuse, while it can be refused, a file that the driver could not move (I3)."""
    try:
        found = source.stat()
    except FileNotFoundError as error:
        raise Misconfigured(
            f"a task has written {source}, and the driver does not see it",
            "the folder above the root must be one and the same for the driver and every "
            "executor: a shared mount, or one machine (local[*])",
        ) from error
    if found.st_size != size:
        raise Misconfigured(
            f"{source} has {found.st_size} bytes, and its task wrote {size}",
            "something else writes there, or the shared mount shows stale sizes",
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
