"""HTTP services: in two phases, or by calls that carry a key."""

from epochal.sinks.http.sink import Http

__all__ = ["Http"]
