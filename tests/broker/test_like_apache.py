"""The same conversations with our broker and with Apache Kafka: the same answers."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import consumer_scenarios
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


def answers_of_both(
    ours: str, theirs: str, scenario: Callable[[Transcript], None]
) -> tuple[list[str], list[str]]:
    """At the same time: much of a scenario is waiting."""
    with ThreadPoolExecutor(2) as pool:
        found = pool.map(answers_of, (ours, theirs), (scenario, scenario))
        return next(found), next(found)


@pytest.mark.parametrize(
    "scenario",
    [*scenarios.ALL, *consumer_scenarios.ALL],
    ids=lambda scenario: scenario.__name__,
)
def test_every_answer_is_as_apache_kafka_gives_it(broker, apache, scenario) -> None:
    ours, theirs = answers_of_both(broker.address(), apache.address(), scenario)
    assert ours == theirs
