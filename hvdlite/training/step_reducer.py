"""The exchange of one step's gradients that are values: means over what each rank counts, see gradients/weights.py."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, Final

from hvdlite import api
from hvdlite.core.array import Array
from hvdlite.core.errors import MismatchError, UnsupportedError
from hvdlite.core.process_set import ProcessSet, global_process_set
from hvdlite.core.types import ReduceOp
from hvdlite.handoff.handle import is_foreign_thread
from hvdlite.runtime.followers import Learner
from hvdlite.runtime.names import Names
from hvdlite.runtime.runtime import Runtime
from hvdlite.training.arguments import check_compression, factors, group_ids
from hvdlite.training.gradients.arrays import ArrayReducer, Gradient, Rows, scaled
from hvdlite.training.gradients.weights import check_weight
from hvdlite.training.replicas import FirstComparison

_BROADCAST: Final = ("callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)] in fit, or "
                     "hvd.broadcast_variables(model.variables, root_rank=0) in a loop of your own")
_weight: ContextVar[Any] = ContextVar("hvdlite_weight", default=None)
_open: dict[object, Any] = {}
"""The weights of the contexts that are open, of all threads, in their order."""


@contextmanager
def weighing(weight: Any) -> Iterator[None]:
    """Return a context in which averages of gradients are weighted.

    Args:
        weight: this rank's, such as its number of samples: a number or a scalar tensor; None to weight all ranks equally.
    """
    token, key = _weight.set(weight), object()
    _open[key] = weight
    try:
        yield
    finally:
        del _open[key]
        _weight.reset(token)


@contextmanager
def weighted_by(weight: Any, op: ReduceOp) -> Iterator[None]:
    """Return a context in which gradients have the weight that a script gives; None for none.

    Raises:
        ValueError: for what is no weight, also where no other rank takes part; in a compiled function, when that is run.
        UnsupportedError: for a weight with another op than Average, and in a strategy's step.
    """
    if weight is None:
        yield
        return
    if op is not ReduceOp.AVERAGE:
        raise UnsupportedError(f"weight={weight!r} weights averages: it needs op=Average, not {op.name.capitalize()}")
    if current_weight() is not None:
        raise UnsupportedError(f"weight={weight!r} is for optimizers and tapes outside of a scope: a MirroredStrategy "
                               "weighs ranks by their rows")
    with suppress(TypeError):  # a compiled function is being made
        float(weight)
        check_weight(weight, api.rank())
    with weighing(weight):
        yield


def current_weight() -> Any:
    """Return this rank's weight in the current `weighing` context, or None.

    torch carries out backward passes on a GPU in threads of its own. There, the newest context of any thread is current.
    """
    if is_foreign_thread():
        return next(iter(list(_open.values())[-1:]), None)
    return _weight.get()


class StepReducer(Learner):
    """Reduces lists of gradients of the same variables, step after step, in one world after the other.

    Compiled functions of the script keep their step reducer. So this outlives a world: it leaves one that has ended, and
    takes part in the next one with its first gradients there. It is numbered by that, because ranks use their reducers in
    the same order, but may have made them in different ones: some ranks did so in an earlier world.

    Args:
        frontend: the first part of the label.
        compression: the framework's compressor.
        sparse_as_dense: densify sparse gradients.
        op: Average or Sum.
        gradient_predivide_factor: for Average: divide by this before the sum, and by size/this after it.
        process_set: the ranks that exchange gradients; on others gradients stay what they are.
        groups: gradients that are reduced together: a number of groups, or a list of lists of variables.

    Raises:
        ValueError: for another op, for a predivide factor with Sum, and for invalid groups.
    """

    _runtime: Runtime | None = None  # of the world in which it takes part
    _rounds = 0  # in this world
    _comparison: FirstComparison | None = None  # until it has an answer
    _process_set_id: int
    _label: str
    world = 0
    """The number of worlds in which this has taken part."""

    def __init__(self, frontend: str, *, compression: Any, sparse_as_dense: bool = False, op: ReduceOp = ReduceOp.AVERAGE,
                 gradient_predivide_factor: float = 1.0, process_set: ProcessSet = global_process_set,
                 groups: Any = None) -> None:
        op = ReduceOp(op)
        if op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
            raise ValueError(f"gradients are reduced with op Average or Sum, not {op.name.capitalize()}")
        check_compression(compression)
        self._prescale, self._postscale = factors(op, gradient_predivide_factor)
        self._frontend = frontend
        self._process_set = process_set
        self._op = op
        self._compression = compression
        self._sparse_as_dense = sparse_as_dense
        self._lock = threading.Lock()
        self._groups = groups
        checked = group_ids(groups, ())
        self._group_ids = None if isinstance(groups, int) else checked  # None: until the variables are known
        if api.attached_runtime() is not None:
            self.take_part()
        api.follow(self)

    def world_ended(self) -> None:
        """Let go of the runtime, and of a round under way."""
        self._runtime = self._comparison = None
        self._rounds = 0

    def world_began(self, runtime: Runtime) -> None:
        """Nothing yet: see above."""

    def take_part(self) -> Runtime:
        """Return the present runtime, in whose world this takes part from now on.

        Raises:
            NotInitializedError: where there is none.
            UnsupportedError: when the process set is not registered.
        """
        runtime = api.runtime()
        if runtime is not self._runtime:
            with self._lock:
                if runtime is not self._runtime:
                    self.world_ended()
                    self._attach(runtime)
        return runtime

    def _attach(self, runtime: Runtime) -> None:
        self._process_set_id = api.set_id(self._process_set)
        self._label = self.gradient_label = runtime.names.label(self._frontend, self._process_set_id)
        self.world += 1
        self._runtime = runtime

    def next_label(self, names: Names) -> str:
        """Return the label of its gradient set in the next world, if these sets come in the same order there."""
        return self.gradient_label if self._process_set is global_process_set else ""

    @property
    def is_current(self) -> bool:
        """Whether this takes part in the world of the present runtime already."""
        return api.is_initialized() and self._runtime is api.runtime()

    @property
    def process_set(self) -> int:
        """The id of the process set of the ranks that exchange gradients."""
        self.take_part()
        return self._process_set_id

    @property
    def label(self) -> str:
        """The label of the gradient set; equal on all of these ranks."""
        self.take_part()
        return self._label

    @property
    def size(self) -> int:
        """The number of these ranks."""
        return len(self.take_part().members(self._process_set_id))

    @property
    def is_shared(self) -> bool:
        """Whether there are other ranks to exchange gradients with."""
        runtime = self.take_part()
        members = runtime.members(self._process_set_id)
        return len(members) > 1 and runtime.world.rank in members

    @property
    def is_used(self) -> bool:
        """Whether gradients go through this: other ranks take part, or may do so before a compiled function is called."""
        return self.is_shared

    def divisor(self) -> Any:
        """Return the number of ranks, in a compiled function a tensor that has it whenever that is called."""
        return self.size

    def watch(self, variables: Sequence[Any]) -> None:
        """Prepare for the gradients of these variables; all ranks pass the same variables in the same order."""
        raise NotImplementedError

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the reduced gradients. A variable for which no rank has a gradient keeps None.

        Args:
            gradients: None for a variable without a gradient, which counts as zeros if another rank has one.
            variables: the variables of the gradients, each once.
        """
        raise NotImplementedError

    def is_weightless(self, weight: float) -> bool:
        """Return whether the weights of all ranks were 0 in the last step, that of this rank being `weight`."""
        return weight == 0

    def _compare_once(self, few_values: Callable[[], tuple[Sequence[tuple[str, str]], Array]]) -> None:
        """A step's gradients are reduced, and variables do not change yet: in the second one, compare those of all ranks.

        Args:
            few_values: returns names and dtypes of variables, and values of them, see `FirstComparison`.
        """
        self._rounds += 1
        if self._comparison is not None and self._comparison.report():
            self._comparison = None
        if self._rounds == 2:
            named, values = few_values()
            self._comparison = FirstComparison(self.take_part(), named, values, f"{self.label}.check", self.process_set,
                                               _BROADCAST)

    @staticmethod
    def _step_begins() -> None:
        """Gradients are reduced, so variables change next."""
        api.worlds().step_begins()

    def _group_ids_of(self, variables: Sequence[Any]) -> list[int]:
        """Return each variable's group, from 1, or 0; the first call determines which variables there are."""
        if self._group_ids is None:
            self._group_ids = group_ids(self._groups, variables)
        return [self._group_ids.get(id(variable), 0) for variable in variables]


class ArrayStepReducer(StepReducer):
    """Reduces gradients as arrays. Each variable has a permanent slot, numbered in the order of first use."""

    def __init__(self, frontend: str, **arguments: Any) -> None:
        self._slots: dict[int, tuple[weakref.ref[Any], int]] = {}  # by a variable's identity
        # By slot, the arguments of `ArrayReducer.add`.
        self._slot_kinds: list[tuple[tuple[int, ...] | None, str, int]] = []
        self._reducer: ArrayReducer | None = None  # of this world
        self._alone: dict[int, Gradient] = {}  # of this rank, where no other one takes part
        super().__init__(frontend, **arguments)

    def world_ended(self) -> None:
        self._reducer = None
        self._alone.clear()
        super().world_ended()

    def _attach(self, runtime: Runtime) -> None:
        super()._attach(runtime)
        self._reducer = ArrayReducer(runtime, self._label, op=self._op, prescale=self._prescale, postscale=self._postscale,
                                     process_set=self._process_set_id)
        self._reducer.reducer.set.weights.is_optional = True
        for kind in self._slot_kinds:
            self._reducer.add(*kind)

    def has_slots(self, variables: Sequence[Any]) -> bool:
        """Return whether each of these variables has a slot."""
        return all((slot := self._slots.get(id(variable))) and slot[0]() is variable for variable in variables)

    def watch(self, variables: Sequence[Any]) -> None:
        if api.attached_runtime() is not None and self.is_shared:
            self._slots_of(variables)

    def _slots_of(self, variables: Sequence[Any]) -> list[int]:
        if not self.has_slots(variables):
            for variable, group_id in zip(variables, self._group_ids_of(variables), strict=True):
                if not self.has_slots([variable]):
                    self._slots[id(variable)] = weakref.ref(variable), len(self._slot_kinds)
                    self._slot_kinds.append((*self._described(variable), group_id))
                    if self._reducer is not None:
                        self._reducer.add(*self._slot_kinds[-1])
        return [self._slots[id(variable)][1] for variable in variables]

    def _name_of(self, slot: int) -> str:
        """Return the name of a variable in the script."""
        variable = next((reference() for reference, index in self._slots.values() if index == slot), None)
        return str(getattr(variable, "path", None) or getattr(variable, "name", None) or f"number {slot + 1}, from 1")

    def _described(self, variable: Any) -> tuple[tuple[int, ...] | None, str]:
        """Return the shape of a variable's gradient, and its dtype on the wire."""
        return tuple(variable.shape), self._wire_dtype(str(variable.dtype))

    def _wire_dtype(self, dtype: str) -> str:
        """Return the wire dtype for gradients of a dtype; a user-defined compressor may not provide it."""
        target_for = getattr(self._compression, "target_for", None)
        return (target_for(dtype) if target_for is not None else None) or dtype

    def _enqueue(self, gradients: dict[int, Gradient], slots: Collection[int], weight: float | None) -> None:
        """Enqueue gradients of the round by slot.

        Args:
            slots: the slots of all variables of the round.
            weight: this rank's, if averages are weighted.
        """
        factor = self._factor(weight)
        if not self.is_shared:
            self._alone.update((slot, scaled(_copied(gradient), factor)) for slot, gradient in gradients.items())
            return
        assert self._reducer is not None
        self._reducer.expect(slots)
        for slot, gradient in reversed(gradients.items()):  # the last layers' gradients came first
            self._reducer.hand_over(slot, scaled(gradient, factor))

    def is_weightless(self, weight: float) -> bool:
        return self._reducer.reducer.set.weights.is_zero if self._reducer is not None and self.is_shared else weight == 0

    def _factor(self, weight: float | None) -> float:
        """Return by what this rank's gradients are multiplied before the reduction; alone, those of weight 0 are zeros."""
        if weight is None or not self.is_shared:
            return 0.0 if weight == 0 else 1.0
        assert self._reducer is not None
        weights = self._reducer.reducer.weigh()
        weights.renew()
        return check_weight(weight, api.rank()) / weights.unit

    def _finish(self, slots: Collection[int], weight: float | None) -> dict[int, Gradient]:
        """Return the reduced gradients, by slot.

        Args:
            weight: Like `_enqueue`.

        Raises:
            MismatchError: if another rank had a gradient for a variable that is not among these.
        """
        if not self.is_shared:
            alone, self._alone = self._alone, {}
            self._step_begins()
            return alone
        assert self._reducer is not None
        self._reducer.reducer.set.weights.add(weight)
        reduced = self._reducer.finish()
        others = sorted(reduced.keys() - set(slots))
        if others:
            raise MismatchError(
                f"rank {api.rank()}: another rank has gradients for {len(others)} variables that have none "
                f"here in this step (the first one is '{self._name_of(others[0])}'); freeze the same variables everywhere, "
                "and make the same ones part of the loss when a tf.function is traced")
        self._step_begins()
        return reduced


def _copied(gradient: Gradient) -> Gradient:
    return Rows(gradient.indices.copy(), gradient.values.copy()) if isinstance(gradient, Rows) else gradient.copy()
