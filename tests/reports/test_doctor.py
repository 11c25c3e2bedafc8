"""The doctor queries every target, even if one of them fails."""

from __future__ import annotations

from dataclasses import replace

from epochal import Postgres
from epochal.config.resolve_target import OpenedTarget
from epochal.coordinator import this_driver
from epochal.reports.doctor import diagnose, grants
from epochal.reports.inspect import committer_of
from epochal.reports.recover import plan_recovery, recover
from epochal.reports.status import require_record


def test_a_healthy_pipeline_has_no_problems(shop):
    shop.run(epochs=1)
    report = diagnose(shop.opened)
    assert report.problems == []
    assert [one.is_reached for one in report.sinks] == [True, True]
    assert report.sinks[0].newest == "proves epoch 0; the log has decided 0"
    assert {ability.name for ability in report.sinks[0].abilities} == {
        "whole epochs",
        "outlives the driver",
    }


def test_leftovers_are_listed_with_the_verdict_of_recovery(shop):
    driver = shop.die("prepared")
    report = diagnose(shop.opened)
    assert [one.found[0].verdict for one in report.sinks] == ["abort", "abort"]
    assert len(report.problems) == 2
    assert "no decision names it" in report.problems[0]
    assert driver is not None


def test_a_decided_epoch_without_a_driver_is_a_problem(shop):
    driver = shop.die("decided")
    report = diagnose(shop.opened)
    assert report.problems[0].startswith("epoch 0 is decided and not settled on orders, audit")
    assert {one.found[0].verdict for one in report.sinks} == {"commit"}
    assert driver is not None


def test_a_decided_epoch_is_a_problem_only_where_the_target_does_not_prove_it(shop):
    """The log has it as settled only with the next decision, which a killed driver never made."""
    drivers = [shop.die("decided")]
    state = require_record(shop.log).record.state
    with committer_of(shop.orders, state, shop.limits) as committer:
        committer.commit(state.unsettled.epoch, state.pending["orders"])
    (problem, *found) = diagnose(shop.opened).problems
    assert problem.startswith("epoch 0 is decided and not settled on audit, for")
    assert [one.partition(":")[0] for one in found] == ["audit"]
    recover(shop.opened)
    drivers.append(shop.die("settled"))
    assert require_record(shop.log).record.state.unsettled is not None
    assert diagnose(shop.opened).problems == []
    assert plan_recovery(shop.opened).steps[1:] == ["nothing is in doubt"]
    drivers.append(shop.die("prepared"))
    assert {one.found[0].verdict for one in diagnose(shop.opened).sinks} == {"abort"}


def test_the_epoch_of_a_running_driver_is_no_problem(shop):
    with shop.session() as session:
        shop.epoch(session)
        assert diagnose(shop.opened).problems == []
    driver = shop.die("prepared", driver=this_driver())
    report = diagnose(shop.opened)
    assert [one.found[0].verdict for one in report.sinks] == ["held by the running driver"] * 2
    assert report.problems == []
    assert driver is not None


def test_a_target_that_fails_keeps_no_other_from_being_queried(shop):
    shop.run(epochs=1)
    broken = Postgres("postgresql://nobody@127.0.0.1:1/none", table="t", name="away")
    report = diagnose(replace(shop.opened, sinks=[*shop.sinks, broken]))
    assert [one.is_reached for one in report.sinks] == [True, True, False]
    assert [problem.partition(":")[0] for problem in report.problems] == ["away"]


def test_without_a_checkpoint_the_targets_are_queried_too(shop):
    report = diagnose(OpenedTarget(target="jobs:p", log=None, pipeline="shop", sinks=shop.sinks))
    assert report.log.startswith("not read")
    assert all(one.is_reached for one in report.sinks)


def test_with_the_log_alone_the_doctor_reads_the_log(shop):
    shop.run(epochs=1)
    report = diagnose(shop.log_alone)
    assert "is readable" in report.log
    assert report.sinks == []


def test_a_corrupt_log_is_a_problem_by_name(shop):
    shop.run(epochs=1)
    last = max((shop.root / "chk" / "epochal" / "log").glob("*.json"))
    last.write_bytes(b"torn")
    assert "not a readable record" in diagnose(shop.opened).problems[0]


def test_a_server_reports_its_time_and_what_a_prepared_transaction_blocks(shop, postgres):
    with postgres.connect() as connection:
        connection.execute("CREATE TABLE doctored (id bigint)")
    shop.orders = Postgres(
        postgres.url,
        table="doctored",
        name="orders",
        strategy="prepared",
        meta_schema="doctored_meta",
    )
    driver = shop.die("prepared")
    (diagnosis, _) = diagnose(shop.opened).sinks
    assert abs(diagnosis.clock_skew_s) < 5
    assert "vacuum" in diagnosis.found[0].blocks
    assert driver is not None


def test_grants_are_statements_of_the_target(shop):
    shop.audit = Postgres("postgresql://etl@db/shop", table="public.audit", name="audit")
    report = grants(shop.opened)
    assert any("GRANT" in statement for statement in report.sinks["audit"])
    # As a DBA's client reads them.
    assert all(statement.endswith(";") for statement in report.sinks["audit"])
    assert set(report.unknown) == {"orders"}
