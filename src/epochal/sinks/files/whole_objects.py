"""
The back end of a Files sink on stores that can only put whole objects.

A task puts its files below `data/<handle>/` beside the root, where they stay. The epoch's manifest,
put in one piece, shows them; readers go by it (`read_epochs`). A marker below `in-doubt/` lists an
attempt whose data no manifest names yet (see `kit.marked_files`).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pyarrow as pa

from epochal.contract import EngineWritten
from epochal.errors import InvariantBroken, Misconfigured, PreparedLost, TryAgain
from epochal.kit.engine_files import hadoop_url, listed_sizes, require_put
from epochal.kit.marked_files import Markers, at_once
from epochal.sinks.files import layout
from epochal.sinks.files.backend import PreparedFile, Showing, Stores, files_of
from epochal.storage import FileStore, Output, Store
from epochal.terms import (
    JOB_PARTITION,
    Ability,
    EpochNumber,
    Handle,
    Identity,
    InDoubt,
    Json,
    Receipt,
)

_SCRATCH_AGE_S = 600.0
LATE_TASKS_S = 300.0
"""How long tasks of a job that is over may still write: more than spark.network.timeout."""


class WholeObjectAttempt:
    """One attempt's files below a folder of its own."""

    held_bytes = 0
    is_listed = True

    def __init__(self, ours: FileStore, handle: Handle) -> None:
        self.ours = ours
        self._handle = handle
        self._markers = Markers(ours, layout.IN_DOUBT)
        self._outputs: list[_ArrowOutput] = []

    def errors(self) -> AbstractContextManager[None]:
        """The store raises our errors itself."""
        return nullcontext()

    def create(self, relative: str) -> pa.NativeFile:
        if not self._outputs:
            self._markers.put(self._handle)
        output = _ArrowOutput(self.ours.create(self._key(relative)))
        self._outputs.append(output)
        return pa.PythonFile(output, mode="w")

    def seal(self, relatives: Sequence[str]) -> list[dict[str, Json]]:
        # Again: a driver that took this attempt for dead may have discarded it meanwhile. Then the
        # sizes show it, or the marker makes the rest be found.
        self._markers.put(self._handle)
        keys = [self._key(relative) for relative in relatives]
        entries = at_once(self.ours.entry, keys)
        if None in entries:
            raise TryAgain(f"files of {self._handle} below {self.ours.location} were removed")
        return [
            {"path": key, "bytes": entry.size}
            for key, entry in zip(keys, entries, strict=True)
            if entry is not None
        ]

    def discard(self) -> None:
        for output in self._outputs:
            output.discard()
        _discard(self.ours, self._handle)

    # A job of the engine's own writer

    @property
    def job_url(self) -> str:
        return f"{hadoop_url(self.ours.location)}/{layout.data(self._handle)}"

    def make(self) -> None:
        self._markers.put(self._handle)

    def gather(
        self,
        written: EngineWritten,
        name: Callable[[int], str],  # noqa: ARG002  nothing is renamed here
        footer_of: Callable[[Path], tuple[Any, int]] | None,  # noqa: ARG002  see below
        has_rows: Callable[[Path], bool],  # noqa: ARG002
    ) -> dict[str, int | None]:
        """The files that the engine's log names."""
        sizes = listed_sizes(written, self.job_url) if written.fingerprint.rows else {}
        entries = at_once(self.ours.entry, [self._key(relative) for relative in sizes])
        found = [None if entry is None else entry.size for entry in entries]
        require_put(sizes, found, self.job_url, self.ours.location)
        if not sizes:
            self.ours.delete(list(_keys_below(self.ours, layout.data(self._handle))))
            self._markers.delete([self._handle])
        return dict.fromkeys(sizes)

    def _key(self, relative: str) -> str:
        return f"{layout.data(self._handle)}/{relative}"


class _ArrowOutput:
    """A file of a store, with the methods that Arrow calls."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._size = 0
        self.closed = False

    def write(self, content: bytes) -> int:
        if not self.closed:
            self._output.write(content)
            self._size += len(content)
        return len(content)

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        """A part goes when it is full."""

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._output.finish()

    def discard(self) -> None:
        """What is written or closed from now on goes nowhere."""
        if not self.closed:
            self.closed = True
            self._output.discard()


class WholeObjectStaging:
    """Objects that no reader looks at, as the driver sees them."""

    trusts_rehearsal = True
    shows_by_manifest = True

    def __init__(
        self,
        stores: Stores,
        identity: Identity,
        *,
        lifecycle: Callable[[], Ability] | None = None,
    ) -> None:
        """`lifecycle`: looks at the rules by which the store removes objects, where it has some."""
        self.stores = stores
        self._lifecycle = lifecycle
        self._ours = stores.ours
        self._identity = identity
        self._markers = Markers(stores.ours, layout.IN_DOUBT)

    def check(self) -> Sequence[Ability]:
        found = check_put_if_absent(self._ours, self._identity)
        return [found] if self._lifecycle is None else [found, self._lifecycle()]

    def rehearse(self, receipts: Sequence[Receipt]) -> None:
        if lost := self._lost(receipts):
            raise TryAgain(
                f"{self._ours.location} does not show {lost[0][1].path}, which a task has put "
                "there",
                "somebody removes objects there",
            )

    def require_prepared(
        self,
        epoch: EpochNumber,
        receipts: Sequence[Receipt],
        showing: Showing,  # noqa: ARG002  nothing is shown file by file here
    ) -> None:
        if lost := self._lost(receipts):
            handles = tuple(dict.fromkeys(str(handle) for handle, _ in lost))
            raise PreparedLost(
                f"epoch {epoch}: objects of {len(handles)} of {len(receipts)} receipts are gone "
                f"from {self._ours.location}, {lost[0][1].path} for one",
                "somebody removed them: what is there belongs to the pipeline",
                handles=handles,
            )

    def publish(
        self,
        epoch: EpochNumber,  # noqa: ARG002
        receipts: Sequence[Receipt],  # noqa: ARG002
        showing: Showing,  # noqa: ARG002
    ) -> bool:
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
        _discard(self._ours, receipt.handle)

    def clear(self, receipts: Sequence[Receipt]) -> None:
        made = [receipt for receipt in receipts if files_of(receipt)]
        self._markers.delete(receipt.handle for receipt in made)

    def listed(self) -> Sequence[InDoubt]:
        return self._markers.of_pipeline(self._identity.uid)

    def clear_listed(self, found: InDoubt) -> None:
        self._ours.delete([f"{layout.IN_DOUBT}/{found.name}"])

    @property
    def engine_location(self) -> str:
        return hadoop_url(self._ours.location)

    def engine_refusal(self) -> str | None:
        if self._ours.location.startswith("az://"):
            return "Hadoop knows this store as abfss://container@account.dfs.core.windows.net/…"
        return None

    def engine_attempt(self, handle: Handle) -> WholeObjectAttempt:
        return WholeObjectAttempt(self._ours, handle)

    def remove_old_scratch(self) -> None:
        remove_old_objects(self._ours, self._identity)

    def _lost(self, receipts: Sequence[Receipt]) -> Sequence[tuple[Handle, PreparedFile]]:
        files = [(receipt.handle, file) for receipt in receipts for file in files_of(receipt)]
        entries = at_once(lambda one: self._ours.entry(_require_of(*one)), files)
        return [
            one
            for one, entry in zip(files, entries, strict=True)
            if entry is None or entry.size != one[1].bytes
        ]


def check_put_if_absent(store: Store, identity: Identity) -> Ability:
    """
    Put, list, read and remove a scratch key, to show that all of it is allowed.

    The key is random, so nobody else puts it, before its deletion or after.
    """
    probe = f"{layout.scratch_of(identity.uid, identity.tag)}{secrets.token_hex(8)}"
    if store.put_if_absent(probe, b"") and store.put_if_absent(probe, b""):
        raise Misconfigured(
            f"{store.location} overwrites where it was asked to put if absent",
            "use a server that honours If-None-Match on PUT",
        )
    store.read(probe)
    store.names(layout.SCRATCH)
    store.delete([probe])
    return Ability(
        name="put if absent",
        granted=True,
        because=f"{store.location} refused to put one key twice",
    )


def remove_old_objects(store: Store, identity: Identity) -> None:
    """Remove probes of killed processes."""
    oldest = time.time() - _SCRATCH_AGE_S
    keys = {f"{layout.SCRATCH}/{entry.name}": entry for entry in store.entries(layout.SCRATCH)}
    scratch = layout.scratch_of(identity.uid, identity.tag)
    store.delete(
        [
            key
            for key, entry in keys.items()
            if key.startswith(scratch) and entry.modified_at < oldest
        ]
    )


def _discard(store: FileStore, handle: Handle) -> None:
    """
    The data first: as long as some is left, its marker must be listed.

    Tasks of a job that failed or was cancelled write on for a while, as Spark kills them later. So
    the marker of a job is kept until it is old, and a later sweep finds what such tasks leave.
    """
    # Uploads first: one that is completed meanwhile is an object by the time they are listed.
    store.discard_unfinished(layout.data(handle))
    store.delete(list(_keys_below(store, layout.data(handle))))
    if handle.partition == JOB_PARTITION:
        marker = store.entry(f"{layout.IN_DOUBT}/{handle}")
        if marker is not None and time.time() - marker.modified_at < LATE_TASKS_S:
            return
    Markers(store, layout.IN_DOUBT).delete([handle])


def _keys_below(store: Store, folder: str) -> Iterator[str]:
    yield from (f"{folder}/{name}" for name in store.names(folder))
    for inner in store.folders(folder):
        yield from _keys_below(store, f"{folder}/{inner}")


def _require_of(handle: Handle, file: PreparedFile) -> str:
    """A path from a receipt, if this attempt's writer can have written it."""
    top = f"{layout.data(handle)}/"
    if not file.path.startswith(top):
        raise InvariantBroken(
            f"a receipt names the file {file.path!r}, which no writer of ours does"
        )
    layout.require_inside(file.path.removeprefix(top))
    return file.path
