"""The weight of this rank's gradients, of uneven shards or by `set_weight`: where it is applied, and why that is exact.

Rank r's loss L_r is a mean over its n_r samples. The loss of the global batch is the average over R ranks of w_r L_r, with
w_r = n_r R / sum(n). A script differentiates L_r: no hook of torch sees every loss (`backward`, `autograd.grad`, scalers,
closures). Gradients are linear in the loss, so w_r is applied where they leave the graph: at the nodes that accumulate the
gradients of parameters.

A collective moves gradients between ranks before they get there. Let C be its Jacobian, with blocks C_sr from the tensor x_r
of rank r to the result y_s of rank s, and let u_s = dL_s/dy_s. The gradient that rank r needs is

    sum_s C_sr^T w_s u_s  =  w_r v_r,

where v_r is the gradient that the collective returns and w_r is applied to v_r later. So

    v_r = (1 / w_r) sum_s C_sr^T (w_s u_s),    that is    v = W^-1 C^T W u    with    W = diag(w).

This is the adjoint of C under the inner product <u, v> = sum_r w_r u_r v_r. Each rank multiplies u_r by its own weight, runs
the unweighted adjoint and divides by its own weight, so no rank needs another rank's weight. A chain of collectives is exact
too, because the weights between them cancel. So does a factor that all ranks' weights have: w_r = n_r is as good. The rule
covers every collective that has a gradient, linear or not.

Each backward pass is weighted or not as a whole. A pass that computes gradients of weighted parameters is weighted. A pass
that only returns gradients of other tensors, as for a gradient penalty, is a derivative of the sum of all ranks' outputs and
has no weights; the pass that later differentiates the penalty is weighted.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from hvdlite import api
from hvdlite.core.errors import UnsupportedError
from hvdlite.runtime.runtime import Runtime
from hvdlite.training.gradients.weights import RankWeights

transforms_active: Callable[[], bool] = getattr(torch._C, "_are_functorch_transforms_active", lambda: True)
_current_node: Callable[[], Any] | None = getattr(torch._C, "_current_autograd_node", None)


_uneven: weakref.WeakSet[GradientWeight | _LaterWeight] = weakref.WeakSet()
"""Weights that may not be 1. Backward passes look here first: autograd does not pass them their scope."""


class GradientWeight:
    """Multiplies gradients of parameters on this rank before they are accumulated, by hooks that stay.

    Args:
        runtime: of this rank.
        passes: counts the weights of backward passes, each of which has its own, and has their unit; None: a scope or loop
            weighs gradients by rows.

    Attributes:
        weight: None for none.
    """

    def __init__(self, runtime: Runtime, passes: RankWeights | None = None) -> None:
        self.runtime, self.passes = runtime, passes
        self.weight: float | None = None
        # By a parameter's identity: its dtype and device (with others, torch makes another node), its node, and our hook.
        self._weighted: dict[int, tuple[Any, Any, Any]] = {}

    @property
    def value(self) -> float:
        """The weight; 1 where there is none."""
        return 1.0 if self.weight is None else self.weight

    @property
    def factor(self) -> float:
        """By what gradients are multiplied."""
        return self.value if self.weight is None or self.passes is None else self.weight / self.passes.unit

    @property
    def is_pending(self) -> bool:
        """Whether it is the weight of a pass that has not come yet."""
        return self.weight is not None and self.passes is not None

    @property
    def is_outdated(self) -> bool:
        """Whether a weighted parameter was cast or moved since: its gradients come from another node, without our hook."""
        return self in _uneven and any((node.variable.dtype, node.variable.device) != kind
                                       for kind, node, _ in self._weighted.values())

    def check(self) -> None:
        """Raise `UnsupportedError` when a parameter was cast or moved since the weight was set."""
        if self.is_outdated:
            raise UnsupportedError(
                f"rank {self.runtime.world.rank}: parameters were cast or moved after the gradients of this batch had got a "
                f"weight ({self.value:g}), and they lost it. Call model.to(), double() or half() before the batch is taken "
                "from its loader, or before set_weight()")

    def count_pass(self) -> None:
        """A pass is over, or its gradients were set by the script: the weight was for it only."""
        if self.passes is not None:
            self.passes.add(self.weight)
            self.set(None, ())

    def nodes(self) -> Iterable[Any]:
        """Return the nodes that accumulate the gradients of the weighted parameters."""
        return [node for _, node, _ in self._weighted.values()]

    def set(self, weight: float | None, parameters: Iterable[torch.Tensor]) -> None:
        """Weigh the gradients of these parameters and of no others from now on; lazy ones have no gradients yet.

        Args:
            weight: 0 makes them zeros, also those that are not finite; None is none.
        """
        self.weight = weight
        if weight is None or (weight == 1 and self.passes is None):
            _uneven.discard(self)
            return
        before, self._weighted = self._weighted, {}
        for parameter in parameters:
            key, kind = id(parameter), (parameter.dtype, parameter.device)
            if key in before and before[key][0] == kind:
                self._weighted[key] = before.pop(key)
            elif (kind[0].is_floating_point or kind[0].is_complex) and not (is_lazy(parameter) or parameter.is_inference()):
                node = _accumulator(parameter)
                self._weighted[key] = kind, node, node.register_prehook(_multiply_by(weakref.ref(self)))
        for _, _, hook in before.values():
            hook.remove()
        _uneven.add(self)


@dataclasses.dataclass(eq=False)
class _LaterWeight:
    """Like `GradientWeight`, of gradients that another part of hvdlite multiplies."""

    runtime: Runtime
    value: float
    nodes: Callable[[], Iterable[Any]]


@contextmanager
def weighted_later(runtime: Runtime, value: float, parameters: Callable[[], Iterable[torch.Tensor]]) -> Iterator[None]:
    """Return a context in whose backward passes another part of hvdlite multiplies gradients once they are accumulated.

    Args:
        runtime: of this rank.
        value: by what they are multiplied.
        parameters: returns the parameters of these gradients; called in the first backward pass that needs them.
    """
    nodes = functools.cache(lambda: [_accumulator(parameter) for parameter in parameters() if parameter.requires_grad])
    weight = _LaterWeight(runtime, value, nodes)
    _uneven.add(weight)
    try:
        yield
    finally:
        _uneven.discard(weight)


def weight_of_this_pass(name: str) -> float:
    """Return this rank's weight in the running backward pass, by which gradients are multiplied when they reach parameters.

    That may be another multiple of it, if it is the same on all ranks.

    Args:
        name: of the collective that asks, for messages.

    Raises:
        UnsupportedError: in an uneven batch, inside a transform of torch.func, where parameters cannot be distinguished from
            other tensors; and where it is ambiguous which of several weights applies.
    """
    if not _uneven:
        return 1.0
    uneven = [each for each in list(_uneven) if each.runtime is api.runtime()]
    if not uneven:
        return 1.0
    where = f"'{name}': rank {api.runtime().world.rank} differentiates this collective"
    if transforms_active():
        raise UnsupportedError(f"{where} with torch.func in a batch whose shards may differ between ranks, and hvdlite "
                               "cannot know whether the gradients will be weighted; use torch.autograd.grad or "
                               "backward(), or batches that divide evenly (drop_last=True)")
    values = {each.value for each in uneven if any(_fate(node) is not _Fate.IGNORED for node in each.nodes())}
    if not values and _accumulates_activations():
        values = {each.value for each in uneven}
    if len(values) > 1:
        raise UnsupportedError(f"{where} while {len(uneven)} strategies or optimizers have the weights {sorted(values)}, "
                               "and hvdlite cannot know which one applies; leave one of the loops first, or give all "
                               "optimizers of the pass the same weight")
    return values.pop() if values else 1.0


def _accumulates_activations() -> bool:
    """Return whether the running pass ends, ahead of the running node, in tensors that it accumulates and no parameters.

    The input of a reentrant checkpoint is such a tensor. Its gradient continues in the pass around this one.
    """
    if _current_node is None:  # older torch
        return not torch.is_grad_enabled()
    seen, ahead = set(), [_current_node()]
    accumulates = False
    while ahead:
        for node, _ in ahead.pop().next_functions:
            if node is None or node in seen:
                continue
            seen.add(node)
            leaf = getattr(node, "variable", None)
            if leaf is None:
                ahead.append(node)
                continue
            fate = _fate(node)
            if fate is not _Fate.IGNORED and isinstance(leaf, torch.nn.Parameter):
                return False
            accumulates = accumulates or fate is _Fate.ACCUMULATED
    return accumulates


class _Fate(enum.Enum):
    """The treatment of a leaf's gradient by the running backward pass."""

    ACCUMULATED = enum.auto()
    RETURNED = enum.auto()
    IGNORED = enum.auto()


def _fate(leaf: Any) -> _Fate:
    """Return what happens to a leaf's gradient, given the node that accumulates it."""
    try:
        return _Fate.ACCUMULATED if torch._C._will_engine_execute_node(leaf) else _Fate.IGNORED
    except RuntimeError:  # torch's answer for a leaf whose gradient `torch.autograd.grad` returns
        return _Fate.RETURNED


def _accumulator(parameter: torch.Tensor) -> Any:
    """Return the node that accumulates a parameter's gradients; of a frozen one, the node that will when it is trained."""
    is_frozen = not parameter.requires_grad
    with torch.inference_mode(False), torch.enable_grad(), torch._C.DisableTorchFunctionSubclass():
        if is_frozen:  # torch makes no node then, but keeps one that is held when a parameter is frozen
            parameter.requires_grad_(True)
        try:
            return torch.autograd.graph.get_gradient_edge(parameter).node
        finally:
            if is_frozen:
                parameter.requires_grad_(False)


def _multiply_by(owner: weakref.ref[GradientWeight]
                 ) -> Callable[[tuple[torch.Tensor | None, ...]], tuple[torch.Tensor | None, ...] | None]:
    """Return a hook that does not keep its owner alive: torch does not let Python see the cycle that would make."""
    def multiply(gradients: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...] | None:
        weight = owner()
        value = 1.0 if weight is None else weight.factor
        return None if value == 1 else tuple(None if each is None else times(each, value) for each in gradients)
    return multiply


@torch.no_grad()
def weigh(gradient: torch.Tensor, weight: float) -> None:
    """Like `times`, in place."""
    if weight == 0:
        gradient.zero_()
    elif weight != 1:
        gradient.mul_(weight)


def times(gradient: torch.Tensor, weight: float) -> torch.Tensor:
    """Return a new gradient, times a weight: zeros for 0, also of values that are not finite."""
    return gradient * weight if weight else torch.zeros_like(gradient)
