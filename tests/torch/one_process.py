"""Training scripts on ranks as threads, and the same scripts in one process with all ranks' data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvdlite.runtime.runtime import Runtime
from hvdlite_torch.optimizer.distributed_optimizer import wrap_optimizer
from tests.torch.models import net
from tests.worlds import threads

SIZE = 2


class Case:
    """What a script gets: it calls `loss`, `has_batch` and `optimizer`, and trains `model`.

    Attributes:
        rank: of this rank; None for the process that has all ranks' data.
    """

    def __init__(self, rank: int | None, wrap: Callable[[torch.optim.Optimizer], Any]) -> None:
        self.rank, self._wrap = rank, wrap
        self.model = net()

    def optimizer(self, plain: torch.optim.Optimizer | None = None) -> Any:
        """Return an optimizer, SGD of all parameters by default; a distributed one on a rank."""
        return self._wrap(torch.optim.SGD(self.model.parameters(), lr=0.2, momentum=0.5) if plain is None else plain)

    def loss(self, turn: int, model: Any = None, *, parts: bool = False, without: int | None = None) -> Any:
        """Return the mean over the ranks' losses; on a rank its own.

        Args:
            turn: chooses the data.
            parts: whether every rank but 0 uses the last layer only.
            without: a rank whose loss is zero.
        """
        losses = []
        for rank in range(SIZE) if self.rank is None else [self.rank]:
            used, width = model or self.model, 6
            if parts and rank > 0:
                used, width = used[2], 16
            x = torch.randn(4, width, generator=torch.Generator().manual_seed(100 * turn + rank))
            losses.append(used(x).square().mean() if rank != without else torch.zeros(()))
        return sum(losses[1:], losses[0]) / len(losses)


Script = Callable[[Case], Any]


def compare(scripts: Sequence[Script], options: Callable[[int], dict[str, Any]] = lambda rank: {}, *,
            tolerance: float = 1e-5, **config: Any) -> None:
    """Run scripts on two ranks, one after the other; parameters must be equal, and those of one process.

    Args:
        options: what a rank gives `DistributedOptimizer`.
        tolerance: relative and absolute, to the parameters of one process.
    """

    def step(runtime: Runtime) -> list[list[torch.Tensor]]:
        rank, found = runtime.world.rank, []
        for script in scripts:
            case = Case(rank, lambda plain: wrap_optimizer(plain, runtime=runtime, **options(rank)))
            script(case)
            runtime.barrier("between scripts").wait()
            found.append([parameter.detach().clone() for parameter in case.model.parameters()])
        return found
    everywhere = threads(SIZE, step, **config)
    for number, script in enumerate(scripts):
        alone = Case(None, lambda plain: plain)
        script(alone)
        for one, *others, wanted in zip(*(found[number] for found in everywhere), alone.model.parameters(), strict=True):
            assert all(torch.equal(one, other) for other in others), f"{script.__name__}: the ranks differ"
            torch.testing.assert_close(one, wanted.detach(), rtol=tolerance, atol=tolerance,
                                       msg=lambda text, name=script.__name__: f"{name}: {text}")
