"""
The back end of a Files sink on a local or shared file system.

An attempt writes into `<root>.epochal/<handle>`, beside the root, under the final names; a commit
renames. That folder is the attempt's marker. A file that is moved without a manifest is of a
decided epoch whose commit was cut short; the repeat finishes it, since a source that is gone and a
destination that is there mean: done.

Consumers may take files away as soon as they see them. So the ledger notes, durably and before the
first move, that files of an epoch are being shown, and a repeated commit judges a file that is in
neither place by that note:

    not noted                            nothing was moved: somebody removed it, its rows are lost
    noted, the attempt's folder is there    it was moved, and a consumer took it away: done
    noted, the folder is gone, too          nobody can know: left to a person

The last one is what cleaners of old files do. Nothing of ours removes that folder before the
manifest is there.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from epochal.contract import EngineWritten
from epochal.errors import InvariantBroken, Misconfigured, PreparedLost, TryAgain
from epochal.kit.marked_files import at_once
from epochal.sinks.files import layout
from epochal.sinks.files.backend import Showing, Stores, files_of
from epochal.storage.local import (
    LocalStore,
    disk_errors,
    is_shared,
    make_folder,
    make_private_folder,
    sync,
    user_name,
)
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

logger = logging.getLogger("epochal")

_TOO_FEW_FOR_THREADS = 8

_PROBE = ".epochal-probe-"
_PROBE_AGE_S = 60.0
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
    is_listed = False

    def __init__(self, root: Path, handle: Handle) -> None:
        self._beside = folder_beside(root)
        self.ours = LocalStore(self._beside)
        self._path = self._beside / layout.prepared(handle)

    @property
    def job_folder(self) -> Path:
        """Inside, as the engine makes it with rights of its own."""
        return self._path / "job"

    @property
    def job_url(self) -> str:
        return f"file://{self.job_folder}"

    def gather(
        self,
        written: EngineWritten,
        name: Callable[[int], str],
        footer_of: Callable[[Path], tuple[Any, int]] | None,
        has_rows: Callable[[Path], bool],
    ) -> dict[str, int | None]:
        """Under their final names: from here on the files are like those of a task."""
        from epochal.kit.engine_files import engine_files  # noqa: PLC0415  not for tasks

        rows: dict[str, int | None] = {}
        for file in engine_files(self.job_folder, written, footer_of=footer_of, has_rows=has_rows):
            relative = f"{file.partition}/{name(len(rows))}" if file.partition else name(len(rows))
            make_folder((self._path / relative).parent, is_durable=False)
            file.move_to(self._path / relative)
            rows[relative] = file.rows
        return rows

    def make(self) -> None:
        """The attempt's marker, and what keeps other users from looking at its rows."""
        if not self._path.is_dir():
            make_folder(self._beside)
            make_private_folder(self._path)

    def errors(self) -> AbstractContextManager[None]:
        return disk_errors("prepare files in", str(self._path))

    def create(self, relative: str) -> pa.NativeFile:
        self.make()
        path = self._path / relative
        make_folder(path.parent, is_durable=False)
        return pa.OSFile(str(path), "wb")

    def seal(self, relatives: Sequence[str]) -> list[dict[str, Json]]:
        """Make all files durable, with every folder above them that a task may have made."""
        paths = [self._path / relative for relative in relatives]
        # Each waits for the disk: two at once take as long as the longer one.
        at_once(sync, paths)
        _on_disk(sync, _folders_of(relatives, self._path))
        for folder in (self._beside, self._beside.parent):
            sync(folder)
        return [
            {"path": relative, "bytes": path.stat().st_size}
            for relative, path in zip(relatives, paths, strict=True)
        ]

    def discard(self) -> None:
        with suppress(OSError):
            shutil.rmtree(self._path)


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
        self._require_apart()
        try:
            make_folder(self._root)
            self._require_same_file_system()
            self._make_beside()
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

    def _require_apart(self) -> None:
        """Readers of a folder look into those inside, and would see what is prepared there."""
        outer = next((one for one in self._root.parents if _is_root(one)), None)
        inner = next(iter(sorted(self._root.glob(f"*{layout.BESIDE}"))), None)
        if outer is None and inner is None:
            return
        raise Misconfigured(
            f"Files can't write to {self._root}: readers of {outer or self._root}, the folder of a "
            f"sink, would see what is prepared for another one in {inner or self._beside}",
            "folders of two sinks must be beside each other, not one inside of the other",
        )

    def _make_beside(self) -> None:
        """As the root is: who may write there may prepare, and readers of manifests may read."""
        if self._beside.is_dir():
            return
        make_folder(self._beside)
        root = self._root.stat()
        with suppress(PermissionError):
            os.chown(self._beside, -1, root.st_gid)
        self._beside.chmod(stat.S_IMODE(root.st_mode) & ~stat.S_ISVTX)

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
        for old in (*self._beside.glob(f"{_PROBE}*"), *self._root.glob(f"{_PROBE}*")):
            if (_age_s(old) or 0.0) > _PROBE_AGE_S:  # else another process may be at it
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
        """
        See every file from here, and that it can be moved: executors may have written to a disk of
        their own, or as another user.
        """
        for receipt in receipts:
            files = zip(files_of(receipt), self._moves(receipt), strict=True)
            try:
                for file, (source, target) in files:
                    _check_prepared(source, target, file.bytes)
            except PermissionError as error:
                reason = error.strerror or str(error)
                raise self._not_allowed("look into", self._prepared(receipt), reason) from error
        moves = [move for receipt in receipts for move in self._moves(receipt)]
        self._require_writable({source.parent for source, _ in moves}, verb="move files out of")
        targets = {_nearest(target.parent) for _, target in moves}
        self._require_writable(targets, verb="move files to")
        # Rights alone don't show it all: of each user's files one is given another name, and back.
        for source in {_owners(source): source for source, _ in moves}.values():
            self._try_to_rename(source)

    def _require_writable(self, folders: Iterable[Path], *, verb: str) -> None:
        for folder in folders:
            if not os.access(folder, os.W_OK | os.X_OK):
                raise self._not_allowed(verb, folder, os.strerror(errno.EACCES))

    def _try_to_rename(self, source: Path) -> None:
        """Within its own folder: commands of an operator clear what lies in scratch."""
        probe = source.with_name(f"{_PROBE}{secrets.token_hex(8)}")
        try:
            source.rename(probe)
            probe.rename(source)
        except PermissionError as error:
            reason = error.strerror or str(error)
            raise self._not_allowed("move files out of", source.parent, reason) from error

    def _not_allowed(self, verb: str, folder: Path, reason: str) -> Misconfigured:
        driver, owner = user_name(os.geteuid()), user_name(folder.stat().st_uid)
        return Misconfigured(
            f"the driver, which runs as {driver}, can't {verb} {folder}, which belongs to {owner}: "
            f"{reason}",
            f"run driver and executors as one user; or give {driver} and {owner} a common group: "
            f"chgrp -R GROUP {self._root} {self._beside} and chmod -R g+rwXs on both",
        )

    def require_prepared(
        self, epoch: EpochNumber, receipts: Sequence[Receipt], showing: Showing
    ) -> None:
        """With sizes: a file that was cut by a failing disk or another program is lost."""
        states = [(receipt, {*self._states(receipt)}) for receipt in receipts]
        missing = [
            (receipt, found)
            for receipt, found in states
            if not found <= {_State.WAITING, _State.SHOWN}
        ]
        if not missing:
            return
        is_showing = showing.age_s() is not None
        lost = []
        for receipt, found in missing:
            is_kept = self._prepared(receipt).is_dir()
            if is_showing and is_kept and not found & {_State.CUT, _State.CHANGED}:
                continue
            if found & {_State.SHOWN, _State.CHANGED} or (is_showing and _State.GONE in found):
                raise self._half_moved(epoch, receipt, showing)
            lost.append(str(receipt.handle))
        if lost:
            raise PreparedLost(
                f"epoch {epoch}: files of {len(lost)} of {len(receipts)} receipts are neither in "
                f"{self._beside} as their tasks wrote them nor in their place below {self._root}, "
                "and no manifest proves them committed",
                f"somebody removed or changed them: what is in {self._beside} belongs to the "
                "pipeline",
                handles=tuple(lost),
            )

    def _states(self, receipt: Receipt) -> list[_State]:
        files = zip(files_of(receipt), self._moves(receipt), strict=True)
        return [_state(source, target, file.bytes) for file, (source, target) in files]

    def _half_moved(
        self, epoch: EpochNumber, receipt: Receipt, showing: Showing
    ) -> InvariantBroken:
        """Written again, rows whose files came to their place already would be there twice."""
        paths = [str(target) for _, target in self._moves(receipt)]
        found = list(zip(paths, self._states(receipt), strict=True))
        missing = [path for path, state in found if state not in (_State.WAITING, _State.SHOWN)]
        shown = [path for path, state in found if state is _State.SHOWN]
        return half_published(epoch, missing, shown, showing)

    def publish(
        self,
        epoch: EpochNumber,  # noqa: ARG002
        receipts: Sequence[Receipt],
        showing: Showing,  # noqa: ARG002
    ) -> bool:
        paths = [file.path for receipt in receipts for file in files_of(receipt)]
        folders = _folders_of(paths, self._root)
        for folder in folders:
            make_folder(folder, is_durable=False)
        moved = _on_disk(
            lambda one: self._move_one(*one),
            [(receipt, *move) for receipt in receipts for move in self._moves(receipt)],
        )
        # All of them, not only new ones: a killed commit may have made some, and synced none.
        _on_disk(sync, folders)
        return all(moved)

    def is_published(self, receipt: Receipt) -> bool:
        return any(target.exists() for _, target in self._moves(receipt))

    def is_prepared(self, receipt: Receipt) -> bool:
        moves = self._moves(receipt)
        is_there = self._prepared(receipt).is_dir()
        return is_there and (not moves or any(source.exists() for source, _ in moves))

    def _move_one(self, receipt: Receipt, source: Path, target: Path) -> bool:
        """True where this call did it, False where it was in its place already."""
        try:
            source.rename(target)
        except FileNotFoundError as error:
            # Or it was: another driver moved it, and a consumer took it away since.
            if not target.exists() and not self._prepared(receipt).is_dir():
                raise TryAgain(f"{source} and its folder were removed meanwhile") from error
            return False
        return True

    def discard(self, receipt: Receipt) -> None:
        self._discard(self._prepared(receipt))

    def _discard(self, prepared: Path) -> None:
        """
        Move a folder aside, then remove it: an attempt that still writes can't bring files back
        into a folder that is being emptied. What can't be removed is still listed, or is scratch.
        """
        aside = self._aside()
        try:
            make_folder(aside.parent)
            prepared.rename(aside)
        except FileNotFoundError:
            return
        except OSError as error:
            _warn(prepared, error)
            return
        _remove(aside)

    def _aside(self) -> Path:
        scratch = layout.scratch_of(self._identity.uid, self._identity.tag)
        return self._beside / f"{scratch}{secrets.token_hex(8)}"

    def clear(self, receipts: Sequence[Receipt]) -> None:
        for receipt in receipts:
            self._discard(self._prepared(receipt))

    def listed(self) -> Sequence[InDoubt]:
        prefix = handle_prefix(self._identity.uid)
        listed = sorted(self._beside.glob(f"{prefix}*"))
        return [found for path in listed if (found := _found(path)) is not None]

    def clear_listed(self, found: InDoubt) -> None:
        self._discard(self._beside / found.name)

    engine_location = "file:///"

    def engine_refusal(self) -> str | None:
        """Driver and executors may be two users there, and Spark makes folders for one only."""
        found = next((one for one in (self._beside, self._root) if one.is_dir()), None)
        if found is None or not is_shared(found):
            return None
        return f"{found} is shared by a group (g+ws), and what Spark's writer makes is not"

    def engine_attempt(self, handle: Handle) -> LocalAttempt:
        return LocalAttempt(self._root, handle)

    def remove_old_scratch(self) -> None:
        """Folders that an abort could not remove, or was killed at; the store removes its own."""
        scratch = layout.scratch_of(self._identity.uid, self._identity.tag)
        for path in self._beside.glob(f"{scratch}*"):
            _remove(path)

    def _prepared(self, receipt: Receipt) -> Path:
        return self._beside / layout.prepared(receipt.handle)

    def _moves(self, receipt: Receipt) -> list[tuple[Path, Path]]:
        prepared = self._prepared(receipt)
        return [
            (prepared / file.path, self._root / layout.require_inside(file.path))
            for file in files_of(receipt)
        ]


def _is_root(folder: Path) -> bool:
    """Whether a Files sink writes to this folder."""
    return folder.name != "" and folder.with_name(layout.beside(folder.name)).is_dir()


def _found(path: Path) -> InDoubt | None:
    age_s = _age_s(path)
    if age_s is None:
        return None
    return InDoubt(name=path.name, handle=Handle.parse(path.name), age_s=age_s)


def _age_s(path: Path) -> float | None:
    """None where it is gone."""
    try:
        return max(0.0, time.time() - path.stat().st_mtime)
    except FileNotFoundError:
        return None


def half_published(
    epoch: EpochNumber, missing: Sequence[str], shown: Sequence[str], showing: Showing
) -> InvariantBroken:
    return InvariantBroken(
        f"epoch {epoch} was being committed, and of its files somebody removed or changed "
        f"{list(missing)}; {list(shown)}, of the same tasks, are in their place",
        "put the missing files back and start again; or, if no reader has had them, remove those "
        f"in their place and {showing.name}: the epoch's rows are then written again",
    )


def _folders_of(relatives: Iterable[str], top: Path) -> list[Path]:
    """Every folder, from `top` down, that holds one of these files or leads to it."""
    inner = {parent for relative in relatives for parent in Path(relative).parents}
    return sorted(top / folder for folder in inner)


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


class _State(Enum):
    WAITING = "prepared"
    SHOWN = "in its place"
    CUT = "prepared, and not as it was written"
    CHANGED = "in its place, and not as it was written"
    GONE = "in neither place"


def _state(source: Path, target: Path, size: int) -> _State:
    # In this order: of a file that another driver moves meanwhile, one of the two is seen.
    for path, whole, other in (
        (source, _State.WAITING, _State.CUT),
        (target, _State.SHOWN, _State.CHANGED),
    ):
        with suppress(FileNotFoundError):
            return whole if path.stat().st_size == size else other
    return _State.GONE


def _remove(path: Path) -> None:
    """Remove a file, or a folder with all that is in it, as far as this user may."""
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    except FileNotFoundError:
        pass  # another driver removes it, too
    except OSError as error:
        _warn(path, error)


def _warn(path: Path, error: OSError) -> None:
    """Not raised: what one user left must not stop every start of another."""
    with suppress(FileNotFoundError):
        owner = user_name(path.lstat().st_uid)
        logger.warning(
            "%s, which belongs to %s, can't be removed, and no decision needs it: %s",
            path,
            owner,
            error,
        )


def _owners(file: Path) -> tuple[int, int]:
    return file.lstat().st_uid, file.parent.lstat().st_uid


def _nearest(folder: Path) -> Path:
    """The folder itself, or the one above it in which it is going to be made."""
    return folder if folder.exists() else _nearest(folder.parent)
