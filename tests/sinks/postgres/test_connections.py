"""`session_sql`, passwords by a function, and connections that were cut, on PostgreSQL."""

import time
from dataclasses import replace

import pytest
from kit.sql.connections import *  # noqa: F403  every test there is one of this module, too
from kit.sql.connections import PASSWORD, TOKENS

from epochal.config.pipeline import file_at


@pytest.fixture
def set_and_seen(orders):
    return "SET epochal_test.said = 'from the session'", [
        f"CREATE FUNCTION {orders.schema}.f() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN NEW.name := current_setting('epochal_test.said'); RETURN NEW; END $$",
        f"CREATE TRIGGER t BEFORE INSERT ON {orders.schema}.orders"
        f" FOR EACH ROW EXECUTE FUNCTION {orders.schema}.f()",
    ]


@pytest.fixture
def account(orders):
    """A role that gets in by password only."""
    role, rules = f"{orders.schema}_tokens", orders.server.data / "pg_hba.conf"
    orders.sql(f"CREATE ROLE {role} LOGIN PASSWORD '{PASSWORD}'")
    for statement in orders.sink().grants(role):
        orders.sql(statement)
    before = rules.read_text()
    rules.write_text(f"host all {role} 127.0.0.1/32 scram-sha-256\n{before}")
    orders.sql("SELECT pg_reload_conf()")
    yield orders.url(user=role)
    rules.write_text(before)
    orders.sql("SELECT pg_reload_conf()")
    orders.sql(f"DROP OWNED BY {role}")
    orders.sql(f"DROP ROLE {role}")


def test_a_function_that_a_file_names_gives_the_password(orders, some, account, tmp_path):
    (tmp_path / "orders.yaml").write_text(
        f"""\
pipeline: orders
checkpoint: {tmp_path}/checkpoint
source: {{format: rate}}
sinks:
  - kind: postgres
    url: "{account}"
    table: {orders.schema}.orders
    meta_schema: {orders.meta}
    password: {{python: "kit.sql.connections:token"}}
"""
    )
    (sink,) = file_at(tmp_path / "orders.yaml").sinks
    before = next(TOKENS)
    life = orders.life(url=account)
    orders.keep(replace(life, sink=sink, opened=[])).write(0, some(1))
    assert orders.rows(columns="id") == [(1,)]
    assert next(TOKENS) - before > 1


def test_idle_connections_of_the_driver_that_were_all_cut_are_replaced_at_once(orders, proxy, some):
    """As by a failover; `connect_timeout_s` leaves no time to wait after each."""
    life = orders.life(url=orders.url(port=proxy.port), pool_min=4, connect_timeout_s=1)
    life.start(some(1))
    life.committer.in_doubt()
    deadline_s = time.monotonic() + 30
    while proxy.connections < 4:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    proxy.cut()
    life.write(0, some(1))
    assert len(orders.rows()) == 1
