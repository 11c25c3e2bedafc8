"""Values for Arrow are the same as those of pyarrow's own functions, and don't import pandas."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest

from epochal import arrow_values


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ("ü", pa.string()),
        ("", pa.large_string()),
        (b"\x00x", pa.binary()),
        (b"x", pa.large_binary()),
        (-1, pa.int32()),
        (2**63 - 1, pa.int64()),
        (None, pa.timestamp("us")),
    ],
)
def test_a_scalar_equals_the_one_of_pyarrow(value, kind):
    assert arrow_values.scalar(value, kind) == pa.scalar(value, kind)


def test_arrays_come_back_as_they_were_also_from_slices():
    values = np.array([3, -1, 2**40], dtype=np.int64)
    column = arrow_values.number_array(values[::-1])
    assert column.to_pylist() == [2**40, -1, 3]
    assert arrow_values.numbers(column.slice(1, 2)).tolist() == [-1, 3]
    assert arrow_values.numbers(column.slice(3)).tolist() == []
    flags = np.array([True] * 9 + [False])
    assert arrow_values.flag_array(flags).to_pylist() == flags.tolist()
    assert arrow_values.flags(arrow_values.flag_array(flags).slice(8)).tolist() == [True, False]
    assert arrow_values.texts(["a", "", "ß"], pa.string()).to_pylist() == ["a", "", "ß"]


def test_none_of_them_imports_pandas():
    code = """
import sys
import numpy as np, pyarrow as pa
from epochal import arrow_values as av
column = av.number_array(np.arange(3))
av.numbers(column), av.flags(column.is_valid()), av.flag_array(np.array([True]))
av.scalar("x", pa.string()), av.scalar(1, pa.int8()), av.scalar(None, pa.int8())
av.texts(["x"], pa.string())
sys.exit("pandas" in sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
