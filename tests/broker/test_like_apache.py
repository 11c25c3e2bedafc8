"""The same conversations with our broker and with Apache Kafka: the same answers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import scenarios
from conftest_tools import new_topic
from scenarios import Transcript

from epochal.clock import SystemClock
from epochal.kafka.client import Client


def answers_of(address: str, scenario: Callable[[Transcript], None]) -> list[str]:
    with Client(address, clock=SystemClock()) as client:
        teller = Transcript(client, new_topic(client, 2))
        teller.warm_up()
        try:
            scenario(teller)
        except Exception as error:
            error.add_note("\n".join(teller.lines))
            raise
        return teller.lines


@pytest.mark.parametrize("scenario", scenarios.ALL, ids=lambda scenario: scenario.__name__)
def test_every_answer_is_as_apache_kafka_gives_it(broker, apache, scenario) -> None:
    assert answers_of(broker.address(), scenario) == answers_of(apache.address(), scenario)
