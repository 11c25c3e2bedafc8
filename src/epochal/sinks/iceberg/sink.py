"""The declaration of an Iceberg sink."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import ClassVar, Literal, get_args

from epochal.contract import APPEND_ONLY, Committer, Task, Writer
from epochal.errors import Misconfigured, not_installed
from epochal.kit.compaction import CompactOption, parse_schedule
from epochal.kit.secrets import Secret
from epochal.kit.sink_base import Promises, SinkBase
from epochal.terms import Identity, Json, Limits, SinkName

try:
    from epochal.sinks.iceberg.client import TableAddress, parse_address
except ImportError as error:
    raise not_installed("the Iceberg sink", error.name, "iceberg") from error

Mode = Literal["append", "upsert", "overwrite_partitions"]
Evolve = Literal["never", "add_columns"]
_MAIN = "main"


PROMISES = (
    Promises(
        sink="`Iceberg`",
        at_one_instant="a whole epoch: one snapshot; of several tables of one REST catalog too, "
        "if it offers multi-table commits",
        proof="a property of the table",
        append="yes, and overwrite_partitions",
        by_key="upsert",
        output_modes="append; upsert also update",
        limits=[
            "keyed modes are computed in the driver's memory",
            "unknown table features are refused",
        ],
        cannot={"refuse rows": "Iceberg has no constraints but the schema, which `check` compares"},
    ),
)


@dataclass(frozen=True)
class Iceberg(SinkBase):
    """
    A table of an Iceberg catalog, in format version 1 or 2, with Parquet files.

    An epoch is one snapshot: readers see it whole or not at all. The table must exist. Files are
    written by Iceberg's own writer for Spark where its runtime is on the class path, else by
    Spark's writer of parquet or by tasks, as `check` reports; the driver commits them.

    `mode="append"` adds rows. `mode="upsert"` replaces rows of the same `keys`; files that hold
    such rows are written anew, by the driver. `mode="overwrite_partitions"` replaces the partitions
    that an epoch has rows for, and the whole of a table without partitions.
    """

    kind: ClassVar[str] = "iceberg"
    writes_on_driver: ClassVar[bool] = True

    catalog: str
    """`lake.shop.orders`; or the catalog alone, with the table apart."""
    table: str | None = None
    """`shop.orders`, where `catalog` names the catalog alone."""
    _: KW_ONLY
    properties: Mapping[str, str | Secret] = field(default_factory=dict, repr=False)
    """The catalog's, as pyiceberg names them, beside those in its own configuration."""
    mode: Mode = "append"
    """Rows are added, replace those of the same keys, or replace whole partitions."""
    keys: Sequence[str] | str = ()
    """Fields that identify a row, for upsert."""
    order_by: Sequence[str] | str = ()
    """Of several rows of one key in one epoch the highest by these fields wins."""
    evolve: Evolve = "never"
    """Whether columns that the table does not have are added, before the first row."""
    branch: str = _MAIN
    """Which branch of the table is written."""
    audit_branch: str | None = None
    """A branch where gates find each epoch before it is decided; removed afterwards."""
    snapshots_kept: int | None = None
    """How many of this sink's own snapshots stay; older ones are expired with each commit."""
    file_bytes_max: int | None = None
    """
    A file that holds this much, as it is in memory, is closed and another begun; 128 MiB where
    tasks write. Spark's own writer makes one file per task and partition value, and Iceberg's goes
    by the table's `write.target-file-size-bytes`, so where this is given, tasks write.
    """
    buffer_bytes_max: int = 64 * 1024 * 1024
    """How much a task holds in memory; up to two files' worth where the table has a sort order."""
    open_files_max: int = 64
    """How many files a task keeps open; one more closes the one that rested longest."""
    compact: CompactOption | None = None
    """`{"target_mb": 128, "every": "1h"}`: the driver compacts small files now and then."""

    address: TableAddress = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._set("address", parse_address(self.catalog, self.table, self.properties))
        self._set("catalog", self.address.catalog)
        self._set("table", self.address.table)
        self._set("properties", dict(self.address.properties))
        for option in ("keys", "order_by"):
            given = getattr(self, option)
            self._set(option, (given,) if isinstance(given, str) else tuple(given))
        if not self.name and self.branch != _MAIN:
            self._set("name", SinkName(f"{self.kind}:{self.target}"))
        super().__post_init__()
        self._check_options()

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_options(self) -> None:
        for option, known in (("mode", get_args(Mode)), ("evolve", get_args(Evolve))):
            if getattr(self, option) not in known:
                raise Misconfigured(
                    f"Iceberg: {option}={getattr(self, option)!r}", f"one of {', '.join(known)}"
                )
        is_upsert = self.mode == "upsert"
        if is_upsert and not self.keys:
            raise Misconfigured("Iceberg: mode='upsert' without keys", 'keys=["id"]')
        for option in ("keys", "order_by"):
            if getattr(self, option) and not is_upsert:
                raise Misconfigured(
                    f"Iceberg: {option} with mode={self.mode!r}, which looks at no key",
                    f"mode='upsert', or no {option}",
                )
        for option in ("file_bytes_max", "buffer_bytes_max", "open_files_max", "snapshots_kept"):
            value = getattr(self, option)
            if value is not None and value < 1:
                raise Misconfigured(f"Iceberg: {option}={value}", "give a number above zero")
        if self.compact is not None:
            parse_schedule("Iceberg", self.compact)
        if self.audit_branch in (self.branch, _MAIN, ""):
            raise Misconfigured(
                f"Iceberg: audit_branch={self.audit_branch!r}, which is where readers are",
                f'another name, such as audit_branch="{self.table}_audit"',
            )

    @property
    def target(self) -> str:
        return str(self.address) if self.branch == _MAIN else f"{self.address}@{self.branch}"

    @property
    def transaction_key(self) -> str | None:
        """One account of one REST catalog, which may commit several tables by one request."""
        server = self.address.server_key
        return None if server is None else f"{self.kind} {server}"

    @property
    def output_modes(self) -> frozenset[str]:
        return frozenset({"append", "update"}) if self.mode == "upsert" else APPEND_ONLY

    def describe(self) -> Mapping[str, Json]:
        return {
            "kind": self.kind,
            "target": self.target,
            "mode": self.mode,
            "branch": self.branch,
            "evolve": self.evolve,
        }

    def writer(self, task: Task) -> Writer:
        # Here, as the driver may do without it.
        from epochal.sinks.iceberg.writer import IcebergWriter  # noqa: PLC0415

        return IcebergWriter(self, task)

    def committer(self, identity: Identity, limits: Limits) -> Committer:
        # Here, as tasks do without it: a new worker process pays for every import.
        from epochal.sinks.iceberg.committer import IcebergCommitter  # noqa: PLC0415

        return IcebergCommitter(self, identity, limits)
