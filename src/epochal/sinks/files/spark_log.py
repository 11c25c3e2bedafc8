"""Spark's own log of a folder, `_spark_metadata`: with it plain Spark readers see whole epochs.

Where this folder exists, `spark.read` lists no files but reads the log: entries `0, 1, 2 …`, each a
line `v1` and then one JSON line per file; every tenth (9, 19, …) is `<n>.compact` and repeats all
that came before it. A reader goes by the newest number and needs every entry down to the last
compact one, so numbers must not have gaps. Epochs can (of a sink that was added late, of two
pipelines in one folder, of epochs without rows): the log therefore counts for itself.

An entry is put if its number is absent, after looking whether the files are in the log already: of
two drivers that carry out one decision, the second finds the first one's entry. Old entries are
deleted, so a put at an old number succeeds, and no reader goes by it. Hence after a put the log is
listed, and where newer entries are there, they must repeat the files:

    pipeline P, suspended          pipeline Q in the same folder    entries
    last is 11                                                      9.compact 10 11
                                   puts 12 … 29.compact             … 29.compact
                                   deletes what is below 19         19.compact … 29.compact
    put 12: the slot is empty                                       12, 19.compact … 29.compact
    list: 29 is the newest, and its lines don't have P's files: put 30

The compact entries grow with the folder, as they do under Spark's own sink.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import quote

from epochal.errors import CorruptRecord, Misconfigured
from epochal.sinks.files.layout import SPARK_LOG, require_inside
from epochal.sinks.files.ledger import DataFile
from epochal.storage.local import LocalStore

_HEADER = "v1"
_COMPACT_EVERY = 10
_COMPACT = ".compact"
_MARK = "_epochal"
"""A name that Spark passes over; it marks the log as ours."""
_BLOCK_BYTES = 32 * 1024 * 1024
_URI_SAFE = "/:=@!$&'()*+,;~-._"


class SparkLog:
    """The `_spark_metadata` of one root."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._folder = root / SPARK_LOG
        self._store = LocalStore(root, folder=SPARK_LOG)

    def refuse_unless_ours(self) -> None:
        """Refuse a log of Spark's own, and one that would hide files from Spark's readers."""
        if self._store.entry(_MARK) is not None:
            return
        if self.last() >= 0:
            raise Misconfigured(
                f"{self._folder} was written by Spark's own file sink, not by this one",
                "write to a folder of its own; two sinks can't keep one log",
            )
        if strays := self._visible_names():
            raise Misconfigured(
                f"spark_metadata=True, and {self._root} holds {strays[0]!r} already: Spark "
                "would no longer see files that its log does not list",
                "start on an empty folder, or leave spark_metadata out",
            )

    def mark(self) -> None:
        """Mark the log as ours. From here on Spark's readers see what it lists, and no more."""
        if self._store.entry(_MARK) is None:
            self._store.put_if_absent(_MARK, b"written by epochal\n")

    def refuse_if_there(self) -> None:
        """Refuse to add files that Spark's readers would not see."""
        if self._folder.is_dir():
            raise Misconfigured(
                f"{self._folder} exists: Spark reads the files it lists, and would not see these",
                "spark_metadata=True if this sink wrote it; otherwise write to a folder of its own",
            )

    def last(self) -> int:
        """The newest entry's number, or -1."""
        stems = (name.removesuffix(_COMPACT) for name in self._store.names())
        return max((int(stem) for stem in stems if stem.isdecimal()), default=-1)

    def append(self, files: Sequence[DataFile], *, since: int) -> None:
        """Add files as one entry, unless an entry above `since` has them already."""
        while True:
            last = self.last()
            if self._has(files[0], since, last):
                return
            number = last + 1
            lines = (
                [*self._live(last), *self._entry(files)]
                if _is_compact(number)
                else self._entry(files)
            )
            content = "\n".join([_HEADER, *lines]).encode()
            if self._store.put_if_absent(_name(number), content) and self.last() == number:
                break
        if _is_compact(number):
            self._forget(number - _COMPACT_EVERY)

    def _has(self, file: DataFile, since: int, last: int) -> bool:
        """Names carry a handle: one that is found in a line is this very file."""
        name = file.path.rpartition("/")[2]
        return any(name in line for line in self._live(last, since))

    def _live(self, last: int, since: int = -1) -> Iterator[str]:
        """All lines above `since` that a reader would go by."""
        for number in range(max(since + 1, _last_compact(last)), last + 1):
            yield from self._lines(number)

    def _lines(self, number: int) -> list[str]:
        content = self._store.read(_name(number)) or b""
        header, *lines = content.decode().splitlines() or [""]
        if header != _HEADER:
            path = self._folder / _name(number)
            raise CorruptRecord(f"{path} is not a {_HEADER} entry of Spark's log: {header[:40]!r}")
        return lines

    def _entry(self, files: Sequence[DataFile]) -> list[str]:
        return [self._line(file) for file in files]

    def _line(self, file: DataFile) -> str:
        path = self._root / require_inside(file.path)
        status = {
            "path": "file://" + quote(str(path), safe=_URI_SAFE),
            "size": file.bytes,
            "isDir": False,
            "modificationTime": _modified_ms(path),
            "blockReplication": 1,
            "blockSize": _BLOCK_BYTES,
            "action": "add",
        }
        return json.dumps(status, separators=(",", ":"))

    def _forget(self, below: int) -> None:
        """Remove entries that the last two compact ones repeat; a slow reader retries by itself."""
        names = self._store.names()
        stems = {name: name.removesuffix(_COMPACT) for name in names}
        old = [name for name, stem in stems.items() if stem.isdecimal() and int(stem) < below]
        self._store.delete(old)

    def _visible_names(self) -> list[str]:
        root = LocalStore(self._root)
        found = [*root.names(), *root.folders()]
        return sorted(name for name in found if not name.startswith(("_", ".")))


def _modified_ms(path: Path) -> int:
    """A consumer may have taken the file away since it came to its place."""
    try:
        return path.stat().st_mtime_ns // 1_000_000
    except FileNotFoundError:
        return time.time_ns() // 1_000_000


def _is_compact(number: int) -> bool:
    return (number + 1) % _COMPACT_EVERY == 0


def _last_compact(number: int) -> int:
    """The newest compact entry up to this number; 0 where there is none yet."""
    return max(0, (number + 1) // _COMPACT_EVERY * _COMPACT_EVERY - 1)


def _name(number: int) -> str:
    return f"{number}{_COMPACT}" if _is_compact(number) else str(number)
