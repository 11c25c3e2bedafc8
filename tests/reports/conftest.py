"""A pipeline with two sinks in memory, a log on disk, and drivers that die at a given step."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field, replace
from pathlib import Path

import psycopg
import pyarrow as pa
import pytest
from servers.postgres import running_server

from epochal import Limits, Memory, Pipeline, Session
from epochal.config.resolve_target import OpenedTarget
from epochal.coordinator import Environment
from epochal.logs import open_log

SCHEMA = pa.schema([("id", pa.int64())])
DEAD = f"{socket.gethostname()} pid 999999999"
ELSEWHERE = "another-host pid 4711"


class Killed(BaseException):
    """The death of a driver: none of its code runs afterwards, not even its clean-up."""


@dataclass
class Shop:
    root: Path
    monkeypatch: pytest.MonkeyPatch
    orders: Memory = field(default_factory=lambda: Memory(name="orders"))
    audit: Memory = field(default_factory=lambda: Memory(name="audit"))
    limits: Limits = field(default_factory=Limits)
    schema: pa.Schema = SCHEMA
    dead: str = DEAD
    elsewhere: str = ELSEWHERE

    @property
    def log_path(self) -> str:
        return str(self.root / "chk" / "epochal" / "log")

    @property
    def log(self):
        return open_log(self.log_path)

    @property
    def sinks(self):
        return [self.orders, self.audit]

    @property
    def pipeline(self) -> Pipeline:
        return Pipeline("shop", sinks=self.sinks, log=self.log_path, limits=self.limits)

    @property
    def opened(self) -> OpenedTarget:
        return OpenedTarget(
            target="jobs:pipeline",
            log=self.log,
            pipeline="shop",
            sinks=self.sinks,
            limits=self.limits,
        )

    @property
    def log_alone(self) -> OpenedTarget:
        return OpenedTarget(target=self.log_path, log=self.log)

    def session(self, *, driver=None, die_at=None, limits=None, gates=()) -> Session:
        if driver is not None:
            self.monkeypatch.setattr("epochal.session.this_driver", lambda: driver)

        def watch(step, epoch):
            if step == die_at:
                raise Killed(step)

        return Session(
            "shop",
            sinks=self.sinks,
            schema=self.schema,
            log=self.log_path,
            gates=gates,
            limits=limits or self.limits,
            environment=Environment(on_step=watch),
        )

    def run(self, epochs=3, rows=2) -> None:
        with self.session() as session:
            for _ in range(epochs):
                self.epoch(session, rows)

    @staticmethod
    def epoch(session, rows=2) -> None:
        session.begin(session.next_epoch)
        session.write([{"id": n} for n in range(rows)])
        session.commit()

    def die(self, at="decided", *, driver=DEAD) -> Session:
        """Let a driver without heartbeat die in an epoch. Keep a reference, or it is closed."""
        limits = replace(self.limits, history_epochs_kept=0)
        session = self.session(driver=driver, die_at=at, limits=limits)
        with pytest.raises(Killed):
            self.epoch(session)
        return session


@pytest.fixture
def shop(tmp_path, monkeypatch):
    # A driver that ends does not wait long for its history; on a busy machine these tests must.
    monkeypatch.setattr("epochal.telemetry.history_writer._CLOSE_WAIT_MAX_S", 60.0)
    return Shop(root=tmp_path, monkeypatch=monkeypatch)


@dataclass(frozen=True)
class Database:
    url: str

    def connect(self):
        return psycopg.connect(self.url, autocommit=True)


@pytest.fixture(scope="session")
def postgres():
    with running_server() as server:
        yield Database(server.url())
