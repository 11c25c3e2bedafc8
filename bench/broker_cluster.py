"""[broker_cluster_{postgres,etcd}_{32,128}, broker_cluster_end_txn, broker_cluster_takeover] A
cluster of two members on this machine: its transactions against the single broker that syncs, the
time of EndTxn at a pace, and a takeover with 10,000 open transactions. PostgreSQL and etcd are the
tests' own, but sync every put to the disk.

    python -m bench.broker_cluster [name …]     prints one JSON object a line
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import psutil

from bench import broker_load
from bench.broker import (
    END_TXN_MS_MAX,
    OPEN_TRANSACTIONS,
    PACE,
    PACED_PRODUCERS,
    ROUNDS,
    TESTS,
    TXN_SECONDS,
    open_many,
    ours,
)
from bench.harness import Comparison, report, say
from epochal.broker.embedded import BrokerProcess
from epochal.broker.shared.status import cluster_status

TAKEOVER_MAX_S = 5.0
_PATIENCE_S = 60.0
_ETCD_NODES = 3


@contextmanager
def journal(kind: str, folder: Path) -> Iterator[str]:
    """The URL of a shared journal, with its server."""
    sys.path.insert(0, str(TESTS))
    if kind == "postgres":
        from servers.postgres import running_server  # noqa: PLC0415  of the tests

        with running_server({"fsync": "on"}) as server:
            yield f"{server.url()}#bench"
    elif kind == "etcd":
        from servers.etcd import NEW, running_etcd  # noqa: PLC0415  of the tests

        with running_etcd(size=_ETCD_NODES, suite=NEW, is_synced=True) as etcd:
            yield etcd.url("bench/journal")
    else:
        yield str(folder / "journal")


class TwoMembers:
    def __init__(self, folder: Path, url: str) -> None:
        self.url = url
        self._members: dict[str, BrokerProcess] = {}
        for name in "ab":
            options = {"journal": url, "member": name, "advertised": "127.0.0.1:0"}
            segments = {"segments": str(folder / "segments")}
            process = BrokerProcess(folder / name, cluster={**options, **segments})
            process.start()
            self._members[name] = process

    def active(self) -> BrokerProcess:
        deadline_s = time.monotonic() + _PATIENCE_S
        while time.monotonic() < deadline_s:
            for one in cluster_status(self.url).members:
                if one.role == "active" and self._members[one.member].pid > 0:
                    return self._members[one.member]
            time.sleep(0.02)
        raise TimeoutError("no member is active")

    def standby(self) -> BrokerProcess:
        active = self.active()
        (other,) = (one for one in self._members.values() if one is not active)
        return other

    def stop(self) -> None:
        for process in self._members.values():
            process.kill()


@contextmanager
def two_members(kind: str) -> Iterator[TwoMembers]:
    with tempfile.TemporaryDirectory() as folder, journal(kind, Path(folder)) as url:
        members = TwoMembers(Path(folder), url)
        try:
            yield members
        finally:
            members.stop()


def transactions(kind: str, number: int) -> Comparison:
    found = Comparison(
        name=f"broker_cluster_{kind}_{number}",
        peer_name="the single broker with fsync",
        unit="transactions/s",
        is_rate=True,
    )
    with two_members(kind) as members, ours(fsync=True) as single:
        active = members.active()
        for address in (active.address, single.address):
            broker_load.make_topic(address, "bench", number)
        roles = {active.pid: "active", members.standby().pid: "standby", single.pid: "single"}

        def measure(address: str) -> float:
            before = _cpu_s(roles)
            rate, p99_ms, _ = broker_load.run(address, number, TXN_SECONDS, "bench")
            used = {
                role: round((seconds - before[role]) / (rate * TXN_SECONDS) * 1e6, 1)
                for role, seconds in _cpu_s(roles).items()
            }
            if address == active.address:
                found.beside["end_txn_p99_ms"] = round(p99_ms, 2)
                found.beside["cpu_us_per_transaction"] = used
            else:
                found.beside["single_cpu_us_per_transaction"] = used
            return rate

        found.run(partial(measure, active.address), partial(measure, single.address), rounds=ROUNDS)
    return found


def _cpu_s(roles: Mapping[int, str]) -> dict[str, float]:
    """CPU time so far of this process, which makes the load, and of those that it has started."""
    me = psutil.Process()
    names = {me.pid: "load", **roles}
    found = dict.fromkeys([*names.values(), "store"], 0.0)
    for process in [me, *me.children(recursive=True)]:
        with suppress(psutil.Error):
            times = process.cpu_times()
            found[names.get(process.pid, "store")] += times.user + times.system
    return found


def end_txn() -> Comparison:
    found = Comparison(
        name="broker_cluster_end_txn", peer_name="the limit", unit="ms", is_rate=False
    )
    with two_members("postgres") as members:
        address = members.active().address
        broker_load.make_topic(address, "bench", PACED_PRODUCERS)
        for number in range(ROUNDS + 1):
            rate, p99_ms, _ = broker_load.run(
                address, PACED_PRODUCERS, TXN_SECONDS, "bench", rate=PACE
            )
            say(f"{found.name}: round {number}: p99 {p99_ms:.3g} ms at {rate:.0f}/s")
            found.ours.append(p99_ms)
            found.beside = {"transactions_s": round(rate)}
    found.ours = found.ours[1:]
    found.peer = [END_TXN_MS_MAX] * len(found.ours)
    return found


def takeover() -> Comparison:
    """From SIGKILL of the active to another one, with transactions open."""
    found = Comparison(
        name="broker_cluster_takeover", peer_name="the limit", unit="s", is_rate=False
    )
    with two_members("postgres") as members:
        first = members.active()
        broker_load.make_topic(first.address, "open", 8)
        open_many(first.address)
        began_s = time.monotonic()
        first.kill()
        members.active()
        found.ours.append(time.monotonic() - began_s)
    found.peer = [TAKEOVER_MAX_S]
    found.beside = {"open_transactions": OPEN_TRANSACTIONS}
    return found


RUNS: dict[str, Callable[[], Comparison]] = {
    **{
        f"broker_cluster_{kind}_{number}": partial(transactions, kind, number)
        for kind in ("postgres", "etcd")
        for number in (32, 128)
    },
    "broker_cluster_end_txn": end_txn,
    "broker_cluster_takeover": takeover,
}


def main() -> int:
    for name in sys.argv[1:] or RUNS:
        say(f"{name} …")
        report(RUNS[name]())
    return 0


if __name__ == "__main__":
    sys.exit(main())
