"""The life of an epoch: only rows of the table, and every refusal names both states."""

from itertools import product

import pytest

from epochal.errors import IllegalMove, InvariantBroken
from epochal.protocol.machine import DECIDED_PHASES, TABLE, Move, Phase, advance
from epochal.terms import EpochNumber


@pytest.mark.parametrize(
    ("phase", "move"), [pair for pair in product(Phase, Move) if pair not in TABLE]
)
def test_a_move_that_the_table_does_not_have_is_refused_and_names_both_states(phase, move):
    with pytest.raises(IllegalMove) as caught:
        advance(phase, move, EpochNumber(7))
    aims = {aim.value for (_, by), aim in TABLE.items() if by is move}
    assert f"the epoch is {phase.value}" in caught.value.message
    assert all(aim in caught.value.message for aim in aims)
    assert "epoch 7" in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(("row", "after"), TABLE.items())
def test_every_row_of_the_table_is_taken(row, after):
    assert advance(*row) is after


def test_an_illegal_move_is_a_broken_invariant():
    with pytest.raises(InvariantBroken):
        advance(Phase.IDLE, Move.COMMIT)


def test_a_second_decision_is_refused():
    with pytest.raises(IllegalMove, match="decided once"):
        advance(Phase.DECIDED, Move.DECIDE)


def test_no_way_leads_from_decided_to_aborted():
    reached, new = set(), {Phase.DECIDED}
    while new:
        reached |= new
        steps = {
            aim for (phase, move), aim in TABLE.items() if phase in new and move is not Move.BEGIN
        }
        new = steps - reached
    assert reached == DECIDED_PHASES


def test_every_phase_can_be_reached_from_idle():
    reached = {Phase.IDLE}
    for _ in Phase:
        reached |= {aim for (phase, _), aim in TABLE.items() if phase in reached}
    assert reached == set(Phase)
