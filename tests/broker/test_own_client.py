"""Every test of our own client against Apache Kafka holds against our broker too."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("test_broker")

from test_broker import *  # noqa: E402, F403  the same tests, with this folder's broker
