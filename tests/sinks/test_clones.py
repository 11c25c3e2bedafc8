"""Cloned machines: two processes with copies of one log share nothing but the target."""

import json
import random
import shutil
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psycopg
import pyarrow.dataset as ds
import pytest
from confluent_kafka import Consumer
from confluent_kafka.admin import AdminClient, NewTopic
from servers.postgres import running_server
from sinks import clone
from sinks.clone import ROWS

from epochal.coordinator import read_state
from epochal.coordinator.targets import identity_of
from epochal.logs import open_log
from epochal.terms import Limits
from epochal.testing import broker

SINKS = ("files", "postgres-staged", "postgres-prepared", "kafka")
PARTITIONS = 2


@pytest.fixture(scope="module")
def servers():
    with ExitStack() as stack:
        postgres = stack.enter_context(running_server())
        yield {"postgres": postgres.url(), "kafka": stack.enter_context(broker())}


@pytest.fixture
def at(servers, tmp_path):
    """The targets, empty."""
    with psycopg.connect(servers["postgres"], autocommit=True) as connection:
        connection.execute("SET lock_timeout = '20s'")
        connection.execute("DROP TABLE IF EXISTS orders")
        connection.execute("CREATE TABLE orders (id bigint, name text)")
    admin = AdminClient({"bootstrap.servers": servers["kafka"]})
    for done in admin.delete_topics(["orders"]).values():
        done.exception(30)
    admin.create_topics([NewTopic("orders", PARTITIONS)])["orders"].result(30)
    return {**servers, "files": str(tmp_path / "files"), "pipeline": tmp_path.name}


class Machine:
    """One of the two, by the answers of its driver."""

    def __init__(self, process):
        self.process = process

    def hear(self):
        return self.process.stdout.readline().strip()

    def go(self):
        self.process.stdin.write("go\n")
        self.process.stdin.flush()


@contextmanager
def machine(at, folder, sink, *, first, epochs):
    command = [sys.executable, str(Path(__file__).with_name("clone.py")), json.dumps(at)]
    with subprocess.Popen(
        [*command, str(folder), sink, str(first), str(epochs)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield Machine(process)
        finally:
            process.kill()


def live(at, folder, sink, *, first, epochs=1):
    """A whole life that nothing holds up: its answers."""
    heard = []
    with machine(at, folder, sink, first=first, epochs=epochs) as driver:
        while answer := driver.hear():
            heard.append(answer)
            if answer == "decided":
                driver.go()
    return heard


def give_up(at, folder, sink):
    """What a person does for the machine that was refused; prepared rows hold others up."""
    state = read_state(open_log(str(folder)))
    decided = state.unsettled
    committer = clone.sink(at, sink).committer(identity_of(state, sink), Limits())
    assert {found.handle for found in committer.in_doubt()} >= {
        receipt.handle for receipt in decided.receipts[sink]
    }, "rows of a decided epoch are lost"
    committer.abort(decided.epoch, decided.receipts[sink])
    committer.close()


def visible(at, sink):
    if sink == "files":
        parquet = [str(path) for path in Path(at["files"]).glob("*.parquet")]
        return sorted(ds.dataset(parquet).to_table()["id"].to_pylist())
    if sink == "kafka":
        return sorted(_consumed(at["kafka"]))
    with psycopg.connect(at["postgres"]) as connection:
        return sorted(one for (one,) in connection.execute("SELECT id FROM orders"))


def _consumed(bootstrap):
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": f"readers-{random.random()}",
            "isolation.level": "read_committed",
            "auto.offset.reset": "earliest",
            "enable.partition.eof": True,
        }
    )
    consumer.subscribe(["orders"])
    found, ended = [], set()
    while len(ended) < PARTITIONS:
        message = consumer.poll(30)
        assert message is not None, "the topic has no end within 30 s"
        if message.error():
            ended.add(message.partition())
        else:
            found.append(json.loads(message.value())["id"])
    consumer.close()
    return found


def ids(*firsts):
    return sorted(first + at for first in firsts for at in range(ROWS))


@pytest.fixture
def folders(at, tmp_path, request):
    """The log after two epochs, and a copy of it."""
    sink = request.getfixturevalue("sink")
    original, copy = tmp_path / "original", tmp_path / "copy"
    assert live(at, original, sink, first=0, epochs=2) == ["decided", "committed"] * 2
    shutil.copytree(original, copy)
    return original, copy


@pytest.mark.parametrize("sink", SINKS)
def test_of_two_clones_that_decided_one_epoch_only_one_carries_it_out(at, folders, sink):
    original, copy = folders
    with (
        machine(at, original, sink, first=10_000, epochs=1) as one,
        machine(at, copy, sink, first=20_000, epochs=1) as other,
    ):
        assert (one.hear(), other.hear()) == ("decided", "decided")
        one.go()
        assert one.hear() == "committed"
        other.go()
        code, message = json.loads(other.hear())
    assert (code, "a copy of this epoch log is at work" in message) == ("refused", True)
    (refused,) = live(at, copy, sink, first=20_000)
    assert json.loads(refused)[0] == "refused"
    give_up(at, copy, sink)
    assert visible(at, sink) == ids(0, 1000, 10_000)
    assert live(at, original, sink, first=30_000) == ["decided", "committed"]
    assert visible(at, sink) == ids(0, 1000, 10_000, 30_000)


@pytest.mark.parametrize("sink", SINKS)
def test_of_two_clones_that_commit_at_one_moment_one_wins(at, folders, sink):
    original, copy = folders
    with (
        machine(at, original, sink, first=10_000, epochs=1) as one,
        machine(at, copy, sink, first=20_000, epochs=1) as other,
    ):
        assert (one.hear(), other.hear()) == ("decided", "decided")
        one.go()
        other.go()
        heard = [one.hear(), other.hear()]
    assert heard.count("committed") == 1, heard
    (refused,) = [json.loads(answer) for answer in heard if answer != "committed"]
    assert refused[0] == "refused"
    winner = heard.index("committed")
    give_up(at, (copy, original)[winner], sink)
    assert visible(at, sink) == ids(0, 1000, (10_000, 20_000)[winner])


@pytest.mark.parametrize("sink", SINKS)
def test_a_clone_that_fell_behind_loses_no_row_to_the_epochs_of_the_other(at, folders, sink):
    original, copy = folders
    with machine(at, copy, sink, first=20_000, epochs=1) as behind:
        assert behind.hear() == "decided"
        ahead = live(at, original, sink, first=10_000, epochs=3)
        assert ahead == ["decided", "committed"] * 3
        behind.go()
        code, _ = json.loads(behind.hear())
    assert code == "refused"
    give_up(at, copy, sink)
    assert visible(at, sink) == ids(0, 1000, 10_000, 11_000, 12_000)
