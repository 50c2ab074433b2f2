"""`state.loop`: the bodies of a training loop, whose samples do not depend on the world.

Body b of an epoch has the samples b*B to (b+1)*B of the epoch's order, where B is the global batch. Ranks load and take
shards by their shares, as in a scope, and their gradients are weighted by rows, so the average is that of the global batch.
A batch with fewer rows than there are ranks goes to all of them whole. A place counts rows of all ranks: shares may change.

The place belongs to the state (`_place`): what `PositionedLoader.state_dict` returns. Rank 0's generator decides the order,
and its state travels with the place, so any rank can draw the order again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from hvdlite import api
from hvdlite.training.mirrored.shares import Shares, SharesPass, shares_of_world
from hvdlite.training.objects import broadcast_object
from hvdlite.training.positions import by_turns
from hvdlite_torch.checkpoints.resumable_loader import PositionedLoader
from hvdlite_torch.gradients.weights import GradientWeight
from hvdlite_torch.optimizer import Distributed
from hvdlite_torch.uncompiled import leave_to_python

if TYPE_CHECKING:
    from hvdlite_torch.elastic.torch_state import TorchState

SCALE = "scale"


class BodyLoader(PositionedLoader):
    """A DataLoader whose global batches ranks share. It stays with a state, and its workers with it if they are persistent.

    Args:
        loader: over all samples.

    Raises:
        TypeError: for something else than a map-style DataLoader.
        ValueError: for a sampler that divides samples among ranks, and for a batch sampler of the script's.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        kind = type(loader).__name__
        if isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset):
            kind = f"DataLoader of a {type(loader.dataset).__name__}"
        elif isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__:
            kind = ""
        if kind:
            raise TypeError("state.loop divides batches by position: it takes a torch.utils.data.DataLoader of samples by "
                            f"index, and no {kind}. Iterate over that yourself, and call state.commit()")
        super().__init__(loader)
        sampler = type(self._sampler).__name__
        if self._batch_sampler is None:
            raise ValueError("state.loop makes batches itself: give the loader a batch_size, and instead of the "
                             f"{sampler} a sampler of single samples")
        if hasattr(self._sampler, "num_replicas"):
            raise ValueError(f"state.loop divides samples among ranks itself, and the loader's {sampler} does so, too: give "
                             "the loader all samples (shuffle=True, or a sampler for one process)")
        self._weight: _Weight | None = None  # of the last call of `bodies`
        self._shares: Shares | None = None  # of the last world
        self._first: dict[str, Any] | None = None  # the place where it began, for a state that goes back to before that

    def global_batch(self, asked: int | str | None) -> int:
        """Return the rows of a global batch in this world.

        Raises:
            ValueError: for something else than a positive number, "scale" or None.
        """
        assert self._batch_sampler is not None
        own = self._batch_sampler.batch_size
        if asked is None or asked == SCALE:
            return own if asked is None else own * api.size()
        if isinstance(asked, bool) or not isinstance(asked, int) or asked < 1:
            raise ValueError("global_batch is the number of samples of all ranks together, or "
                             f"\"{SCALE}\" for the loader's batch size times the number of ranks; it is {asked!r}")
        return asked

    @leave_to_python
    def bodies(self, state: TorchState, epochs: int, rows: int, shares: Any = None) -> Iterator[Any]:
        """Yield this rank's shards of the bodies that are left of so many epochs.

        Args:
            rows: of a global batch.
            shares: of the ranks, see `Shares`.

        Raises:
            HostsUpdatedInterrupt: between bodies, when members come or go.
            MismatchError: when ranks ask for different shares.
            ValueError: when ranks draw different orders, or the state's place does not fit.
        """
        if self._weight is not None:
            self._weight.end()  # who has left that loop by an error may still refer to it
        self._weight = weight = _Weight(state)
        self._go_on(state)
        current: SharesPass | None = None
        try:
            while self.epoch < epochs:
                state._begin_body()  # ranks agree in the first body: else a loss then would undo the last one
                if current is None:
                    self._shares = shares_of_world(shares, self._shares, self._depth)
                else:
                    current.finished()
                cut = self._cut(rows)
                current = self._shares.begin()
                loaded = self._loaded(cut, current.taken)
                for body in range(len(cut)):
                    if body > 0:
                        state._begin_body()
                        current.finished()
                    end, batch = next(loaded)
                    weight.set(current.weight(end - self._consumed))
                    self._consumed = end
                    self._note(state)
                    yield batch
                next(loaded, None)  # the loader's own iteration ends
                self._end_epoch()
                self._note(state)
                if api.is_elastic():
                    state.commit()  # at the next boundary: so much is lost at most when all have stepped and one is lost
            state._end_bodies()
        finally:
            weight.end()
            if self._weight is weight:  # and not a later call, before which this one was left by an error
                state._in_body = False

    def _go_on(self, state: TorchState) -> None:
        """Take the place from the state; another `epoch` there begins anew."""
        place, epoch = state._place or self._first, state.epoch
        if place is not None:
            self.load_state_dict(place if place["epoch"] == epoch else {**place, "epoch": epoch, "consumed": 0})
        self.epoch = epoch
        self._note(state)

    def _note(self, state: TorchState) -> None:
        vars(state).update(_place=self.state_dict(), epoch=self.epoch)

    @property
    def _depth(self) -> int:
        """How many batches workers prefetch."""
        return self._inner.num_workers * (self._inner.prefetch_factor or 0)

    def _cut(self, rows: int) -> list[tuple[int, Any]]:
        """Return the rest of the epoch: the position after each body, and its indices."""
        assert self._batch_sampler is not None
        return by_turns(self._order(), self._consumed, 0, 1, rows, drops_batch=self._batch_sampler.drop_last)

    def _order(self) -> list[Any]:
        """Return the order of rank 0's sampler, which all ranks draw from the same state; all ranks call this.

        Raises:
            ValueError: when they draw different ones.
        """
        runtime = api.runtime()
        if runtime.world.rank == 0:
            super()._order()
        self._source()  # seeds what stands in for the default generator, which advances by one number on all ranks
        self._begin, checksum = broadcast_object(runtime, (self._begin, self._checksum), 0, "elastic.order")
        order = super()._order()
        if self._checksum != checksum:
            raise ValueError(f"rank {runtime.world.rank}'s {type(self._sampler).__name__} gives epoch {self.epoch} another "
                             "order than rank 0's from the same state of its generator: let it depend on its `generator`, "
                             "or torch's default one, and not on the rank")
        self._first = self._first or self.state_dict()
        return order


class _Weight:
    """The weight of this rank's gradients in one world, for the optimizers and modules of a state."""

    def __init__(self, state: TorchState) -> None:
        values = [handler.value for handler in state._handlers.values()]
        optimizers = [each for each in values if isinstance(each, torch.optim.Optimizer)]
        self._parameters = {parameter for each in optimizers for group in each.param_groups for parameter in group["params"]}
        for each in values:
            self._parameters.update(each.parameters() if isinstance(each, torch.nn.Module) else ())
        self._weight = GradientWeight(api.runtime())
        hooks = [each._hooks for each in optimizers if isinstance(each, Distributed) and each._is_attached]
        self._before = [(each, each.weight) for each in hooks]
        for each in hooks:
            each.weight = self._weight
        self.set(1.0)

    def set(self, weight: float) -> None:
        """Multiply the gradients of later backward passes, and those that the script sets itself."""
        if weight != self._weight.weight or self._weight.is_outdated:
            self._weight.set(weight, self._parameters)

    def end(self) -> None:
        """The loop is over; may be called again."""
        self._weight.set(None, ())
        for hooks, before in self._before:
            hooks.weight = before
        self._before = []
