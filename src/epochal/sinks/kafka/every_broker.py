"""Questions that each broker answers for its own part only: groups, transactional ids."""

from __future__ import annotations

from typing import Any, TypeVar

from epochal.errors import EpochalError
from epochal.kafka import faults
from epochal.kafka.client import Ask, Client
from epochal.kafka.messages.list_groups import ListGroupsRequest
from epochal.kafka.messages.list_transactions import ListTransactionsRequest
from epochal.kafka.primitives import Message, Request

Answer = TypeVar("Answer", bound=Message)


def ask_every_broker(client: Client, request: Request[Answer], about: str) -> list[Answer]:
    """All answers; one that is missing or refused raises, as the rest would pass for the whole."""
    asks: list[Ask[Answer]] = [Ask(request=request, to=node) for node in client.nodes()]
    answers: list[Any] = client.ask_all(asks)
    for answer in answers:
        if isinstance(answer, EpochalError):
            raise answer
        faults.check(answer.error_code, about)
    return answers


def groups(client: Client) -> set[str]:
    """Every consumer group that may be seen."""
    answers = ask_every_broker(client, ListGroupsRequest(), "listing groups")
    return {group.group_id for answer in answers for group in answer.groups}


def producers(client: Client) -> dict[int, str]:
    """
    The transactional id of each producer, of all ids that brokers remember and that may be seen,
    whether a transaction is open or not. Brokers before 3.0 don't tell.
    """
    if not client.speaks(ListTransactionsRequest.API_KEY):
        return {}
    answers = ask_every_broker(client, ListTransactionsRequest(), "listing transactional ids")
    return {
        one.producer_id: one.transactional_id
        for answer in answers
        for one in answer.transaction_states
    }
