"""A replica that lagged behind takes over under a running driver: nothing is lost in silence."""

from contextlib import ExitStack, closing

import pytest
from kit.sql.failover import *  # noqa: F403  every test there is one of this module, too
from kit.sql.failover import KINDS, tables
from servers.mysql import MariaDBServer, running_server
from servers.tcp_proxy import Proxy

from epochal.sinks.mysql import MySQL

pytestmark = pytest.mark.products("mariadb", "mysql")

LOGGED = {"skip-log-bin": None, "log-bin": "binlog", "binlog-format": "ROW"}
GTIDS = {"gtid-mode": "ON", "enforce-gtid-consistency": "1"}
WAIT_S = 60


class Pair:
    change = ("another server answers",)

    def __init__(self, primary, replica, proxy):
        self.primary, self.replica, self.proxy = primary, replica, proxy
        self.is_mariadb = isinstance(primary, MariaDBServer)

    def sink(self, kind):
        url = f"mysql://root@127.0.0.1:{self.proxy.port}/shop?ssl_disabled=true"
        return MySQL(url, table=f"shop.{kind}", name=kind, pool_min=1, **KINDS[kind])

    def sql(self, statement, server=None):
        with closing((server or self.primary).connect()) as admin, admin.cursor() as cursor:
            cursor.execute(statement)
            return sorted(cursor.fetchall())

    def follow(self):
        if self.is_mariadb:
            source = "MASTER TO MASTER_HOST='127.0.0.1', MASTER_PORT={}, MASTER_USER='root'"
            source += ", MASTER_USE_GTID=slave_pos"
        else:
            source = "REPLICATION SOURCE TO SOURCE_HOST='127.0.0.1', SOURCE_PORT={}"
            source += ", SOURCE_USER='root', SOURCE_AUTO_POSITION=1, GET_SOURCE_PUBLIC_KEY=1"
        self.sql(f"CHANGE {source.format(self.primary.port)}", self.replica)
        self.sql(f"START {self.role}", self.replica)

    @property
    def role(self):
        return "SLAVE" if self.is_mariadb else "REPLICA"

    def cut_off(self):
        """The replica has all that the primary has now, and gets no more."""
        done, waiting = (
            ("@@gtid_binlog_pos", "MASTER_GTID_WAIT")
            if self.is_mariadb
            else ("@@global.gtid_executed", "WAIT_FOR_EXECUTED_GTID_SET")
        )
        ((now,),) = self.sql(f"SELECT {done}")
        assert self.sql(f"SELECT {waiting}('{now}', {WAIT_S})", self.replica) == [(0,)]
        self.sql(f"STOP {self.role}", self.replica)

    def fail_over(self):
        self.primary.kill()
        self.proxy.to_port = self.replica.port

    def ids(self, kind):
        return [number for (number,) in self.sql(f"SELECT id FROM shop.{kind}", self.replica)]

    def leftovers(self):
        """Staged attempts and prepared transactions on the replica."""
        staged = "SELECT handle FROM epochal_staging.slots WHERE handle IS NOT NULL"
        return self.sql(staged, self.replica) + self.sql("XA RECOVER", self.replica)


@pytest.fixture
def pair(product, servers):
    kind = type(servers(product))
    settings = LOGGED if kind is MariaDBServer else {**LOGGED, **GTIDS}
    with ExitStack() as stack:
        primary, replica = (
            stack.enter_context(running_server({**settings, "server-id": number}, kind))
            for number in ("1", "2")
        )
        made = Pair(primary, replica, stack.enter_context(closing(Proxy(primary.port))))
        made.follow()
        for statement in ("CREATE DATABASE shop", *tables("shop.{}")):
            made.sql(statement)
        yield made
