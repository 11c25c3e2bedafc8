"""Numbers with their nouns, as text."""

import pytest

from epochal.terms import quantity


@pytest.mark.parametrize(
    ("text", "number", "nouns"),
    [
        ("0 rows", 0, ["row"]),
        ("1 row", 1, ["row"]),
        ("2,000 rows", 2000, ["row"]),
        ("1 entry", 1, ["entry", "entries"]),
        ("3 entries", 3, ["entry", "entries"]),
    ],
)
def test_a_number_and_its_noun_agree(text, number, nouns):
    assert quantity(number, *nouns) == text
