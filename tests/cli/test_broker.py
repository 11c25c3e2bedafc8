"""`epochal broker`, run as a user runs it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer
from servers.processes import default_sigint

COMMAND = [sys.executable, "-m", "epochal.cli", "broker"]


@contextmanager
def running_broker(
    folder: Path, preexec_fn: Callable[[], object], *options: str
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A broker in its own process, with its address."""
    command = [*COMMAND, "--data", str(folder), "--port", "0", *options]
    running = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=preexec_fn,  # noqa: PLW1509  it takes no lock
    )
    try:
        yield running, running.stderr.readline().split()[2].rstrip(",")
    finally:
        running.kill()
        running.stderr.close()
        running.wait()


def test_the_members_of_a_cluster_are_shown(tmp_path):
    journal = str(tmp_path / "journal")
    options = ["--cluster", journal, "--member", "m1", "--advertise", "127.0.0.1:0"]
    shown = [*COMMAND, "status", journal]
    nobody = subprocess.run(shown, capture_output=True, text=True, check=False)
    assert nobody.returncode == 1
    assert "no cluster of brokers has its journal at" in nobody.stderr
    with running_broker(tmp_path / "m1", default_sigint, *options) as (_, address):
        produce(address)
        table = subprocess.run(shown, capture_output=True, text=True, check=True).stdout
        assert table.splitlines()[1].split()[:2] == ["m1", "active"]
        assert address in table
        printed = subprocess.run([*shown, "--json"], capture_output=True, check=True).stdout
    (member,) = json.loads(printed)["members"]
    assert (member["role"], member["generation"], member["lag"]) == ("active", 1, 0)


@pytest.mark.parametrize(
    "options",
    [["--member", "m1"], ["--cluster", "journal"], ["--cluster", "etcd://h:2379/p/"]],
    ids=["no-cluster", "no-name", "etcd-without-segments"],
)
def test_half_a_member_is_refused(tmp_path, options):
    whole = ["--member", "m1", "--advertise", "h:1"] if "etcd" in options[-1] else []
    command = [*COMMAND, "--data", str(tmp_path), *options, *whole]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert "[misconfigured]" in refused.stderr


def ignored_sigint() -> None:
    """As a shell does for the background jobs of a script."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def test_rows_outlive_the_broker_and_ctrl_c_stops_it_cleanly(tmp_path):
    for _ in range(2):
        with running_broker(tmp_path, default_sigint) as (running, address):
            produce(address)
            found = consume(address)
            running.send_signal(signal.SIGINT)
            assert running.wait(60) == 0
    assert found == [b"row", b"row"]


def test_ctrl_c_at_a_script_does_not_stop_a_broker_in_its_background(tmp_path):
    with running_broker(tmp_path, ignored_sigint) as (running, address):
        running.send_signal(signal.SIGINT)
        produce(address)
        assert consume(address) == [b"row"]
        assert running.poll() is None
        running.terminate()
        assert running.wait(60) == 0


def produce(address: str) -> None:
    producer = Producer({"bootstrap.servers": address})
    producer.produce("orders", b"row")
    assert producer.flush(20) == 0


def consume(address: str) -> list[bytes]:
    consumer = Consumer(
        {
            "bootstrap.servers": address,
            "group.id": "readers",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
        }
    )
    consumer.subscribe(["orders"])
    found: list[bytes] = []
    while (message := consumer.poll(20)) is not None and message.error() is None:
        found.append(message.value())
    consumer.close()
    return found


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--host", "0.0.0.0"], "0.0.0.0"),
        (["--users", "/nowhere"], "No such file"),
    ],
)
def test_unsafe_or_missing_options_are_refused_in_one_message(tmp_path, options, message):
    done = subprocess.run(
        [*COMMAND, "--data", str(tmp_path), "--port", "0", *options],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert message in done.stderr
    assert "Traceback" not in done.stderr
