"""`optimizer.join()`: ranks may run out of batches at different times."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hvdlite.core.errors import UnsupportedError
from hvdlite.core.process_set import GLOBAL_PROCESS_SET_ID
from hvdlite.runtime.runtime import Runtime
from hvdlite_torch.collectives.broadcasts import take_over


@dataclasses.dataclass
class Joined:
    """The value that `with optimizer.join() as joined` binds.

    Attributes:
        last_rank: the rank that ran out of batches last, when the block is over. `broadcast_parameters(tensors, last_rank)`
            brings other tensors up to date.
    """

    last_rank: int | None = None


class UnevenInputs:
    """Mixed into distributed optimizers."""

    _runtime: Runtime
    _active: bool
    _process_set: int

    @contextmanager
    def join(self, *models: torch.nn.Module, synchronize: bool = True) -> Iterator[Joined]:
        """Let ranks run out of batches at different times inside this; all ranks use it, around their training loop.

        A rank that comes to the end waits, and its share in the others' averages is nothing (which are divided by the number
        of all ranks, unless HVDLITE_JOIN_DIVIDES_BY_ACTIVE is set). When all have come, parameters and optimizer state are
        taken from the last one, because the others have missed its steps. For several optimizers, nest their joins around
        one loop (`with one.join(), two.join():`): all of them take from the same rank.

        Args:
            models: modules whose parameters and buffers are taken from the last rank as well. An optimizer does not know
                buffers: pass the model when it has running statistics (BatchNorm).
            synchronize: whether to take anything.

        Raises:
            TypeError: for models that are no modules.
            UnsupportedError: for an optimizer of some ranks only.
        """
        for model in models:
            if not isinstance(model, torch.nn.Module):
                raise TypeError(f"join() takes the modules whose parameters and buffers are brought up to date, not a "
                                f"{type(model).__name__}; whether to do so at all is synchronize=...")
        joined = Joined()
        yield joined
        joined.last_rank = self._runtime.world.rank
        if not self._active:
            return
        if self._process_set != GLOBAL_PROCESS_SET_ID:
            raise UnsupportedError("join() is for all ranks; this optimizer shares gradients with some only")
        joined.last_rank = self._runtime.join().wait()
        if synchronize:
            assert isinstance(self, torch.optim.Optimizer)
            take_over(self._runtime, self, joined.last_rank, models)
