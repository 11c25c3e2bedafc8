"""The list of mutants matches the code; `make proof ONLY=mutants` runs them."""

from pathlib import Path

import pytest

from proof import mutants

ROOT = Path(__file__).resolve().parent.parent.parent


def test_there_are_enough_of_them_and_each_has_a_name():
    names = [mutant.name for mutant in mutants.MUTANTS]
    assert len(names) >= 12
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda mutant: mutant.name)
def test_the_text_that_it_breaks_is_in_the_code_once(mutant):
    for edit in mutant.edits:
        text = (ROOT / edit.path).read_text()
        assert text.count(edit.old) == 1, edit
        assert edit.new != edit.old


def test_a_mutant_whose_text_is_gone_is_reported(tmp_path):
    gone = mutants.Edit("x.py", "no such text", "")
    (tmp_path / "x.py").write_text("something else")
    assert not mutants.applied(gone, tmp_path)
    assert not mutants.applied(mutants.Edit("missing.py", "a", "b"), tmp_path)
