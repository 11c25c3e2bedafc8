"""
The audit of a demonstration: what readers of the targets see, row by row, against the source.

Each target is read by its own client and by none of our code. The column `part` of the
source identifies the epoch of a row.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from epochal.coordinator import read_state
from epochal.demo.workspace import AMOUNTS, EVENTS, ORDERS, TABLE, TOPIC, Workspace, part_sizes
from epochal.errors import EpochalError
from epochal.logs import checkpoint_log
from epochal.terms import DEFAULT_LIMITS, Identity, SinkName

_BROKER_SILENCE_MAX_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result of an audit. Row counts are sums over all sinks."""

    rows: int
    sinks: int
    epochs: int
    lost: int
    duplicated: int
    torn_epochs: int
    left_in_doubt: int

    @property
    def is_clean(self) -> bool:
        return not (self.lost or self.duplicated or self.torn_epochs or self.left_in_doubt)

    def to_json(self) -> dict[str, int]:
        return asdict(self)


def audit(workspace: Workspace, *, rows: int, parts: int) -> Verdict:
    """Count and compare. The servers must be running."""
    seen = {sink: read(workspace) for sink, read in READERS.items()}
    return Verdict(
        rows=rows,
        sinks=len(seen),
        epochs=_epochs(workspace),
        lost=sum(rows - _distinct(table) for table in seen.values()),
        duplicated=sum(table.num_rows - _distinct(table) for table in seen.values()),
        torn_epochs=_torn(seen, part_sizes(rows, parts)),
        left_in_doubt=_left_in_doubt(workspace),
    )


def _distinct(table: pa.Table) -> int:
    return int(pc.count_distinct(table["id"]).as_py())


def _torn(seen: Mapping[SinkName, pa.Table], sizes: list[int]) -> int:
    """Count the epochs that are visible in part, or in one sink and not in another."""
    counts = [_rows_by_part(table) for table in seen.values()]
    return sum(
        1
        for part, size in enumerate(sizes)
        if {count.get(part, 0) for count in counts} not in ({0}, {size})
    )


def _rows_by_part(table: pa.Table) -> dict[int, int]:
    grouped = table.group_by("part").aggregate([("id", "count_distinct")])
    return dict(
        zip(grouped["part"].to_pylist(), grouped["id_count_distinct"].to_pylist(), strict=True)
    )


def _epochs(workspace: Workspace) -> int:
    state = read_state(checkpoint_log(workspace.checkpoint))
    return 0 if state is None else state.expected


def _left_in_doubt(workspace: Workspace) -> int:
    state = read_state(checkpoint_log(workspace.checkpoint))
    if state is None:
        return 0
    left = len(state.pending)
    for sink in workspace.sinks():
        identity = Identity(
            pipeline=state.pipeline, uid=state.uid, sink=sink.name, generation=state.generation
        )
        committer = sink.committer(identity, DEFAULT_LIMITS)
        left += len(committer.in_doubt())
        committer.close()
    return left


def read_table(workspace: Workspace) -> pa.Table:
    import psycopg  # noqa: PLC0415  the demo's extra

    with psycopg.connect(workspace.addresses.postgres) as connection:
        there = connection.execute("SELECT to_regclass(%s)", (TABLE,)).fetchone()
        if there is None or there[0] is None:
            return _rows([], [])
        found = connection.execute(f"SELECT id, part FROM {TABLE}").fetchall()  # noqa: S608  ours
    return _rows([number for number, _ in found], [part for _, part in found])


def read_topic(workspace: Workspace) -> pa.Table:
    """Read all committed records, to the end of every partition."""
    from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition  # noqa: PLC0415  an extra

    consumer = Consumer(
        {
            "bootstrap.servers": workspace.addresses.kafka,
            "group.id": f"audit-{uuid.uuid4()}",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
        }
    )
    try:
        partitions = consumer.list_topics(TOPIC, timeout=30).topics[TOPIC].partitions
        consumer.assign([TopicPartition(TOPIC, number, OFFSET_BEGINNING) for number in partitions])
        values = _drain(consumer, len(partitions))
    finally:
        consumer.close()
    rows = [json.loads(value) for value in values]
    return _rows([row["id"] for row in rows], [row["part"] for row in rows])


def _drain(consumer: object, partitions: int) -> list[bytes]:
    from confluent_kafka import KafkaError  # noqa: PLC0415  an extra

    values: list[bytes] = []
    ended: set[int] = set()
    received_s = time.monotonic()
    while len(ended) < partitions:
        # Returns when all of these messages have arrived or the time is up.
        messages = consumer.consume(num_messages=10_000, timeout=0.2)  # type: ignore[attr-defined]
        if messages:
            received_s = time.monotonic()
        elif time.monotonic() - received_s > _BROKER_SILENCE_MAX_S:
            raise EpochalError(f"the broker has sent nothing for {_BROKER_SILENCE_MAX_S:.0f} s")
        for message in messages:
            if message.error() is None:
                values.append(message.value())
            elif message.error().code() == KafkaError._PARTITION_EOF:
                ended.add(message.partition())
            else:
                raise EpochalError(f"the topic can't be read: {message.error()}")
    return values


def read_folder(workspace: Workspace) -> pa.Table:
    # Like most readers of a folder, a dataset ignores names that begin with "_" or ".".
    if not workspace.amounts.exists():
        return _rows([], [])
    return ds.dataset(workspace.amounts, format="csv").to_table(columns=["id", "part"])


def _rows(ids: list[int], parts: list[int]) -> pa.Table:
    return pa.table({"id": pa.array(ids, pa.int64()), "part": pa.array(parts, pa.int64())})


READERS: Mapping[SinkName, Callable[[Workspace], pa.Table]] = {
    ORDERS: read_table,
    EVENTS: read_topic,
    AMOUNTS: read_folder,
}
