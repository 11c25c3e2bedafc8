"""A function of yours, called with each epoch after its decision."""

from epochal.sinks.callback.delivery import CallbackEpoch
from epochal.sinks.callback.sink import Callback

__all__ = ["Callback", "CallbackEpoch"]
