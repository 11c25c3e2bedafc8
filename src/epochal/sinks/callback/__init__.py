"""`Callback`: a function that is called with each epoch after its decision."""

from epochal.sinks.callback.sink import Callback, CallbackEpoch

__all__ = ["Callback", "CallbackEpoch"]
