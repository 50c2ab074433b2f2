"""The weight of this rank's gradients in an uneven global batch: where it is applied, and why the result is exact.

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
too, because the weights between them cancel. The rule covers every collective that has a gradient, linear or not.

Each backward pass is weighted or not as a whole. A pass that computes gradients of weighted parameters is weighted. A pass
that only returns gradients of other tensors, as for a gradient penalty, is a derivative of the sum of all ranks' outputs and
has no weights; the pass that later differentiates the penalty is weighted.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.nn.parameter import is_lazy

from hvdlite import api
from hvdlite.core.errors import UnsupportedError
from hvdlite.runtime.runtime import Runtime

transforms_active: Callable[[], bool] = getattr(torch._C, "_are_functorch_transforms_active", lambda: True)
_current_node: Callable[[], Any] | None = getattr(torch._C, "_current_autograd_node", None)


class _UnevenWeight(NamedTuple):
    """A weight that is not 1.

    Attributes:
        nodes: returns the nodes that accumulate the gradients of the weighted parameters.
    """

    runtime: Runtime
    value: float
    nodes: Callable[[], Iterable[Any]]


_uneven: dict[int, _UnevenWeight] = {}
"""By identity of their owners. Backward passes look here first: autograd does not pass them their scope."""


class GradientWeight:
    """Multiplies the gradients of one scope's parameters on this rank before they are accumulated.

    Args:
        runtime: of this rank.

    Attributes:
        value: the weight; 1 in even batches, which then cost nothing.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.value = 1.0
        self.runtime = runtime
        self._hooks: dict[Any, Any] = {}  # by the node that accumulates a parameter's gradient; nodes live while held

    def apply_to(self, parameters: Iterable[torch.Tensor]) -> None:
        """Weigh the gradients of these parameters and no others; lazy ones have no gradients yet."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        _uneven.pop(id(self), None)
        if self.value != 1:
            for parameter in parameters:
                trainable = parameter.is_floating_point() or parameter.is_complex()
                if trainable and not is_lazy(parameter) and not parameter.is_inference():
                    node = _accumulator(parameter)
                    self._hooks[node] = node.register_prehook(_multiply_by(self.value))
            _uneven[id(self)] = _UnevenWeight(self.runtime, self.value, lambda: self._hooks)


@contextmanager
def weighted_later(runtime: Runtime, value: float, parameters: Callable[[], Iterable[torch.Tensor]]) -> Iterator[None]:
    """Return a context in whose backward passes another part of hvdlite multiplies gradients once they are accumulated.

    Args:
        runtime: of this rank.
        value: by what they are multiplied.
        parameters: returns the parameters of these gradients; called in the first backward pass that needs them.
    """
    nodes = functools.cache(lambda: [_accumulator(parameter) for parameter in parameters() if parameter.requires_grad])
    weight = _UnevenWeight(runtime, value, nodes)
    _uneven[id(weight)] = weight
    try:
        yield
    finally:
        del _uneven[id(weight)]


def weight_of_this_pass(name: str) -> float:
    """Return by what the gradients of the running backward pass are multiplied on this rank when they reach parameters.

    Args:
        name: of the collective that asks, for messages.

    Raises:
        UnsupportedError: in an uneven batch, inside a transform of torch.func, where parameters cannot be distinguished from
            other tensors; and where it is ambiguous which of several weights applies.
    """
    if not _uneven:
        return 1.0
    uneven = [each for each in list(_uneven.values()) if each.runtime is api.runtime()]
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
        raise UnsupportedError(f"{where} while {len(uneven)} strategies have uneven batches with the weights "
                               f"{sorted(values)}, and hvdlite cannot know which one applies; leave one of the loops first")
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


def _multiply_by(weight: float) -> Callable[[tuple[torch.Tensor | None, ...]], tuple[torch.Tensor | None, ...]]:
    return lambda gradients: tuple(None if each is None else each * weight for each in gradients)
