"""Epochs that a target lost are written again from the source, once, and the pipeline goes on."""

from __future__ import annotations

import shutil

import pytest
from reports.test_verify_source import Lake

from epochal.config.resolve_target import OpenedTarget
from epochal.errors import Refused, WentBack
from epochal.reports.repair import repair
from epochal.reports.status import pipeline_status
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
    for folder in tmp_path.glob("odd*"):
        shutil.rmtree(folder)
    copy(tmp_path, "kept", "odd")
    return lake


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


def test_a_query_that_can_not_be_read_again_is_refused_and_nothing_is_accepted(lake):
    with pytest.raises(Refused, match="depend on time or chance"):
        repaired(lake, stream=lake.stream.selectExpr("id", "string(rand()) v"))
    assert pipeline_status(lake.pipeline.log_of(None)).accepted == []
    assert visible(lake) == [1, 3]
