"""
What Spark's checkpoint folder says: whose query it is, how far it got, which rows an epoch holds.

    metadata          {"id": query id}, written once
    offsets/N         planned: from line 3 on, one line a source, the end of epoch N in that source
    commits/N         Spark takes epoch N for finished
    sources/I/K       file sources: the files of their own log entry K, to which an offset points;
                      K.compact holds those of all entries up to K, oldest first

With a million files, K.compact has a hundred megabytes, and every tenth epoch is in one. The files
of an epoch are the last lines there, so it is read from its end, as far as an older entry.

It is Spark's: nothing here writes to it. Local folders are read as files, all others through the
file system that Spark itself uses for them; object stores directly where there is no Spark session.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from epochal.errors import CorruptRecord, Misconfigured, Refused
from epochal.logs import located
from epochal.protocol.admission import Position
from epochal.storage import Store, open_store
from epochal.storage.urls import OBJECT_SCHEMES
from epochal.terms import EpochNumber, Offsets, quantity

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_TEXT_CHARS_MAX = 2000
_LINES_BEFORE_SOURCES = 2
_TAIL_BYTES = 64 * 1024
_TAIL_GROWTH = 4


class Checkpoint:
    """One checkpoint location, as Spark left it. Read anew at every call."""

    def __init__(self, location: str, store: Store) -> None:
        self.location = location
        self._store = store
        self._ends: dict[EpochNumber, Sequence[str]] = {}
        """Where the newest epochs end: the next one's file lists begin there."""

    @property
    def query_id(self) -> str | None:
        data = self._store.read("metadata")
        return None if data is None else str(self._json(data, "metadata")["id"])

    @property
    def position(self) -> Position:
        return Position(planned=self._highest("offsets"), finished=self._highest("commits"))

    def planned_at(self, epoch: EpochNumber) -> float | None:
        """When Spark wrote down what an epoch holds."""
        entry = self._store.entry(f"offsets/{epoch}")
        return None if entry is None else entry.modified_at

    def triggered_at(self, epoch: EpochNumber) -> float | None:
        """When Spark's driver began to plan an epoch, by its own clock; kept when it runs again."""
        data = self._store.read(f"offsets/{epoch}")
        if data is None:
            return None
        _, metadata, *_ = data.split(b"\n")
        return float(self._json(metadata, f"offsets/{epoch}")["batchTimestampMs"]) / 1000

    def offsets(self, epoch: EpochNumber) -> Offsets:
        """Which rows an epoch holds, by what Spark wrote down before it ran it (I10)."""
        sources = self._sources(epoch)
        if sources is None:
            raise Refused(
                f"{self.location} has no offsets/{epoch}, and Spark is running that epoch",
                "the query must have this very folder as its checkpointLocation",
            )
        files = [file for at, end in enumerate(sources) for file in self._new_files(at, end, epoch)]
        digest = hashlib.sha256("\n".join([*sources, *files]).encode()).hexdigest()
        text = "; ".join(sources) + (f" ({quantity(len(files), 'file')})" if files else "")
        self._ends = {at: end for at, end in self._ends.items() if at == epoch - 1}
        self._ends[epoch] = sources
        return Offsets(digest=digest, text=text[:_TEXT_CHARS_MAX], sources=tuple(sources))

    def files(self, since: EpochNumber, last: EpochNumber) -> Sequence[str]:
        """Every file that file sources gave to these epochs."""
        ends = [_log_offset(end) for end in self._sources(last) or ()]
        return [
            file
            for at, end in enumerate(ends)
            if end is not None
            for file in self._entries(at, self._files_before(at, since) + 1, end)
        ]

    def read(self, name: str) -> bytes | None:
        """One of its files as it is."""
        return self._store.read(name)

    def source_files(self) -> Sequence[str]:
        """The names of all that sources keep for themselves."""
        count = len(self._sources(self._highest("offsets") or EpochNumber(0)) or ())
        return [
            f"sources/{at}/{name}"
            for at in range(count)
            for name in self._store.names(f"sources/{at}")
        ]

    def _highest(self, folder: str) -> EpochNumber | None:
        numbers = [int(name) for name in self._store.names(folder) if name.isdecimal()]
        return EpochNumber(max(numbers)) if numbers else None

    def _sources(self, epoch: EpochNumber) -> Sequence[str] | None:
        data = self._store.read(f"offsets/{epoch}")
        if data is None:
            return None
        return data.decode().split("\n")[_LINES_BEFORE_SOURCES:]

    def _new_files(self, at: int, end: str, epoch: EpochNumber) -> Sequence[str]:
        """For a file source, the files between the last epoch's end and this one's."""
        last = _log_offset(end)
        if last is None:
            return []
        first = self._files_before(at, epoch) + 1
        return [file for entry in range(first, last + 1) for file in self._entry(at, entry)]

    def _files_before(self, at: int, epoch: EpochNumber) -> int:
        if epoch == 0:
            return -1
        ends = self._ends.get(EpochNumber(epoch - 1)) or self._sources(EpochNumber(epoch - 1)) or ()
        before = _log_offset(ends[at]) if at < len(ends) else None
        return -1 if before is None else before

    def _entry(self, at: int, entry: int) -> Sequence[str]:
        """The files of one entry of a file source's log; a later compaction may hold them."""
        data = self._store.read(f"sources/{at}/{entry}")
        if data is not None:
            lines = (self._json(line, str(entry)) for line in data.splitlines()[1:] if line.strip())
            return sorted(str(file["path"]) for file in lines)
        for later in (entry, *(one for one in self._compacted(at) if one > entry)):
            files = self._held(f"sources/{at}/{later}.compact", entry)
            if files is not None:
                return sorted(str(file["path"]) for file in files if file["batchId"] == entry)
        return []

    def _entries(self, at: int, first: int, last: int) -> list[str]:
        """The files of many entries: the newest compaction is read once for all that it holds."""
        compacted = max(self._compacted(at), default=-1)
        held = self._held(f"sources/{at}/{compacted}.compact", first) or ()
        found = [str(file["path"]) for file in held if first <= file["batchId"] <= last]
        later = range(max(first, compacted + 1), last + 1)
        return found + [file for entry in later for file in self._entry(at, entry)]

    def _compacted(self, at: int) -> list[int]:
        names = self._store.names(f"sources/{at}")
        stems = [name.removesuffix(".compact") for name in names if name.endswith(".compact")]
        return sorted(int(stem) for stem in stems if stem.isdecimal())

    def _held(self, name: str, since: int) -> list[Any] | None:
        """The files of a compaction from one entry on, and perhaps some before; None without it."""
        found = self._store.entry(name)
        if found is None:
            return None
        length = _TAIL_BYTES
        while True:
            start = max(0, found.size - length)
            # The first line is the version, or the rest of one that was cut.
            _, *lines = self._store.read_range(name, start, found.size).split(b"\n")
            held = (line for line in lines if line.strip())
            if start == 0 or any(self._json(line, name)["batchId"] < since for line in lines[:1]):
                return [self._json(line, name) for line in held]
            length *= _TAIL_GROWTH

    def _json(self, data: bytes, name: str) -> Any:
        try:
            return json.loads(data)
        except ValueError as error:
            raise CorruptRecord(
                f"{self.location}: {name} of Spark's checkpoint can't be read: {error}",
                "restore the checkpoint from a backup, together with the epoch log",
            ) from None


def _log_offset(line: str) -> int | None:
    """Where a file source's own log ends, or None for any other source."""
    try:
        read = json.loads(line)
    except ValueError:
        return None
    offset = read.get("logOffset") if isinstance(read, dict) else None
    return offset if isinstance(offset, int) else None


def open_checkpoint(
    checkpoint: str | os.PathLike[str], spark: SparkSession | None = None
) -> Checkpoint:
    location = located(checkpoint, spark)
    if location.startswith("/"):
        return Checkpoint(location, open_store(location))
    if spark is not None:
        from epochal.storage.hadoop import HadoopStore  # noqa: PLC0415  needs py4j, as Spark does

        return Checkpoint(location, HadoopStore(spark, location))
    if location.split(":", 1)[0] in OBJECT_SCHEMES:
        return Checkpoint(location, open_store(location))
    raise Misconfigured(
        f"{location} can only be read through Spark's own file system, which is out of reach here",
        "in a process with a Spark session: pipeline.adopt(…) or pipeline.fork(…); or keep the "
        "checkpoint in a shared folder or an object store",
    )
