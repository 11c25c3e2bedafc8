"""What Kafka promises and what it can't do, as data for docs and conformance suite."""

from __future__ import annotations

from epochal.kit.promises import Promises

PROMISES = (
    Promises(
        sink="`Kafka`",
        at_one_instant="a task's rows, complete within milliseconds",
        readers_must="use `isolation.level=read_committed`",
        proof="a consumer group's offset, committed in the transaction",
        deletes="tombstones",
        limits=[
            "open transactions block `read_committed` consumers of their partitions",
            "if the driver is down longer than the broker keeps a transaction, a replay or "
            "`spool=` is needed",
        ],
    ),
)
