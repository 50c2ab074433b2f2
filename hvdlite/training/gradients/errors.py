"""The errors for gradients that are computed or changed in an order in which they cannot be reduced exactly."""

from __future__ import annotations

from collections.abc import Collection

from hvdlite.core.errors import HvdliteError, UnsupportedError
from hvdlite.core.types import ReduceOp
from hvdlite.negotiation.agreement import named_ranks

_FEWER_PASSES = ("use backward_passes_per_step, optimizer.no_sync() for all but the last backward pass, or add the losses "
                 "before one backward()")


class GradientOrderError(HvdliteError, AssertionError):
    """Raised when a gradient is computed again although its round is over or under way (Horovod: AssertionError).

    Also raised by a step whose gradients were changed on this rank, but could not be on others, and for gradients that
    replaced reduced ones, of which it is unknown whether they are reduced.
    """


def computed_twice(name: str, rank: int, passes: int, reduction: str) -> GradientOrderError:
    """Return the error for a gradient that is reduced, and was accumulated onto, where reducing it again is not exact.

    Args:
        reduction: in words, as in "with op=Sum".
    """
    return GradientOrderError(
        f"'{name}' was computed more than backward_passes_per_step={passes} times before optimizer.step() or zero_grad() on "
        f"rank {rank}: its gradient is already reduced, and with {reduction} reducing it again would count the other ranks "
        f"twice. To have it computed once, {_FEWER_PASSES}. With op=Average, passes add up")


def computed_after_round(name: str, rank: int, reduction: str) -> GradientOrderError:
    """Return the error for a gradient that came after its round, in which other ranks had one, had been closed without it.

    Args:
        reduction: in words, as in "with op=Sum".
    """
    return GradientOrderError(
        f"'{name}' was computed on rank {rank} only after the round of an earlier backward(), in which other ranks computed "
        f"it: with {reduction}, reducing it in another round would count the other ranks twice, so it is dropped here. "
        f"Compute it in the same backward() on all ranks; or {_FEWER_PASSES}. With op=Average, passes add up")


def sparse(name: str, op: ReduceOp) -> UnsupportedError:
    """Return the error for a sparse gradient with an operation other than Average and Sum."""
    return UnsupportedError(f"'{name}' has a sparse gradient, which has no {op.name.capitalize()}; use Average or Sum, or "
                            "sparse_as_dense=True")


def replaced(name: str, rank: int, reduction: str) -> GradientOrderError:
    """Return the error for a reduced gradient that the script has replaced, where reducing it again is not exact."""
    return GradientOrderError(
        f"'{name}' has another gradient on rank {rank} than the one that was reduced in this step. With {reduction} it "
        "cannot be told whether it is reduced already. Change .grad in place (p.grad.copy_(...), p.grad.mul_(...)) to use "
        "it as it is, or clear gradients with optimizer.zero_grad() before you set them, to have them reduced")


def computed_again_without(name: str, others: Collection[int]) -> GradientOrderError:
    """Return the error for a reduced gradient that was accumulated onto, when some ranks' reduced parts are missing.

    Args:
        others: those ranks; empty when they are not known.
    """
    who = named_ranks(sorted(others)) if others else "another rank"
    return GradientOrderError(
        f"'{name}' was computed again after its reduction in this step, but {who} took part without "
        f"the reduced gradient (joined, or cleared it): their shares would be missing. Instead, {_FEWER_PASSES}")


def accumulated_alone(rank: int, accumulates: bool) -> GradientOrderError:
    """Return the error for a closure whose later call accumulates on some ranks, and does nothing on others.

    Args:
        accumulates: whether rank `rank` is one of those that accumulate.
    """
    here = ("accumulated gradients onto those that an earlier call left, and other ranks neither cleared theirs nor did so"
            if accumulates else "neither cleared the gradients of an earlier call nor accumulated onto them, and others did")
    return GradientOrderError(f"the closure of optimizer.step() was called again, and on rank {rank} it {here}: this rank's "
                              "part of the averages would be wrong. Call optimizer.zero_grad() at the beginning of the "
                              "closure, on all ranks")


def weighed_late(label: str, rank: int) -> GradientOrderError:
    """Return the error for a first weight after gradients that have none."""
    return GradientOrderError(
        f"rank {rank}: '{label}' has accumulated gradients since the last step without a weight, so this comes too late: "
        "call set_weight(n) before the first backward() of a step, or clear gradients with optimizer.zero_grad()")


def changed_alone(name: str, ranks_in_step: Collection[int]) -> GradientOrderError:
    """Return the error for a gradient that was changed where `ranks_in_step` could not change it."""
    return GradientOrderError(
        f"'{name}' was written to on this rank after its reduction (clipped or unscaled, say), but "
        f"{named_ranks(sorted(ranks_in_step))} had no backward() in this step and took part in the reduction only in "
        "optimizer.step(), too late to change it: the replicas would differ. Call optimizer.synchronize() on all ranks, "
        "also where there was no backward(), and then change gradients")
