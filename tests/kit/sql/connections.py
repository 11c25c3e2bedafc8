"""What a user gives to every connection: `session_sql`, and a password that a function returns.

A module of tests for each database imports these, beside its own fixtures `orders`, `some` and
`session`: how a statement sets something, and a query that shows it.
"""

from __future__ import annotations

import itertools
import logging
import pickle

import pytest

from epochal.errors import EpochalError, Misconfigured, TryAgain
from epochal.kit.sql.client import _KEPT_MAX as KEPT_FOR_TASKS
from epochal.session import Session

TOKENS = itertools.count(1)
PASSWORD = "a token that nobody may see"


def token() -> str:
    """As a vault would give it: called for each connection."""
    next(TOKENS)
    return PASSWORD


def wrong_token() -> str:
    return f"{PASSWORD}, and no more"


def test_session_sql_is_run_on_every_connection_and_shown_by_check(orders, some, set_and_seen):
    statement, trigger = set_and_seen
    for made in trigger:
        orders.sql(made)
    life = orders.life(session_sql=[statement])
    life.write(0, some(1, 2))
    # The trigger writes what the session that applies the rows has set.
    assert {name for _, name in orders.rows()} == {"from the session"}
    shown = [one for one in life.committer.check(some(1).schema) if one.name == "session_sql"]
    assert [statement in one.because for one in shown] == [True]
    writer = life.writer(some(1).schema, 1)
    writer.write(some(3).to_batches()[0])
    connection = writer._get_ready()
    assert orders.setting(connection) == "from the session"
    writer.abort()


@pytest.mark.parametrize("given", ["SET x = 1", [""], ["COMMIT"], ["begin;"], [7]])
def test_what_is_no_statement_or_ends_a_transaction_is_refused(orders, given):
    with pytest.raises(Misconfigured, match="session_sql"):
        orders.sink(session_sql=given)


def test_a_statement_that_fails_is_named_before_the_first_row(orders, some):
    life = orders.life(session_sql=["SELECT nothing FROM nowhere_at_all"])
    with pytest.raises(Misconfigured, match=r"session_sql on .*: SELECT nothing FROM nowhere"):
        life.start(some(1))


def test_a_function_is_asked_for_the_password_again_at_every_connection(
    orders, some, account, caplog
):
    caplog.set_level(logging.DEBUG)
    before = next(TOKENS)
    life = orders.life(url=account, password=token)
    life.write(0, some(1))
    again = orders.keep(life.fresh(generation=2))
    again.write(1, some(2))
    assert orders.rows(columns="id") == [(1,), (2,)]
    assert next(TOKENS) - before > 3
    copy = pickle.loads(pickle.dumps(life.sink))
    assert copy.server == life.sink.server
    bad = orders.life(url=account, password=wrong_token)
    with pytest.raises(EpochalError) as refused:
        bad.start(some(1))
    for shown in (repr(life.sink), repr(life.sink.server), str(refused.value), caplog.text):
        assert PASSWORD not in shown


def test_a_function_that_executors_could_not_call_is_refused(orders):
    with pytest.raises(Misconfigured, match="can't be pickled"):
        orders.sink(password=lambda: "x")


def _number() -> str:
    return 7  # type: ignore[return-value]


def test_a_function_that_returns_no_text_is_reported(orders, some):
    with pytest.raises(Misconfigured, match="returned a int, not a str"):
        orders.life(password=_number).start(some(1))


def _away() -> str:
    raise LookupError(f"the vault is away, and had {PASSWORD}")


def test_a_function_that_fails_is_called_again_later(orders, some):
    with pytest.raises(TryAgain, match=r"_away\).* raised LookupError") as raised:
        orders.life(password=_away).start(some(1))
    assert PASSWORD not in f"{raised.value} {raised.value.__cause__}"


def test_ten_sinks_share_the_connections_of_their_driver(place, some, tmp_path):
    names = [f"table_{number}" for number in range(10)]
    sinks = [
        place.sink(
            name, name=name, create_table="if_missing", pool_min=2, pool_max=4, strategy=strategy
        )
        for name, strategy in zip(names, itertools.cycle(["staged", "prepared"]), strict=False)
    ]
    seen = []
    with Session("ten", sinks=sinks, log=tmp_path, schema=some(1).schema) as session:
        for number in range(3):
            session.begin(session.next_epoch)
            session.write(some(number, number + 10))
            session.commit()
            seen.append(len(place.sessions(session._coordinator.state.uid)))
    # Of the driver those that one sink may have, and one more for each other; those of tasks.
    assert max(seen) <= 4 + len(names) - 1 + KEPT_FOR_TASKS
    for name in names:
        assert len(place.rows(name)) == 6
    assert place.leftovers() == []


def test_one_connection_of_the_driver_is_enough_and_none_is_refused(orders, some):
    orders.life(pool_max=1).write(0, some(1))
    assert orders.rows(columns="id") == [(1,)]
    with pytest.raises(Misconfigured, match="pool_max=0"):
        orders.sink(pool_max=0)
