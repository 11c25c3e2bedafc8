"""The declaration of a Delta table."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from os import PathLike, fspath
from typing import ClassVar, Literal
from urllib.parse import urlsplit

import pyarrow as pa

from epochal.contract import APPEND_ONLY, Committer, Task, Writer
from epochal.errors import Misconfigured, not_installed
from epochal.kit.compaction import CompactOption, parse_schedule
from epochal.kit.secrets import HeldSecret, Secret
from epochal.kit.sink_base import Promises, SinkBase
from epochal.sinks.delta.table_files import TableFiles, local_folder
from epochal.storage.urls import absolute_path, require_path
from epochal.terms import Identity, Json, Limits

Mode = Literal["append", "overwrite_partitions", "merge"]

_MODES = ("append", "overwrite_partitions", "merge")
_COMPRESSIONS = ("snappy", "zstd", "gzip", "lz4", "none")


_MAX_FILE_BYTES = 256 * 1024 * 1024

PROMISES = (
    Promises(
        sink="`Delta`",
        at_one_instant="a whole epoch: one version",
        proof="the table's application transaction",
        append="yes, and overwrite_partitions",
        by_key="merge",
        deletes="`delete_when`",
        output_modes="append; merge also update",
        limits=[
            "keyed modes are computed in the driver's memory",
            "unknown table features are refused",
        ],
    ),
)


@dataclass(frozen=True)
class Delta(SinkBase):
    """
    A Delta table: each epoch is one version of it, whole or not there at all.

    `mode="append"` adds rows; `"overwrite_partitions"` replaces the partitions that an epoch has
    rows for; `"merge"` updates, inserts and deletes by `keys`. Spark's own writer or
    tasks write the files, the driver commits them with the epoch's number as the table's
    application transaction.
    """

    kind: ClassVar[str] = "delta"
    writes_on_driver: ClassVar[bool] = True

    table: str | PathLike[str]
    """A folder, or a URL that deltalake knows: s3://bucket/path, gs://…, abfss://…"""
    _: KW_ONLY
    mode: Mode = "append"
    """Rows are added, replace whole partitions, or are merged by their keys."""
    keys: Sequence[str] | str = ()
    """Columns that identify a row, for merge."""
    order_by: Sequence[str] | str = ()
    """Of several rows of one key in one epoch the highest by these columns wins."""
    delete_when: str | None = None
    """A condition in DataFusion's SQL over the columns that arrive: rows that delete their key."""
    partition_by: Sequence[str] | None = None
    """Columns of a table that is created here; of one that exists, its own."""
    create_table: Literal["never", "if_missing"] = "never"
    """Whether a table that does not exist is created, for the columns that arrive."""
    evolve: Literal["never", "add_columns"] = "never"
    """Whether columns that the table does not have are added, before the first row."""
    storage_options: Mapping[str, str | Secret] = field(default_factory=dict, repr=False)
    """As deltalake takes them; a value may be `env(…)` or `file(…)`."""
    compression: str = "snappy"
    """snappy, zstd, gzip, lz4 or none."""
    max_file_bytes: int | None = None
    """
    A file that has reached this is closed and another begun; 256 MiB where tasks write. Spark's own
    writer makes one file per task and partition value, so where this is given, tasks write.
    """
    buffer_bytes_max: int = 64 * 1024 * 1024
    """How much a task holds in memory, over all partition values."""
    open_files_max: int = 64
    """How many files a task keeps open; one more closes the one that rested longest."""
    recovery_window_s: float = 3 * 24 * 3600.0
    """How long a pipeline may be down and still go on: the table must remember it that long."""
    compact: CompactOption | None = None
    """`{"target_mb": 128, "every": "1h"}`: the driver compacts small files now and then."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "table", _address(self.table))
        for option in ("keys", "order_by"):
            object.__setattr__(self, option, _names(getattr(self, option)))
        if self.partition_by is not None:
            object.__setattr__(self, "partition_by", _names(self.partition_by))
        held = {
            name: HeldSecret(value) if isinstance(value, str) else value
            for name, value in self.storage_options.items()
        }
        object.__setattr__(self, "storage_options", held)
        super().__post_init__()
        self._require_options()

    def _require_options(self) -> None:
        for option, known in (
            ("mode", _MODES),
            ("create_table", ("never", "if_missing")),
            ("evolve", ("never", "add_columns")),
            ("compression", _COMPRESSIONS),
        ):
            value = getattr(self, option)
            if value not in known:
                raise Misconfigured(f"Delta: {option}={value!r}", f"one of {', '.join(known)}")
        if self.mode == "merge" and not self.keys:
            raise Misconfigured("Delta: mode='merge' without keys", 'keys=["id"]')
        for option in ("keys", "order_by", "delete_when"):
            if self.mode != "merge" and getattr(self, option):
                raise Misconfigured(
                    f"Delta: {option} with mode={self.mode!r}, which looks at no key",
                    f"mode='merge', or no {option}",
                )
        if self.compact is not None:
            parse_schedule("Delta", self.compact)
        for option in ("max_file_bytes", "buffer_bytes_max", "open_files_max"):
            given = getattr(self, option)
            if given is not None and given < 1:
                raise Misconfigured(f"Delta: {option}={given}", "a number above 0")

    @property
    def target(self) -> str:
        return str(self.table)

    @property
    def output_modes(self) -> frozenset[str]:
        return frozenset({"append", "update"}) if self.mode == "merge" else APPEND_ONLY

    def describe(self) -> Mapping[str, Json]:
        return {
            "kind": self.kind,
            "target": self.target,
            "mode": self.mode,
            "keys": list(self.keys),
            "partition_by": None if self.partition_by is None else list(self.partition_by),
        }

    def table_files(self) -> TableFiles:
        """The table's files, with secrets read now."""
        revealed = {
            name: value if isinstance(value, str) else value.reveal()
            for name, value in self.storage_options.items()
        }
        return TableFiles(self.target, revealed)

    def writer(self, task: Task) -> Writer:
        # Here, as the driver does without it.
        from epochal.kit.file_buffer import BufferLimits  # noqa: PLC0415
        from epochal.sinks.delta.writer import GROUP_ROWS, DeltaWriter, FileShape  # noqa: PLC0415

        handout = task.handout if isinstance(task.handout, Mapping) else {}
        is_staged = self.mode == "merge"
        declared = handout.get("partition_by", self.partition_by) or ()
        shape = FileShape(
            limits=BufferLimits(
                partition_by=() if is_staged else _names(declared),  # type: ignore[arg-type]
                split_rows=task.limits.buffer_rows,
                group_rows=GROUP_ROWS,
                max_file_bytes=self.max_file_bytes or _MAX_FILE_BYTES,
                buffer_bytes_max=self.buffer_bytes_max,
                open_files_max=self.open_files_max,
            ),
            is_staged=is_staged,
            types=_types(task.schema, handout.get("types")),
            compression=self.compression,
            stats_columns_max=int(str(handout.get("stats_columns", 32))),
            columns=str(handout.get("columns", "")),
        )
        return DeltaWriter(task, self.table_files(), shape)

    def committer(self, identity: Identity, limits: Limits) -> Committer:
        try:
            # Here, as tasks do without it: a new worker process pays for every import.
            from epochal.sinks.delta.committer import DeltaCommitter  # noqa: PLC0415
        except ImportError as error:
            raise not_installed("the Delta sink", error.name, "delta") from error
        return DeltaCommitter(self, identity, limits)


def _address(table: str | PathLike[str]) -> str:
    """Absolute from here on: executors have a working directory of their own."""
    given = fspath(table)
    if not given:
        raise Misconfigured("Delta needs a table, and its path is empty", "Delta('/data/orders')")
    parts = urlsplit(given)
    if "://" in given and (parts.username or parts.password):
        raise Misconfigured(
            f"Delta: the URL of {parts.scheme}://{parts.hostname} carries credentials",
            "give them as storage_options, each as env(…) or file(…)",
        )
    local = local_folder(given)
    if local is not None and parts.scheme != "file":
        require_path(given, "Delta")
    return given.rstrip("/") if local is None else absolute_path(str(local))


def _names(given: Sequence[str] | str) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)


def _types(schema: pa.Schema, wider: Json) -> dict[str, pa.DataType]:
    """The types that the driver handed out by name."""
    given = wider if isinstance(wider, Mapping) else {}
    return {name: _alias(str(given[name])) for name in schema.names if name in given}


def _alias(text: str) -> pa.DataType:
    decimal = re.fullmatch(r"decimal128\((\d+), (-?\d+)\)", text)
    if decimal is not None:
        return pa.decimal128(int(decimal[1]), int(decimal[2]))
    return pa.type_for_alias(text)
