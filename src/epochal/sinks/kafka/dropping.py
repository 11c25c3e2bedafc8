"""Making a cluster forget a sink: its ledger goes, and its transactional ids in their own time."""

from __future__ import annotations

from epochal.contract import Dropped
from epochal.errors import Misconfigured
from epochal.kafka import faults
from epochal.kafka.client import Client, group_coordinator
from epochal.kafka.codes import Code
from epochal.kafka.messages.delete_groups import DeleteGroupsRequest
from epochal.sinks.kafka.every_broker import groups, producers
from epochal.sinks.kafka.names import Names
from epochal.terms import quantity

_GONE = (Code.NONE, Code.GROUP_ID_NOT_FOUND)


def drop(client: Client, names: Names, *, is_dry_run: bool) -> Dropped:
    """The groups that prove epochs. An id can't be removed: it holds nothing, and expires."""
    found = sorted(group for group in groups(client) if names.is_own_group(group))
    ids = [name for name in producers(client).values() if names.has(name)]
    if not is_dry_run:
        for group in found:
            _delete(client, group)
    return Dropped(
        removed=[f"the consumer group {group}" for group in found],
        kept=f"{quantity(len(ids), 'transactional id')}: no request removes one, brokers forget it "
        "transactional.id.expiration.ms (a week by default) after its last use"
        if ids
        else "",
    )


def _delete(client: Client, group: str) -> None:
    answer = client.ask(
        DeleteGroupsRequest(groups_names=[group]),
        group_coordinator(group),
        is_repeatable=True,
        code_of=lambda told: told.results[0].error_code,
    )
    code = answer.results[0].error_code
    if code == Code.GROUP_AUTHORIZATION_FAILED:
        raise Misconfigured(
            f"no right to delete the group {group}: whoever drops a pipeline needs the operation "
            "Delete on it, or waits until brokers forget it (offsets.retention.minutes)"
        )
    if code not in _GONE:
        faults.check(code, f"deleting the group {group}")
