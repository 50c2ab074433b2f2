"""How workers train by themselves and exchange what they have learned: the argument `outer` of distributed optimizers.

Sources: Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019; Douillard et al., "DiLoCo: Distributed
Low-Communication Training of Language Models", arXiv 2311.08105; Douillard et al., "Streaming DiLoCo with overlapping
communication", arXiv 2501.18512.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from hvdlite.core.errors import UnsupportedError
from hvdlite.core.process_set import ProcessSet, global_process_set
from hvdlite.core.types import ReduceOp
from hvdlite.core.world import Hosts

CARRY = "carry"
"""The value of `merge` that keeps what was learned during the exchange."""


@dataclasses.dataclass(frozen=True)
class DiLoCo:
    """Train in workers that average gradients inside, and exchange their changes of the parameters every few steps.

    The parameters are divided into fragments, which are exchanged one after the other. The mean change of all workers is
    the gradient of an outer optimizer, SGD, which changes the global weights. All ranks give equal arguments.

    Attributes:
        every: steps of the optimizer between two exchanges of a fragment.
        workers: "host": the ranks of a host are a worker; "rank": each rank is one; or registered process sets, each rank of
            the job in one of them.
        fragments: number of parts of about equal size; at most one for each parameter.
        delay: steps between the begin of an exchange and its use, less than `every`, in which training goes on. None: as
            many steps as an exchange was measured to take, at most `every // fragments - 1`.
        merge: what a parameter becomes after an exchange with a delay. "carry": the new global weight plus what this worker
            has learned since the exchange began. A number a, at least 0 and below 1: a times the local weight plus 1 - a
            times the global one.
        lr: learning rate of the outer optimizer.
        momentum: of the outer optimizer; at least 0, below 1.
        nesterov: whether this is Nesterov's momentum.
        wire: "int8": changes are sent in 8 bits, and rounding errors are kept for the next exchange; None: as they are.

    Raises:
        ValueError: for anything else.
    """

    every: int
    _: dataclasses.KW_ONLY
    workers: str | Sequence[ProcessSet] = "host"
    fragments: int = 4
    delay: int | None = None
    merge: str | float = CARRY
    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True
    wire: str | None = "int8"

    def __post_init__(self) -> None:
        self._check("every", _is_count(self.every, 1), "a whole number, at least 1")
        self._check("fragments", _is_count(self.fragments, 1), "a whole number, at least 1")
        self._check("delay", self.delay is None or (_is_count(self.delay, 0) and self.delay < self.every),
                    f"None, or a whole number from 0 to every - 1 = {self.every - 1}")
        self._check("merge", self.merge == CARRY or _is_between(self.merge, 0.0, 1.0),
                    '"carry", or a number of at least 0 and below 1')
        self._check("lr", _is_between(self.lr, 0.0, math.inf) and self.lr > 0, "a positive number")
        self._check("momentum", _is_between(self.momentum, 0.0, 1.0), "a number of at least 0 and below 1")
        self._check("wire", self.wire in ("int8", None), '"int8" or None')
        is_known = self.workers in ("host", "rank") if isinstance(self.workers, str) else (
            isinstance(self.workers, (list, tuple)) and all(isinstance(each, ProcessSet) for each in self.workers))
        self._check("workers", is_known, '"host", "rank", or a list of process sets')

    def _check(self, name: str, is_valid: bool, what: str) -> None:
        if not is_valid:
            raise ValueError(f"outer: {name} must be {what}, not {getattr(self, name)!r}")

    def ranks_of_workers(self, hosts: Hosts) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of each worker, in the order of their first ranks.

        Args:
            hosts: of all ranks of the job.

        Raises:
            ValueError: for process sets that are not registered, or that do not have each rank of the job once.
        """
        everybody = sorted(rank for host in hosts.ranks_by_host for rank in host)
        if self.workers == "host":
            return hosts.ranks_by_host
        if isinstance(self.workers, str):
            return tuple((rank,) for rank in everybody)
        found = sorted(tuple(each.ranks or ()) for each in self.workers if each.process_set_id is not None)
        if sorted(rank for ranks in found for rank in ranks) != everybody or len(found) < len(self.workers):
            raise ValueError(f"outer: workers={list(self.workers)} must be registered process sets (hvd.add_process_set) "
                             f"with each of the ranks 0 to {len(everybody) - 1} in one of them")
        return tuple(found)


def LocalSGD(every: int, *, workers: str | Sequence[ProcessSet] = "host") -> DiLoCo:
    """Return the settings of local SGD: every few steps, all parameters become the mean of all workers' parameters.

    Args:
        every: steps of the optimizer between two exchanges.
        workers: see `DiLoCo`.

    Raises:
        ValueError: for invalid arguments.
    """
    return DiLoCo(every, workers=workers, fragments=1, delay=0, lr=1.0, momentum=0.0, nesterov=False, wire=None)


def check_outer(outer: object, op: ReduceOp, process_set: ProcessSet, *refused: tuple[bool, str]) -> None:
    """Raise an error for what does not go with `outer`.

    Args:
        refused: whether something is there, and what it is and does.

    Raises:
        ValueError: for something that is no `DiLoCo`, and a process set.
        UnsupportedError: for Adasum, and what is refused.
    """
    if not isinstance(outer, DiLoCo):
        raise ValueError(f"outer must be hvd.DiLoCo(...) or hvd.LocalSGD(...), not {outer!r}")
    if process_set is not global_process_set:
        raise ValueError("outer= trains with all ranks of the job: leave process_set out, and give "
                         "outer=hvd.DiLoCo(workers=[...]) the process sets that are workers")
    for is_there, what in ((op is ReduceOp.ADASUM, "op=Adasum combines the steps of all ranks in every step"), *refused):
        if is_there:
            raise UnsupportedError(f"outer=: {what}, and workers train by themselves; leave one of the two out")


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_between(value: object, least: float, below: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value < below
