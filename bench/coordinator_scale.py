"""
[coordinator_scale] Seconds and bytes of one epoch of many tasks, and how they grow.

An epoch of 100, 1,000 and 10,000 tasks with five sinks, and one of 10, 100 and 1,000 tasks with
1,000 files each, on a log in a folder and targets that cost nothing: what is measured is the
coordinator, the log and the reports.

    decide    from the first receipt to the durable decision
    recover   a new driver claims, carries the decision out, and asks the targets what is in doubt
    judge     a sweep over as many attempts that no decision names as there are receipts
    status    `epochal status` of the pipeline while the epoch is decided and not carried out

Growth is the exponent of the tasks: 1 is proportional, 2 quadratic.
"""

from __future__ import annotations

import logging
import math
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.harness import Comparison, say, stopwatch
from epochal.contract import Task, Writer
from epochal.coordinator import Coordinator, Environment
from epochal.coordinator.targets import described
from epochal.kit import CommitterBase, SinkBase
from epochal.logs import StoredLog, open_log
from epochal.protocol.admission import Start
from epochal.reports.status import pipeline_status
from epochal.terms import (
    Ability,
    EpochNumber,
    Fingerprint,
    Handle,
    Identity,
    InDoubt,
    Json,
    Limits,
    Mark,
    Proof,
    Receipt,
    Receipts,
    SinkName,
)

ROUNDS = 3
TARGET_S = 5.0
"""For any verb at the largest size."""
RECORD_BYTES_MAX = 1_000_000
_FIRST = EpochNumber(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    tasks: int
    sinks: int
    files: int
    """Per task and sink."""


SIZES = {
    "tasks": [Size(tasks=tasks, sinks=5, files=1) for tasks in (100, 1_000, 10_000)],
    "files": [Size(tasks=tasks, sinks=1, files=1_000) for tasks in (10, 100, 1_000)],
}


@dataclass
class _Place:
    """What a target holds: handles."""

    prepared: dict[Handle, None] = field(default_factory=dict)
    committed: set[Handle] = field(default_factory=set)


@dataclass(frozen=True, kw_only=True)
class _Sink(SinkBase):
    kind = "nothing"
    place: _Place = field(default_factory=_Place)

    @property
    def target(self) -> str:
        return "nothing"

    def writer(self, task: Task) -> Writer:
        raise NotImplementedError

    def committer(self, identity: Identity, limits: Limits) -> _Committer:  # noqa: ARG002
        return _Committer(self.place)


class _Committer(CommitterBase):
    def __init__(self, place: _Place) -> None:
        self._place = place

    def check(self, schema: object) -> Sequence[Ability]:  # noqa: ARG002
        return ()

    def rehearse(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        """It refuses nothing."""

    def commit(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:  # noqa: ARG002
        for receipt in receipts:
            self._place.prepared.pop(receipt.handle, None)
            self._place.committed.add(receipt.handle)

    def abort(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:  # noqa: ARG002
        for receipt in receipts:
            self._place.prepared.pop(receipt.handle, None)

    def in_doubt(self) -> Sequence[InDoubt]:
        return [InDoubt(name=str(handle), handle=handle) for handle in self._place.prepared]

    def outcome(self, epoch: EpochNumber, receipt: Receipt) -> Proof:  # noqa: ARG002
        is_committed = receipt.handle in self._place.committed
        return Proof.COMMITTED if is_committed else Proof.UNKNOWN

    def newest(self) -> Sequence[Mark] | None:
        return None


class _Killed(BaseException):
    """The driver's end right after its decision."""


def _die(step: str, _epoch: EpochNumber | None) -> None:
    if step == "decided":
        raise _Killed


def _start(sinks: Sequence[_Sink]) -> Start:
    return Start(pipeline="bench", location="bench", sinks=described(sinks))


def _coordinator(log: StoredLog, sinks: Sequence[_Sink], *, dies: bool) -> Coordinator:
    environment = Environment(on_step=_die) if dies else Environment()
    coordinator = Coordinator(log=log, sinks=sinks, environment=environment)
    coordinator.start(_start(sinks))
    return coordinator


def _prepared(coordinator: Coordinator, sinks: Sequence[_Sink], size: Size) -> Receipts:
    """A winner for each task, and an attempt that lost: it stays for the sweep."""
    receipts: dict[SinkName, list[Receipt]] = {}
    for sink in sinks:
        identity = coordinator.identity(sink.name)
        token: dict[str, Json] = {
            "files": [_file(at, size.files) for at in range(size.files)],
        }
        for partition in range(size.tasks):
            lost, won = (
                identity.handle(_FIRST, partition=partition, attempt=2 * partition + attempt)
                for attempt in range(2)
            )
            sink.place.prepared |= {lost: None, won: None}
            one = Receipt(handle=won, fingerprint=Fingerprint(1000, partition), token=token)
            receipts.setdefault(sink.name, []).append(one)
    return receipts


def _file(at: int, files: int) -> str:
    day = f"day=2026-{at % 12 + 1:02d}-{at % 28 + 1:02d}/" if files > 1 else ""
    return f"{day}part-{at:05d}-9b2f0f6a-7c1d-4a8e-9d57-{at:012x}.zstd.parquet"


def _measured(size: Size) -> Mapping[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        log = open_log(Path(folder) / "log")
        sinks = [_Sink(name=f"sink-{at}") for at in range(size.sinks)]
        first = _coordinator(log, sinks, dies=True)
        first.begin(_FIRST)
        receipts = _prepared(first, sinks, size)
        first.preparing()
        decide_s = _seconds(lambda: _until_death(first, receipts))
        status_s = _seconds(lambda: pipeline_status(log))
        record = max(file.stat().st_size for file in (Path(folder) / "log").glob("*.json"))
        lists = sum(file.stat().st_size for file in (Path(folder) / "log" / "lists").glob("*"))
        losers = [dict(sink.place.prepared) for sink in sinks]
        with stopwatch() as seconds:
            second = _coordinator(log, sinks, dies=False)
            recover_s = seconds()
        assert not any(sink.place.prepared for sink in sinks)
        for sink, left in zip(sinks, losers, strict=True):
            sink.place.prepared |= {one: None for one in left if one not in sink.place.committed}
        judge_s = _seconds(second._cleanup.sweep)
        second.stop()
    return {
        "decide_s": decide_s,
        "recover_s": recover_s,
        "judge_s": judge_s,
        "status_s": status_s,
        "record_bytes": record,
        "lists_bytes": lists,
    }


def _until_death(coordinator: Coordinator, receipts: Receipts) -> None:
    try:
        coordinator.conclude(receipts)
    except _Killed:
        return
    raise AssertionError("the driver lived on")


def _seconds(act: Callable[[], object]) -> float:
    with stopwatch() as seconds:
        act()
        return seconds()


def growth(sizes: Sequence[int], figures: Sequence[float]) -> float:
    """The exponent of the best power law through these points."""
    across = [math.log(size) for size in sizes]
    up = [math.log(max(figure, 1e-9)) for figure in figures]
    return statistics.linear_regression(across, up).slope


def run() -> Comparison:
    comparison = Comparison(
        name="coordinator_scale",
        peer_name=f"the target: any verb within {TARGET_S:g} s",
        unit="s, the slowest verb at the largest size",
        is_rate=False,
    )
    logging.getLogger("epochal").setLevel(logging.ERROR)
    slowest: list[list[float]] = []
    for shape, sizes in SIZES.items():
        rounds = [[_measured(size) for size in sizes] for _ in range(ROUNDS)]
        slowest.append([max(s for n, s in one[-1].items() if n.endswith("_s")) for one in rounds])
        for name in rounds[0][0]:
            figures = [statistics.median(one[at][name] for one in rounds) for at in range(3)]
            exponent = growth([size.tasks for size in sizes], figures)
            shown = ", ".join(f"{figure:.4g}" for figure in figures)
            say(f"coordinator_scale: {shape}: {name}: {shown}; grows with tasks^{exponent:.2f}")
            comparison.beside[f"{shape}_{name}"] = [round(figure, 4) for figure in figures]
            comparison.beside[f"{shape}_{name}_growth"] = round(exponent, 2)
            if name == "record_bytes":
                assert figures[-1] < RECORD_BYTES_MAX
    comparison.ours = [max(times) for times in zip(*slowest, strict=True)]
    comparison.peer = [TARGET_S] * ROUNDS
    return comparison


RUNS = {"coordinator_scale": run}
