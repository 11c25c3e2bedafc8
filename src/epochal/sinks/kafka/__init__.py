"""A topic of a Kafka cluster, written in transactions that the driver ends."""

from epochal.sinks.kafka.sink import Kafka
from epochal.sinks.kafka.values import json
from epochal.sinks.kafka.values_avro import avro
from epochal.sinks.kafka.values_protobuf import protobuf

__all__ = ["Kafka", "avro", "json", "protobuf"]
