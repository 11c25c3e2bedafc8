"""Where a pipeline is put together from its parts: the one room that knows every adapter's name."""

from __future__ import annotations

from epochal.assembly.reaching import Reached, log_at, reach

__all__ = ["Reached", "log_at", "reach"]
