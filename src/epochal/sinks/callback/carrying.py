"""A function on its way to the process that calls it, past those that don't."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from typing import Any


class CarriedFunction:
    """
    Pickled, it is bytes until it is called: executors only write to the spool, and need not have
    the function's module.
    """

    def __init__(self, function: Callable[[Any], Any]) -> None:
        module = getattr(function, "__module__", type(function).__module__)
        name = getattr(function, "__qualname__", type(function).__qualname__)
        self.told = f"{module}.{name}"
        self._function: Callable[[Any], Any] | None = function
        self._pickled = b""

    def get(self) -> Callable[[Any], Any]:
        if self._function is None:
            self._function = pickle.loads(self._pickled)  # noqa: S301  our own bytes, see below
        return self._function

    def __call__(self, epoch: Any) -> Any:
        return self.get()(epoch)

    def __repr__(self) -> str:
        return self.told

    def __getstate__(self) -> dict[str, Any]:
        pickled = self._pickled if self._function is None else _pickled(self._function)
        return {"told": self.told, "_function": None, "_pickled": pickled}


def _pickled(function: Callable[[Any], Any]) -> bytes:
    """As Spark pickles functions, where there is Spark: those of a notebook or script too."""
    if "pyspark" not in sys.modules:
        return pickle.dumps(function)
    from pyspark import cloudpickle  # noqa: PLC0415  only where it is loaded already

    carried: bytes = cloudpickle.dumps(function)  # type: ignore[no-untyped-call]  # untyped there
    return carried
