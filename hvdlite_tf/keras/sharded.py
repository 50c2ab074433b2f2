"""`DistributedOptimizer(..., sharded=True)` for Keras 3: a variable's owner alone has its slots and updates it.

Gradients are reduced as without sharding, and clipped as all of them. Then the optimizer sees the pairs of gradients and
variables that this rank owns, and the owners publish the new values. An optimizer is built as always, but where another rank
owns a variable, with a stand-in that has no elements. So slots keep their places among the optimizer's variables, and those
of others take no memory.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020, section 5.1.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import keras
import numpy as np

from hvdlite.core.array import ALIGNMENT, Array, aligned_empty
from hvdlite.core.errors import UnsupportedError
from hvdlite.training.objects import allgather_object
from hvdlite.training.ownership import assign_owners
from hvdlite.training.replicas import check_replicas, digest
from hvdlite.training.step_reducer import StepReducer
from hvdlite_tf.keras.backends import call, cond, values_of, with_errors_of_backend
from hvdlite_tf.keras.broadcast import array_of
from hvdlite_tf.keras.optimizer import Distributed, distributed_in
from hvdlite_tf.variables import is_elsewhere, is_sharded

Kind = tuple[tuple[int, ...], str]
"""Shape and dtype."""
_ADVICE: Final = ("A sharded optimizer needs the same variables, with the same values, on all ranks when it begins: begin "
                  "the model with keras.Input, put BroadcastGlobalVariablesCallback first or call broadcast_variables "
                  "before the first step, load the optimizer's state on all ranks, and freeze the same variables everywhere")
_EARLIER: Final = ("a sharded optimizer of an earlier world has a part of its state only: before shutdown(), call "
                   "consolidate_state(to=None) and save the model; after init(), on all ranks, compile it with a new "
                   "sharded optimizer, call optimizer.build(model.trainable_variables), and load what was saved")


class Shards:
    """Who owns the variables of one optimizer in one world.

    Args:
        reducer: of the optimizer's gradients.
        variables: those that it trains.
        key: returns what identifies a variable.

    Attributes:
        stand_ins: while the optimizer is built, the variables for which it sees a stand-in, by this one's identity.
        start: the value of the optimizer's `iterations` before its first step in this process.
        has_begun: whether a step has been made, or compiled.
        gathered: the rank that has the values of all variables of the optimizer since the last step, None for all, and these
            values there; None where nothing has been gathered.
    """

    def __init__(self, reducer: StepReducer, variables: Sequence[Any], key: Callable[[Any], Any]) -> None:
        self._reducer, self._key = reducer, key
        runtime = reducer.take_part()
        self.rank, self.ranks = runtime.world.rank, runtime.members(reducer.process_set)
        self.name, self._world = f"{reducer.label}.sharded=True", reducer.world
        sizes = [math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in map(_kind, variables)]
        self._owners = {key(variable): self.ranks[owner] for variable, owner in zip(
            variables, assign_owners(sizes, [0] * len(self.ranks)), strict=True)}
        self.stand_ins: dict[int, Any] = {}
        self.start, self.has_begun = 0, False
        self.gathered: tuple[int | None, list[Array]] | None = None

    def is_own(self, variable: Any) -> bool:
        """Return whether this rank updates a variable."""
        return self._owners[self._key(variable)] == self.rank

    def check(self, variables: Sequence[Any], iterations: Any, gradient: Any) -> Any:
        """Compare the variables and `iterations` of all ranks; all ranks call this. Returns the gradient.

        Args:
            gradient: a tensor, by which this comes between other collectives in the same place of every compiled step.

        Raises:
            ReplicaMismatchError: on all ranks, where they differ.
        """
        names = [f"variable.{index} ({getattr(each, 'path', each.name)})" for index, each in enumerate(variables)]

        def compare(arrays: Sequence[Array]) -> list[Array]:
            self._check_world()
            named = [(name, np.asarray(array, order="C"))
                     for name, array in zip([*names, "iterations"], arrays, strict=False)]
            check_replicas(self._reducer.take_part(), named, f"{self.name}.begin", self._reducer.process_set, _ADVICE)
            return [arrays[-1]]
        return call(compare, [*values_of([*variables, iterations]), gradient], [gradient])[0]

    def publish(self, variables: Sequence[Any], is_due: Any = True) -> None:
        """Give every rank the owners' values of variables; all ranks call this with the same ones.

        Args:
            is_due: False to change nothing: a bool, or a tensor that is equal on all ranks.
        """
        own = list(filter(self.is_own, variables))
        changed = [variable for variable in variables if not self.is_own(variable)] or own[:1]
        owners = [self._owners[self._key(variable)] for variable in changed]
        kinds: dict[int, list[Kind]] = {}
        for variable in variables:
            kinds.setdefault(self._owners[self._key(variable)], []).append(_kind(variable))

        def publish(arrays: Sequence[Array]) -> list[Array]:
            self._check_world()
            self.gathered = None
            found = {owner: iter(each) for owner, each in self.exchange(arrays, kinds, "values").items()}
            return [next(found[owner]) for owner in owners]
        results = cond(is_due, lambda: call(publish, values_of(own), values_of(changed)), lambda: values_of(changed))
        for variable, result in zip(changed, results, strict=True):
            variable.assign(result)

    def exchange(self, arrays: Sequence[Array], kinds: Mapping[int, Sequence[Kind]], name: str) -> dict[int, list[Array]]:
        """Return each owner's arrays on all ranks, in one block of memory for each owner; all ranks call this.

        Args:
            arrays: this rank's.
            kinds: of the arrays, by owner; equal on all ranks.
        """
        runtime, found, handles = self._reducer.take_part(), {}, []
        for owner, each in sorted(kinds.items()):
            sizes = [math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in each]
            begins = list(itertools.accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=0))
            block = aligned_empty((begins[-1],), np.dtype(np.uint8))
            found[owner] = [block[begin:begin + size].view(dtype).reshape(shape)
                            for begin, size, (shape, dtype) in zip(begins, sizes, each, strict=False)]
            if owner == self.rank:
                for place, array in zip(found[owner], arrays, strict=True):
                    place[...] = array
            handles.append(runtime.broadcast(f"{self.name}.{name}.{owner}", block, owner,
                                             process_set=self._reducer.process_set))
        for handle in handles:
            handle.wait()
        return found

    def gather(self, variables: Sequence[Any], local: Sequence[Any], root: int | None) -> None:
        """Gather the values of all variables of the optimizer on one rank, or on all; all ranks call this.

        Args:
            local: those among them that each rank has for itself.
        """
        self._check_world()
        self.gathered = None
        arrays = list(map(array_of, variables))
        here = [(array.shape, array.dtype.name, digest(array)) for array in arrays]
        everywhere = allgather_object(self._reducer.take_part(), here, f"{self.name}.kinds", self._reducer.process_set)
        kinds, places = {rank: list[Kind]() for rank in self.ranks}, {rank: list[int]() for rank in self.ranks}
        for index, (variable, each) in enumerate(zip(variables, zip(*everywhere, strict=True), strict=True)):
            owners = [rank for rank, (shape, *_) in zip(self.ranks, each, strict=True) if math.prod(shape)]
            if len(owners) == 1:
                kinds[owners[0]].append(each[self.ranks.index(owners[0])][:2])
                places[owners[0]].append(index)
            elif is_sharded(variable) and len(set(each)) > 1 and all(variable is not other for other in local):
                raise UnsupportedError(f"sharded=True: the optimizer's variable '{variable.path}' differs between ranks, "
                                       "and has no dimension by which its owner is seen; make it in the shape of a variable")
        found = self.exchange([arrays[index] for index in places[self.rank]],
                              {rank: each for rank, each in kinds.items() if each}, "state")
        for rank, values in found.items() if root in (self.rank, None) else ():
            for index, value in zip(places[rank], values, strict=True):
                arrays[index] = value
        self.gathered = root, arrays

    def _check_world(self) -> None:
        if self._reducer.take_part() is None or self._reducer.world != self._world:
            raise UnsupportedError(_EARLIER)


class Sharded(Distributed):
    """Mixed into the user's optimizer class."""

    def build(self, variables: Sequence[Any]) -> None:
        """Like the base class's; this rank gets slots for the variables that it owns.

        Raises:
            UnsupportedError: for an optimizer whose slots begin with values of variables.
        """
        state, reducer = self._hvdlite_state, self._hvdlite_step_reducer()
        if self.built or not reducer.is_shared:  # type: ignore[has-type]
            super().build(variables)
            return
        state.shards = shards = Shards(reducer, variables, self._var_key)  # type: ignore[attr-defined]
        given = [each if shards.is_own(each) else _stand_in(each) for each in variables]
        before = len(self.variables)  # type: ignore[attr-defined]
        shards.stand_ins = dict(zip(map(id, given), variables, strict=True))
        super(Distributed, self).build(given)  # type: ignore[misc]
        shards.stand_ins = {}
        object.__setattr__(self, "_trainable_variables", list(variables))
        object.__setattr__(self, "_trainable_variables_indices", {
            self._var_key(each): index for index, each in enumerate(variables)})  # type: ignore[attr-defined]
        for each in [self._iterations, *self.variables[before:]]:  # type: ignore[attr-defined]
            each._hvdlite_sharded = True  # see `is_sharded`
        self._hvdlite_watch(variables)

    def add_variable_from_reference(self, reference_variable: Any, name: str | None = None, *arguments: Any,
                                    **named: Any) -> Any:
        """Like the base class's; each rank accumulates all of its own gradients."""
        shards = self._hvdlite_state.shards
        if shards is not None and name == "gradient_accumulator":
            reference_variable = shards.stand_ins.get(id(reference_variable), reference_variable)
        return super().add_variable_from_reference(reference_variable, name, *arguments, **named)  # type: ignore[misc]

    def assign(self, variable: Any, value: Any) -> None:
        """Like the base class's."""
        shards = self._hvdlite_state.shards
        if shards is not None and shards.stand_ins:
            raise UnsupportedError(f"sharded=True: {type(self).__name__} begins its state with the values of the variables, "
                                   "which are not those of all ranks yet")
        super().assign(variable, value)  # type: ignore[misc]

    def finalize_variable_values(self, var_list: Sequence[Any]) -> None:
        """Like the base class's."""
        shards = self._hvdlite_state.shards
        if shards is None or not self.use_ema:  # type: ignore[attr-defined]
            super().finalize_variable_values(var_list)  # type: ignore[misc]
            return
        with self._hvdlite_only_own(shards):
            super().finalize_variable_values(list(filter(shards.is_own, var_list)))  # type: ignore[misc]
        shards.publish(var_list)

    # --- state ---------------------------------------------------------------------------------------------------------

    @with_errors_of_backend
    def consolidate_state(self, to: int | None = 0) -> None:
        """Gather the state of all variables, until the next step, on one rank or on all; all of the process set call this.

        There the optimizer is saved like a plain one, with its model or alone. Plain Keras loads it, and so does a sharded
        optimizer, on any number of ranks. It takes memory for the whole state.

        Args:
            to: the rank; None for all.

        Raises:
            ValueError: for a rank that is not in the process set.
        """
        shards = self._hvdlite_state.shards
        if shards is None:
            return
        if to is not None and to not in shards.ranks:
            raise ValueError(f"consolidate_state(to={to}): the optimizer's state is on ranks "
                             f"{', '.join(map(str, shards.ranks))}")
        shards.gather(self.variables, getattr(self, "_accumulated_gradients", ()), to)  # type: ignore[attr-defined]

    def save_own_variables(self, store: Any) -> None:
        """Like the base class's, after `consolidate_state()`, on the rank that has the whole state.

        Raises:
            UnsupportedError: on other ranks, and where no `consolidate_state()` came after the last step.
        """
        if not save_whole(self, store):
            super().save_own_variables(store)  # type: ignore[misc]

    def load_own_variables(self, store: Any) -> None:
        """Like the base class's, from the whole state; this rank takes that of its own variables. Call it on all ranks."""
        if not load_whole(self, store):
            super().load_own_variables(store)  # type: ignore[misc]

    def _trackable_children(self, *arguments: Any, **named: Any) -> Any:
        """Like the base class's, with which TensorFlow writes its own checkpoints."""
        if self._hvdlite_state.shards is not None:
            raise UnsupportedError("a sharded optimizer cannot be part of a tf.train.Checkpoint or SavedModel: it has the "
                                   "state of its own variables only; use hvd.save, or consolidate_state() and model.save")
        return super()._trackable_children(*arguments, **named)  # type: ignore[misc]

    # --- stages of a step ----------------------------------------------------------------------------------------------

    def _backend_apply_gradients(self, grads: Sequence[Any], trainable_variables: Sequence[Any]) -> Any:
        shards = self._hvdlite_state.shards
        if shards is None:
            super()._backend_apply_gradients(grads, trainable_variables)
            return
        shards.has_begun = True
        done, first = self._iterations, grads[0]  # type: ignore[attr-defined]
        values = first.values if hasattr(first, "dense_shape") else first  # tf.IndexedSlices
        values = cond(done == shards.start, lambda: shards.check(trainable_variables, done, values), lambda: values)
        first = type(first)(values, first.indices, first.dense_shape) if hasattr(first, "dense_shape") else values
        with self._hvdlite_only_own(shards):
            super()._backend_apply_gradients([first, *grads[1:]], trainable_variables)
        steps = self.gradient_accumulation_steps  # type: ignore[attr-defined]
        if self.use_ema and self.ema_overwrite_frequency:  # type: ignore[attr-defined]
            shards.publish(self._trainable_variables)  # type: ignore[attr-defined]
        else:
            shards.publish(trainable_variables, (done + 1) % steps == 0 if steps else True)

    def _apply_weight_decay(self, variables: Sequence[Any]) -> None:
        own, _ = self._hvdlite_own(variables, variables)
        if own:
            super()._apply_weight_decay(own)  # type: ignore[misc]

    def _backend_update_step(self, grads: Sequence[Any], trainable_variables: Sequence[Any], learning_rate: Any) -> None:
        grads, own = self._hvdlite_own(grads, trainable_variables)
        if own or keras.backend.backend() != "torch":  # which updates the slots of all variables at once
            super()._backend_update_step(grads, own, learning_rate)  # type: ignore[misc]

    def _hvdlite_own(self, values: Sequence[Any], variables: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Return the values for those variables that this rank updates, and these variables."""
        shards = self._hvdlite_state.shards
        own = [pair for pair in zip(values, variables, strict=True) if shards is None or shards.is_own(pair[1])]
        return [value for value, _ in own], [variable for _, variable in own]

    @contextmanager
    def _hvdlite_only_own(self, shards: Shards) -> Iterator[None]:
        """Hide the variables of others, and their averages."""
        names = ["_trainable_variables", *(["_model_variables_moving_average"] if self.use_ema else [])]  # type: ignore
        whole = {name: getattr(self, name) for name in names}
        for name, values in whole.items():
            own, _ = self._hvdlite_own(values, whole["_trainable_variables"])
            object.__setattr__(self, name, own)
        try:
            yield
        finally:
            for name, values in whole.items():
                object.__setattr__(self, name, values)


def check_sharded(optimizer: Any) -> None:
    """Raise `UnsupportedError` for an optimizer that cannot be sharded."""
    if hasattr(optimizer, "optimizers"):
        raise UnsupportedError(f"sharded=True: {type(optimizer).__name__} passes variables on to optimizers of its own, "
                               "which would have their whole state; wrap a plain optimizer")
    if optimizer.built:
        raise UnsupportedError(f"sharded=True: optimizer '{optimizer.name}' has been built, with its whole state. Wrap a "
                               "new one, build it with the model's trainable variables, and load what has been saved "
                               "with model.load_weights or hvd.load, on all ranks")


def sharded_in(optimizer: Any) -> Sharded | None:
    """Return the sharded optimizer that an optimizer is or scales the loss for; None when there is none, or it is whole."""
    found = distributed_in(optimizer)
    return found if issubclass(type(found), Sharded) and found._hvdlite_state.shards is not None else None


def whole_values(optimizer: Any) -> list[Array] | None:
    """Return the values of an optimizer's variables, where they have been gathered; None for a whole one.

    Raises:
        UnsupportedError: where they have not.
    """
    inner = sharded_in(optimizer)
    if inner is None:
        return None
    shards = inner._hvdlite_state.shards
    assert shards is not None
    if shards.gathered is None or shards.gathered[0] not in (shards.rank, None):
        last = "" if shards.gathered is None else f" (the last call gathered it on rank {shards.gathered[0]})"
        raise UnsupportedError(
            f"rank {shards.rank}: a sharded optimizer has the state of its own variables only; call "
            f"optimizer.consolidate_state(to={shards.rank}) on all ranks, after the step and before it is saved{last}")
    values = shards.gathered[1]
    return [*map(array_of, optimizer.variables[:-len(values)]), *values]


def save_whole(optimizer: Any, store: Any) -> bool:
    """Write the values of all variables of an optimizer into a store of Keras; return False for a whole optimizer."""
    values = whole_values(optimizer)
    for index, value in enumerate(values or ()):
        store[str(index)] = value
    return values is not None


def load_whole(optimizer: Any, store: Any) -> bool:
    """Set those variables that this rank has; return False for a whole optimizer, or where Keras warns of the store."""
    inner, variables = sharded_in(optimizer), optimizer.variables
    if inner is None or len(store.keys()) != len(variables):
        return False
    for index, variable in enumerate(variables):
        if not is_elsewhere(variable):
            variable.assign(store[str(index)])
    shards = inner._hvdlite_state.shards
    assert shards is not None
    shards.gathered = None
    if not shards.has_begun:
        shards.start = int(array_of(inner._iterations))  # type: ignore[attr-defined]
    return True


def _kind(variable: Any) -> Kind:
    return tuple(variable.shape), keras.backend.standardize_dtype(variable.dtype)


def _stand_in(variable: Any) -> Any:
    """Return a variable without elements, with the number of dimensions, dtype and path of a model's variable."""
    shape, dtype = _kind(variable)
    made = keras.Variable(keras.initializers.Zeros(), shape=(0,) * max(len(shape), 1), dtype=dtype,
                          name=str(variable.name).replace("/", "_"))
    made._path = getattr(variable, "path", variable.name)
    if getattr(variable, "overwrite_with_gradient", False):
        made.overwrite_with_gradient = True
    return made
