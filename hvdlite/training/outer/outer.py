"""One rank's part in the training of several workers: counts steps, begins exchanges, and merges what they bring.

Rules
- All ranks count the same steps. What is exchanged when depends on the count only, so nobody is asked.
- Global weights and momentum are bitwise equal on all ranks: each makes the same outer step with the same mean change.
- An exchange whose mean change is not finite is skipped on all ranks: they decode the same bytes.
- What an exchange leaves (errors) counts when it is merged. So one under way can begin again after a restart, from
  `Fragment.start`, with the same bytes.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from hvdlite import api
from hvdlite.core.array import Array
from hvdlite.core.errors import MismatchError, UnsupportedError
from hvdlite.core.process_set import ProcessSet
from hvdlite.runtime.runtime import Runtime
from hvdlite.training import objects
from hvdlite.training.outer.exchange import Exchange, Round
from hvdlite.training.outer.fragment import NEVER, Fragment
from hvdlite.training.outer.schedule import Schedule, divide
from hvdlite.training.outer.settings import DiLoCo
from hvdlite.training.replicas import check_replicas

_log = logging.getLogger("hvdlite")

_ADVICE = ("Global weights have to be equal on all ranks when training begins, and when a checkpoint is loaded: call "
           "broadcast_parameters (Keras: broadcast_variables, BroadcastGlobalVariablesCallback) before the first step, and "
           "load checkpoints of the same step")


class LocalWeights(Protocol):
    """The parameters of this rank, in a framework. Flat arrays have the dtype of their fragment."""

    def read(self, parameters: range, dtype: np.dtype[np.floating]) -> Array:
        """Return a copy of the values of some parameters, one after the other."""

    def write(self, parameters: range, values: Array) -> None:
        """Overwrite parameters; `values` are not kept."""

    def rounded(self, parameters: range, values: Array) -> Array:
        """Return what `read` returns after `write`: `values` themselves, or a copy for parameters in fewer bits."""


@dataclasses.dataclass(frozen=True)
class Parameter:
    """What is known of a parameter without its values.

    Attributes:
        size: number of real values.
        dtype: NumPy's name of the parameter's.
    """

    name: str
    size: int
    dtype: str


def agree_on_workers(runtime: Runtime, settings: DiLoCo, label: str) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each worker, or nothing where there is only one; all ranks call this.

    Args:
        label: equal on all ranks.

    Raises:
        MismatchError: on all ranks, when their arguments differ.
        ValueError: see `DiLoCo.ranks_of_workers`.
    """
    workers = settings.ranks_of_workers(runtime.hosts)
    arguments = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
    arguments["workers"] = list(map(list, workers))
    _check_equal(runtime, ", ".join(f"{name}={value!r}" for name, value in arguments.items()), f"{label}.arguments",
                 "give all ranks the same arguments")
    if len(workers) > 1:
        return workers
    if runtime.world.rank == 0 and not api.is_provisional():
        _log.warning("outer= changes nothing here: all %d ranks are one worker (workers=%r), which averages gradients in "
                     "every step", runtime.world.size, settings.workers)
    return ()


def register_worker(runtime: Runtime, workers: Sequence[tuple[int, ...]]) -> ProcessSet | None:
    """Register the workers as process sets, and return that of this rank; None without workers. All ranks call this."""
    own = None
    for ranks in workers:
        found = runtime.process_set_of(ranks)
        number = runtime.add_process_set(ranks).wait() if found is None else found
        if runtime.world.rank in ranks:
            own = ProcessSet(ranks)
            own.register(number, runtime.world.rank)
    return own


def _check_equal(runtime: Runtime, own: str, name: str, advice: str) -> None:
    texts = objects.allgather_object(runtime, own, name)
    other = next((rank for rank, text in enumerate(texts) if text != texts[0]), None)
    if other is not None:
        raise MismatchError(f"outer= differs between ranks: {texts[0]} on rank 0, {texts[other]} on rank {other}; {advice}")


def saved_weights(state: Mapping[str, Any], settings: DiLoCo, parameters: Sequence[Parameter]) -> list[tuple[str, Array]]:
    """Return what `Outer.global_weights` returns after a begin with a state, without the begin.

    Raises:
        ValueError: for a state that does not fit.
    """
    parts = divide([each.size for each in parameters], settings.fragments)
    check_fits(state, [sum(parameters[index].size for index in part) for part in parts])
    return _by_parameter([each["weights"] for each in state["fragments"]], parts, parameters)


def _by_parameter(weights: Sequence[Array], parts: Sequence[range],
                  parameters: Sequence[Parameter]) -> list[tuple[str, Array]]:
    """Return the name and the values of each parameter, given the values of each fragment."""
    found = []
    for part, values in zip(parts, weights, strict=True):
        ends = np.cumsum([parameters[index].size for index in part])
        found += [(parameters[index].name, own) for index, own in zip(part, np.split(values, ends[:-1]), strict=True)]
    return found


def first_fragments(settings: DiLoCo, parameters: Sequence[Parameter],
                    weights: LocalWeights) -> tuple[list[range], list[Fragment]]:
    """Return the indices of the parameters of each fragment, and the fragments of a beginning."""
    parts, fragments = divide([each.size for each in parameters], settings.fragments), []
    for part in parts:
        is_double = any(parameters[index].dtype in ("float64", "complex128") for index in part)
        begin = weights.read(part, np.dtype(np.float64 if is_double else np.float32))
        fragments.append(Fragment(begin, np.zeros_like(begin) if settings.momentum else None))
    return parts, fragments


def check_fits(state: Mapping[str, Any], expected: Sequence[int]) -> None:
    """Raise a `ValueError` for a state whose fragments have other numbers of values."""
    sizes = [each["weights"].size for each in state["fragments"]]
    if sizes != list(expected):
        raise ValueError(f"the optimizer's outer state, saved by rank {state['rank']}, is of fragments of {sizes} values, "
                         f"and this optimizer has fragments of {list(expected)}: load it with the same parameters and "
                         "fragments=")


class Outer:
    """The exchanges of one optimizer in one world.

    Args:
        label: equal on all ranks.
        workers: the ranks of each worker, at least two of them.
        parameters: the same on all ranks.
        weights: their values on this rank, which are equal on all ranks, unless a state is loaded.
        state: of `state`, to go on with; None for a beginning.

    Raises:
        MismatchError: on all ranks, when their states are of different steps.
        ReplicaMismatchError: on all ranks, when their parameters or global weights differ.
        UnsupportedError: for parameters that are no floating-point or complex numbers.
        ValueError: for a state that does not fit.
    """

    def __init__(self, runtime: Runtime, label: str, settings: DiLoCo, workers: Sequence[tuple[int, ...]],
                 parameters: Sequence[Parameter], weights: LocalWeights, state: Mapping[str, Any] | None = None) -> None:
        self._runtime, self._label, self._settings, self._workers = runtime, label, settings, workers
        self._parameters, self._weights = parameters, weights
        for each in parameters:
            if not each.dtype.startswith(("float", "bfloat", "complex")):
                raise UnsupportedError(f"rank {runtime.world.rank}: outer=: parameter '{each.name}' is {each.dtype}, and "
                                       "workers average floating-point and complex numbers: make it a buffer, or leave it "
                                       "out of the optimizer")
        self._parts, self._fragments = first_fragments(settings, parameters, weights)
        self._schedule = Schedule(settings.every, len(self._parts), settings.delay or 0)
        if settings.delay is None:
            self._schedule.delay = self._schedule.longest_delay
        self._has_delay = settings.delay is not None or not self._schedule.longest_delay  # else it is to be measured
        self.step = self.skipped = 0
        self._seconds, self._stepped, self._timed = 0.0, time.monotonic(), 0
        self._rounds: dict[int, Round] = {}  # under way, in the order of their begins
        if state is not None:
            self._load(state)
        self._check_alike()
        self._exchange = Exchange.open(f"{label}", workers, runtime.world.rank, settings.wire)
        for index in sorted((index for index, each in enumerate(self._fragments) if each.start is not None),
                            key=lambda index: (self._fragments[index].due, index)):
            self._send(index)

    def close(self) -> None:
        """Give up what is under way, and leave the world."""
        self._rounds.clear()
        self._exchange.close()

    # --- steps ---------------------------------------------------------------------------------------------------------

    @property
    def is_due(self) -> bool:
        """Whether the next `stepped` begins or merges something; else it needs no weights."""
        following = self.step + 1
        return bool(self._schedule.beginning(following)) or any(
            self._fragments[index].due <= following for index in self._rounds)

    def stepped(self) -> None:
        """The optimizer has made a step: begin and merge what is due."""
        self.step += 1
        now = time.monotonic()
        if self._timed:
            self._seconds += now - self._stepped
        self._timed, self._stepped = self._timed + 1, now
        for index in self._schedule.beginning(self.step):
            self._begin(index, self._schedule.delay)
        slowest = [self._merge(index) for index in list(self._rounds) if self._fragments[index].due <= self.step]
        if slowest and not self._has_delay and self.step >= self._settings.every:
            self._agree_on_delay(max(slowest))

    def synchronize(self) -> None:
        """Merge everything now: the local weights of all ranks become the global ones. All ranks call this.

        What is under way is merged as usual. What workers have learned since is averaged without the outer optimizer, whose
        momentum would make a whole step of it, however little it is. If that is left out, it is lost.
        """
        for index in list(self._rounds):
            self._merge(index)
        behind = [index for index, each in enumerate(self._fragments)
                  if each.begun < self.step or each.due > each.begun]
        for index in behind:
            self._begin(index, 0)
        for index in behind:
            self._merge(index, averages=True)

    def _begin(self, index: int, delay: int) -> None:
        part, fragment = self._parts[index], self._fragments[index]
        fragment.start = self._weights.read(part, fragment.weights.dtype)
        fragment.begun, fragment.due, fragment.is_reset = self.step, self.step + delay, False
        self._send(index)

    def _send(self, index: int) -> None:
        fragment = self._fragments[index]
        change = self._weights.rounded(self._parts[index], fragment.weights) - fragment.start
        what = f"outer exchange of fragment {index}, begun at step {fragment.begun} for step {fragment.due}"
        self._rounds[index] = Round(self._exchange, what, change, fragment.errors)

    def _merge(self, index: int, *, averages: bool = False) -> float:
        """Merge an exchange; return how long it took.

        Args:
            averages: add the mean change to the global weights, without a step of the outer optimizer.
        """
        round_, fragment, part = self._rounds.pop(index), self._fragments[index], self._parts[index]
        mean = round_.finish()
        if np.isfinite(mean).all():
            local = self._weights.read(part, mean.dtype)
            fragment.errors = round_.errors
            fragment.merges += 1
            if averages:
                fragment.weights -= mean
            else:
                fragment.step(mean, self._settings)
            self._weights.write(part, fragment.merged(local, self._settings))
            fragment.start = None
            return round_.seconds
        fragment.start = None
        self._skip(fragment)
        if averages:
            self._weights.write(part, fragment.weights)
        else:
            fragment.begun = fragment.due = NEVER
        return round_.seconds

    def _skip(self, fragment: Fragment) -> None:
        """Leave out an exchange; a rank with weights that are not finite takes the global ones, of all fragments."""
        local = (self._weights.read(part, each.weights.dtype)
                 for part, each in zip(self._parts, self._fragments, strict=True))
        is_finite = all(np.isfinite(values).all() for values in local)
        if not self.skipped:
            _log.warning("rank %d: the outer exchange that began at step %d is left out on all ranks, because some workers' "
                         "weights are not finite; %s. Later ones are left out without a message",
                         self._runtime.world.rank, fragment.begun, "this rank's are" if is_finite else
                         "this rank's are not, and become the global weights. State of its optimizer may be NaN too; then "
                         "they do not stay finite: load a checkpoint")
        self.skipped += 1
        if is_finite:
            return
        for part, each in zip(self._parts, self._fragments, strict=True):
            self._weights.write(part, each.weights)
            each.is_reset = each.start is not None

    def _agree_on_delay(self, seconds: float) -> None:
        """Let all ranks wait as many steps for an exchange as it takes on rank 0."""
        longest = self._schedule.longest_delay
        step = self._seconds / max(1, self._timed - 1)
        wanted = math.ceil(seconds / step) if step else longest
        agreed = np.array([min(wanted, longest)])
        self._runtime.broadcast(f"{self._label}.delay", agreed, 0, blocking=True).wait()
        self._schedule.delay, self._has_delay = int(agreed[0]), True
        if self._runtime.world.rank == 0:
            _log.info("outer exchanges take %.3f s, and steps %.3f s: they are merged after %d steps%s", seconds, step,
                      self._schedule.delay, f", and training waits for the rest: raise every={self._settings.every}"
                      if wanted > longest else "")

    # --- comparisons ---------------------------------------------------------------------------------------------------

    def global_weights(self) -> list[tuple[str, Array]]:
        """Return the name and the global values of each parameter, flat; views, which change with the next exchange."""
        return _by_parameter([each.weights for each in self._fragments], self._parts, self._parameters)

    def check_replicas(self) -> None:
        """Compare the global weights of all ranks, which call this alike; see `training.replicas`."""
        check_replicas(self._runtime, self.global_weights(), f"{self._label}.check", advice=_ADVICE)

    def _check_alike(self) -> None:
        under_way = {index: each.due for index, each in enumerate(self._fragments) if each.start is not None}
        _check_equal(self._runtime, f"step {self.step} and merges to come (fragment: step) {under_way}",
                     f"{self._label}.begin", "load checkpoints of the same step on all ranks")
        self.check_replicas()

    # --- checkpoints ---------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint of this rank has: plain data, and copies of arrays."""
        return {"step": self.step, "delay": self._schedule.delay, "has_delay": self._has_delay,
                "rank": self._runtime.world.rank, "workers": [list(each) for each in self._workers],
                "fragments": [each.state() for each in self._fragments]}

    def _load(self, state: Mapping[str, Any]) -> None:
        """Go on with a state. Errors of another rank, or of other workers, are not this one's."""
        is_own = (state["rank"], state["workers"]) == (self._runtime.world.rank, [list(each) for each in self._workers])
        check_fits(state, [each.weights.size for each in self._fragments])
        self.step = state["step"]
        if self._settings.delay is None:
            self._schedule.delay = min(state["delay"], self._schedule.longest_delay)
            self._has_delay = self._has_delay or state["has_delay"]
        for fragment, saved in zip(self._fragments, state["fragments"], strict=True):
            fragment.load(saved, with_errors=is_own and self._settings.wire is not None)
