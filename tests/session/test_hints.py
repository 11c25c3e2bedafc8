"""Hints are followed to the letter, and help."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pyarrow as pa
import pytest
from typer.testing import CliRunner

import epochal as ep
from epochal import Files, Memory, Session
from epochal.cli import application
from epochal.errors import Misconfigured, PreparedLost, Refused, Unsettled
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


POSTGRES = "ep.Postgres('postgresql://u@h/d', table='t', {})"
OPTIONS = [
    ("ep.Files('')", "Files('/data/orders')", "ep.{}"),
    ("ep.Files('/')", "/folder", "ep.Files('{}')"),
    ("ep.Files('file://a/b')", "file:///a/b", "ep.Files('{}')"),
    ("ep.Files('s3://b//x')", "s3://bucket/folder", "ep.Files('{}')"),
    ("ep.Files('ftp://a/b')", "az://container/folder", "ep.Files('{}')"),
    ("ep.Files('/d', partition_by='day')", "partition_by=['day']", "ep.Files('/d', {})"),
    ("ep.Files('/d', sort_by='day')", "sort_by=['day']", "ep.Files('/d', {})"),
    ("ep.Files('/d', select='day')", "select=['day']", "ep.Files('/d', {})"),
    (
        "ep.Files('/d', partition_by=['_day'])",
        'select=["*", "_day as part"], partition_by=["part"]',
        "ep.Files('/d', {})",
    ),
    ("ep.Files('/d', format='xml')", "avro", "ep.Files('/d', format='{}')"),
    ("ep.Files('/d', compression='rar')", "lz4", "ep.Files('/d', compression='{}')"),
    (
        "ep.Files('s3://b/x', storage_options={'kms_key_id': 'k'})",
        'storage_options={"encryption": "aws:kms", "kms_key_id": …}',
        "ep.Files('s3://b/x', {})",
    ),
    ("ep.Memory(mode='update')", "complete", "ep.Memory(mode='{}')"),
    ("ep.Delta('')", "Delta('/data/orders')", "ep.{}"),
    ("ep.Delta('/t', mode='merge')", 'keys=["id"]', "ep.Delta('/t', mode='merge', {})"),
    ("ep.Delta('/t', keys=['id'])", "mode='merge'", "ep.Delta('/t', keys=['id'], {})"),
    ("ep.Hudi('')", "Hudi('/lake/orders')", "ep.{}"),
    ("ep.Hudi('/t', mode='merge')", "upsert", "ep.Hudi('/t', mode='{}')"),
    ("ep.Iceberg('orders')", 'Iceberg("catalog.namespace.table")', "ep.{}"),
    ("ep.Iceberg('c.n.t', mode='upsert')", 'keys=["id"]', "ep.Iceberg('c.n.t', mode='upsert', {})"),
    (
        "ep.Postgres('x', table='t')",
        "postgresql://user@host:5432/database",
        "ep.Postgres('{}', table='t')",
    ),
    (POSTGRES.format("mode='upsert'"), 'keys=["id"]', POSTGRES.format("mode='upsert', {}")),
    (POSTGRES.format("keys=['id']"), "mode='replace'", POSTGRES.format("keys=['id'], {}")),
    (POSTGRES.format("columns='x'"), 'columns={"field": "column"}', POSTGRES),
    (POSTGRES.format("session_sql='SET x=1'"), "session_sql=['SET x=1']", POSTGRES),
    (
        POSTGRES.format("pressure={'drop_above_s': 300}"),
        "pressure=ep.PressureLimits(drop_above_s=300)",
        POSTGRES,
    ),
    (
        POSTGRES.format("types={'a': 'int'}"),
        "evolve='add_columns'",
        POSTGRES.format("types={'a': 'int'}, {}"),
    ),
    (
        POSTGRES.format("staging='fixed', create_table='if_missing'"),
        "create_table='never'",
        POSTGRES.format("staging='fixed', {}"),
    ),
    (
        POSTGRES.format("on_reject='rejected'"),
        "on_reject=Files('/data/rejected')",
        POSTGRES,
    ),
    ("ep.MySQL('h', table='t')", "mysql://user@host:3306/database", "ep.MySQL('{}', table='t')"),
    ("ep.Oracle('h', table='t')", "oracle://user@host:1521/service", "ep.Oracle('{}', table='t')"),
    ("ep.Kafka('', topic='t')", "host:9092,host:9092", "ep.Kafka('{}', topic='t')"),
    ("ep.Http('x')", "https://host/path", "ep.Http('{}')"),
    (
        "ep.Http('https://h/p', mode='idempotency-key')",
        'spool="/mnt/shared/spool"',
        "ep.Http('https://h/p', mode='idempotency-key', {})",
    ),
    ("ep.Callback(print)", 'spool="s3://bucket/spool"', "ep.Callback(print, {})"),
    ("ep.Callback(print, spool='file://h/x')", "file:///h/x", "ep.Callback(print, spool='{}')"),
]


@pytest.mark.parametrize(("wrong", "quoted", "corrected"), OPTIONS, ids=[one[0] for one in OPTIONS])
def test_what_a_hint_writes_for_an_option_is_accepted(wrong, quoted, corrected):
    names = {"ep": ep, "Files": Files}
    with pytest.raises(Misconfigured) as no:
        eval(wrong, names)
    assert quoted in no.value.hint
    eval(corrected.replace("{}", quoted.replace("…", "'k'")), names)


def orders(log: Path, name: str = "orders", out: str = "out", sinks: str = "f", **more) -> Session:
    declared = [Files(log.parent / out / one, name=one, format="jsonl") for one in sinks]
    return Session(name, sinks=declared, schema=SCHEMA, log=log, **more)


def write_one(session: Session) -> None:
    session.begin(session.next_epoch)
    session.write([{"id": 1}])
    session.commit()


def epochal(command: str) -> None:
    ended = CliRunner().invoke(application(), shlex.split(command))
    assert ended.exit_code == 0, ended.output


def unchanged(log: Path) -> Path:
    return log


def moved(log: Path) -> Path:
    return log.rename(log.with_name("moved"))


def copied(log: Path) -> Path:
    return shutil.copytree(log, log.with_name("copy"))


def paused(log: Path) -> Path:
    epochal(f"pause {log} --because upgrade")
    return log


def killed(log: Path) -> Path:
    session = orders(log, sinks="fg")
    session.begin(session.next_epoch)
    session.write([{"id": 2}])
    return log


@pytest.mark.parametrize(
    ("meanwhile", "start", "which"),
    [
        (unchanged, {"name": "sales"}, 0),
        (moved, {}, 0),
        (copied, {}, 1),
        (paused, {}, 0),
        (killed, {"sinks": "f"}, 0),
    ],
)
def test_a_refused_start_is_admitted_after_the_command_of_its_hint(
    tmp_path, meanwhile, start, which
):
    log = tmp_path / "log"
    with orders(log, sinks="f" if meanwhile is not killed else "fg") as session:
        write_one(session)
    log = meanwhile(log)
    with pytest.raises(Refused) as no:
        orders(log, **start)
    epochal(re.findall(r"`epochal ([^`]*)`", no.value.hint)[which])
    with orders(log, **start) as session:
        write_one(session)
        assert session.next_epoch == 2


@pytest.mark.parametrize(
    ("before", "start", "option"),
    [
        ({}, {"out": "elsewhere"}, r"retarget=\[.*?\]"),
        ({"run": "a"}, {"run": "b"}, r"run='.*?'"),
    ],
)
def test_a_refused_start_is_admitted_with_the_option_of_its_hint(tmp_path, before, start, option):
    log = tmp_path / "log"
    with orders(log, **before) as session:
        write_one(session)
    with pytest.raises(Refused) as no:
        orders(log, **start)
    (written,) = re.findall(option, no.value.hint)
    with orders(log, **{**start, **eval(f"dict({written})")}) as session:
        write_one(session)
        assert session.next_epoch == 2


def test_a_sink_whose_target_is_gone_is_removed_by_the_commands_of_the_hints(tmp_path):
    log = tmp_path / "log"
    write_one(orders(log, sinks="fg"))  # killed before the next record, which says that it is done
    with pytest.raises(Refused, match="not yet carried out on g") as pending:
        orders(log)
    follow(pending.value.hint, log)
    with pytest.raises(Refused, match="g is no longer among the sinks") as unclear:
        orders(log)
    epochal(re.findall(r"`epochal ([^`]*)`", unclear.value.hint)[0])
    with orders(log) as session:
        assert session.next_epoch == 1


@pytest.mark.parametrize("wrong", [{"retry_backoff_ms": ()}, {"commit_timeout_s": -1.0}])
def test_limits_with_which_nothing_could_be_carried_out_are_refused_before_the_claim(
    tmp_path, wrong
):
    with pytest.raises(Misconfigured, match=f"Limits.{next(iter(wrong))}"):
        orders(tmp_path / "log", limits=Limits(**wrong))
    with orders(tmp_path / "log", limits=Limits(retry_backoff_ms=(100, 500, 2000))) as session:
        write_one(session)
