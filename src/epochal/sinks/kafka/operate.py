"""An operator's verbs: `grants`, `recount` for `epochal verify`, `drop` for `epochal drop`.

`recount` counts what readers of a topic see of one sink, from its batches. A batch names the
producer that wrote it, and a marker behind it shows how its transaction ended. Brokers remember for
a week which transactional id a producer belongs to: until then our records are distinguished from
those of others; later they are counted together, and the report mentions that. Committed records
behind an open transaction of another producer count too: readers see them once that ends.

There is nothing to compare where a partition no longer holds all that was ever written to it:
retention removes its beginning, compaction leaves gaps.
"""

from __future__ import annotations

import shlex
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from epochal.errors import Misconfigured, TryAgain
from epochal.kafka import batch_reader
from epochal.kafka.batch_reader import Batch
from epochal.kafka.batches import Marker
from epochal.kafka.client import Client, group_coordinator
from epochal.kafka.cluster import Leader
from epochal.kafka.codes import Code
from epochal.kafka.errors import require_ok
from epochal.kafka.messages.delete_groups import DeleteGroupsRequest
from epochal.kafka.messages.list_transactions import ListTransactionsRequest
from epochal.kit.sink_base import Dropped, Recount
from epochal.sinks.kafka.ledger import groups
from epochal.sinks.kafka.proof import fetch
from epochal.sinks.kafka.transactional_ids import TransactionalIds
from epochal.terms import quantity

if TYPE_CHECKING:
    from epochal.sinks.kafka.sink import Kafka

_EMPTY_FETCHES_MAX = 100
_GONE = (Code.NONE, Code.GROUP_ID_NOT_FOUND)


def grants(sink: Kafka, principal: str) -> list[str]:
    """Commands for an administrator: the least that a principal of this sink needs."""
    command = ["kafka-acls.sh", "--bootstrap-server", sink.bootstrap]
    command += ["--add", "--allow-principal", principal]
    ours = f"{sink.transactional_id_prefix}epochal-"
    by_prefix = ["--resource-pattern-type", "prefixed"]
    given = [
        [*_operations("Write", "Describe", "DescribeConfigs"), "--topic", sink.topic],
        # To read markers, where only the topic shows how a transaction ended; and to commit offsets
        # under the topic's name.
        [*_operations("Read"), "--topic", sink.topic],
        [*_operations("Write", "Describe"), "--transactional-id", ours, *by_prefix],
        [*_operations("Read", "Describe"), "--group", ours, *by_prefix],
    ]
    if sink.commit_offsets is not None:
        given.append([*_operations("Read"), "--group", sink.commit_offsets])
    return [shlex.join([*command, *arguments]) for arguments in given]


def _operations(*names: str) -> list[str]:
    return [argument for name in names for argument in ("--operation", name)]


def drop(client: Client, ids: TransactionalIds, *, is_dry_run: bool) -> Dropped:
    """Delete the groups that prove epochs. Ids stay until they expire: no request removes one."""
    found = sorted(group for group in groups(client) if ids.is_own_group(group))
    kept = [name for name in _transactional_ids(client).values() if ids.has(name)]
    if not is_dry_run:
        for group in found:
            _delete(client, group)
    return Dropped(
        removed=[f"the consumer group {group}" for group in found],
        kept=f"{quantity(len(kept), 'transactional id')}: no request removes one, brokers forget "
        "it transactional.id.expiration.ms (a week by default) after its last use"
        if kept
        else "",
    )


def _delete(client: Client, group: str) -> None:
    answer = client.ask(
        DeleteGroupsRequest(groups_names=[group]),
        group_coordinator(group),
        is_repeatable=True,
        code_of=lambda response: response.results[0].error_code,
    )
    code = answer.results[0].error_code
    if code == Code.GROUP_AUTHORIZATION_FAILED:
        raise Misconfigured(
            f"no right to delete the group {group}",
            "grant the operation Delete on it; without, brokers forget it by themselves "
            "(offsets.retention.minutes)",
        )
    if code not in _GONE:
        require_ok(code, f"deleting the group {group}")


def _transactional_ids(client: Client) -> dict[int, str]:
    """
    The id of each producer, of all ids that brokers remember and that this principal may see, with
    an open transaction or without. Brokers before 3.0 list none.
    """
    if not client.supports(ListTransactionsRequest.API_KEY):
        return {}
    answers = client.ask_every_broker(ListTransactionsRequest(), "listing transactional ids")
    return {
        one.producer_id: one.transactional_id
        for answer in answers
        for one in answer.transaction_states
    }


class _Incomplete(Exception):
    """A partition no longer holds all that was written to it."""


@dataclass(slots=True)
class _Partition:
    """Counts one partition from its first record on."""

    at: Leader
    offset: int = 0
    committed: Counter[int] = field(default_factory=Counter)
    """Records by producer."""
    is_held_back: bool = False
    _open: Counter[int] = field(default_factory=Counter)

    @property
    def _name(self) -> str:
        return f"{self.at.topic}-{self.at.partition}"

    def read(self, client: Client) -> None:
        end, empty = None, 0
        while end is None or self.offset < end:
            part = fetch(client, self.at, self.offset)
            if part.error_code == Code.OFFSET_OUT_OF_RANGE:
                raise _Incomplete(f"retention removed the first records of {self._name}")
            require_ok(part.error_code, f"reading {self._name}")
            end = part.high_watermark if end is None else end
            self.is_held_back = 0 <= part.last_stable_offset < part.high_watermark
            before = self.offset
            for batch in batch_reader.read(part.records or b""):
                self._count(batch)
            empty = empty + 1 if self.offset == before else 0
            if empty > _EMPTY_FETCHES_MAX:
                raise TryAgain(f"{self._name} returns nothing at {self.offset}, and ends at {end}")

    def _count(self, batch: Batch) -> None:
        if batch.base_offset != self.offset or batch.count != batch.last_offset_delta + 1:
            raise _Incomplete(f"compaction removed records of {self._name}, at {self.offset}")
        self.offset = batch.last_offset + 1
        marker = batch.marker()
        if marker is not None:
            ended = self._open.pop(batch.producer_id, 0)
            self.committed[batch.producer_id] += ended if marker is Marker.COMMIT else 0
        elif batch.is_transactional and not batch.is_control:
            self._open[batch.producer_id] += batch.count


def recount(client: Client, topic: str, ids: TransactionalIds) -> Recount:
    owners = _transactional_ids(client)
    count = client.await_topic(topic).partition_count
    partitions = [_Partition(Leader(topic, index)) for index in range(count)]
    try:
        for partition in partitions:
            partition.read(client)
    except _Incomplete as reason:
        return Recount(rows=None, because=f"{reason}: what is left can't be compared")
    committed: Counter[int] = Counter()
    for partition in partitions:
        committed.update(partition.committed)
    ours = sum(rows for who, rows in committed.items() if ids.has(owners.get(who, "")))
    unknown = sum(rows for who, rows in committed.items() if who not in owners)
    held_back = sum(partition.is_held_back for partition in partitions)
    return Recount(
        rows=ours + unknown,
        because=_what_was_counted(topic, unknown=unknown, held_back=held_back),
        is_alone=not unknown,
    )


def _what_was_counted(topic: str, *, unknown: int, held_back: int) -> str:
    text = f"committed records of {topic} under this sink's transactional ids"
    if unknown:
        text += (
            f", and {unknown} of ids that the brokers no longer know or don't show, which may be "
            "of other writers"
        )
    if held_back:
        text += f"; an open transaction makes readers of {held_back} partitions wait"
    return text
