"""The rules of StagedCommitter that are not visible from outside, on the SQLite example."""

import sqlite3
from contextlib import closing

import pytest
from epochal_sqlite import SQLite, SQLiteCommitter

from epochal.errors import OutcomeUnknown, PreparedLost, Refused, TryAgain
from epochal.terms import EpochNumber, Proof
from epochal.testing.trial import Target, Trial

ZERO, ONE = EpochNumber(0), EpochNumber(1)


@pytest.fixture
def path(tmp_path):
    path = str(tmp_path / "shop.db")
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE orders (id INTEGER, name TEXT NOT NULL)")
    return path


@pytest.fixture
def trial(path):
    def visible():
        with closing(sqlite3.connect(path)) as connection:
            return [{"id": id_} for (id_,) in connection.execute("SELECT id FROM orders")]

    trial = Trial(Target(sink=SQLite(path=path, table="orders"), visible=visible))
    yield trial
    trial.close()


class BadLine(SQLiteCommitter):
    """Loses the reply to its first COMMIT."""

    is_cut = True

    def transaction(self, *, is_read):
        return _Line(super().transaction(is_read=is_read), self)


class _Line:
    def __init__(self, real, owner):
        self._real, self._owner = real, owner

    def commit(self):
        self._real.commit()
        if self._owner.is_cut:
            self._owner.is_cut = False
            error = sqlite3.OperationalError("no reply")
            error.sqlite_errorcode = sqlite3.SQLITE_IOERR
            raise error

    def __getattr__(self, name):
        return getattr(self._real, name)


def test_a_lost_reply_to_commit_is_an_unknown_outcome_and_the_ledger_answers_it(trial):
    receipt = trial.prepare(0, trial.batch(1))
    committer = BadLine(trial.sink, trial.identity(), trial.target.limits)
    with pytest.raises(OutcomeUnknown, match="no reply"):
        committer.commit(ZERO, [receipt])
    assert committer.outcome(ZERO, receipt) is Proof.COMMITTED
    committer.commit(ZERO, [receipt])
    assert trial.ids() == [1]


def test_a_rehearsal_holds_the_transaction_that_commit_ends(trial, path):
    receipt = trial.prepare(0, trial.batch(1))
    committer = trial.committer()
    committer.rehearse(ZERO, [receipt])
    with (
        closing(sqlite3.connect(path, timeout=0)) as other,
        pytest.raises(sqlite3.OperationalError),
    ):
        other.execute("INSERT INTO orders VALUES (2, 'slipped in')")
    committer.commit(ZERO, [receipt])
    assert trial.ids() == [1]


def test_a_commit_of_other_attempts_than_were_rehearsed_starts_again(trial):
    rehearsed, decided = trial.prepare(0, trial.batch(1)), trial.prepare(0, trial.batch(1))
    committer = trial.committer()
    committer.rehearse(ZERO, [rehearsed])
    committer.commit(ZERO, [decided])
    assert trial.ids() == [1]
    assert trial.handles() == {rehearsed.handle}


def test_a_second_decision_for_an_epoch_is_refused(trial):
    trial.commit(0, trial.prepare(0, trial.batch(1)))
    with pytest.raises(Refused, match="a copy of this epoch log is at work"):
        trial.commit(0, trial.prepare(0, trial.batch(1)))
    assert trial.ids() == [1]


def test_a_proof_that_was_pruned_is_neither_committed_nor_aborted(trial):
    first = trial.prepare(0, trial.batch(1))
    trial.commit(0, first)
    trial.commit(1, trial.prepare(1, trial.batch(2)))
    trial.committer().prune(ONE)
    assert trial.committer().outcome(ZERO, first) is Proof.UNKNOWN


def test_rows_that_are_no_longer_staged_are_named(trial):
    kept, lost = (trial.prepare(0, trial.batch(at), partition=at) for at in range(2))
    trial.abort(0, lost)
    with pytest.raises(PreparedLost) as caught:
        trial.commit(0, kept, lost)
    assert caught.value.handles == (str(lost.handle),)
    assert trial.handles() == {kept.handle}


def test_a_busy_target_is_tried_again(trial, path):
    receipt = trial.prepare(0, trial.batch(1))
    busy = SQLite(path=path, table="orders", busy_timeout_s=0.01)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(TryAgain, match="locked"):
            busy.committer(trial.identity(), trial.target.limits).commit(ZERO, [receipt])
    trial.commit(0, receipt)
    assert trial.ids() == [1]


def test_dropping_a_pipeline_forgets_its_ledger_and_keeps_its_rows(trial):
    trial.commit(0, trial.prepare(0, trial.batch(1)))
    assert trial.committer().drop(is_dry_run=True).removed == ["1 ledger entry"]
    assert trial.committer().newest()
    trial.committer().drop(is_dry_run=False)
    assert not trial.committer().newest()
    assert trial.ids() == [1]
