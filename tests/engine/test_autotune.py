"""Settings are tried, scored, logged, and taken over by all ranks at once."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hvdlite.core.config import Config, tunable
from hvdlite.core.errors import ConfigError
from hvdlite.engine.autotune import SAMPLES, SETTLING_ROUNDS, Autotuner
from hvdlite.negotiation.coordinator import Coordinator
from hvdlite.negotiation.layouts import BucketSizes
from hvdlite.negotiation.negotiator import Policy
from tests.engine.programs import autotune as programs
from tests.worlds import TORCH, processes

pytest.importorskip("optuna")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Recorded(Coordinator):
    """A coordinator whose progress the test makes, and whose settings it sees."""

    rounds = reduced_bytes = 0  # type: ignore[assignment]

    def __init__(self, size: int, policy: Policy) -> None:
        super().__init__(size, policy)
        self.told: list[dict[str, int]] = []

    def tune(self, settings: Mapping[str, int], now: float) -> None:
        self.told.append(dict(settings))
        super().tune(settings, now)


def test_the_best_setting_stays_and_what_the_user_set_is_left_alone(tmp_path: Path) -> None:
    log = tmp_path / "tuning.csv"
    config = Config(autotune=True, autotune_log_file=str(log), autotune_max_samples=12, autotune_steps_per_sample=2,
                    autotune_warmup_samples=1, shm_chunk=1 << 19 | 1, shm_direct=1)
    assert "shm_chunk" not in tunable(config) and "bucket_size" in tunable(config)
    coordinator, clock = Recorded(2, Policy(bucket_sizes=BucketSizes(4 << 20, 25 << 20))), Clock()
    told = coordinator.told
    tuner = Autotuner(config, coordinator, clock)
    for _ in range(12 * (SAMPLES * 2 + SETTLING_ROUNDS + 4)):
        size = told[-1]["bucket_size"] if told else 25 << 20
        clock.now += 1.0 + abs(size - (8 << 20)) / (8 << 20)  # 8 MiB is best
        coordinator.rounds += 1
        coordinator.reduced_bytes += 1000
        tuner.look()
    rows = list(csv.DictReader(log.open()))
    scores = [float(row["score"]) for row in rows]
    assert len(told) == 12 and len(rows) == 13
    assert int(rows[0]["bucket_size"]) == 25 << 20  # the first one tried is the user's
    assert scores[-1] == max(scores) > scores[0] and dict(rows[-1]) == dict(rows[scores.index(max(scores))])
    assert told[-1]["bucket_size"] == int(rows[-1]["bucket_size"]) and set(told[-1]) == set(tunable(config))
    decision = coordinator.decide()
    assert decision is not None and dict(decision.tuned)["bucket_size"] == told[-1]["bucket_size"]
    assert coordinator.negotiator.policy.bucket_sizes.middle == told[-1]["bucket_size"]


def test_a_log_that_cannot_be_written_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        Autotuner(Config(autotune_log_file=str(tmp_path / "no" / "log.csv")), Coordinator(1, Policy()))


def test_training_goes_on_with_equal_replicas_while_settings_change(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    log = tmp_path / "tuning.csv"
    environment: dict[str, Any] = {
        "HVDLITE_AUTOTUNE": "1", "HVDLITE_AUTOTUNE_LOG_FILE": str(log), "HVDLITE_AUTOTUNE_MAX_SAMPLES": "4",
        "HVDLITE_AUTOTUNE_STEPS_PER_SAMPLE": "2", "HVDLITE_AUTOTUNE_WARMUP_SAMPLES": "0", "HVDLITE_REPLICA_CHECK_STEPS": "5"}
    processes(2, programs.training_goes_on_with_equal_replicas_while_settings_change, environment=environment,
              imported=TORCH)
    rows = list(csv.DictReader(log.open()))
    assert len(rows) == 5 and len({row["bucket_size"] for row in rows}) > 1 and all(float(row["score"]) > 0 for row in rows)
