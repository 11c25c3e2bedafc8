"""The promises of a lease, judged the same way for every back end; and what each does by itself."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
from servers.pgbouncer import running_pgbouncer
from servers.processes import pause_process

from epochal.errors import EpochalError, Misconfigured
from epochal.storage import open_store
from epochal.storage.etcd import EtcdLease
from epochal.storage.etcd_client import address_of
from epochal.storage.leases import FileLease, Lease, SlotLease, lease_at
from epochal.storage.memory import MemoryStore

HOLDER = """
import sys, time
from epochal.errors import EpochalError
from epochal.storage import open_store
from epochal.storage.leases import SlotLease, lease_at
store = open_store(sys.argv[1])
lease = lease_at(store)
if isinstance(lease, SlotLease):
    lease = SlotLease(store.beside("lease"), ttl_s=3.0)
while not lease.acquire("first"):
    time.sleep(0.05)
print("held", flush=True)
while True:
    time.sleep(0.1)
    try:
        if not lease.renew():
            break
    except EpochalError:
        pass  # a request that was under way when it fell asleep
print("lost", flush=True)
"""
KINDS = ["local", "sqlite", "postgres", "etcd", "objects-s3"]
LeaseMaker = Callable[[], Lease]


@pytest.fixture
def lease(url: str, kind: str) -> Iterator[LeaseMaker]:
    """Opens the same lease as another process would; slots are given up after three seconds."""
    opened: list[Lease] = []

    def open_one() -> Lease:
        store = open_store(url)
        one = lease_at(store)
        if isinstance(one, SlotLease):
            one = SlotLease(store.beside("lease"), ttl_s=3.0)
        opened.append(one)
        return one

    yield open_one
    for one in opened:
        one.close()


def await_lease(lease: Lease, within_s: float) -> float:
    """How long it takes until the lease is given."""
    began_s = time.monotonic()
    while not lease.acquire("next"):
        assert time.monotonic() - began_s < within_s, "the lease of a dead holder is never given"
        time.sleep(0.1)
    return time.monotonic() - began_s


@pytest.mark.parametrize("kind", KINDS, indirect=True)
def test_one_holds_a_lease_until_it_lets_go(lease: LeaseMaker) -> None:
    first, second = lease(), lease()
    assert first.acquire("first") is True
    assert second.acquire("second") is False
    assert (first.renew(), second.renew()) == (True, False)
    first.release()
    first.release()
    assert first.renew() is False
    assert await_lease(second, 5) < 5
    assert (first.acquire("first"), second.renew()) == (False, True)


@pytest.mark.parametrize("kind", KINDS, indirect=True)
def test_the_lease_of_a_killed_holder_is_given_to_a_waiter(url: str, lease: LeaseMaker) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, url], stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        waiter = lease()
        assert waiter.acquire("next") is False
        holder.kill()
        await_lease(waiter, 30)
        assert waiter.renew() is True


@pytest.mark.parametrize("kind", ["etcd", "objects-s3"], indirect=True)
def test_a_holder_that_slept_longer_than_its_lease_learns_that_it_is_lost(
    url: str, lease: LeaseMaker
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, url], stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        pause_process(holder.pid)
        waiter = lease()
        await_lease(waiter, 30)
        os.kill(holder.pid, 18)  # SIGCONT
        deadline_s = time.monotonic() + 30
        while holder.poll() is None:
            assert waiter.renew() is True
            assert time.monotonic() < deadline_s
            time.sleep(0.1)
        assert holder.stdout.readline() == "lost\n"


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_slots_that_stand_still_are_judged_by_the_waiters_own_clock() -> None:
    store, clock = MemoryStore(), Clock()
    holder, waiter = (SlotLease(store, ttl_s=9.0, monotonic=clock) for _ in range(2))
    assert holder.acquire("a") is True
    for _ in range(20):
        assert waiter.acquire("b") is False
        clock.now_s += 5.0
        assert holder.renew() is True
    assert waiter.acquire("b") is False
    clock.now_s += 8.9
    assert waiter.acquire("b") is False
    clock.now_s += 0.2
    assert waiter.acquire("b") is True
    assert holder.renew() is False
    assert len(store.names()) <= 4, "old slots are deleted"


def test_a_holder_that_slept_over_the_deletion_of_its_slot_has_lost_the_lease() -> None:
    store, clock = MemoryStore(), Clock()
    sleeper, other = (SlotLease(store, ttl_s=9.0, monotonic=clock) for _ in range(2))
    assert sleeper.acquire("a") is True
    assert other.acquire("b") is False
    clock.now_s += 10
    assert other.acquire("b") is True
    for _ in range(10):
        assert other.renew() is True
    assert "00000000000000000002.json" not in store.names()
    assert sleeper.renew() is False, "its put succeeds, and a newer slot is there"
    assert other.renew() is True


def test_a_fill_whose_answer_was_lost_finds_itself() -> None:
    store = MemoryStore()
    lease = SlotLease(store)
    assert lease.acquire("a") is True
    store.put_if_absent("00000000000000000002.json", lease._content())
    assert lease.renew() is True


def test_a_lock_on_a_file_that_was_removed_is_nobodys(tmp_path: Path) -> None:
    first, second = FileLease(tmp_path / ".lease"), FileLease(tmp_path / ".lease")
    assert first.acquire("a") is True
    (tmp_path / ".lease").unlink()
    assert second.acquire("b") is True
    assert first.renew() is False
    first.close()
    second.close()


@pytest.mark.parametrize("kind", ["postgres"], indirect=True)
def test_a_lost_session_is_a_lost_lease(lease: LeaseMaker, postgres) -> None:
    first, second = lease(), lease()
    assert first.acquire("a") is True
    with psycopg.connect(postgres.url(), autocommit=True) as admin:
        admin.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE application_name = 'epochal-lease' AND pid <> pg_backend_pid()"
        )
    with pytest.raises(EpochalError):
        first.renew()
    assert first.renew() is False
    assert await_lease(second, 5) < 5


@pytest.mark.parametrize("kind", ["postgres"], indirect=True)
def test_a_lock_of_a_session_is_refused_behind_a_pooler(url: str, postgres) -> None:
    with running_pgbouncer(postgres) as port:
        lease = lease_at(open_store(url.replace(str(postgres.port), str(port))))
        with pytest.raises(Misconfigured, match="a pooler is in between"):
            lease.acquire("a")
        lease.close()


@pytest.mark.parametrize("kind", ["etcd"], indirect=True)
def test_a_lease_of_etcd_that_expired_is_lost_and_leaves_no_key(url: str) -> None:
    lease, other = (EtcdLease(address_of(url), ttl_s=5) for _ in range(2))
    assert lease.acquire("a") is True
    assert other.acquire("b") is False
    await_lease(other, 30)
    assert lease.renew() is False
    other.release()
    assert open_store(url).names() == []
    lease.close()
    other.close()
