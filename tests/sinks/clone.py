"""A driver of a cloned machine: it waits at the decision of each epoch until it may go on.

    python clone.py <targets, JSON> <folder of the log> <name of one sink> <first id> <epochs>

The log says that it is at one path, as on a machine of its own. Every line is an answer: `decided`,
`committed`, or the error by which the driver ended.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

import pyarrow as pa

import epochal as ep
from epochal.contract import Sink
from epochal.coordinator import Environment
from epochal.errors import EpochalError
from epochal.logs import open_log

PLACE = "/var/lib/orders"
ROWS = 40
SCHEMA = pa.schema([("id", pa.int64()), ("name", pa.string())])


def sink(at: dict[str, str], name: str) -> Sink:
    if name == "files":
        return ep.Files(at["files"], name=name)
    if name == "kafka":
        return ep.Kafka(at["kafka"], topic="orders", key="id", value=ep.json("*"), name=name)
    strategy = name.removeprefix("postgres-")
    return ep.Postgres(at["postgres"], table="orders", strategy=strategy, name=name)


class OtherMachine:
    """A log in a folder of this machine, under the path that it has on its own."""

    def __init__(self, folder: str) -> None:
        self._log = open_log(folder)
        self.place = PLACE

    def put_if_absent(self, number: int, record: bytes) -> bool:
        return self._log.put_if_absent(number, record)

    def numbers(self) -> Sequence[int]:
        return self._log.numbers()

    def read(self, number: int) -> bytes | None:
        return self._log.read(number)

    def delete(self, numbers: Sequence[int]) -> None:
        self._log.delete(numbers)

    def put_list(self, name: str, content: bytes) -> None:
        self._log.put_list(name, content)

    def read_list(self, name: str) -> bytes | None:
        return self._log.read_list(name)

    def list_names(self) -> Sequence[str]:
        return self._log.list_names()

    def delete_lists(self, names: Sequence[str]) -> None:
        self._log.delete_lists(names)

    def close(self) -> None:
        self._log.close()


def answer(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def wait_at_decision(step: str, epoch: int | None) -> None:
    if step == "decided":
        answer("decided")
        sys.stdin.readline()


def main() -> None:
    at, folder, name, first, epochs = json.loads(sys.argv[1]), *sys.argv[2:]
    try:
        with ep.Session(
            at["pipeline"],
            sinks=[sink(at, name)],
            log=OtherMachine(folder),
            schema=SCHEMA,
            environment=Environment(on_step=wait_at_decision),
            limits=ep.Limits(history_epochs_kept=0),
        ) as session:
            for number in range(int(epochs)):
                session.begin(session.next_epoch)
                ids = range(int(first) + number * 1000, int(first) + number * 1000 + ROWS)
                session.write([{"id": one, "name": f"row {one}"} for one in ids])
                session.commit()
                answer("committed")
    except EpochalError as error:
        answer(json.dumps([error.code, error.message]))


if __name__ == "__main__":
    main()
