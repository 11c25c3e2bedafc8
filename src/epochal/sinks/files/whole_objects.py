"""
The back end of a Files sink on stores that can only put whole objects.

A task puts its files below `_epochal/data/<handle>/`, where they stay. The epoch's manifest, put in
one piece, is what shows them; readers go by it (`read_epochs`). A marker under `_epochal/prepared/`
says that an attempt has data which no manifest names yet (see `kit.marked_files`).
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from epochal.errors import InvariantBroken, PreparedLost, TryAgain
from epochal.kit.marked_files import at_once
from epochal.sinks.files import layout
from epochal.sinks.files.backend import Output, PreparedFile, WholeStore, files_of
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

_SCRATCH_AGE_S = 600.0


class WholeObjectAttempt:
    """One attempt's files below its own hidden folder."""

    held_bytes = 0

    def __init__(self, store: WholeStore, handle: Handle) -> None:
        self.store = store
        self._handle = handle
        self._is_marked = False
        self._outputs: list[Output] = []

    def create(self, relative: str) -> pa.NativeFile:
        if not self._is_marked:
            self._mark()
        output = self.store.open_to_write(self._key(relative))
        self._outputs.append(output)
        return pa.PythonFile(output, mode="w")

    def seal(self, relatives: Sequence[str]) -> list[dict[str, Json]]:
        # Again: a driver that took this attempt for dead may have discarded it meanwhile. Then the
        # sizes show it, or the marker makes the rest be found.
        self._mark()
        keys = [self._key(relative) for relative in relatives]
        sizes = at_once(self.store.size, keys)
        if None in sizes:
            raise TryAgain(f"files of {self._handle} below {self.store.root} were removed")
        return [{"path": key, "bytes": size or 0} for key, size in zip(keys, sizes, strict=True)]

    def discard(self) -> None:
        for output in self._outputs:
            output.abandon()
        discard(self.store, self._handle)

    def _mark(self) -> None:
        self.store.put_if_absent(layout.prepared(self._handle), b"")
        self._is_marked = True

    def _key(self, relative: str) -> str:
        return f"{layout.data(self._handle)}/{relative}"


class WholeObjectStaging:
    """Hidden objects as the driver sees them."""

    trusts_rehearsal = True

    def __init__(self, store: WholeStore, identity: Identity) -> None:
        self.store = store
        self._prefix = handle_prefix(identity.uid)
        self._scratch = layout.scratch_of(identity.uid, identity.tag)

    def check(self) -> Sequence[Ability]:
        return self.store.check(self._scratch)

    def rehearse(self, receipts: Sequence[Receipt]) -> None:
        if lost := self._lost(receipts):
            raise TryAgain(
                f"{self.store.root} does not show {lost[0][1].path}, which a task has put there",
                "somebody removes objects below _epochal/",
            )

    def require_prepared(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        if lost := self._lost(receipts):
            handles = tuple(dict.fromkeys(str(handle) for handle, _ in lost))
            raise PreparedLost(
                f"epoch {epoch}: objects of {len(handles)} of {len(receipts)} receipts are gone "
                f"from {self.store.root}, {lost[0][1].path} for one",
                "somebody removed them: what is below _epochal/ belongs to the pipeline",
                handles=handles,
            )

    def publish(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> bool:  # noqa: ARG002
        """Nothing moves: the manifest shows the objects where they are."""
        return True

    def is_published(self, receipt: Receipt) -> bool:  # noqa: ARG002
        """Only a manifest shows anything here."""
        return False

    def is_prepared(self, receipt: Receipt) -> bool:
        return bool(files_of(receipt)) and not self._lost([receipt])

    def discard(self, receipt: Receipt) -> None:
        for file in files_of(receipt):
            _require_of(receipt.handle, file)
        discard(self.store, receipt.handle)

    def clear(self, receipts: Sequence[Receipt]) -> None:
        made = [receipt for receipt in receipts if files_of(receipt)]
        at_once(self.store.remove, [layout.prepared(receipt.handle) for receipt in made])

    def listed(self) -> Sequence[InDoubt]:
        ages = self.store.aged(f"{layout.PREPARED}/{self._prefix}")
        names = {layout.name_of(key): age_s for key, age_s in ages.items()}
        return [
            InDoubt(name=name, handle=Handle.parse(name), age_s=age_s)
            for name, age_s in sorted(names.items())
        ]

    def clear_listed(self, found: InDoubt) -> None:
        self.store.remove(f"{layout.PREPARED}/{found.name}")

    def remove_old_scratch(self) -> None:
        remove_old_objects(self.store, self._scratch)

    def _lost(self, receipts: Sequence[Receipt]) -> Sequence[tuple[Handle, PreparedFile]]:
        files = [(receipt.handle, file) for receipt in receipts for file in files_of(receipt)]
        sizes = at_once(lambda one: self.store.size(_require_of(*one)), files)
        return [one for one, size in zip(files, sizes, strict=True) if size != one[1].bytes]


def discard(store: WholeStore, handle: Handle) -> None:
    """The data first: as long as some is left, its marker must be listed."""
    at_once(store.remove, list(store.aged(f"{layout.data(handle)}/")))
    store.remove(layout.prepared(handle))


def remove_old_objects(store: WholeStore, prefix: str) -> None:
    for key, age_s in store.aged(prefix).items():
        if age_s > _SCRATCH_AGE_S:
            store.remove(key)


def _require_of(handle: Handle, file: PreparedFile) -> str:
    """A path from a receipt, if this attempt's writer can have written it."""
    top = f"{layout.data(handle)}/"
    if not file.path.startswith(top):
        raise InvariantBroken(
            f"a receipt names the file {file.path!r}, which no writer of ours does"
        )
    layout.require_inside(file.path.removeprefix(top))
    return file.path
