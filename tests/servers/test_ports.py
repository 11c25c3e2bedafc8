"""No two servers of a test run are given the same port, in whichever process they are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from servers import ports

_ANOTHER = """
import sys
from servers import ports
ports._RANGE = range(*map(int, sys.argv[1:]))
print(ports.free_port())
"""


def test_a_port_stays_with_the_process_that_got_it(monkeypatch: pytest.MonkeyPatch) -> None:
    first = ports.free_port()
    monkeypatch.setattr(ports, "_RANGE", range(first, first + 1))
    with pytest.raises(RuntimeError, match="no free port"):
        ports.free_port()
    ran = subprocess.run(
        [sys.executable, "-c", _ANOTHER, str(first), str(first + 1)],
        cwd=Path(ports.__file__).parent.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert f"no free port between {first} and" in ran.stderr
