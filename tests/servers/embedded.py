"""Our own broker with the handles that Apache Kafka's server has in the tests."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from servers.processes import pause_process

from epochal.broker.embedded import BrokerProcess

SETTINGS = {"topics_auto_created": False, "retention_ms": -1}
"""As Apache Kafka is set up here: records of tests may be of any time."""


class EmbeddedServer:
    def __init__(self, folder: Path, **options: Any) -> None:
        self.folder = folder
        settings = {**SETTINGS, **options.pop("settings", {})}
        self._process = BrokerProcess(folder, settings=settings, **{"fsync": False, **options})

    def address(self, _listener: str = "PLAIN") -> str:
        return self._process.address

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self) -> None:
        self._process.start()

    def stop(self) -> None:
        self._process.stop()

    def kill(self) -> None:
        self._process.kill()

    def pause(self) -> None:
        pause_process(self._process.pid)

    def resume(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)
