"""The declaration of a Hudi table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from os import PathLike, fspath
from typing import ClassVar, Literal, get_args

from epochal.contract import APPEND_ONLY, Committer, Task, Writer
from epochal.errors import Misconfigured, Problems
from epochal.kit.secrets import HeldSecret, Secret
from epochal.kit.sink_base import Promises, SinkBase
from epochal.storage.urls import canonical, host_of, scheme_of
from epochal.terms import Identity, Json, Limits

Mode = Literal["append", "upsert"]
TASKS_REFUSAL = "a Hudi table is written by Hudi's own writer for Spark, and by nothing else"

FIXED: Mapping[str, tuple[str, str]] = {
    "hoodie.metadata.enable": (
        "true",
        "without the metadata table readers list folders, and see files of tasks that died",
    ),
    "hoodie.metadata.streaming.write.enabled": (
        "false",
        "tasks would write to the metadata table before there is a decision",
    ),
    "hoodie.clean.failed.writes.policy": (
        "LAZY",
        "EAGER rolls back every instant that is pending when another one starts, decided or not",
    ),
    "hoodie.write.concurrency.mode": (
        "OPTIMISTIC_CONCURRENCY_CONTROL",
        "only under its lock two drivers can't both complete one instant",
    ),
    "hoodie.allow.empty.commit": ("true", "an epoch without rows is committed too"),
    "hoodie.embed.timeline.server": ("false", "it ends with the driver, and another one commits"),
    "hoodie.write.markers.type": ("DIRECT", "the process that commits reads the markers of tasks"),
    "hoodie.write.auto.upgrade": ("false", "an upgrade of the table rolls pending instants back"),
}
"""Options of Hudi that are not for choice: their value, and what another one would break."""
FIXED_FOR: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "append": {
        "hoodie.datasource.write.operation": (
            "bulk_insert",
            "mode='append' adds rows and looks at no key",
        ),
        "hoodie.bulkinsert.sort.mode": ("NONE", "a shuffle above the count of rows may run twice"),
        "hoodie.combine.before.insert": (
            "false",
            "rows of one key would be dropped from the count",
        ),
        "hoodie.datasource.write.insert.drop.duplicates": ("false", "the same"),
    },
    "upsert": {
        "hoodie.datasource.write.operation": ("upsert", "mode='upsert' replaces rows by their key"),
        "hoodie.combine.before.upsert": ("true", "two rows of one key would both be written"),
    },
}
"""The same, of one mode each."""
_INDEX = "hoodie.index.type"
_INDEXES = ("SIMPLE", "BLOOM", "GLOBAL_SIMPLE", "GLOBAL_BLOOM")
_OTHER_NAMES = {"hoodie.cleaner.policy.failed.writes": "hoodie.clean.failed.writes.policy"}
_LOCK = "hoodie.write.lock.provider"
_LOCKS = "org.apache.hudi.client.transaction.lock."
_FILE_LOCK = f"{_LOCKS}FileSystemBasedLockProvider"
_FILE_LOCK_EXPIRES = "hoodie.write.lock.filesystem.expire"
_NO_LOCKS = ("InProcessLockProvider", "NoopLockProvider")
_FILE_LOCK_SCHEMES = {None, "file", "hdfs"}
DEFAULTS = {
    # Of a driver that was killed inside the lock: others wait that many minutes.
    _FILE_LOCK_EXPIRES: "2",
    "hoodie.write.lock.client.num_retries": "3",
    "hoodie.compact.inline": "false",
    _INDEX: _INDEXES[0],
}
"""Options of Hudi where none is given."""

PROMISES = (
    Promises(
        sink="`Hudi`",
        at_one_instant="a whole epoch: one commit of the timeline",
        readers_must="use the metadata table, as Hudi's readers do by default",
        proof="the commit's extra metadata, carried on from commit to commit",
        append="yes, by bulk_insert",
        by_key="upsert",
        deletes="rows with `_hoodie_is_deleted`",
        output_modes="append; upsert also update",
        limits=[
            "Spark 3.5 with Hudi 1.2; committing needs a Spark session",
            "every other writer must clean lazily (`hoodie.clean.failed.writes.policy=LAZY`) under "
            "the same lock",
            "an upsert is written again where another writer has changed the same partitions since",
        ],
        cannot={
            "refuse rows": "the schema is compared by `check`; a Hudi table has no constraints"
        },
    ),
)


@dataclass(frozen=True)
class Hudi(SinkBase):
    """
    A Hudi table, copy-on-write or merge-on-read: each epoch is one commit of its timeline.

    Rows are written by Hudi's own writer for Spark, under an instant that readers pass over until
    the driver completes it. The table must exist. Both need Spark in its classic mode with Hudi's
    bundle on the class path.

    `mode="append"` adds rows, by bulk insert. `mode="upsert"` replaces rows of the same key: key
    and order are the table's own (`primaryKey`, `preCombineField`), and the row with the higher
    order is kept.
    """

    kind: ClassVar[str] = "hudi"
    moves_rows: ClassVar[bool] = True

    table: str | PathLike[str]
    """The table's base path: a folder, or a URL that Spark reaches."""
    _: KW_ONLY
    mode: Mode = "append"
    """Rows are added, or replace those of the same key."""
    options: Mapping[str, str | Secret] = field(default_factory=dict, repr=False)
    """Hudi's own, by their full names: the lock, cleaning, archival. A value may be `env(…)`."""

    def __post_init__(self) -> None:
        given = fspath(self.table)
        if not given:
            raise Misconfigured("Hudi needs a table, and its path is empty", "Hudi('/lake/orders')")
        object.__setattr__(self, "table", canonical(given))
        if self.mode not in get_args(Mode):
            raise Misconfigured(f"Hudi: mode={self.mode!r}", f"one of {', '.join(get_args(Mode))}")
        held = {
            _OTHER_NAMES.get(name, name): HeldSecret(value) if isinstance(value, str) else value
            for name, value in self.options.items()
        }
        object.__setattr__(self, "options", held)
        super().__post_init__()
        self._require_options()

    def _require_options(self) -> None:
        problems = Problems()
        given = {
            name: value.reveal()
            for name, value in self.options.items()
            if isinstance(value, HeldSecret)
        }
        for name, (needed, because) in self.fixed_options.items():
            if name in given and given[name].upper() != needed.upper():
                problems.add(f"{name}={given[name]}: {because}", f"leave it out: it is {needed}")
        if given.get(_INDEX, _INDEXES[0]) not in _INDEXES:
            problems.add(
                f"{_INDEX}={given[_INDEX]}: it was never tried here",
                f"one of {', '.join(_INDEXES)}",
            )
        lock = given.get(_LOCK, "")
        if not lock and scheme_of(self.target) not in _FILE_LOCK_SCHEMES:
            problems.add(
                f"no {_LOCK}, and a lock file at {scheme_of(self.target)}://{host_of(self.target)} "
                "holds nobody off",
                f"options={{'{_LOCK}': '{_LOCKS}StorageBasedLockProvider'}}, or ZooKeeper's",
            )
        if lock.endswith(_NO_LOCKS):
            problems.add(
                f"{_LOCK}={lock}, which holds off nobody outside this process",
                "a lock that all drivers share: by a file, ZooKeeper, the Hive metastore, storage",
            )
        if lock in {"", _FILE_LOCK} and given.get(_FILE_LOCK_EXPIRES) == "0":
            problems.add(
                f"{_FILE_LOCK_EXPIRES}=0: the lock of a driver that was killed is held for ever",
                f"{_FILE_LOCK_EXPIRES}=2, in minutes: longer than any commit takes",
            )
        problems.raise_if_any("Hudi")

    def revealed(self) -> dict[str, str]:
        """The options that were given, with secrets read now."""
        return {
            name: value if isinstance(value, str) else value.reveal()
            for name, value in self.options.items()
        }

    @property
    def fixed_options(self) -> Mapping[str, tuple[str, str]]:
        return {**FIXED, **FIXED_FOR[self.mode]}

    def writer_options(self) -> dict[str, str]:
        """All options of Hudi's writer but those that the table itself decides."""
        fixed = {name: value for name, (value, _) in self.fixed_options.items()}
        return {_LOCK: _FILE_LOCK, **DEFAULTS, **self.revealed(), **fixed}

    @property
    def has_global_keys(self) -> bool:
        """A key is unique in the whole table, and not in each partition."""
        return self.revealed().get(_INDEX, "").startswith("GLOBAL_")

    @property
    def output_modes(self) -> frozenset[str]:
        return frozenset({"append", "update"}) if self.mode == "upsert" else APPEND_ONLY

    @property
    def target(self) -> str:
        return str(self.table)

    @property
    def prepares_last(self) -> bool:
        """A pending instant holds up the archival of the table's timeline."""
        return True

    def describe(self) -> Mapping[str, Json]:
        return {"kind": self.kind, "target": self.target, "mode": self.mode}

    def writer(self, task: Task) -> Writer:  # noqa: ARG002
        raise Misconfigured(
            TASKS_REFUSAL, "here rows are written by a task, or by the driver itself"
        )

    def committer(self, identity: Identity, limits: Limits) -> Committer:
        # Here, as tasks do without it: a new worker process pays for every import.
        from epochal.sinks.hudi.committer import HudiCommitter  # noqa: PLC0415

        return HudiCommitter(self, identity, limits)
