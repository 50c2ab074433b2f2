"""The beginning of a world of an elastic job: global weights become equal on all ranks, and no exchange is under way.

Survivors have stopped at different steps: workers wait for each other in exchanges only. Some have merged an exchange that
others have not, or have gone back to an older commit; new ranks have no state. For each fragment

1. The global weights and the momentum of the rank with the most merges count. A rank that lacks the last merge, and has that
   exchange under way, makes it now: its change is part of it. Another one that lacks merges takes the global weights: what
   its state has learned is part of them.
2. An exchange that no rank has merged is given up. What was learned is still the difference of local and global weights.
3. The mean of these differences is added to the global weights, without a step of the outer optimizer, as in
   `Outer.synchronize`. Local weights become the global ones, also on new ranks, which have no part in the mean.

If a rank is lost meanwhile, each of these is done on a rank or not, and the next world begins in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from hvdlite.core.array import Array
from hvdlite.core.types import ReduceOp
from hvdlite.runtime.runtime import Runtime
from hvdlite.training import objects
from hvdlite.training.outer.fragment import NEVER, Fragment
from hvdlite.training.outer.outer import LocalWeights, Parameter, check_fits, first_fragments
from hvdlite.training.outer.settings import DiLoCo

_MERGES: Final = 2
"""As how many merges this counts: not as one, for which an older rank could have an exchange under way."""


def recover(runtime: Runtime, label: str, settings: DiLoCo, workers: Sequence[tuple[int, ...]],
            parameters: Sequence[Parameter], weights: LocalWeights, state: dict[str, Any]) -> bool:
    """Merge everything; all ranks call this. Where no rank has a state, nothing is done.

    Args:
        label: equal on all ranks.
        workers: the ranks of each worker; empty where there is one.
        state: what `Outer.state` has returned, or empty; it is brought up to date, also when this fails.

    Returns:
        Whether the ranks of this worker, one of several, have all made the same steps: what else they have is equal, too.

    Raises:
        HorovodInternalError: like every collective.
        ValueError: for a state that does not fit.
    """
    rank, step = runtime.world.rank, state.get("step", NEVER)
    parts, fragments = first_fragments(settings, parameters, weights)
    if state:
        check_fits(state, [each.weights.size for each in fragments])
    for index, fragment in enumerate(fragments):
        fragment.merges = NEVER
        if state:
            fragment.load(state["fragments"][index], with_errors=False)
    places = objects.allgather_object(runtime, (step, [each.merges for each in fragments]), f"{label}.places")
    steps, merges = zip(*places, strict=True)
    if max(steps) == NEVER:
        return False
    own = next((ranks for ranks in workers if rank in ranks), range(runtime.world.size))
    speaks = step != NEVER and rank == max(own, key=lambda other: (steps[other], -other))  # for its worker
    try:
        for index, (part, fragment) in enumerate(zip(parts, fragments, strict=True)):
            local = weights.read(part, fragment.weights.dtype)
            weights.write(part, _newest(runtime, f"{label}.newest.{index}", fragment, local, settings,
                                        [each[index] for each in merges]))
            change = weights.rounded(part, fragment.weights) - weights.read(part, fragment.weights.dtype)
            total = np.append(change, np.ones(1, change.dtype))
            if not speaks or not np.isfinite(change).all():
                total[:] = 0
            runtime.allreduce(f"{label}.changes.{index}", total, total, ReduceOp.SUM, blocking=True).wait()
            if total[-1]:
                fragment.weights -= total[:-1] / total[-1]
            fragment.merges += _MERGES
            weights.write(part, fragment.weights)
        step = max(steps)
    finally:
        state.update(step=step, delay=settings.every, has_delay=False, rank=0, workers=[],  # the delay is measured anew
                     fragments=[each.state() for each in fragments])
    return bool(workers) and {steps[each] for each in own} == {steps[rank]} != {NEVER}


def _newest(runtime: Runtime, name: str, fragment: Fragment, local: Array, settings: DiLoCo, merges: Sequence[int]) -> Array:
    """Bring a fragment up to date, with nothing under way; return what the local weights become.

    Args:
        merges: of all ranks.
    """
    newest = max(merges)
    if min(merges) < newest:
        received = np.stack([fragment.weights] if fragment.momentum is None else [fragment.weights, fragment.momentum])
        runtime.broadcast(name, received, merges.index(newest), blocking=True).wait()
        if fragment.merges < newest:
            if fragment.merges + 1 < newest:
                fragment.start = None
            fragment.weights, fragment.merges = received[0], newest
            fragment.momentum = None if fragment.momentum is None else received[1]
            local = fragment.merged(local, settings)
    fragment.start, fragment.is_reset, fragment.begun, fragment.due = None, False, NEVER, NEVER
    return local
