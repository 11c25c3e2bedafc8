"""A member of a cluster that others, or the store, can't be reached by.

Files in the folder that CUT_OFF names say what: `members`, at the start, or `store-PID`, at any
time. Run as `python -m epochal.broker` is.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

from epochal.broker.__main__ import main
from epochal.broker.shared import member, peers
from epochal.broker.shared.journal import SharedJournal
from epochal.errors import TryAgain

SILENCE_S = 0.4
STUCK_S = 0.5
_carry_out = SharedJournal.carry_out


async def _say_nothing(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
    await reader.read()


async def _deaf(host: str, port: int, *_: Any) -> asyncio.Server:
    return await asyncio.start_server(_say_nothing, host, port)


def _carry(journal: SharedJournal, action: Any) -> Any:
    if (Path(os.environ["CUT_OFF"]) / f"store-{os.getpid()}").exists():
        raise TryAgain("no route to the store")
    return _carry_out(journal, action)


if __name__ == "__main__":
    member._STUCK_S = STUCK_S
    SharedJournal.carry_out = _carry  # type: ignore[method-assign]
    if (Path(os.environ["CUT_OFF"]) / "members").exists():
        peers.SILENCE_S = SILENCE_S
        peers.serve_status = _deaf
    sys.exit(main())
