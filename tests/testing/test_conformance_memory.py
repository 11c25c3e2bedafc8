"""The reference sink meets the suite."""

from epochal.sinks.memory import Memory
from epochal.sinks.memory.sink import PROMISES
from epochal.testing.conformance import SinkConformance, Target

(PROMISED,) = PROMISES
CANNOT = PROMISED.cannot


class TestMemory(SinkConformance):
    def make(self, tmp_path):
        sink = Memory()
        return Target(sink=sink, visible=lambda: sink.rows().to_pylist(), cannot=CANNOT)
