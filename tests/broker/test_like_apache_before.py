"""The transaction protocols before the newest one: the same answers as Apache Kafka's, again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import scenarios
from scenarios import Transcript
from servers.embedded import EmbeddedServer
from servers.kafka import KafkaServer
from test_like_apache import answers_of_both
from wire import fetch, values

from epochal.kafka.codes import Code


def requests_of_the_newer_protocol(t: Transcript) -> None:
    """Produce 12 adds its partition by itself only where the newer protocol is switched on."""
    name = scenarios.fresh()
    txn = t.begun(name)
    t.say("produce v12", t.produced(t.batch(b"early", txn=txn), name=name, version=12))
    t.say("state", t.settle(txn))
    assert t.added(txn) == Code.NONE
    t.say("produce v12 once added", t.produced(t.batch(b"kept", txn=txn), name=name, version=12))
    t.say("end", t.ended(txn, commit=True, version=4))
    t.say("state", t.settle(txn))
    t.say("epoch", t.begun(name).producer_epoch)
    found, _ = fetch(t.client, t.topic, committed=True)
    t.say("rows", values(found))


TRANSACTIONAL = (
    requests_of_the_newer_protocol,
    scenarios.ends_of_a_transaction,
    scenarios.fencing_an_open_transaction,
    scenarios.offsets_in_transactions,
)


@pytest.fixture(scope="module", params=[0, 1], ids=lambda level: f"transaction.version={level}")
def addresses(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, str]]:
    level: int = request.param
    settings = {"transaction_version": level}
    ours = EmbeddedServer(tmp_path_factory.mktemp("ours"), settings=settings)
    theirs = KafkaServer(
        tmp_path_factory.mktemp("theirs"),
        features={"transaction.version": level},
        settings={"transaction.abort.timed.out.transaction.cleanup.interval.ms": "200"},
    )
    ours.start()
    theirs.start()
    yield ours.address(), theirs.address()
    ours.stop()
    theirs.kill()


@pytest.mark.parametrize("scenario", TRANSACTIONAL, ids=lambda scenario: scenario.__name__)
def test_every_answer_is_as_apache_kafka_gives_it(addresses, scenario) -> None:
    ours, theirs = addresses
    of_ours, of_theirs = answers_of_both(ours, theirs, scenario)
    assert of_ours == of_theirs
