"""A consumer that is to be killed: commits what it has written to its file, and says so.

Usage: python group_member.py address group topic file protocol
"""

from __future__ import annotations

import sys
from pathlib import Path

from confluent_kafka import Consumer, KafkaException


def main(address: str, group: str, topic: str, file: str, protocol: str) -> None:
    consumer = Consumer(
        {
            "bootstrap.servers": address,
            "group.id": group,
            "group.protocol": protocol,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "reconnect.backoff.ms": 20,
            "reconnect.backoff.max.ms": 200,
            "log_level": 0,
        }
    )
    consumer.subscribe([topic])
    with Path(file).open("ab", buffering=0) as rows:
        while True:
            found = [one for one in consumer.consume(20, timeout=0.1) if one.error() is None]
            if not found:
                continue
            rows.write(b"".join(b"%s\n" % one.value() for one in found))
            try:
                consumer.commit(asynchronous=False)
            except KafkaException:
                continue  # fenced, or the broker is away: its next reader reads again


if __name__ == "__main__":
    main(*sys.argv[1:])
