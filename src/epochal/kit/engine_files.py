"""
Files that one job of Spark's own writer has left in a folder of its own.

    <folder>/day=2026-01-31/part-00003-….snappy.parquet    as the commit of the job put it there
    <folder>/_temporary/0/…                                what late tasks still write

A sink moves the first kind to where it prepares files, under a name that holds the job's handle.
Nothing is taken from `_temporary/`: those are attempts that don't count.

An executor that Spark has given up may wake and commit its task once more, which removes and
replaces files of the attempt that counts. So what lies in the folder is compared with what the
writer says of the attempts that count: files, their sizes, and the rows where footers count them.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq

from epochal.contract import EngineWritten
from epochal.errors import InvariantBroken, Misconfigured, TryAgain
from epochal.kit.hive_partitions import (
    MUST_ESCAPE,
    NAME_BYTES_MAX,
    WITHOUT_FORM,
    escape,
    has_nul,
    refused,
    too_long,
)
from epochal.kit.marked_files import Markers, at_once, of_sink
from epochal.terms import Handle, Identity, InDoubt, Uid, handle_prefix, quantity

_SHARED = (
    "the folder must be one and the same for the driver and every executor: a shared mount, or one "
    "machine (local[*])"
)
_REPLACED = (
    "an executor that Spark had given up removed or replaced files of another; nothing was "
    "decided, and the epoch is tried again at the next start"
)
_NEXT_START = "the epoch is tried again at the next start"
_TOO_FEW_FOR_THREADS = 8
_FIRST_PAGE_ROWS = 20_000
"""parquet.page.row.count.limit. What is shorter does not show what a longer one would do."""
_FOOTERS_MAX = 8
_TRY_ALL_EVERY = 50
_SPARK_CODECS = {"lz4": "lz4_raw"}
"""Spark's names of codecs, where they differ from Arrow's."""


def writer_options(compression: str) -> dict[str, str]:
    """Options of Spark's parquet writer."""
    return {"compression": _SPARK_CODECS.get(compression, compression)}


class Dictionaries:
    """
    Which columns need no dictionary, as the footers of earlier jobs show.

    Spark's writer begins a dictionary for every column, and gives up one that saves nothing by the
    first page of a row group, of up to 20,000 rows: of columns whose values don't repeat, a tenth
    of the time of a small file. Where it was given up it is not begun again, but for a job now and
    then, as what rows are like may change. The files are the same.
    """

    def __init__(self) -> None:
        self._plain: frozenset[str] = frozenset()
        self._seen: list[Any] = []
        self._jobs = 0

    def footer(self, path: Path) -> tuple[Any, int]:
        """The footer of a file of a job, which the next job goes by, and its rows."""
        footer, rows = parquet_footer(path)
        self.note(footer)
        return footer, rows

    def note(self, footer: Any) -> None:
        """The next job goes by this footer, too."""
        if len(self._seen) < _FOOTERS_MAX:
            self._seen.append(footer)

    def unneeded(self) -> list[str]:
        """The columns, by their paths in a file, for which the next job is to begin none."""
        seen, self._seen = self._seen, []
        self._jobs += 1
        is_to_try_all = self._jobs % _TRY_ALL_EVERY == 0
        self._plain = frozenset() if is_to_try_all else self._plain | _without_dictionary(seen)
        return sorted(self._plain)

    def options(self) -> dict[str, str]:
        """Options of Spark's parquet writer for the next job."""
        return {f"parquet.enable.dictionary#{path}": "false" for path in self.unneeded()}


def _without_dictionary(footers: Sequence[Any]) -> frozenset[str]:
    groups = [footer.row_group(n) for footer in footers for n in range(footer.num_row_groups)]
    columns = [
        group.column(place)
        for group in groups
        if group.num_rows >= _FIRST_PAGE_ROWS
        for place in range(group.num_columns)
    ]
    kept = {column.path_in_schema for column in columns if column.has_dictionary_page}
    return frozenset(column.path_in_schema for column in columns) - kept


def sql_name(column: str) -> str:
    return f"`{column.replace('`', '``')}`"


def sql_text(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def refusing(column: str, sql: str) -> str:
    """
    The text of a partition column, which `sql` computes. One that can't be the name of a folder
    fails the job with the error that a task raises, which the driver finds in the text of Spark's.
    """
    room = NAME_BYTES_MAX - len(f"{escape(column)}=".encode())
    # Of few texts, as each character takes up to three bytes once it is escaped.
    escaped = f"regexp_replace({sql}, {sql_text(MUST_ESCAPE.pattern)}, '%00')"
    errors = {
        **{f"({sql}) = {sql_text(text)}": refused(column, text) for text in WITHOUT_FORM},
        f"contains({sql}, char(0))": has_nul(column),
        f"octet_length({sql}) > {room // 3} AND octet_length({escaped}) > {room}": too_long(column),
    }
    raised = (
        f"WHEN {test} THEN raise_error({sql_text(error.to_line())})"
        for test, error in errors.items()
    )
    return f"CASE {' '.join(raised)} ELSE {sql} END"


def rising(column: str) -> str:
    """An item of `EngineWrite.sort_by`."""
    return f"{sql_name(column)} ASC NULLS FIRST"


@dataclass(frozen=True, slots=True)
class JobFolders:
    """The folders of jobs, each named by its handle: what is in them is in no table yet."""

    place: Path | None
    """Of a local disk; None where the table has none, and so no jobs."""

    def folder(self, handle: Handle) -> Path:
        if self.place is None:
            raise InvariantBroken(f"{handle}: a job of Spark's own writer needs a local disk")
        return self.place / str(handle)

    def remove_unmarked(self, identity: Identity, markers: Markers) -> None:
        """
        Remove what late tasks wrote of jobs whose attempts are committed or aborted: these have no
        marker any more, and one that goes on had its marker before its folder.
        """
        for one in of_sink(identity, self._listed(identity.uid)):
            if one.handle is not None and not markers.exists(one.handle):
                self.remove(one.handle)

    def remove(self, handle: Handle) -> None:
        while self.place is not None and self.folder(handle).exists():
            with suppress(FileNotFoundError):
                shutil.rmtree(self.folder(handle))

    def _listed(self, uid: Uid) -> list[InDoubt]:
        found = [] if self.place is None else sorted(self.place.glob(f"{handle_prefix(uid)}*"))
        return [InDoubt(name=path.name, handle=Handle.parse(path.name)) for path in found]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFile:
    """A file as Spark's writer has left it, with at least one row."""

    path: Path
    partition: str
    """Its folder below that of the job, as `day=2026-01-31`; empty without partitions."""
    bytes: int
    footer: Any
    """What its format keeps at the end of a file; None in formats without it."""
    rows: int | None
    """As the footer counts them."""

    def move_to(self, place: Path) -> None:
        self.path.rename(place)


def parquet_footer(path: Path) -> tuple[Any, int]:
    footer = pq.read_metadata(path)
    return footer, int(footer.num_rows)


def orc_footer(path: Path) -> tuple[Any, int]:
    from pyarrow import orc  # noqa: PLC0415  few sinks write it

    footer = orc.ORCFile(path)
    return footer, int(footer.nrows)


def engine_files(
    folder: Path,
    written: EngineWritten,
    *,
    footer_of: Callable[[Path], tuple[Any, int]] | None = parquet_footer,
    has_rows: Callable[[Path], bool] = lambda _: True,
    named: Sequence[Path] | None = None,
) -> list[EngineFile]:
    """
    The files of a job that succeeded; those without rows are removed. `named`: those that count,
    where the writer itself says so, and not the folder that they are in.

    Raises where they are not what the writer says: one was lost between the commit of its task and
    that of the job, or the driver does not see what executors write. `footer_of`: the footer of a
    file, and its rows; None for a format without. Then `has_rows` says whether a file has any, of
    the one that Spark begins before it has seen a row.
    """
    found = sorted(_written(folder) if named is None else named)
    sizes = at_once(lambda path: path.stat().st_size, found, at_least=_TOO_FEW_FOR_THREADS)
    if (len(found), sum(sizes)) != (written.files, written.bytes):
        raise _not_as_written(folder, len(found), sum(sizes), written)
    footers = (
        [(None, None if has_rows(path) else 0) for path in found]
        if footer_of is None
        else at_once(lambda path: _read(footer_of, path), found, at_least=_TOO_FEW_FOR_THREADS)
    )
    counted = sum(rows or 0 for _, rows in footers)
    if footer_of is not None and counted != written.fingerprint.rows:
        raise _not_these_rows(folder, counted, written)
    files = [
        EngineFile(
            path=path, partition=_partition(folder, path), bytes=size, footer=footer, rows=rows
        )
        for path, size, (footer, rows) in zip(found, sizes, footers, strict=True)
    ]
    for file in files:
        if file.rows == 0:
            file.path.unlink()
    return [file for file in files if file.rows != 0]


def hadoop_url(location: str) -> str:
    """A place in a store as Hadoop's file systems name it."""
    return location.replace("s3://", "s3a://", 1) if location.startswith("s3://") else location


def listed_sizes(written: EngineWritten, job_url: str) -> dict[str, int]:
    """The files that a job has listed, by their paths below its folder, with their sizes."""
    listed = [json.loads(report) for report in written.reports or ()]
    # Not by urlsplit: the keys of a store may have a # or a ?.
    top = f"{_key_in(job_url)}/"
    return {unquote(_key_in(one["path"])).removeprefix(top): one["size"] for one in listed}


def _key_in(url: str) -> str:
    return url.partition("://")[2].partition("/")[2]


def require_put(
    sizes: Mapping[str, int], found: Sequence[int | None], job_url: str, store: str
) -> None:
    """
    See that a store shows the files of a job as Spark has put them there. Each has a name of its
    own, which no other attempt can write to, so that sizes tell enough.
    """
    if sizes and all(size is None for size in found):
        raise Misconfigured(
            f"Spark has written to {job_url}, and {store} does not show it",
            "Spark's settings (spark.hadoop.fs.s3a.…) and those of the sink must lead to the same "
            "bucket of the same server",
        )
    for (relative, size), is_there in zip(sizes.items(), found, strict=True):
        if is_there != size:
            fact = "is not there" if is_there is None else f"has {is_there} bytes"
            raise TryAgain(
                f"Spark has put {relative} with {size} bytes below {job_url}, and it {fact}",
                "somebody removes or changes objects there",
            )


def _written(folder: Path) -> Iterator[Path]:
    """
    Files of committed tasks. Hadoop keeps its own under names that begin with `_` or `.`; a folder
    of a partition has a `=` in its name, and may begin so too.
    """
    for inner, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if "=" in name or not name.startswith(("_", "."))]
        yield from (Path(inner) / name for name in names if not name.startswith(("_", ".")))


def _partition(folder: Path, path: Path) -> str:
    relative = path.parent.relative_to(folder)
    return "" if relative == Path() else str(relative)


def _read(footer_of: Callable[[Path], tuple[Any, int]], path: Path) -> tuple[Any, int]:
    try:
        return footer_of(path)
    except (OSError, pa.ArrowException) as error:
        raise TryAgain(
            f"{path}, which Spark has just written, can't be read: {error}", _NEXT_START
        ) from error


def _not_as_written(
    folder: Path, files: int, size: int, written: EngineWritten
) -> Misconfigured | TryAgain:
    fact = (
        f"Spark has written {quantity(written.fingerprint.rows, 'row')} to "
        f"{quantity(written.files, 'file')} of {written.bytes} bytes, and in {folder} there are "
        f"{quantity(files, 'file')} of {size} bytes"
    )
    return TryAgain(fact, _REPLACED) if files else Misconfigured(fact, _SHARED)


def _not_these_rows(folder: Path, counted: int, written: EngineWritten) -> TryAgain:
    return TryAgain(
        f"Spark has written {quantity(written.fingerprint.rows, 'row')}, and the files in {folder} "
        f"have {quantity(counted, 'row')}",
        _REPLACED,
    )
