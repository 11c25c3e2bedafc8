"""Hints of a session are followed to the letter, and help."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pyarrow as pa
import pytest
from typer.testing import CliRunner

from epochal import Memory, Session
from epochal.cli import application
from epochal.errors import Misconfigured, PreparedLost, Unsettled
from epochal.sinks.memory.sink import MemoryCommitter
from epochal.terms import Limits

SCHEMA = pa.schema([("id", pa.int64())])


class Broken(MemoryCommitter):
    error: Exception | None = None

    def commit(self, epoch, receipts):
        if Broken.error is not None:
            raise Broken.error
        super().commit(epoch, receipts)


class BrokenSink(Memory):
    def committer(self, identity, limits):
        return Broken(identity, self._reference.store(), replaces=False)


@pytest.fixture(autouse=True)
def whole_again():
    yield
    Broken.error = None


def session_on(log: Path, sink: Memory, **more) -> Session:
    limits = Limits(commit_retry_max_s=0.0)
    return Session("orders", sinks=[sink], schema=SCHEMA, log=log, limits=limits, **more)


def follow(hint: str, log: Path) -> None:
    (command,) = re.findall(r"`epochal (resolve give-up [^`]*)`", hint)
    command = command.replace("PIPELINE", str(log))
    command = command.replace("--kept-at …", "--kept-at s3://kept/0")
    command = command.replace("--because …", "--because 'the table is gone'")
    ended = CliRunner().invoke(application(), [*shlex.split(command), "--take-over"])
    assert ended.exit_code == 0, ended.output


def test_a_target_that_never_takes_a_decided_epoch_is_given_up_by_the_command_of_the_hint(tmp_path):
    log, sink = tmp_path / "log", BrokenSink(name="m")
    Broken.error = Misconfigured("the table is gone", "create it again")
    with session_on(log, sink) as session:
        session.begin(0)
        session.write([{"id": 1}])
        with pytest.raises(Unsettled, match="'m' could not be committed: the table") as no:
            session.commit()
        assert no.value.hint.startswith("create it again; ")
        with pytest.raises(Unsettled, match="epoch 1 can't begin") as still:
            session.begin(1)
    with pytest.raises(Unsettled):
        session_on(log, sink)
    follow(no.value.hint, log)
    Broken.error = None
    with session_on(log, sink) as session:
        assert session.next_epoch == 1
        session.begin(1)
        session.write([{"id": 2}])
        session.commit()
    assert sink.rows().to_pylist() == [{"id": 2}]
    assert "resolve give-up PIPELINE --sink m --epoch 0" in still.value.hint


def test_rows_that_a_target_threw_away_are_given_up_by_the_command_of_the_hint(tmp_path):
    log, sink = tmp_path / "log", BrokenSink(name="m")
    with session_on(log, sink, fingerprint=False) as session:
        session.begin(0)
        session.write([{"id": 1}])
        Broken.error = PreparedLost("gone", handles=("epochal-x",))
        with pytest.raises(Unsettled, match="threw its prepared rows away"):
            session.commit()
        with pytest.raises(Unsettled) as lost:
            session.begin(0)
    assert "start again once the target answers" not in lost.value.hint
    follow(lost.value.hint, log)
    Broken.error = None
    with session_on(log, sink, fingerprint=False) as session:
        assert session.next_epoch == 1
