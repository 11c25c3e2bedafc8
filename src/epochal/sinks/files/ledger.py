"""The ledger of a Files sink: one manifest per epoch, put last and never changed.

A manifest proves that its epoch is committed and names the files of its rows, so readers of whole
epochs go by it; none is ever dropped. They lie in folders of a thousand, so that the newest one is
found in two short listings after any number of epochs, without a pointer that could be stale. A
thousand that is settled as a whole may be folded into one file.

Folding is safe at every step: the folded file is durable before the first single one goes, and a
reader looks for the single file first and for the folded one after it.

Both are put if absent. A folded file is never deleted, so its first content stays. A single one is
deleted once it is folded, and a driver that was suspended before its put may fill that key again:

    driver A: publish 5, suspended     driver B: publish 5, put 5 … fold 0 to 999, delete 5
    put 5: the key is free             read 5: A's manifest; fold: is folded already, delete 5

It names the same handles and files, as a decision does not change (I2). Only a rewrite takes other
attempts, and there is none where A had published its files: they were not lost.

On a disk and on S3 files come to their place one by one, before the manifest. Where a copy of the
epoch log is at work, two drivers have files of one epoch under different handles, and both could
find no manifest and move theirs. So the handles are put first, if absent, into `<epoch>.showing`,
and the manifest is looked for once more after it:

    driver A   no manifest │ put showing: a │ no manifest │ move files │ put manifest │ showing goes
    driver B   no manifest │ put showing: it is there, with a: refused, nothing moved
    later, B   put showing: b │ a manifest, of a: refused, nothing moved

The key of `showing` is free again once the manifest is there, and a driver that fills it then finds
the manifest.

It also says, to a commit that is repeated, that a file which is nowhere may have been shown, and
taken away by a consumer since.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

from epochal.errors import CorruptRecord, require_known_format
from epochal.kit.marked_files import TakenEpoch, at_once, take_epoch, takers
from epochal.sinks.files import layout
from epochal.sinks.files.backend import Showing, files_of
from epochal.sinks.files.layout import EPOCHS_PER_BUCKET, bucket_of
from epochal.storage import Store
from epochal.terms import EpochNumber, Generation, Handle, Identity, Mark, Receipt, SinkTag, Uid

_VERSION = 1
_LEDGER = re.compile(r"(?P<uid>[a-z2-7]{12})-s(?P<tag>[0-9a-f]{8})")
_SINGLE, _FOLDED, _NOTE = ".manifest", ".manifests", ".showing"
"""No format's extension: a glob for rows must not find them either."""
_BUCKET = re.compile(rf"(?P<number>\d{{17}})({re.escape(_FOLDED)})?")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    path: str
    """Below the root, or in the folder beside it (`layout.is_data`); with `/`."""
    rows: int | None
    """None where the format does not count them and Spark's writer wrote it."""
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The files and attempts of one epoch of one sink."""

    pipeline: str
    sink: str
    uid: Uid
    run: str | None
    epoch: EpochNumber
    generation: Generation
    """Of the attempts that wrote it, not of the driver that put this."""
    handles: tuple[str, ...]
    schema: str | None
    """The digest under which the columns are kept; None where there are no rows."""
    files: tuple[DataFile, ...]

    def to_line(self) -> bytes:
        return json.dumps({"version": _VERSION, **asdict(self)}, sort_keys=True).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes, name: str) -> Manifest:
        try:
            fields: dict[str, Any] = json.loads(line)
            version = fields.pop("version")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise _unreadable(name, error) from error
        require_known_format(f"the manifest {name}", version, _VERSION)
        try:
            fields["handles"] = tuple(fields["handles"])
            fields["files"] = tuple(DataFile(**file) for file in fields["files"])
            return cls(**fields)
        except (ValueError, KeyError, TypeError) as error:
            raise _unreadable(name, error) from error


def _unreadable(name: str, error: Exception) -> CorruptRecord:
    return CorruptRecord(
        f"the manifest {name} can't be read: {error}", "it was cut short or changed by hand"
    )


def manifest_of(identity: Identity, epoch: EpochNumber, receipts: Sequence[Receipt]) -> Manifest:
    schemas: list[Any] = [
        receipt.token["schema"] for receipt in receipts if "schema" in receipt.token
    ]
    generations = [receipt.handle.generation for receipt in receipts]
    return Manifest(
        pipeline=identity.pipeline,
        sink=identity.sink,
        uid=identity.uid,
        run=identity.run,
        epoch=epoch,
        generation=max(generations, default=identity.generation),
        handles=tuple(sorted(str(receipt.handle) for receipt in receipts)),
        schema=schemas[0] if schemas else None,
        files=tuple(
            DataFile(path=file.path, rows=file.rows, bytes=file.bytes)
            for receipt in receipts
            for file in files_of(receipt)
        ),
    )


class Ledger:
    """The manifests of one uid and one sink."""

    def __init__(self, store: Store, uid: Uid, tag: SinkTag) -> None:
        self.store = store
        self._folder = layout.ledger_of(uid, tag)

    def find(self, epoch: EpochNumber) -> Manifest | None:
        line = self.store.read(self._single(epoch))
        if line is not None:
            return Manifest.from_line(line, self._full_name(self._single(epoch)))
        return self._folded(bucket_of(epoch)).get(epoch)

    def put(self, manifest: Manifest) -> bool:
        """True where this call put it, False where the epoch has a manifest already."""
        return self.store.put_if_absent(self._single(manifest.epoch), manifest.to_line())

    def start_showing(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> TakenEpoch | None:
        """Before files come to their place: see `take_epoch`."""
        return take_epoch(self.store, self._showing(epoch), receipts)

    def showing(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> Showing:
        """The note that these attempts, and no others, come to their place."""

        def age_s() -> float | None:
            handles = {str(receipt.handle) for receipt in receipts}
            found = takers(self.store, self._showing(epoch))
            entries = [self.store.entry(key) for key, named in found.items() if named == handles]
            ages = [time.time() - entry.modified_at for entry in entries if entry is not None]
            return max(0.0, *ages) if ages else None

        return Showing(name=self._full_name(self._showing(epoch)), age_s=age_s)

    def shown(self, epoch: EpochNumber) -> frozenset[str]:
        """The handles whose files come to their place, or are there: also before the manifest."""
        noted = takers(self.store, self._showing(epoch)).values()
        # After it: the note goes when the manifest is there.
        manifest = self.find(epoch)
        return frozenset(chain(*noted, manifest.handles if manifest is not None else ()))

    def newest(self) -> Manifest | None:
        for bucket in reversed(self._buckets()):
            epochs = {*self._singles(bucket), *self._folded(bucket)}
            if epochs:
                return self.find(max(epochs))
        return None

    def all(self) -> Iterator[Manifest]:
        """Every manifest, in the order of epochs, also while another process folds."""
        for bucket in self._buckets():
            lines = self._lines(bucket)
            found = self._folded(bucket)
            for epoch, line in lines.items():
                if line is not None:
                    found[epoch] = Manifest.from_line(line, self._full_name(self._single(epoch)))
            yield from (found[epoch] for epoch in sorted(found))

    def fold(self, below: EpochNumber) -> None:
        """Fold every thousand of epochs that ends under `below` into one file."""
        folders = self.store.folders(self._folder)
        for bucket in sorted(int(name) for name in folders if name.isdecimal()):
            if (bucket + 1) * EPOCHS_PER_BUCKET <= below:
                self._fold(bucket)

    def _fold(self, bucket: int) -> None:
        singles = self._lines(bucket)
        lines = b"".join(line or b"" for line in singles.values())
        self.store.put_if_absent(self._folded_key(bucket), lines)
        folded = self._folded(bucket)
        self.store.delete([self._single(epoch) for epoch in singles if epoch in folded])
        # Of commits that were cut short after their manifest.
        folder = self._bucket_key(bucket)
        notes = [name for name in self.store.names(folder) if _NOTE in name]
        self.store.delete([f"{folder}/{name}" for name in notes])

    def _lines(self, bucket: int) -> dict[EpochNumber, bytes | None]:
        epochs = self._singles(bucket)
        lines = at_once(self.store.read, [self._single(epoch) for epoch in epochs])
        return dict(zip(epochs, lines, strict=True))

    def _buckets(self) -> list[int]:
        names = [*self.store.folders(self._folder), *self.store.names(self._folder)]
        found = (_BUCKET.fullmatch(name) for name in names)
        return sorted({int(match["number"]) for match in found if match})

    def _singles(self, bucket: int) -> list[EpochNumber]:
        names = self.store.names(self._bucket_key(bucket))
        stems = (name.removesuffix(_SINGLE) for name in names)
        return sorted(EpochNumber(int(stem)) for stem in stems if stem.isdecimal())

    def _folded(self, bucket: int) -> dict[EpochNumber, Manifest]:
        key = self._folded_key(bucket)
        lines = (self.store.read(key) or b"").splitlines()
        manifests = (Manifest.from_line(line, self._full_name(key)) for line in lines)
        return {manifest.epoch: manifest for manifest in manifests}

    def _full_name(self, key: str) -> str:
        return f"{self.store.location}/{key}"

    def _bucket_key(self, bucket: int) -> str:
        return f"{self._folder}/{bucket:017d}"

    def _folded_key(self, bucket: int) -> str:
        return f"{self._folder}/{bucket:017d}{_FOLDED}"

    def _showing(self, epoch: EpochNumber) -> str:
        return f"{self._bucket_key(bucket_of(epoch))}/{epoch:020d}{_NOTE}"

    def _single(self, epoch: EpochNumber) -> str:
        return f"{self._bucket_key(bucket_of(epoch))}/{epoch:020d}{_SINGLE}"


class LedgerView:
    """The ledger for one call of the committer: each epoch's manifest is read once."""

    def __init__(self, ledger: Ledger, identity: Identity) -> None:
        self._ledger = ledger
        self._identity = identity
        self._found: dict[EpochNumber, Manifest | None] = {}
        self._shown: dict[EpochNumber, frozenset[str]] = {}
        self._named: dict[EpochNumber, frozenset[str]] = {}

    def find(self, epoch: EpochNumber) -> Manifest | None:
        if epoch not in self._found:
            self._found[epoch] = self._ledger.find(epoch)
        return self._found[epoch]

    def is_done(self, epoch: EpochNumber) -> bool:
        return self.find(epoch) is not None

    def names(self, handle: Handle) -> bool | None:
        manifest = self.find(handle.epoch)
        if manifest is None:
            return None
        if handle.epoch not in self._named:
            self._named[handle.epoch] = frozenset(manifest.handles)
        return str(handle) in self._named[handle.epoch]

    def may_be_shown(self, handle: Handle) -> bool:
        if handle.epoch not in self._shown:
            self._shown[handle.epoch] = self._ledger.shown(handle.epoch)
        return str(handle) in self._shown[handle.epoch]

    def is_of(self, epoch: EpochNumber, handles: frozenset[Handle]) -> bool:
        manifest = self.find(epoch)
        return manifest is not None and {*manifest.handles} == {*map(str, handles)}

    def marks(self) -> list[Mark]:
        newest = (one.newest() for one in ledgers(self._ledger.store, self._identity.tag))
        mine = (self._identity.pipeline, self._identity.sink)
        return [
            Mark(uid=manifest.uid, epoch=manifest.epoch, run=manifest.run)
            for manifest in newest
            if manifest is not None and (manifest.pipeline, manifest.sink) == mine
        ]


def ledgers(store: Store, tag: SinkTag | None = None) -> list[Ledger]:
    """The ledger of every uid that wrote below this root, or of those of one sink."""
    found = (_LEDGER.fullmatch(name) for name in store.folders(layout.EPOCHS))
    return [
        Ledger(store, Uid(match["uid"]), SinkTag(match["tag"]))
        for match in found
        if match and tag in (None, match["tag"])
    ]
