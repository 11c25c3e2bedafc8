"""The reference sink meets the suite."""

from epochal.sinks.memory import Memory
from epochal.testing.conformance import SinkConformance, Target


class TestMemory(SinkConformance):
    def make(self, tmp_path):
        sink = Memory()
        return Target(sink=sink, visible=lambda: sink.rows().to_pylist())
