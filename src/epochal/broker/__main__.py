"""`python -m epochal.broker` with one JSON object as its first input: how `embedded` starts one."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading

from epochal.broker.core.settings import Settings
from epochal.broker.server import serve
from epochal.errors import EpochalError


def main() -> int:
    options = json.loads(sys.stdin.readline())
    settings = Settings(**options.pop("settings", {}))

    def ready(address: str) -> None:
        sys.stdout.write(address + "\n")
        sys.stdout.flush()

    threading.Thread(target=_stop_with_parent, daemon=True).start()
    try:
        serve(**options, settings=settings, ready=ready)
    except EpochalError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    return 0


def _stop_with_parent() -> None:
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
