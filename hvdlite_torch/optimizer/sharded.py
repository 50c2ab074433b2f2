"""`DistributedOptimizer(..., sharded=True)`: each parameter has one owner, which alone has its state and updates it.

Gradients are reduced as without sharding, so every rank has all averages: clipping, loss scaling, accumulation and hooks
keep their meaning. In `step()` the base class sees the parameters that this rank owns; then the owners publish new values.
Parameters are owned as a whole, so optimizers that treat them as matrices work.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020, section 5.1.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from hvdlite.core.errors import HorovodInternalError, HvdliteError, UnsupportedError
from hvdlite.core.types import ReduceOp
from hvdlite.runtime.runtime import Runtime
from hvdlite_torch.optimizer.base import DistributedBase, Stage
from hvdlite_torch.optimizer.distributed import Distributed
from hvdlite_torch.optimizer.reduction import ReductionSettings
from hvdlite_torch.optimizer.shards import Shards
from hvdlite_torch.uncompiled import leave_to_python

_EARLIER = ("a sharded optimizer of an earlier world has a part of its state only: before shutdown(), call "
            "consolidate_state_dict(to=None) and state_dict(), and after init() load_state_dict() that on all ranks")


class Sharded(Distributed):
    """Mixed into the user's optimizer class."""

    state: dict[torch.Tensor, Any]
    _shards: Shards | None = None  # of this world, from the first step on
    _goes_first = False, True  # other hooks before the step see all parameters, and those after it the new values
    _is_partial = False
    """Whether state is divided among ranks; False for an optimizer that has none."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        step = cls.step  # type: ignore[attr-defined] # of the user's class; its attributes and signature stay

        @functools.wraps(step)
        def reporting(self: Sharded, *args: Any, **kwargs: Any) -> Any:
            with self._reporting():
                return step(self, *args, **kwargs)
        cls.step = reporting  # type: ignore[attr-defined]

    def _prepare(self, settings: ReductionSettings) -> None:
        super()._prepare(settings)
        if "step" in vars(self):  # of a scheduler that was made before
            step, optimizer = vars(self)["step"], weakref.ref(self)

            @functools.wraps(step)
            def reporting(*args: Any, **kwargs: Any) -> Any:
                with optimizer()._reporting():  # type: ignore[union-attr]
                    return step(*args, **kwargs)
            vars(self)["step"] = reporting
        self._is_due = False  # in a step that has not published yet
        self._has_assigned = False  # in this step
        self._hidden: list[tuple[dict[str, Any], list[torch.Tensor]]] = []  # groups, and all of their parameters
        # Where the whole state is (see `consolidate_state_dict`), and the part of it that others own.
        self._gathered: tuple[int | None, dict[torch.Tensor, Any]] | None = None

    def _attach(self, runtime: Runtime, label: str | None = None) -> None:
        super()._attach(runtime, label)
        self._shards, self._hooks.reducer.set.sharded = None, True

    def _detach(self) -> None:
        self._show()
        if self._shards is not None:
            self._shards.leave_common_memory()
        super()._detach()
        self._shards, self._gathered = None, None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Like the base class's; the ranks that own least get the new parameters. Call it on all ranks."""
        self._show()
        super().add_param_group(param_group)

    def join(self, *models: torch.nn.Module, synchronize: bool = True) -> Any:
        """Not possible with other ranks: the last one has a part of the state only.

        Raises:
            UnsupportedError: where there are any.
        """
        if self._active:
            raise UnsupportedError("join() takes the optimizer state from the last rank, and a sharded optimizer has only a "
                                   "part of it there")
        return super().join(*models, synchronize=synchronize)

    # --- state ---------------------------------------------------------------------------------------------------------

    @leave_to_python
    def consolidate_state_dict(self, to: int | None = 0) -> None:
        """Gather the state of all parameters, until the next step, on one rank or on all; all of the process set call this.

        There `state_dict()` is then that of a plain optimizer. Plain torch loads it, and so does a sharded optimizer, on any
        number of ranks. It takes memory for the whole state.

        Args:
            to: the rank; None for all.

        Raises:
            ValueError: for a rank that is not in the process set.
        """
        self._show()  # if the last step failed
        if self._shards is None:
            return
        ranks = self._runtime.members(self._process_set)
        if to is not None and to not in ranks:
            raise ValueError(f"consolidate_state_dict(to={to}): the optimizer's state is on ranks "
                             f"{', '.join(map(str, ranks))}")
        self._gathered = to, self._shards.gather(self.state, to)

    def state_dict(self) -> dict[str, Any]:
        """Like the base class's, after `consolidate_state_dict()`, on the rank that has the whole state.

        Raises:
            UnsupportedError: on other ranks, and where no `consolidate_state_dict()` came after the last step.
        """
        self._show()
        if not self._is_partial:
            return super().state_dict()  # type: ignore[misc, no-any-return]
        if not self._is_attached:
            raise UnsupportedError(_EARLIER)
        rank = self._runtime.world.rank
        if self._gathered is None or self._gathered[0] not in (rank, None):
            last = "" if self._gathered is None else f" (the last call gathered it on rank {self._gathered[0]})"
            raise UnsupportedError(f"rank {rank}: a sharded optimizer has the state of its own parameters only; call "
                                   f"optimizer.consolidate_state_dict(to={rank}) on all ranks, after the step and before "
                                   f"state_dict(){last}")
        own = self.state
        self.state = {**own, **self._gathered[1]}
        try:
            return super().state_dict()  # type: ignore[misc, no-any-return]
        finally:
            self.state = own

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Like the base class's, which takes the whole state; this rank keeps that of its own parameters."""
        result = super().load_state_dict(*args, **kwargs)
        self._is_partial, self._gathered = False, None
        self._keep_own()
        return result

    def ownership(self) -> tuple[int, str]:
        """Return how many bytes of parameters this rank owns, and a sentence if one parameter makes the parts unequal."""
        return (0, "") if self._shards is None else self._shards.ownership()

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self._is_partial:
            raise UnsupportedError("a sharded optimizer cannot be copied or pickled: it has the state of its own parameters "
                                   "only; make a new one, and load what consolidate_state_dict() and state_dict() give")
        return super().__reduce_ex__(protocol)

    def _keep_own(self) -> None:
        """Drop the state of parameters that other ranks own; after `shutdown()` there are no owners."""
        if self._shards is not None and not self._runtime.has_ended:
            self._is_partial |= self._has_state
            for parameter in self._shards.owners:
                if not self._shards.is_own(parameter):
                    self.state.pop(parameter, None)

    # --- stages of a step ----------------------------------------------------------------------------------------------

    def _assign(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Give parameters without an owner to ranks."""
        self._show()  # if the last step failed
        self._has_assigned = True
        if not self._active or len(self._runtime.members(self._process_set)) == 1:
            return
        if self._shards is None:
            if self._is_partial:
                raise UnsupportedError(_EARLIER)
            self._shards = Shards(self._runtime, f"{self.gradient_label}.shards", self._process_set, self._settings.names)
        before = len(self._shards.owners)
        self._shards.add(itertools.chain.from_iterable(group["params"] for group in self.param_groups))
        if len(self._shards.owners) > before:
            self._keep_own()

    def _hide(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Let the step see the parameters of this rank; where it calls a closure, after that."""
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if self._shards is None:
            return None
        if not callable(closure):
            self._hide_others()
            return None

        def hiding() -> Any:
            if self._hidden:
                raise UnsupportedError(f"sharded=True: {type(self).__name__} calls the closure of step() more than once, "
                                       "but parameters are published after the step only")
            loss = closure()
            self._hide_others()
            return loss
        hiding = leave_to_python(hiding)
        return ((args[0], hiding, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": hiding})

    def _publish(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Bring parameters up to date on all ranks."""
        self._show()
        self._is_due = False
        if self._shards is not None:
            self._gathered = None
            self._publish_own("")

    def _publish_own(self, failure: str) -> None:
        assert self._shards is not None
        some_failed, some_have_state = self._shards.publish(has_failed=bool(failure), has_state=self._has_state)
        self._is_partial |= some_have_state
        if some_failed:
            self._shards.explain(failure)

    @contextlib.contextmanager
    def _reporting(self) -> Iterator[None]:
        """Tell the other ranks, which wait for this rank's parameters, if `step()` raises before it has published.

        They do not wait where a collective has failed, or where this rank has not taken part in reducing gradients.
        """
        self._show()  # if the last step failed
        self._is_due, self._has_assigned = True, False
        try:
            yield
        except Exception as error:
            is_due = self._is_due and not isinstance(error, HvdliteError) and self._has_gradients
            if self._is_attached and (self._hidden or is_due):
                self._show()
                with contextlib.suppress(HorovodInternalError, UnsupportedError):  # the job is over
                    if self._hooks.reducer.round is not None:  # the others wait for these gradients first
                        self._make_final(in_step=True)
                    if not self._has_assigned:  # a hook has raised that comes before the stages
                        self._check_replicas((), {})
                        self._assign((), {})
                    if self._shards is not None:
                        self._publish_own(f"{type(error).__name__}: {error}")
            raise
        finally:
            self._show()
            self._is_due = False

    @property
    def _has_gradients(self) -> bool:
        """Whether this rank has given its gradients for this step, so that the others make it."""
        reducer = self._hooks.reducer if self._active else None
        return reducer is not None and (
            reducer.has_reduced or (reducer.round is not None and not reducer.closes_in_backward))

    @property
    def _has_state(self) -> bool:
        return any(not isinstance(each, dict) or each for each in self.state.values())  # there are empty ones

    def _hide_others(self) -> None:
        assert self._shards is not None
        for group in self.param_groups:
            self._hidden.append((group, group["params"]))
            group["params"] = [each for each in group["params"] if self._shards.is_own(each)]

    def _show(self) -> None:
        for group, parameters in self._hidden:
            group["params"] = parameters
        self._hidden.clear()

    def _clear(self) -> None:
        self._show()
        super()._clear()

    # Replicas are compared before the step: after it, owners have overwritten what had become different.
    _stages_before: tuple[Stage, ...] = (DistributedBase._take_part, DistributedBase._check_replicas,
                                         Distributed._finish_gradients, _assign, _hide)
    _stages_after: tuple[Stage, ...] = (_publish, Distributed._end_step)


def check_sharded(optimizer: torch.optim.Optimizer, op: ReduceOp) -> None:
    """Raise `UnsupportedError` for what needs all parameters, or their state, on each rank."""
    if op is ReduceOp.ADASUM:
        raise UnsupportedError("sharded=True: op=Adasum combines the steps of all ranks, which are those of all parameters")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UnsupportedError("sharded=True: LBFGS has one state for all parameters together")
    for name, value in vars(optimizer).items():
        if isinstance(value, torch.optim.Optimizer):
            raise UnsupportedError(f"sharded=True: {type(optimizer).__name__} has its state in another optimizer, '{name}' "
                                   f"({type(value).__name__}): shard that one, and let {type(optimizer).__name__} wrap it")
