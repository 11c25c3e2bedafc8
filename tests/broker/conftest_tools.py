"""What several tests need and is no fixture."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable

from epochal.kafka.client import Client
from epochal.kafka.cluster import Controller
from epochal.kafka.messages.create_topics import (
    CreatableTopic,
    CreatableTopicConfig,
    CreateTopicsRequest,
)

PROOF_KILLS = int(os.environ.get("EPOCHAL_KILLS", "70"))
"""How long tests that are marked `proof` go on: `make proof ONLY=kills KILLS=70`."""
MakeTopic = Callable[..., str]
_numbers = itertools.count()


def new_topic(client: Client, partitions: int = 1, *, name: str = "", **configs: str) -> str:
    name = name or f"topic-{os.getpid()}-{next(_numbers)}"
    wanted = CreatableTopic(
        name=name,
        num_partitions=partitions,
        replication_factor=1,
        configs=[
            CreatableTopicConfig(name=key.replace("_", "."), value=value)
            for key, value in configs.items()
        ],
    )
    request = CreateTopicsRequest(topics=[wanted], timeout_ms=10_000)
    (made,) = client.ask(request, Controller()).topics
    assert made.error_code == 0, made.error_message
    return name
