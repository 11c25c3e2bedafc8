"""`epochal broker`, run as a user runs it."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
from confluent_kafka import Consumer, Producer

COMMAND = [sys.executable, "-m", "epochal.cli", "broker"]


def test_rows_outlive_the_broker_and_ctrl_c_stops_it_cleanly(tmp_path):
    for _ in range(2):
        running = subprocess.Popen(
            [*COMMAND, "--data", str(tmp_path), "--port", "0"], stderr=subprocess.PIPE, text=True
        )
        try:
            address = running.stderr.readline().split()[2].rstrip(",")
            produce(address)
            found = consume(address)
            running.send_signal(signal.SIGINT)
            assert running.wait(20) == 0
        finally:
            running.kill()
            running.stderr.close()
            running.wait()
    assert found == [b"row", b"row"]


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
