"""Autotune: rank 0 proposes sizes of fused responses and buckets; all ranks use them from the same decision on.

A setting is measured as the median over some samples of the bytes reduced per second, a sample being some rounds of the
optimizers. Rounds in which layouts are learned anew are not counted. Optuna proposes (tree-structured Parzen estimator,
Bergstra et al., NeurIPS 2011); the first setting is the one the job was started with, and in the end the best one stays.
"""

from __future__ import annotations

import csv
import dataclasses
import logging
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from hvdlite.core.config import Config, tunable
from hvdlite.core.errors import ConfigError
from hvdlite.negotiation.coordinator import Coordinator

_log = logging.getLogger("hvdlite")

SETTLING_ROUNDS: Final = 4
"""After a change: a layout is learned in one round and used two rounds later."""
SAMPLES: Final = 5
"""How many samples the score of a setting is the median of."""
RANDOM_SETTINGS: Final = 5
"""How many settings are tried before the estimator has an opinion."""

Settings = Mapping[str, int]


@dataclasses.dataclass
class _Mark:
    """Where a sample began."""

    round: int
    when: float
    nbytes: int


class Autotuner:
    """Rank 0's.

    Args:
        config: gives the first setting, what may be tuned (what the user did not set), and how long to measure.

    Raises:
        ConfigError: when Optuna is not installed, or the log cannot be written.
    """

    def __init__(self, config: Config, coordinator: Coordinator, clock: Callable[[], float] = time.monotonic) -> None:
        try:
            import optuna
        except ImportError:
            raise ConfigError("HVDLITE_AUTOTUNE needs Optuna: pip install 'hvdlite[autotune]'") from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._config, self._coordinator, self._clock = config, coordinator, clock
        self._space: dict[str, Any] = {
            name: optuna.distributions.IntDistribution(low, high, log=True)
            for name, (low, high) in tunable(config).items()}
        sampler = optuna.samplers.TPESampler(n_startup_trials=RANDOM_SETTINGS, seed=0)
        self._study = optuna.create_study(direction="maximize", sampler=sampler)
        self._study.enqueue_trial({name: coordinator.tuned.get(name, getattr(config, name)) for name in self._space})
        self._trial: Any = self._study.ask(self._space)
        self._to_skip = config.autotune_warmup_samples
        self._scores: list[float] = []
        self._mark: _Mark | None = None
        self._begin_at = coordinator.rounds + SETTLING_ROUNDS
        self._over = not self._space
        self._write([*self._space, "score"], begin=True)

    def look(self) -> None:
        """Take a measurement when one is due, and go on to the next setting; cheap otherwise."""
        rounds = self._coordinator.rounds
        if self._over or rounds < self._begin_at:
            return
        now, nbytes = self._clock(), self._coordinator.reduced_bytes
        if self._mark is not None:
            if rounds < self._mark.round + self._config.autotune_steps_per_sample:
                return
            self._sampled((nbytes - self._mark.nbytes) / (now - self._mark.when))
        self._mark = None if self._over or rounds < self._begin_at else _Mark(rounds, now, nbytes)

    def _sampled(self, score: float) -> None:
        if self._to_skip:
            self._to_skip -= 1
            return
        self._scores.append(score)
        if len(self._scores) < SAMPLES:
            return
        self._study.tell(self._trial, statistics.median(self._scores))
        self._scores.clear()
        self._write([*self._trial.params.values(), f"{self._study.trials[-1].value:.0f}"])
        if len(self._study.trials) < self._config.autotune_max_samples:
            self._trial = self._study.ask(self._space)
            self._apply(self._trial.params)
            return
        best = self._study.best_trial
        self._over = True
        self._apply(best.params)
        self._write([*best.params.values(), f"{best.value:.0f}"])
        _log.info("autotune is done: %s", ", ".join(f"{name}={value}" for name, value in best.params.items()))

    def _apply(self, settings: Settings) -> None:
        self._coordinator.tune(settings, self._clock())
        self._begin_at = self._coordinator.rounds + SETTLING_ROUNDS

    def _write(self, row: list[object], *, begin: bool = False) -> None:
        path = self._config.autotune_log_file
        if not path:
            return
        try:
            with open(path, "w" if begin else "a", encoding="utf-8", newline="") as file:
                csv.writer(file).writerow(row)
        except OSError as error:
            if begin:
                raise ConfigError(f"the log of autotune cannot be written to {path}: {error.strerror}") from None
            _log.error("the log of autotune cannot be written to %s: %s", path, error.strerror)
