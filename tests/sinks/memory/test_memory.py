"""Rows in the driver's memory."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys

import pyarrow as pa
import pytest

from epochal.errors import Misconfigured, PreparedLost, Refused
from epochal.sinks.memory import Memory
from epochal.terms import EpochNumber, Mark, Proof, Uid


def test_rows_are_visible_only_after_commit(drive, numbers):
    sink = Memory()
    driver = drive(sink)
    receipt = driver.prepare(numbers(1, 2), epoch=0)
    assert sink.rows().num_rows == 0
    driver.commit(0, [receipt])
    assert sink.rows()["n"].to_pylist() == [1, 2]
    assert sink.epochs() == [0]


def test_every_verb_may_be_repeated(drive, numbers):
    sink = Memory()
    driver = drive(sink)
    wanted, surplus = driver.prepare(numbers(1), 0), driver.prepare(numbers(1), 0, attempt=1)
    for _ in range(2):
        driver.commit(0, [wanted])
        driver.committer.abort(EpochNumber(0), [surplus])
        driver.committer.abort(EpochNumber(0), [wanted])
        driver.committer.prune(EpochNumber(0))
    assert sink.rows()["n"].to_pylist() == [1]
    assert driver.committer.in_doubt() == []
    assert driver.committer.outcome(EpochNumber(0), wanted) is Proof.COMMITTED
    assert driver.committer.outcome(EpochNumber(0), surplus) is Proof.ABORTED


def test_a_prepared_attempt_is_listed_until_it_is_decided(drive, numbers):
    driver = drive(Memory())
    receipt = driver.prepare(numbers(1), 3)
    (found,) = driver.committer.in_doubt()
    assert found.handle == receipt.handle
    assert driver.committer.outcome(EpochNumber(3), receipt) is Proof.UNKNOWN
    assert driver.another(uid=Uid("zzzzzzzz2222")).committer.in_doubt() == []


def test_a_lost_attempt_is_proven_lost_and_nothing_becomes_visible(drive, numbers):
    sink = Memory()
    driver = drive(sink)
    kept, lost = driver.prepare(numbers(1), 0), driver.prepare(numbers(2), 0, partition=1)
    driver.committer.abort(EpochNumber(0), [lost])
    with pytest.raises(PreparedLost) as caught:
        driver.commit(0, [kept, lost])
    assert caught.value.handles == (str(lost.handle),)
    assert sink.rows().num_rows == 0


def test_an_epoch_can_not_be_committed_with_other_winners(drive, numbers):
    driver = drive(Memory())
    driver.write(numbers(1), 0)
    with pytest.raises(Refused, match="a copy of this epoch log is at work"):
        driver.commit(0, [driver.prepare(numbers(1), 0, attempt=7)])


def test_complete_mode_shows_the_newest_epoch_only(drive, numbers):
    sink = Memory(mode="complete")
    driver = drive(sink)
    first = driver.write(numbers(1), 0)
    driver.write(numbers(2, 3), 1)
    driver.commit(0, first)
    assert sink.rows()["n"].to_pylist() == [2, 3]
    assert sink.output_modes == {"complete"}


def test_an_empty_epoch_is_proven_too(drive):
    driver = drive(Memory(), run="again")
    driver.commit(4, [])
    assert driver.committer.newest() == [Mark(uid=driver.uid, epoch=EpochNumber(4), run="again")]
    assert driver.sink.rows().num_rows == 0


def test_pruning_keeps_the_newest_proof_and_an_old_commit_changes_nothing(drive, numbers):
    sink = Memory()
    driver = drive(sink)
    receipts = [driver.write(numbers(epoch), epoch) for epoch in range(3)]
    driver.committer.prune(EpochNumber(99))
    with pytest.raises(Refused):
        driver.commit(0, receipts[0])
    assert sink.rows()["n"].to_pylist() == [0, 1, 2]
    assert driver.committer.newest() == [Mark(uid=driver.uid, epoch=EpochNumber(2))]
    assert driver.committer.outcome(EpochNumber(0), receipts[0][0]) is Proof.UNKNOWN


def test_two_sinks_of_one_name_share_nothing_and_a_pickled_one_is_the_same(drive, numbers):
    one, other = Memory(), Memory()
    drive(one).write(numbers(1), 0)
    assert other.rows().num_rows == 0
    assert pickle.loads(pickle.dumps(one)).rows()["n"].to_pylist() == [1]


def _prepare_elsewhere(pickled: bytes, numbered: pa.Table, receipts) -> None:
    driver = pickle.loads(pickled)
    receipts.put(driver.prepare(numbered, 0))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_a_task_in_another_process_prepares_for_this_one(drive, numbers, method):
    sink = Memory()
    driver = drive(sink)
    context = multiprocessing.get_context(method)
    receipts = context.Queue()
    child = context.Process(
        target=_prepare_elsewhere, args=(pickle.dumps(driver), numbers(5), receipts)
    )
    child.start()
    receipt = receipts.get(timeout=60)
    child.join()
    assert sink.rows().num_rows == 0
    driver.commit(0, [receipt])
    assert sink.rows()["n"].to_pylist() == [5]


def test_a_killed_task_leaves_what_the_driver_finds_and_clears(drive, numbers):
    driver = drive(Memory())
    code = (
        "import os, pickle, signal, sys\n"
        "driver, rows = pickle.loads(sys.stdin.buffer.read())\n"
        "driver.prepare(rows, 0)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=_by_value((driver, numbers(1))),
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    (found,) = driver.committer.in_doubt()
    driver.committer.abort(EpochNumber(0), [_bare(found.handle)])
    assert driver.committer.in_doubt() == []


def _by_value(value) -> bytes:
    """As Spark ships it: with the classes of this test, which a plain child can't import."""
    from pyspark import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[type(value[0]).__module__])
    return cloudpickle.dumps(value)


def _bare(handle):
    from epochal.terms import NO_ROWS, Receipt

    return Receipt(handle=handle, fingerprint=NO_ROWS)


def test_a_store_that_is_gone_says_what_memory_is_for(numbers):
    code = "import pickle, sys; from epochal.sinks.memory import Memory; "
    code += "sys.stdout.buffer.write(pickle.dumps(Memory()))"
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    with pytest.raises(Misconfigured, match="Memory is for tests"):
        pickle.loads(made.stdout).rows()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_that_was_not_served_is_reported_so(numbers):
    sink = Memory()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            sink.rows()
        except Misconfigured as error:
            os.write(writer, str(error).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert b"forked before the store was served" in os.read(reader, 4096)
    os.close(reader)
    os.close(writer)


def test_the_declaration_reads_well_and_shows_no_key():
    sink = Memory(name="seen", where="n > 1")
    pickle.dumps(sink)
    assert repr(sink) == "Memory(name='seen', where='n > 1', select=None, mode='append')"
    assert sink.describe()["mode"] == "append"
    with pytest.raises(Misconfigured):
        Memory(mode="update")
    with pytest.raises(Misconfigured, match=r"select=\['n'\]"):
        Memory(select="n")
