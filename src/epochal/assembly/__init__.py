"""Where a pipeline is put together from its parts: the one room that knows every adapter's name."""

from __future__ import annotations

from epochal.assembly.reaching import Reached, Streaming, log_at, reach, streaming_by

__all__ = ["Reached", "Streaming", "log_at", "reach", "streaming_by"]
