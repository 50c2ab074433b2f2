"""A program that takes a strategy from `hvdlite_tf` and imports nothing else."""

from __future__ import annotations

import hvdlite_tf


def a_strategy_alone() -> None:
    assert hvdlite_tf.MirroredStrategy().num_replicas_in_sync == 1
