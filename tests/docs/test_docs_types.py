"""The check of the docs' examples, which `make check` runs, finds mistakes and nothing else."""

from __future__ import annotations

import pytest

import docs_types

WRONG = {
    "ep.Filez('out')": ("Filez",),
    "ep.Files('out', formatt='csv')": ("formatt",),
    "ep.Files('out', format='cvs')": ("cvs",),
    "pipeline.start(orders, 'chk', availableNow='yes')": ("availableNow", '"str"'),
    "pipeline.start(orders, 'chk', processing_time='1 second')": ("processing_time", "overload"),
    "pipeline.start(orders, 'chk', outputMode='apend')": ("outputMode", "apend", "overload"),
    "pipeline.start(orders, 'chk', unfinished='never')": ("unfinished", "never", "overload"),
    "pipeline.start('orders', 'chk')": ('"str"', "DataFrame"),
}
RIGHT = """\
pipeline.start(orders, checkpointLocation="chk", trigger={"availableNow": True}, queryName="q")
pipeline.start(orders, "chk", outputMode="update", once=True).awaitTermination()
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    wrong = "\n".join(["# Mistakes", "```python", *WRONG, "```"])
    right = f"# None\n```python\n{RIGHT}```\n"
    texts = {"wrong.md": wrong, "right.md": right}
    return docs_types.mistakes(texts, tmp_path_factory.mktemp("types"))


def test_nothing_is_found_where_there_is_no_mistake(found: list[str]) -> None:
    assert [mistake for mistake in found if not mistake.startswith("wrong.md:")] == []


@pytest.mark.parametrize("checker", ["mypy", "pyright"])
@pytest.mark.parametrize("code", WRONG)
def test_a_mistake_is_an_error_to_both_checkers(code: str, checker: str, found: list[str]) -> None:
    line = list(WRONG).index(code) + 3
    mine = [
        mistake
        for mistake in found
        if mistake.startswith(f"wrong.md:{line}:") and mistake.endswith(f"({checker})")
    ]
    # Of a function with overloads mypy also lists why none of them fits.
    assert mine
    assert any(word in mistake for mistake in mine for word in WRONG[code])
