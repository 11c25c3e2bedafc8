"""H2 in Oracle mode, in a process of its own: it reads Oracle's SQL, and is not Oracle."""

from __future__ import annotations

import base64
import subprocess
import threading
from decimal import Decimal
from pathlib import Path
from typing import Any

from servers.jvm import QUICK
from servers.maven import artifact
from servers.programs import jdk_java

RELEASE = "2.3.232"
_PROGRAM = Path(__file__).resolve().parent.parent / "sinks" / "oracle" / "java" / "H2.java"


class H2Error(Exception):
    """What H2 says, with its number."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.number = number


def jar() -> Path:
    return artifact("h2", f"com.h2database:h2:{RELEASE}")


class H2Server:
    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [jdk_java(), *QUICK, "-cp", str(jar()), str(_PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._lock = threading.Lock()

    def ask(self, session: str, verb: str, statement: str = "") -> int | list[tuple[Any, ...]]:
        """How many rows were touched, or the rows that were asked for."""
        encoded = base64.b64encode(statement.encode()).decode()
        with self._lock:
            if self._process.stdin is None or self._process.stdout is None:
                raise RuntimeError("H2 has no pipes")
            self._process.stdin.write(f"{session} {verb} {encoded}\n".encode())
            self._process.stdin.flush()
            line = self._process.stdout.readline().decode().strip()
        kind, _, rest = line.partition(" ")
        if kind == "done":
            return int(rest)
        if kind == "rows":
            return [tuple(map(_value, row.split())) for row in rest.split("|")[1:]]
        number, _, message = rest.partition(" ")
        raise H2Error(int(number or 0), base64.b64decode(message).decode() or line)

    def stop(self) -> None:
        self._process.kill()
        self._process.communicate()


def _value(cell: str) -> Any:
    kind, text = cell[0], cell[1:]
    if kind == "N":
        return None
    if kind == "I":
        number = Decimal(text)
        return int(number) if number == number.to_integral_value() else number
    data = base64.b64decode(text)
    return data if kind == "B" else data.decode()
