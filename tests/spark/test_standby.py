"""Standby drivers in one process, with leases that do what the test says: lie, vanish, are away."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from epochal import Files, Limits, Memory
from epochal.coordinator import by_hand
from epochal.coordinator.journal import newest_record
from epochal.errors import Misconfigured, Refused, TryAgain
from epochal.logs import checkpoint_log
from epochal.spark import standby as standby_module
from epochal.spark.pipeline import Pipeline
from epochal.spark.standby import Standby, warm_up
from epochal.storage.leases import FileLease
from epochal.telemetry.exporters import serve_metrics
from epochal.telemetry.standby import Role, present_at

WITHIN_S = 120


class Told:
    """A lease that is held when the test says so, and is away when the test says so."""

    look_every_s = 0.05
    renew_every_s = 0.05
    location = "a test's lease"

    def __init__(self, *, is_free: bool = True) -> None:
        self.is_free = is_free
        self.is_away = False
        self.is_held = False
        self.acquired = 0

    def acquire(self, holder: str) -> bool:
        del holder
        self._ask()
        self.is_held = self.is_free
        self.acquired += self.is_held
        return self.is_held

    def renew(self) -> bool:
        self._ask()
        self.is_held = self.is_held and self.is_free
        return self.is_held

    def release(self) -> None:
        self.is_held = False

    def close(self) -> None:
        self.release()

    def _ask(self) -> None:
        if self.is_away:
            raise TryAgain("the store of the lease is away")


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standby_module, "_PAUSE_LOOK_EVERY_S", 0.1)


class Stage:
    """One pipeline with one sink in memory; standbys on it."""

    def __init__(self, source: Any, checkpoint: Path) -> None:
        self.source = source
        self.checkpoint = checkpoint
        self.out = Memory(name="out")
        self.pipeline = Pipeline("shop", [self.out], limits=Limits(sweep_every_s=1))
        self.standbys: list[Standby] = []

    @property
    def log(self) -> Any:
        return checkpoint_log(self.checkpoint)

    def start(self, lease: Any = True, build: Callable[[], Any] | None = None) -> Standby:
        make = build or (lambda: self.source.stream)
        self.standbys.append(self.pipeline.start(make, self.checkpoint, standby=lease))
        return self.standbys[-1]

    def ids(self) -> list[int]:
        rows = self.out.rows()
        return sorted(rows["id"].to_pylist()) if rows.num_rows else []

    def generation(self) -> int:
        newest = newest_record(self.log)
        return 0 if newest is None else newest.record.state.generation

    def await_rows(self, count: int) -> None:
        await_(lambda: len(self.ids()) >= count, lambda: f"{self.ids()}, {self.standbys[-1].error}")
        assert self.ids() == list(range(count)), "a row is missing or there twice"


def await_(is_so: Callable[[], bool], why: Callable[[], str] = lambda: "") -> None:
    deadline = time.monotonic() + WITHIN_S
    while not is_so():
        assert time.monotonic() < deadline, why()
        time.sleep(0.05)


@pytest.fixture
def stage(source: Any, checkpoint: Path) -> Iterator[Stage]:
    made = Stage(source, checkpoint)
    yield made
    for one in made.standbys:
        one.stop()


def test_a_standby_waits_for_the_lease_and_then_works(stage: Stage) -> None:
    """Beside the log, a lock on a file; reports show who waits and who works."""
    stage.source.add_numbers(1)
    other = FileLease(Path(stage.log.store.location) / ".lease")
    assert other.acquire("another driver") is True
    standby = stage.start()
    await_(lambda: standby.role is Role.WAITING)
    await_(lambda: [one.role for one in present_at(stage.log)] == ["waiting"])
    assert (stage.ids(), stage.generation(), standby.query) == ([], 0, None)
    assert standby.awaitTermination(0.1) is False
    other.release()
    stage.await_rows(10)
    await_(lambda: [one.role for one in present_at(stage.log)] == ["working"])
    assert other.acquire("another driver") is False
    standby.stop()
    assert (standby.isActive, standby.error, present_at(stage.log)) == (False, None, [])
    assert other.acquire("another driver") is True
    other.close()


def test_a_lost_lease_ends_the_epoch_cleanly_and_the_standby_waits_again(stage: Stage) -> None:
    lease = Told()
    stage.source.add_numbers(1)
    standby = stage.start(lease)
    stage.await_rows(10)
    for turn in (1, 2):
        lease.is_free = False
        await_(lambda: standby.role is Role.WAITING)
        newest = newest_record(stage.log)
        assert newest is not None
        assert newest.record.state.is_stopped, "it stops as any driver does"
        assert newest.record.state.unsettled is None
        stage.source.add_numbers(1)
        time.sleep(0.3)
        assert len(stage.ids()) == turn * 10, "who does not hold the lease does not work"
        lease.is_free = True
        stage.await_rows((turn + 1) * 10)
    assert (stage.generation(), lease.acquired) == (3, 3)


def test_a_store_of_leases_that_is_away_stops_nobody_while_the_log_answers(stage: Stage) -> None:
    lease = Told()
    lease.is_away = True
    stage.source.add_numbers(1)
    standby = stage.start(lease)
    await_(lambda: standby.role is Role.WAITING)
    time.sleep(0.3)
    assert (standby.isActive, stage.ids()) == (True, [])
    lease.is_away = False
    stage.await_rows(10)
    lease.is_away = True
    stage.source.add_numbers(1)
    stage.await_rows(20)
    assert (standby.role, stage.generation()) == (Role.WORKING, 1)


def test_a_fenced_standby_waits_again_while_the_other_driver_is_at_work(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease lies: both hold it. The other claims, and this one keeps its hands off."""
    monkeypatch.setattr(standby_module, "SILENT_AFTER_S", 3.0)
    stage.source.add_numbers(1)
    standby = stage.start(Told())
    stage.await_rows(10)
    began = time.monotonic()
    by_hand.take_over(stage.log, Limits())
    stage.source.add_numbers(1)
    await_(lambda: standby.role is Role.WAITING)
    stage.await_rows(20)
    assert time.monotonic() - began > 3.0, "it took the pipeline from a driver that it just met"
    assert (stage.generation(), standby.isActive) == (3, True)


def test_a_pause_holds_standbys_back_until_it_is_over(stage: Stage) -> None:
    lease = Told()
    stage.source.add_numbers(1)
    standby = stage.start(lease)
    stage.await_rows(10)
    by_hand.pause(stage.log, by="tests", because="maintenance")
    await_(lambda: standby.role is Role.WAITING and not lease.is_held)
    stage.source.add_numbers(1)
    time.sleep(0.5)
    assert (stage.generation(), stage.ids()) == (1, list(range(10)))
    assert standby.isActive
    by_hand.resume(stage.log, by="tests")
    stage.await_rows(20)
    assert stage.generation() == 2


def test_a_standby_that_starts_paused_waits(stage: Stage) -> None:
    stage.source.add_numbers(1)
    first = stage.start(Told())
    stage.await_rows(10)
    first.stop()
    by_hand.pause(stage.log, by="tests", because="maintenance")
    standby = stage.start(Told())
    await_(lambda: standby.role is Role.WAITING)
    by_hand.resume(stage.log, by="tests")
    stage.source.add_numbers(1)
    stage.await_rows(20)


def test_what_a_start_would_refuse_ends_a_standby_before_its_claim(
    stage: Stage, tmp_path: Path
) -> None:
    stage.source.add_numbers(1)
    stage.start(Told())
    stage.await_rows(10)
    stage.standbys[-1].stop()
    before = stage.generation()
    lease = Told()
    log = str(checkpoint_log(stage.checkpoint).store.location)
    make = lambda: stage.source.stream  # noqa: E731
    for pipeline, checkpoint in (
        (Pipeline("other", [stage.out]), stage.checkpoint),
        (Pipeline("shop", [stage.out], log=log), tmp_path / "elsewhere"),
        (Pipeline("shop", [Files(str(tmp_path / "f"), name="out")]), stage.checkpoint),
    ):
        with pytest.raises(Refused):
            pipeline.start(make, checkpoint, standby=lease)
    with pytest.raises(Misconfigured, match="fence_on_start"):
        Pipeline("shop", [stage.out], limits=Limits(fence_on_start=False)).start(
            make, stage.checkpoint, standby=lease
        )
    with pytest.raises(Misconfigured, match="for a standby"):
        stage.pipeline.start(make, stage.checkpoint)  # type: ignore[call-overload]
    assert (stage.generation(), lease.acquired) == (before, 0)


def test_new_code_takes_over_as_at_any_start(stage: Stage) -> None:
    """Another sink, another selection: what a start accepts, a takeover does."""
    stage.source.add_numbers(1)
    first = stage.start(Told())
    stage.await_rows(10)
    added, lease = Memory(name="added"), Told(is_free=False)
    stage.pipeline = Pipeline("shop", [stage.out, added], limits=Limits(sweep_every_s=1))
    second = stage.start(lease, lambda: stage.source.stream.where("id < 1000"))
    await_(lambda: second.role is Role.WAITING)
    before = stage.generation()
    first.stop()
    stage.source.add_numbers(1)
    lease.is_free = True
    stage.await_rows(20)
    await_(lambda: added.rows().num_rows == 10)
    assert sorted(added.rows()["id"].to_pylist()) == list(range(10, 20))
    assert stage.generation() == before + 1


def test_a_table_in_a_join_is_as_new_as_the_takeover(stage: Stage, tmp_path: Path) -> None:
    prices = tmp_path / "prices"
    spark = stage.source.spark
    spark.range(5).selectExpr("id", "'old' AS price").write.parquet(str(prices))

    def joined() -> Any:
        return stage.source.stream.join(spark.read.parquet(str(prices)), "id").select("id", "price")

    with pytest.raises(Misconfigured, match="reads a table beside its stream"):
        stage.pipeline.start(joined(), stage.checkpoint, standby=True)
    lease = Told(is_free=False)
    standby = stage.start(lease, joined)
    await_(lambda: standby.role is Role.WAITING)
    spark.range(5, 10).selectExpr("id", "'new' AS price").write.mode("append").parquet(str(prices))
    stage.source.add_numbers(1)
    lease.is_free = True
    stage.await_rows(10)
    assert sorted(stage.out.rows()["price"].to_pylist()) == ["new"] * 5 + ["old"] * 5


def test_a_query_with_state_goes_on_across_turns(stage: Stage) -> None:
    lease = Told()

    def unseen() -> Any:
        return stage.source.stream.dropDuplicates(["id"]).select("id")

    stage.source.add([{"id": n, "v": ""} for n in range(6)])
    standby = stage.start(lease, unseen)
    stage.await_rows(6)
    for turn in (1, 2):
        lease.is_free = False
        await_(lambda: standby.role is Role.WAITING)
        lease.is_free = True
        stage.source.add([{"id": n, "v": ""} for n in range(6 + 4 * turn)])
        stage.await_rows(6 + 4 * turn)


def test_an_error_ends_a_standby_with_it_and_frees_the_lease(stage: Stage) -> None:
    lease = Told()

    def refuse(epoch: Any) -> bool:
        return bool(epoch.number == 0)

    stage.pipeline = Pipeline("shop", [stage.out], gates=[refuse])
    stage.source.add_numbers(2)
    standby = stage.start(lease)
    with pytest.raises(Exception, match="gate"):
        standby.awaitTermination(WITHIN_S)
    assert (lease.is_held, standby.isActive, stage.pipeline.error) == (False, False, standby.error)
    assert stage.ids() == list(range(10))


def test_a_warm_up_leaves_nothing_where_all_checkpoints_are_kept(
    stage: Stage, tmp_path: Path
) -> None:
    spark, setting = stage.source.spark, "spark.sql.streaming.checkpointLocation"
    spark.conf.set(setting, str(tmp_path / "all"))
    try:
        warm_up(spark, [stage.out], stage.source.stream.schema)
    finally:
        spark.conf.unset(setting)
    assert not (tmp_path / "all").exists()


def test_probes_know_a_standby_that_waits(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("epochal.telemetry.probes._activities", {})
    port = serve_metrics(0)

    def probe(name: str) -> tuple[int, Any]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/{name}") as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)

    lease = Told(is_free=False)
    stage.pipeline = Pipeline("probed", [stage.out])
    standby = stage.start(lease)
    await_(lambda: standby.role is Role.WAITING)
    await_(lambda: probe("ready")[1]["probed"] == "waiting")
    assert probe("live")[0] == 200
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        assert b'epochal_standby_waiting{pipeline="probed"} 1.0' in answer.read()
    stage.source.add_numbers(1)
    lease.is_free = True
    await_(lambda: probe("ready")[1]["probed"] == "working")
    standby.stop()
    assert probe("ready") == (503, {**probe("ready")[1], "probed": "stopped"})
