"""`Kafka`: a topic of a Kafka cluster, written in transactions that the driver ends."""

from epochal.sinks.kafka.sink import Kafka
from epochal.sinks.kafka.values import json

__all__ = ["Kafka", "json"]
