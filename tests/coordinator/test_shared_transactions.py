"""Sinks that share a transaction are rehearsed, committed and retried as one."""

from dataclasses import dataclass, field, replace

import pytest

from epochal.coordinator import Environment
from epochal.coordinator.commit import Commit
from epochal.coordinator.targets import Targets, shared_transactions
from epochal.errors import InvariantBroken, OutcomeUnknown, PreparedLost, TryAgain
from epochal.sinks.memory import Memory
from epochal.terms import (
    EpochNumber,
    Fingerprint,
    Generation,
    Identity,
    Limits,
    Proof,
    Receipt,
    SinkName,
    Uid,
)
from epochal.testing.driver import one_after_the_other
from proof.behaviour import OwnClock
from proof.calls import SimSink

X, Y, Z = SinkName("x"), SinkName("y"), SinkName("z")
LIMITS = Limits(commit_retry_max_s=10.0, retry_backoff_ms=(100,))
ENVIRONMENT = Environment(random=lambda: 1.0, parallel=one_after_the_other)


def receipt(sink):
    identity = Identity(pipeline="p", uid=Uid("a" * 12), sink=sink, generation=Generation(1))
    handle = identity.handle(EpochNumber(3), partition=0, attempt=1)
    return Receipt(handle=handle, fingerprint=Fingerprint(1, 1))


ALL = {name: (receipt(name),) for name in (X, Y, Z)}


@dataclass
class Keyed:
    name: str
    transaction_key: str | None
    prepares_last: bool = False
    rejects_to: "Keyed | None" = None


@dataclass
class Member:
    proof: Proof = Proof.UNKNOWN

    shared_with: list = field(default_factory=list)

    def share(self, members):
        self.shared_with += members
        return Script()

    def outcome(self, epoch, receipt):
        return self.proof

    def commit(self, epoch, receipts):
        """Alone, and done."""


@dataclass
class Script:
    errors: list = field(default_factory=list)
    commits: list = field(default_factory=list)

    def rehearse(self, epoch, receipts):
        """Nothing to say."""

    def commit(self, epoch, receipts):
        self.commits.append(tuple(receipts))
        error = self.errors.pop(0) if self.errors else None
        if error is not None:
            raise error


def sinks(*keyed):
    return {name: Keyed(name, key, *late) for name, key, *late in keyed}


def targets_of(committers, shared):
    targets = Targets({}, limits=LIMITS, environment=ENVIRONMENT)
    targets.committers, targets.shared = committers, shared
    return targets


def carry(script, *, proofs=(Proof.UNKNOWN, Proof.UNKNOWN), pending=ALL):
    noted = []
    committers = {X: Member(proofs[0]), Y: Member(proofs[1]), Z: Member()}
    commit = Commit(
        epoch=EpochNumber(3),
        targets=targets_of(committers, {X: script, Y: script}),
        limits=LIMITS,
        environment=replace(ENVIRONMENT, clock=OwnClock()),
        note_done=noted.append,
    )
    return commit.carry_out(pending), noted


def shared_of(keyed):
    members = {name: Member() for name in keyed}
    return members, shared_transactions(keyed, members)


def test_sinks_of_one_key_share_a_transaction_and_late_ones_stay_alone():
    keyed = sinks((X, "k"), (Y, None), (Z, "k"), ("late", "k", True), ("rejects", "k"))
    keyed[Y].rejects_to = keyed["rejects"]
    members, shared = shared_of(keyed)
    assert list(shared) == [X, Z]
    assert shared[X] is shared[Z]
    assert members[X].shared_with == [members[X], members[Z]]


def test_a_key_that_only_one_sink_has_is_no_shared_transaction():
    assert shared_of(sinks((X, "k"), (Y, "other"), (Z, None)))[1] == {}


def test_receipts_are_grouped_by_transaction_and_only_those_given():
    members, shared = shared_of(sinks((X, "k"), (Y, None), (Z, "k")))
    targets = targets_of(members, shared)
    assert [list(group) for group in targets.groups(ALL)] == [[X, Z], [Y]]
    assert [list(group) for group in targets.groups({Z: ALL[Z]})] == [[Z]]


def test_what_is_left_of_a_group_still_goes_through_its_transaction():
    members, shared = shared_of(sinks((X, "k"), (Y, None), (Z, "k")))
    targets_of(members, shared).commit(EpochNumber(3), {Z: ALL[Z]})
    assert shared[Z].commits == [(Z,)]


def test_a_key_without_the_verb_is_a_defect_of_the_sink():
    keyed = sinks((X, "k"), (Y, "k"))
    with pytest.raises(InvariantBroken, match="can't share"):
        shared_transactions(keyed, {name: object() for name in keyed})


def test_sinks_of_one_transaction_are_retried_together():
    script = Script([TryAgain("busy"), None])
    assert carry(script) == ({}, [])
    assert script.commits == [(X, Y), (X, Y)]


def test_where_one_lost_its_rows_the_others_wait_and_are_not_noted_as_done():
    lost = PreparedLost("gone", handles=(str(ALL[Y][0].handle),))
    assert carry(Script([lost])) == ({Y: lost.handles}, [{Z}])


def test_where_one_lost_a_part_its_other_parts_are_lost_and_none_of_the_others():
    (first,) = ALL[Y]
    parts = (first, replace(first, handle=replace(first.handle, partition=1)))
    lost = PreparedLost("gone", handles=(str(parts[1].handle),), shows_none=True)
    found, _ = carry(Script([lost]), pending={**ALL, Y: parts})
    assert found == {Y: tuple(str(one.handle) for one in parts)}


def test_a_loss_that_names_nobody_is_everybodys():
    found, noted = carry(Script([PreparedLost("gone")]))
    assert (found.keys(), noted) == ({X, Y}, [{Z}])


def test_a_lost_answer_is_settled_by_the_proofs_of_all():
    done = (Proof.COMMITTED, Proof.COMMITTED)
    script = Script([OutcomeUnknown("?")])
    assert carry(script, proofs=done) == ({}, [])
    assert len(script.commits) == 1
    script = Script([OutcomeUnknown("?"), None])
    carry(script, proofs=(Proof.COMMITTED, Proof.UNKNOWN))
    assert len(script.commits) == 2


def test_a_sink_without_receipts_is_not_proven_by_its_neighbour():
    script = Script([OutcomeUnknown("?"), None])
    carry(script, proofs=(Proof.COMMITTED, Proof.COMMITTED), pending={**ALL, X: ()})
    assert len(script.commits) == 2


def test_the_shipped_sinks_without_a_key_commit_alone():
    memory = Memory(name="m")
    assert (memory.transaction_key, memory.rejects_to) == (None, None)
    simulated = SimSink(name=X, send=lambda _: None, actor="a")
    assert (simulated.transaction_key, simulated.rejects_to) == (None, None)
