"""
aiokafka, run against a broker; what it saw goes to stdout, a line each.

    python aiokafka_client.py <bootstrap> <topic>

It runs in a process of its own: what it leaves behind of its tasks and connections after being
fenced, as it does, is then no part of the process that judges.
"""

from __future__ import annotations

import asyncio
import sys
import uuid
from collections.abc import Awaitable, Callable

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.errors import KafkaError

ROWS = 5
PATIENCE_S = 60


def report(line: object) -> None:
    print(line)  # noqa: T201  stdout is what this program is for


async def write_in_transactions(address: str, topic: str) -> None:
    name = f"tx-{uuid.uuid4().hex}"
    producer = AIOKafkaProducer(bootstrap_servers=address, transactional_id=name)
    newer = AIOKafkaProducer(bootstrap_servers=address, transactional_id=name)
    await producer.start()
    async with producer.transaction():
        for number in range(ROWS):
            await producer.send_and_wait(topic, b"kept %d" % number, partition=0)
    await producer.begin_transaction()
    await producer.send_and_wait(topic, b"dropped", partition=0)
    await producer.abort_transaction()
    report("aborted")
    await newer.start()
    try:
        async with producer.transaction():
            await producer.send_and_wait(topic, b"of a zombie", partition=0)
    except KafkaError:
        report("fenced")
    await newer.stop()
    await producer.stop()


async def read_in_a_group(address: str, topic: str) -> None:
    group = f"group-{uuid.uuid4().hex}"
    consumers = [
        AIOKafkaConsumer(
            topic,
            bootstrap_servers=address,
            group_id=group,
            isolation_level="read_committed",
            auto_offset_reset="earliest",
            session_timeout_ms=6_000,
            heartbeat_interval_ms=300,
        )
        for _ in range(2)
    ]
    for consumer in consumers:
        await consumer.start()
    found: list[bytes] = []

    async def has_read_all() -> bool:
        for consumer in consumers:
            for rows in (await consumer.getmany(timeout_ms=200)).values():
                found.extend(row.value for row in rows)
        return len(found) >= ROWS

    async def has_shared_the_partitions() -> bool:
        return sorted(len(consumer.assignment()) for consumer in consumers) == [1, 2]

    await until(has_read_all)
    for row in found:
        report(row.decode())
    await until(has_shared_the_partitions)
    report("shared")
    for consumer in consumers:
        await consumer.stop()


async def administer(address: str) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=address)
    await admin.start()
    made = f"made-{uuid.uuid4().hex}"
    await admin.create_topics([NewTopic(made, 2, 1)])

    async def is_listed() -> bool:
        return made in await admin.list_topics()

    async def is_gone() -> bool:
        return not await is_listed()

    await until(is_listed)
    await admin.delete_topics([made])
    await until(is_gone)
    report("made and deleted")
    await admin.close()


async def until(is_so: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not await is_so():
            await asyncio.sleep(0.05)


async def main(address: str, topic: str) -> None:
    await write_in_transactions(address, topic)
    await read_in_a_group(address, topic)
    await administer(address)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
