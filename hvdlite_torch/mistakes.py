"""Mistakes of a script that end with no error; the first rank names them when it leaves the job (docs/decisions/0079).

| mistake | rule |
|---|---|
| the optimizer is not wrapped | `broadcast_parameters` has sent its parameters; then ranks exchange nearly nothing (below) |
| it has another model's parameters | a distributed optimizer steps, and no rank ever has a gradient for it |
| `DistributedDataParallel` beside it | before the second step, such a module has one of its parameters |

Nearly nothing: a plain optimizer has stepped with a gradient of these parameters, and fewer values were reduced and gathered
since the broadcast than a hundredth of them; no distributed optimizer steps, and torch.distributed is not initialised.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import logging
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook

from hvdlite import api
from hvdlite.runtime.followers import Learner

_log = logging.getLogger("hvdlite")


@dataclasses.dataclass(eq=False)
class Steps:
    """The steps of a distributed optimizer.

    Attributes:
        optimizer: for people.
        count: of steps with other ranks.
        have_gradients: whether a rank had one in any of them.
    """

    optimizer: str
    count: int = 0
    have_gradients: bool = False


@dataclasses.dataclass(frozen=True)
class _Alone:
    """The first step of a plain optimizer with parameters that were broadcast."""

    optimizer: str
    values: int  # of its parameters
    exchanged: int  # values until they were broadcast


_steps: list[Steps] = []
_sent: dict[StorageWeakRef, int] = {}  # memory of parameters that were broadcast, with the values exchanged until then
_alone: list[_Alone] = []


def count_steps(optimizer: str) -> Steps:
    """Return the count of an optimizer's steps, which begins."""
    api.finish_before_leaving(_report)
    _steps.append(Steps(optimizer))
    return _steps[-1]


def note_broadcast(tensors: Iterable[torch.Tensor]) -> None:
    """All ranks have got these parameters from one of them: they are to be trained together."""
    if api.size() > 1 and not api.is_elastic():
        api.finish_before_leaving(_report)
        _watch()
        for memory in [each for each in _sent if each.expired()]:
            del _sent[memory]
        exchanged = api.runtime().exchanged
        for memory in filter(None, map(_memory, tensors)):
            _sent.setdefault(memory, exchanged)


def leave_out(values: int) -> None:
    """So many values of optimizer state were broadcast: that is a beginning, too."""
    for memory in _sent:
        _sent[memory] += values


def warn_of_ddp(parameters: Collection[torch.Tensor]) -> None:
    """Warn if a `DistributedDataParallel` reduces gradients of these parameters, too."""
    if not _uses_torchs_groups() or not api.is_initialized():
        return
    modules = [each for each in gc.get_objects() if issubclass(type(each), torch.nn.parallel.DistributedDataParallel)]
    own = set(map(id, parameters))
    if api.rank() == 0 and any(id(parameter) in own for module in modules for parameter in module.parameters()):
        _log.warning("the model is in a DistributedDataParallel, which averages its gradients too: leave out either that or "
                     "hvd.DistributedOptimizer")


@functools.cache
def _watch() -> None:
    """Look at the steps of all optimizers of this process."""
    register_optimizer_step_post_hook(torch.compiler.disable(_stepped))


def _stepped(optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
    if _alone or not _sent or isinstance(optimizer, Learner):  # a distributed one may be for some ranks only
        return
    trained = [(parameter.numel(), _sent[memory]) for group in optimizer.param_groups for parameter in group["params"]
               if parameter.grad is not None and (memory := _memory(parameter)) in _sent]
    if trained and api.is_initialized():
        values, exchanged = zip(*trained, strict=True)
        _alone.append(_Alone(type(optimizer).__name__, sum(values), min(exchanged)))


def _memory(tensor: torch.Tensor) -> StorageWeakRef | None:
    """Return a key of a tensor's memory, which no other memory gets when the tensor is gone; None if it has none."""
    try:
        return StorageWeakRef(tensor.untyped_storage())
    except (NotImplementedError, RuntimeError):  # a sparse one, or one of a tensor subclass
        return None


def _report() -> None:
    """This process leaves the job: name what is certain."""
    steps, alone = _steps.copy(), _alone.copy()
    _steps.clear()
    _alone.clear()
    _sent.clear()
    if not api.is_initialized() or api.is_provisional() or api.rank() != 0:
        return
    for each in steps:
        if each.count and not each.have_gradients:
            _log.warning("%s has made %d steps and never got a gradient, on any rank: the loss does not depend on its "
                         "parameters. Make the optimizer from the model that you train, after that is made", each.optimizer,
                         each.count)
    is_shared = any(each.count for each in steps) or _uses_torchs_groups()
    for first in () if is_shared else alone:
        if (api.runtime().exchanged - first.exchanged) * 100 <= first.values:
            _log.warning("no gradient was reduced: each of the %d ranks has trained a model of its own. Wrap the optimizer: "
                         "optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters()); now it is a plain %s",
                         api.size(), first.optimizer)


def _uses_torchs_groups() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
