"""A driver with four sinks that kills itself after so many steps of its life."""

from __future__ import annotations

import json
import os
import signal
import sys

import pyarrow as pa

import epochal as ep
from epochal.contract import Sink
from epochal.coordinator import Environment

SCHEMA = pa.schema([("id", pa.int64()), ("name", pa.string())])
ROWS = 50


def rows(epoch: int) -> list[dict[str, object]]:
    return [{"id": epoch * 1000 + at, "name": f"row {at}"} for at in range(ROWS)]


def sinks(at: dict[str, str]) -> list[Sink]:
    return [
        ep.Postgres(at["postgres"], table="orders", name="postgres"),
        ep.Kafka(at["kafka"], topic="orders", key="id", value=ep.json("*"), name="kafka"),
        ep.Iceberg("lake.shop.orders", properties=json.loads(at["lake"]), name="iceberg"),
        ep.Http(at["http"], name="http"),
    ]


def main() -> None:
    at, epochs, steps = json.loads(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    left = [steps]

    def watch(step: str, epoch: int | None) -> None:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    session = ep.Session(
        "orders",
        sinks=sinks(at),
        log=at["log"],
        schema=SCHEMA,
        environment=Environment(on_step=watch),
    )
    with session:
        while session.next_epoch < epochs:
            session.begin(session.next_epoch)
            session.write(rows(session.next_epoch))
            session.commit()


if __name__ == "__main__":
    main()
