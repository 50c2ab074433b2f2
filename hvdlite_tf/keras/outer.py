"""`DistributedOptimizer(..., outer=hvd.DiLoCo(...))` for Keras 3: workers train by themselves, and exchange their changes.

Inside a worker everything is as without `outer`: the optimizer's process set is the worker's ranks. In each step, also in
compiled ones, a callback counts. Parameters leave the step only when `training.outer` begins or merges an exchange after it.
State of the optimizer stays local. That of the exchanges is saved beside it, where a plain optimizer does not look for it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, Final

import keras
import numpy as np
from keras.src.saving.keras_saveable import KerasSaveable

from hvdlite import api
from hvdlite.core.array import Array
from hvdlite.core.errors import UnsupportedError
from hvdlite.core.process_set import GLOBAL_PROCESS_SET_ID, ProcessSet
from hvdlite.core.types import ReduceOp
from hvdlite.runtime.runtime import Runtime
from hvdlite.training.checkpoints.structure import put_together, taken_apart
from hvdlite.training.objects import allgather_object, broadcast_object
from hvdlite.training.outer.outer import Outer, Parameter, agree_on_workers, register_worker, saved_weights
from hvdlite.training.outer.settings import DiLoCo as DiLoCo
from hvdlite.training.outer.settings import LocalSGD as LocalSGD
from hvdlite.training.replicas import digest
from hvdlite_tf.keras.backends import call, cond, values_of, with_errors_of_backend
from hvdlite_tf.keras.broadcast import array_of, broadcast_variables, read_back, values_of_root
from hvdlite_tf.keras.optimizer import Distributed, distributed_in
from hvdlite_tf.keras.variable_mirror import optimizers_of
from hvdlite_tf.variables import is_random_state

_PLAIN: Final = "plain"
"""The name of what is no array in a store of Keras, as JSON."""
_DUE, _FIRST = 1, 2
"""What a step needs its parameters for: an exchange after it; that, and the global weights, before it."""


class Exchanges(KerasSaveable):  # type: ignore[misc]
    """The exchanges of one optimizer, in one world after the other; implements `LocalWeights`.

    Keras saves them with the optimizer, of which they are an attribute.

    Attributes:
        workers: the ranks of each; empty where there is one.
        process_set: the ranks of this worker.
        variables: those that are exchanged.
        label: of its collectives, equal on all ranks.
        gathered: rank 0's values of the optimizer's variables, and its exchanges' state, while a checkpoint is made.
    """

    def __init__(self, settings: DiLoCo) -> None:
        self._settings, self.process_set = settings, ProcessSet([])
        self.workers: tuple[tuple[int, ...], ...] = ()
        self.variables: Sequence[Any] = ()
        self.gathered: tuple[Sequence[Array], dict[str, Any] | None] = (), None
        self._outer: Outer | None = None  # of this world, from the first step on
        self._state: dict[str, Any] | None = None  # with which it is to begin
        self._arrays: list[Array] = []  # of the variables, while they are read and written
        self.world_began(api.runtime())
        api.follow(self)

    def world_began(self, runtime: Runtime) -> None:
        """See `Follower`."""
        if runtime.world.epoch:
            raise UnsupportedError("outer= does not work in elastic jobs: leave out --min-np and --host-discovery-script")
        self.label = runtime.names.label("outer.keras")
        self.workers = agree_on_workers(runtime, self._settings, self.label)
        own, rank = register_worker(runtime, self.workers), runtime.world.rank
        self.process_set.ranks = list(range(runtime.world.size)) if own is None else own.ranks
        self.process_set.register(GLOBAL_PROCESS_SET_ID if own is None else own.process_set_id, rank)

    def world_ended(self) -> None:
        """See `Follower`."""
        self.restart(self.saved())
        self.process_set.register(None, None)

    def restart(self, state: dict[str, Any] | None) -> None:
        """Begin with another state in the next step."""
        if self._outer is not None:
            self._outer.close()
        self._outer, self._state = None, state

    def saved(self) -> dict[str, Any] | None:
        """Return the state of this rank's exchanges; None where there are none."""
        return self._outer.state() if self._outer is not None else self._state if self.workers else None

    # --- in a step, also in a compiled one -----------------------------------------------------------------------------

    def count(self, arrays: Sequence[Array]) -> list[Array]:
        """Count a step, unless only gradients accumulate; return what its parameters are needed for."""
        needs = 0
        if arrays[0]:
            needs = _FIRST if self._outer is None else _DUE * self._outer.is_due
            if not needs:
                self._stepped()
        return [np.array(needs, np.int32)]

    def begin(self, arrays: Sequence[Array]) -> list[Array]:
        """The parameters, before they change for the first time, are the global weights."""
        self._arrays = list(arrays[:-1])
        self._begin()
        self._arrays = []
        return [arrays[-1].copy()]

    def exchange(self, arrays: Sequence[Array]) -> list[Array]:
        """Begin and merge what is due after a step; return the parameters."""
        self._arrays = [np.array(each) for each in arrays]
        self._stepped()
        found, self._arrays = self._arrays, []
        return found

    def _begin(self) -> None:
        self._outer = Outer(api.runtime(), self.label, self._settings, self.workers, self._parameters(), self, self._state)
        self._state = None

    def _stepped(self) -> None:
        assert self._outer is not None
        self._outer.stepped()
        every = api.runtime().config.replica_check_steps
        if every and self._outer.step % every == 0:
            self._outer.check_replicas()

    def _parameters(self) -> list[Parameter]:  # Keras numbers paths anew in each process: they may differ
        return [Parameter(f"{index} ({each.path})", int(np.prod(each.shape)), keras.backend.standardize_dtype(each.dtype))
                for index, each in enumerate(self.variables)]

    # --- parameters ----------------------------------------------------------------------------------------------------

    def read(self, parameters: range, dtype: np.dtype[np.floating]) -> Array:
        """See `LocalWeights`."""
        return np.concatenate([self._arrays[index].reshape(-1).astype(dtype) for index in parameters])

    def write(self, parameters: range, values: Array) -> None:
        """See `LocalWeights`."""
        for each, own in self._places(parameters, values):
            each[...] = own

    def rounded(self, parameters: range, values: Array) -> Array:
        """See `LocalWeights`."""
        return np.concatenate([own.astype(each.dtype).astype(values.dtype).reshape(-1)
                               for each, own in self._places(parameters, values)])

    def _places(self, parameters: range, values: Array) -> Iterable[tuple[Array, Array]]:
        own = [self._arrays[index] for index in parameters]
        parts = np.split(values, np.cumsum([each.size for each in own])[:-1])
        return [(each, part.reshape(each.shape)) for each, part in zip(own, parts, strict=True)]

    # --- outside of a step ---------------------------------------------------------------------------------------------

    def synchronize(self, buffers: Sequence[Any]) -> None:
        """Merge everything, and make other variables equal on all ranks, which call this."""
        if any(getattr(each, "_value", each) is None for each in self.variables):
            raise UnsupportedError("variables have no values in an epoch of fit on JAX: call synchronize_outer(model)")
        if self._outer is not None or self._state is not None:
            self._arrays = list(map(array_of, self.variables))
            if self._outer is None:  # with the state of a checkpoint, or of the last world
                self._begin()
            assert self._outer is not None
            self._outer.synchronize()
            for variable, array in zip(self.variables, self._arrays, strict=True):
                variable.assign(array)
            self._arrays = []
        arrays, runtime, name = list(map(array_of, buffers)), api.runtime(), f"{self.label}.synchronize_outer"
        digests = allgather_object(runtime, list(map(digest, arrays)), f"{name}.buffers") if arrays else []
        different = [index for index, found in enumerate(zip(*digests, strict=True)) if len(set(found)) > 1]
        floats = [index for index in different if keras.backend.is_float_dtype(buffers[index].dtype)]
        handles = [runtime.allreduce(f"{name}.{index}", arrays[index], arrays[index], ReduceOp.AVERAGE)
                   for index in floats]  # others are left alone: a sum of masks may overflow
        for index, handle in zip(floats, handles, strict=True):
            handle.wait()
            buffers[index].assign(arrays[index])
        broadcast_variables([buffers[index] for index in different if index not in floats], 0, f"{name}.counts")

    def global_weights(self) -> list[tuple[str, Array]] | None:
        """Return the global values of each parameter, flat; None before the first step."""
        if self._outer is not None:
            return self._outer.global_weights()
        return saved_weights(self._state, self._settings, self._parameters()) if self._state and self.workers else None

    def of_root(self, root_rank: int) -> dict[str, Any] | None:
        """Return rank `root_rank`'s state; all ranks call this."""
        state: dict[str, Any] | None = broadcast_object(api.runtime(), self.saved(), root_rank, f"{self.label}.state")
        return state

    def gather(self, optimizer: Any) -> None:
        """Gather what a checkpoint has of rank 0; all ranks call this."""
        self.gathered = values_of_root(optimizer.variables, 0, f"{self.label}.optimizer"), self.of_root(0)

    # --- checkpoints of Keras ------------------------------------------------------------------------------------------

    def _obj_type(self) -> str:
        return "Optimizer"

    def save_own_variables(self, store: Any) -> None:
        """Write this rank's state into a store of Keras."""
        state, arrays = self.saved(), dict[str, Array]()
        if self.workers:  # also before the first step: `load_model` looks for it
            plain = json.dumps(taken_apart("state", state, arrays))
            for name, array in {**arrays, _PLAIN: np.frombuffer(plain.encode(), np.uint8)}.items():
                store[name] = array

    def load_own_variables(self, store: Any) -> None:
        """Go on with a state from a store of Keras; begin anew where that of a plain optimizer has none."""
        arrays = {name: np.asarray(store[name]) for name in sorted(store.keys())}
        plain = arrays.pop(_PLAIN, None)
        self.restart(None if plain is None else put_together(json.loads(plain.tobytes()), arrays))


class WithOuter(Distributed):
    """Mixed into the user's optimizer class. With one worker it does what its base class does."""

    hvdlite_exchanges: Exchanges

    @classmethod
    def from_config(cls, config: dict[str, Any], *arguments: Any, **named: Any) -> Any:
        """Like the base class's; copies are plain, because all ranks make the exchanges of an optimizer."""
        return cls._hvdlite_base.from_config(config, *arguments, **named)  # type: ignore[attr-defined]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._hvdlite_base.from_config, (self.get_config(),)  # type: ignore[attr-defined]

    def apply(self, grads: Sequence[Any], trainable_variables: Any = None, weight: Any = None) -> Any:
        """Like the base class's; then parameters become what an exchange has brought, if one is due."""
        exchanges, variables = self.hvdlite_exchanges, trainable_variables
        if not exchanges.workers:
            return super().apply(grads, trainable_variables, weight)
        grads, variables = list(grads), None if variables is None else list(variables)
        sparse = [index for index, gradient in enumerate(grads) if hasattr(gradient, "dense_shape")]  # tf.IndexedSlices
        if sparse and not self._hvdlite_settings.arguments["sparse_as_dense"]:
            raise UnsupportedError("outer=: the gradient of an embedding is sparse, and workers exchange whole variables: "
                                   "give DistributedOptimizer(sparse_as_dense=True)")
        for index in sparse:
            grads[index] = keras.ops.convert_to_tensor(grads[index])
        if not self.built and variables is not None:  # type: ignore[has-type]
            self.build(variables)
            self.built = True
        own, steps = self._trainable_variables, self.gradient_accumulation_steps  # type: ignore[attr-defined]
        exchanges.variables = own
        applies = (self._iterations + 1) % steps == 0 if steps else True  # type: ignore[attr-defined]
        needs, = call(exchanges.count, [keras.ops.cast(keras.ops.convert_to_tensor(applies), "int32")])
        needs = cond(needs == _FIRST, lambda: call(exchanges.begin, [*values_of(own), needs], [needs])[0], lambda: needs)
        result = super().apply(grads, variables, weight)

        def exchanged() -> list[Any]:
            return call(exchanges.exchange, values_of(own))

        def assign(values: Sequence[Any]) -> None:
            for variable, value in zip(own, values, strict=True):
                variable.assign(value)
        if keras.backend.backend() == "jax":  # whose branches must not assign
            assign(cond(needs >= _DUE, exchanged, lambda: values_of(own)))
        else:
            cond(needs >= _DUE, lambda: assign(exchanged()), lambda: None)
        return result

    @with_errors_of_backend
    def synchronize_outer(self, *models: Any) -> None:
        """Merge everything now: parameters become the global weights on all ranks. All ranks call this.

        `fit` does so at its end, and before Keras' callbacks that save. Elsewhere call it before a model is evaluated or
        saved. With one worker it does nothing.

        Args:
            models: whose non-trainable variables become equal too: floating-point ones that differ their mean over all
                ranks, others rank 0's. An optimizer has none: pass the model when it has moving statistics
                (BatchNormalization).

        Raises:
            MismatchError: when ranks have made different numbers of steps.
            HorovodInternalError: like every collective.
        """
        for model in models:
            read_back(model)
        exchanges = self.hvdlite_exchanges
        self._hvdlite_step_reducer().take_part()
        if exchanges.workers and self.built:  # type: ignore[has-type]
            exchanges.variables = self._trainable_variables  # type: ignore[attr-defined]
            buffers = {id(each): each for model in models for each in model.non_trainable_variables}
            exchanges.synchronize([each for each in buffers.values() if not is_random_state(each)])

    def global_weights(self) -> dict[str, Array]:
        """Return copies of the global weights by the variables' paths: NumPy arrays of float32 or float64.

        They are the same on all ranks, and change when something is merged. Before the first step, and with one worker,
        they are the parameters.
        """
        exchanges, own = self.hvdlite_exchanges, self._trainable_variables  # type: ignore[attr-defined]
        exchanges.variables = own
        found = exchanges.global_weights()
        values = list(map(array_of, own)) if found is None else [each.copy() for _, each in found]
        return {variable.path: each.reshape(variable.shape) for variable, each in zip(own, values, strict=True)}


def outer_in(optimizer: Any) -> WithOuter | None:
    """Return the optimizer with several workers that an optimizer is or scales the loss for; None when there is none."""
    found = distributed_in(optimizer)
    return found if issubclass(type(found), WithOuter) and found.hvdlite_exchanges.workers else None


def outers_of(model: Any) -> list[WithOuter]:
    """Return those of a model's optimizers that have several workers."""
    return [outer for each in optimizers_of(model) if (outer := outer_in(each)) is not None]


_SAVING: Final = tuple(getattr(keras.callbacks, name) for name in ("BackupAndRestore", "ModelCheckpoint", "OrbaxCheckpoint")
                       if hasattr(keras.callbacks, name))


class SynchronizeOuterCallback(keras.callbacks.Callback):
    """Merges everything at the end of `fit`, and of an epoch when some rank has a callback of Keras that keeps weights then.

    hooks.py puts it in front of the callbacks of each `fit` on all ranks. `EarlyStopping` restores weights after it:
    exchanges begin anew with these.
    """

    def __init__(self, others: Sequence[Any]) -> None:
        super().__init__()
        self._restores = any(getattr(each, "restore_best_weights", False) for each in others)
        self._keeps = self._restores or any(isinstance(each, _SAVING) for each in others)

    @with_errors_of_backend
    def on_train_begin(self, logs: Any = None) -> None:
        """Agree on whether some rank keeps weights, and restores them."""
        runtime = api.runtime()
        everywhere = allgather_object(runtime, (self._keeps, self._restores), runtime.names.unnamed("outer", "fit"))
        self._keeps, self._restores = (any(flags) for flags in zip(*everywhere, strict=True))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Merge, if somebody keeps the weights."""
        for optimizer in outers_of(self.model) if self._keeps else ():
            optimizer.synchronize_outer(self.model)

    def on_train_end(self, logs: Any = None) -> None:
        """Merge."""
        for optimizer in outers_of(self.model):
            optimizer.synchronize_outer(self.model)
            if self._restores:
                optimizer.hvdlite_exchanges.restart(None)
