"""Crash at every call, with the simulated sink and with ours; the judge objects where it must."""

import textwrap
from functools import partial

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from epochal.logs import MemoryLog, open_log
from epochal.sinks.files import Files
from epochal.sinks.memory import Memory
from epochal.sinks.memory.client import StoreReference
from epochal.terms import Limits, SinkName
from epochal.testing import crash
from epochal.testing.crash import Breach, Setting, crash_at_every_call
from proof.calls import SimLog, SimSink
from proof.world import Source, Target, World

NAMES = (SinkName("x"), SinkName("y"))


class Batch(tuple):
    """Rows as a simulated writer takes them, and as the judge reads them."""

    __slots__ = ()

    def to_pylist(self):
        return [{"row": row} for row in self]


EPOCHS = [[[Batch("ab")], [Batch("c")]], [], [[Batch("d")], [Batch("ef")]]]


def simulated(make_target=Target):
    world = World(Source.of(), NAMES)
    world.targets = {name: make_target(name) for name in NAMES}

    def send(call):
        return world._verb(call)(*call.args)

    def visible(name):
        return [{"row": row} for rows in world.targets[name].visible.values() for row in rows]

    def leftovers():
        return [handle for target in world.targets.values() for handle in target.prepared]

    return Setting(
        log=lambda: SimLog(send, "A"),
        sinks=lambda: [SimSink(name=name, send=send, actor="A") for name in NAMES],
        epochs=EPOCHS,
        visible=visible,
        leftovers=leftovers,
    )


def test_a_crash_at_any_call_leaves_every_row_visible_once():
    report = crash_at_every_call(simulated, second=False)
    assert report.calls > 50
    assert report.runs > 2 * report.calls


@pytest.mark.proof
def test_a_second_crash_during_the_recovery_changes_nothing():
    report = crash_at_every_call(simulated, second_every=7)
    assert report.runs > 5 * report.calls


def batch(*ids):
    return pa.record_batch({"id": pa.array(ids, pa.int64())})


def in_memory(**limits):
    log, sinks = MemoryLog(), {name: Memory(name=name) for name in NAMES}
    return Setting(
        limits=Limits(retry_backoff_ms=(1,), sweep_every_s=0.0, **limits),
        leftovers=log.list_names,
        log=lambda: log,
        sinks=lambda: list(sinks.values()),
        epochs=[[[batch(1, 2)], [batch(3)]], [], [[batch(4)], []]],
        visible=lambda name: sinks[name].rows().to_pylist(),
        schema=batch().schema,
    )


def test_the_example_of_the_module_runs(tmp_path_factory):
    """The code in its docstring, with a sink and a reader."""
    text = crash.__doc__
    code = textwrap.dedent(text[text.index("    def test_") : text.index("`crash_inside_commit`")])
    names = {
        "MemoryLog": MemoryLog,
        "MySink": lambda folder: Files(str(folder / "out")),
        "Setting": Setting,
        "crash_at_every_call": partial(crash_at_every_call, second=False),
        "my_reader": lambda folder: pq.read_table(folder / "out").to_pylist(),
        "pa": pa,
    }
    exec(code, names)
    names["test_a_crash_at_any_call_leaves_every_row_visible_once"](tmp_path_factory)


def test_a_crash_at_any_call_leaves_every_row_in_memory_once(monkeypatch):
    monkeypatch.setattr(StoreReference, "address", lambda self: None)  # no other process will ask
    crash_at_every_call(in_memory, second=False)


def test_a_crash_at_any_call_leaves_no_row_out_and_no_list_beside_the_log(monkeypatch):
    monkeypatch.setattr(StoreReference, "address", lambda self: None)  # no other process will ask
    crash_at_every_call(partial(in_memory, receipts_inline_bytes=0), second=False)


@pytest.fixture
def in_files(tmp_path_factory):
    def fresh():
        folder = tmp_path_factory.mktemp("crash")
        names = {name: folder / name for name in NAMES}
        return Setting(
            log=lambda: open_log(folder / "log"),
            sinks=lambda: [Files(str(path), name=name) for name, path in names.items()],
            epochs=[[[batch(1, 2)], [batch(3)]], []],
            visible=lambda name: pq.read_table(names[name]).to_pylist(),
            leftovers=lambda: [
                path for path in folder.rglob("*.epochal/epochal-*/**/*") if path.is_file()
            ],
            schema=batch().schema,
        )

    return fresh


def test_a_crash_at_any_call_leaves_every_row_in_files_once(in_files):
    crash_at_every_call(in_files, second=False, effects_only=True)


class Forgetful(Target):
    """Commits what it committed before, as one that keeps no ledger does."""

    def abort(self, identity, epoch, receipts):
        """Throws nothing away."""


class Eager(Target):
    """Shows rows when they are prepared."""

    def prepare(self, identity, handle, rows):
        super().prepare(identity, handle, rows)
        self.visible[f"early {handle}"] = rows


class Lossy(Target):
    """Says that it committed."""

    def commit(self, identity, epoch, receipts, after=None):
        super().commit(identity, epoch, receipts[:1], after)


@pytest.mark.parametrize(("target", "rule"), [(Forgetful, "I5"), (Eager, "I1"), (Lossy, "I4")])
def test_the_judge_objects_to_a_broken_target(target, rule):
    with pytest.raises(Breach, match=rule):
        crash_at_every_call(lambda: simulated(target), second=False)
