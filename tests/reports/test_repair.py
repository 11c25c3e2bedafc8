"""Epochs that a target lost are written again from the source, once, and the pipeline goes on."""

from __future__ import annotations

import shutil

import pytest
from reports.test_verify_source import Lake

from epochal import Limits, Memory, Postgres
from epochal.config.resolve_target import OpenedTarget
from epochal.errors import Refused, WentBack
from epochal.reports.inspect import committer_of
from epochal.reports.repair import repair
from epochal.reports.status import pipeline_status, require_record
from epochal.sinks.files import read_epochs


@pytest.fixture
def lake(spark, tmp_path):
    """Epochs 0 to 3, and the target of `odd` as a backup from after epoch 1 has it."""
    lake = Lake(spark, tmp_path)
    for first in range(0, 8, 2):
        if first == 4:
            lake.run()
            copy(tmp_path, "odd", "kept")
        lake.add(first, first + 1)
    lake.run()
    put_back(tmp_path, "kept")
    return lake


def put_back(root, name):
    """The target of `odd` as a backup has it."""
    for folder in root.glob("odd*"):
        shutil.rmtree(folder)
    copy(root, name, "odd")


def copy(root, name, to):
    for folder in root.glob(f"{name}*"):
        shutil.copytree(folder, root / folder.name.replace(name, to, 1))


def repaired(lake, stream=None, **options):
    pipeline = lake.pipeline
    opened = OpenedTarget(
        target="lake", log=pipeline.log_of(None), pipeline="lake", sinks=pipeline.sinks
    )
    stream = lake.stream if stream is None else stream
    given = {"sink": "odd", "by": "ann", "stream": stream, "dry_run": False, **options}
    return repair(opened, **given)


def visible(lake, sink="odd"):
    rows = read_epochs(lake.root / sink).to_table(columns=["id"])
    return sorted(rows["id"].to_pylist())


def test_lost_epochs_are_written_again_once_and_the_next_start_goes_on(lake):
    with pytest.raises(WentBack, match="epochs 2 to 3, in the source from"):
        lake.run()
    shown = repaired(lake, stream=None, dry_run=True)
    assert "would write epochs 2 to 3 again from the source, as run 'repair-odd-2-3'" in shown.step
    assert visible(lake) == [1, 3]
    assert repaired(lake).step.startswith("2 rows of epochs 2 to 3 written again")
    assert "nothing to repair" in repaired(lake).step
    lake.add(8, 9)
    lake.run()
    assert visible(lake) == [1, 3, 5, 7, 9]
    assert visible(lake, "out") == [*range(10)]
    (accepted,) = pipeline_status(lake.pipeline.log_of(None)).accepted
    assert (accepted.sink, accepted.after, accepted.through, accepted.by) == ("odd", 1, 3, "ann")
    assert "repair-odd-2-3" in accepted.because


def test_a_target_that_goes_back_after_its_repair_gets_only_what_it_has_lost_since(lake):
    repaired(lake)
    copy(lake.root, "odd", "repaired")
    lake.add(8, 9)
    lake.run()
    put_back(lake.root, "repaired")
    assert visible(lake) == [1, 3, 5, 7]
    before = "missing before: epochs 2 to 3, accepted by ann: written again"
    with pytest.raises(WentBack, match=before):
        lake.run()
    assert repaired(lake).step.startswith("1 row of epoch 4 written again")
    assert visible(lake) == [1, 3, 5, 7, 9]
    lake.add(10, 11)
    lake.run()
    # From before the first repair: what that one wrote is lost, too.
    put_back(lake.root, "kept")
    assert repaired(lake).step.startswith("4 rows of epochs 2 to 5 written again")
    lake.run()
    assert visible(lake) == [1, 3, 5, 7, 9, 11]


def test_a_source_that_has_lost_rows_since_is_refused_and_nothing_is_accepted(lake):
    lake.files[3].write_text('{"id": 6, "v": "v6"}')
    with pytest.raises(Refused, match="returns 1 row of them now, and 2 were decided"):
        repaired(lake)
    assert pipeline_status(lake.pipeline.log_of(None)).accepted == []
    assert visible(lake) == [1, 3]


def test_a_query_that_can_not_be_read_again_is_refused_and_nothing_is_accepted(lake):
    with pytest.raises(Refused, match="depend on time or chance"):
        repaired(lake, stream=lake.stream.selectExpr("id", "string(rand()) v"))
    assert pipeline_status(lake.pipeline.log_of(None)).accepted == []
    assert visible(lake) == [1, 3]


@pytest.fixture
def rejecting(shop, postgres):
    """A table that takes no odd number; those are in another sink."""
    with postgres.connect() as connection:
        connection.execute("DROP TABLE IF EXISTS evens")
        connection.execute("CREATE TABLE evens (id bigint CHECK (id % 2 = 0))")
    bad, meta = Memory(name="bad"), f"r{shop.root.name}"[:30]
    shop.orders = Postgres(
        postgres.url, table="evens", name="orders", meta_schema=meta, on_reject=bad
    )
    return bad


def forget(shop, sink):
    """Its target has none of its epochs any more."""
    state = require_record(shop.log).record.state
    with committer_of(sink, state, Limits()) as committer:
        committer.drop(is_dry_run=False)


@pytest.mark.parametrize("dry_run", [True, False])
def test_rows_that_were_rejected_are_not_brought_to_their_sink_a_second_time(
    shop, rejecting, dry_run
):
    shop.run(epochs=2)
    forget(shop, shop.orders)
    fact = "epochs 0 to 1 can't be read again: 2 rows of them went to 'bad' and would go there"
    with pytest.raises(Refused, match=fact) as refused:
        repair(shop.opened, sink="orders", by="ann", dry_run=dry_run)
    assert "resolve accept PIPELINE --sink orders" in refused.value.hint
    assert pipeline_status(shop.log).accepted == []


def test_a_target_that_rejected_nothing_can_be_repaired(shop, rejecting):
    shop.run(epochs=2, rows=1)
    forget(shop, shop.orders)
    shown = repair(shop.opened, sink="orders", by="ann", dry_run=True)
    assert "would write epochs 0 to 1 again" in shown.step


def test_rejected_rows_that_a_target_lost_are_in_no_source(shop, rejecting):
    shop.run(epochs=1)
    forget(shop, rejecting)
    with pytest.raises(Refused, match="other targets reject, and no source has them"):
        repair(shop.opened, sink="bad", by="ann", dry_run=True)
