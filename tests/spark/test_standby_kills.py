"""
Standby drivers in processes of their own: the one that works is killed or stopped, another goes on.

Rows are counted at files, a table and a topic. `make proof ONLY=kills` has the long forms.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import standby_victim
import victim
from kill_stage import expected, judge, read_files, running_targets
from servers.etcd import EtcdCluster, running_etcd

from epochal.coordinator.journal import newest_record
from epochal.logs import checkpoint_log

WITHIN_S = 240
STEPS = (
    "kill claimed",
    "kill begun",
    "kill prepared",
    "freeze prepared",
    "kill rehearsed",
    "kill gated",
    "freeze gated",
    "kill decided",
    "freeze decided",
    "kill committed topic",
    "kill settled",
)


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    with running_targets(tmp_path) as folder:
        yield folder


@pytest.fixture(scope="module")
def etcd() -> Iterator[EtcdCluster]:
    with running_etcd() as cluster:
        yield cluster


def await_(is_so: Callable[[], bool], why: Callable[[], str]) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not is_so():
        assert time.monotonic() < deadline, why()
        time.sleep(0.05)


class Drivers:
    """Standby drivers of one pipeline; epochs are added one by one."""

    def __init__(self, root: Path, lease: str) -> None:
        self.root = root
        self._lease = lease
        self._epochs = 0
        self.processes: list[subprocess.Popen[bytes]] = []

    def add(self) -> subprocess.Popen[bytes]:
        with (self.root / "drivers.txt").open("ab") as output:
            command = [sys.executable, standby_victim.__file__, str(self.root), self._lease]
            process = subprocess.Popen(
                command, stdout=output, stderr=output, start_new_session=True
            )
        self.processes.append(process)
        return process

    def role(self, process: subprocess.Popen[bytes]) -> str:
        note = self.root / f"{process.pid}.role"
        return note.read_text() if note.exists() else ""

    def await_role(self, process: subprocess.Popen[bytes], role: str) -> None:
        await_(lambda: self.role(process) == role, lambda: f"{self.role(process)}: {self.said()}")

    def await_worker(self) -> subprocess.Popen[bytes]:
        def workers() -> list[subprocess.Popen[bytes]]:
            alive = [one for one in self.processes if one.poll() is None]
            return [one for one in alive if self.role(one) == "working"]

        await_(lambda: bool(workers()), self.said)
        return workers()[0]

    def epoch(self) -> None:
        """One more epoch: returns when its rows, and all before, are at the files."""
        victim.add_epoch(self.root, self._epochs)
        self._epochs += 1
        self.await_rows()

    def await_rows(self) -> None:
        count = self._epochs * victim.ROWS

        def visible() -> int:
            try:
                return len(read_files(self.root, "plain"))
            except FileNotFoundError:
                return 0

        await_(lambda: visible() >= count, lambda: f"{visible()} of {count} rows: {self.said()}")

    def fail(self, order: str) -> subprocess.Popen[bytes]:
        """Let the driver that works end at a step of the next epoch; returns it."""
        (self.root / standby_victim.ORDER).write_text(order)
        self.epoch()
        died = [one for one in self.processes if (self.root / f"{one.pid}.died").exists()]
        assert len(died) == 1, f"{order} was carried out by {len(died)}: {self.said()}"
        (self.root / f"{died[0].pid}.died").unlink()
        if not order.startswith("freeze"):
            died[0].wait(WITHIN_S)  # its rows may be visible a moment before
        return died[0]

    def thaw(self, process: subprocess.Popen[bytes]) -> None:
        os.killpg(process.pid, signal.SIGCONT)

    def stop(self) -> None:
        (self.root / standby_victim.STOP).touch()
        for process in self.processes:
            if process.poll() is None:
                assert process.wait(WITHIN_S) == 0, self.said()

    def kill(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def said(self) -> str:
        return (self.root / "drivers.txt").read_text()[-4000:]

    def judge(self) -> int:
        """All rows once, nothing in doubt; returns the generation: how often it was claimed."""
        numbers = range(self._epochs * victim.ROWS)
        return judge(self.root, "plain", expected(numbers)["plain"]).generation


@pytest.fixture
def drivers(root: Path, etcd: EtcdCluster) -> Iterator[Drivers]:
    made = Drivers(root, etcd.url(f"leases/{root.name}"))
    yield made
    made.kill()


def test_a_standby_takes_over_from_a_killed_driver_and_from_one_that_sleeps(
    drivers: Drivers,
) -> None:
    first, second = drivers.add(), drivers.add()
    drivers.epoch()
    assert drivers.fail("kill decided") in (first, second)
    third = drivers.add()
    drivers.await_role(third, "waiting")
    # Stopped for longer than its lease, with an epoch prepared and not decided.
    sleeper = drivers.fail("freeze prepared")
    newest = newest_record(checkpoint_log(drivers.root / "plain"))
    assert newest is not None
    assert f"pid {third.pid} " in newest.record.state.driver
    drivers.thaw(sleeper)
    drivers.await_role(sleeper, "waiting")
    drivers.epoch()
    log = checkpoint_log(drivers.root / "plain")
    after = newest_record(log)
    assert after is not None
    assert f"pid {third.pid} " in after.record.state.driver, (
        "a sleeper that is fenced claims nothing"
    )
    drivers.stop()
    assert drivers.judge() == 3


@pytest.mark.proof
@pytest.mark.timeout(3600)
def test_three_standbys_outlive_every_way_to_die(drivers: Drivers) -> None:
    for _ in range(3):
        drivers.add()
    drivers.epoch()
    for order in STEPS:
        if order == "kill claimed":
            # Only a takeover claims: the one that follows a kill.
            (drivers.root / standby_victim.ORDER).write_text("kill claimed")
            worker = drivers.await_worker()
            os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()
            drivers.add()
            drivers.epoch()
            (died,) = (
                one for one in drivers.processes if (drivers.root / f"{one.pid}.died").exists()
            )
            (drivers.root / f"{died.pid}.died").unlink()
        else:
            died = drivers.fail(order)
        if order.startswith("freeze"):
            drivers.thaw(died)
            drivers.await_role(died, "waiting")
        else:
            drivers.add()
    drivers.stop()
    assert drivers.judge() >= len(STEPS)


@pytest.mark.proof
@pytest.mark.timeout(1800)
def test_leases_that_everybody_holds_cost_takeovers_and_no_row(root: Path) -> None:
    liars = Drivers(root, "lie")
    try:
        for _ in range(2):
            liars.add()
        for _ in range(6):
            liars.epoch()
        liars.fail("kill decided")
        liars.add()
        liars.epoch()
        liars.stop()
        assert liars.judge() < 20
    finally:
        liars.kill()
