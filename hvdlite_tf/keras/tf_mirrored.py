"""`tf.distribute.Strategy` on hvdlite: one replica per rank.

It is TensorFlow's own kind of strategy: Keras' trainer, `tf.nn.compute_average_loss`, `tf.distribute.get_replica_context()`
and the like find it where they look. TensorFlow lets others write strategies, but does not promise the methods that they
must have: `tests/tf/test_mirrored.py` says with which versions this one works.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import values
from tensorflow.python.distribute.one_device_strategy import OneDeviceExtended

from hvdlite import api
from hvdlite.core.errors import MismatchError
from hvdlite.core.types import ReduceOp
from hvdlite.training.objects import allgather_object
from hvdlite.training.strategies import reduction
from hvdlite_tf import ops
from hvdlite_tf.functions import broadcast_variables
from hvdlite_tf.keras import scope
from hvdlite_tf.keras.shares import distributed_dataset, local_dataset


class MirroredStrategy(scope.Mirrored, tf.distribute.Strategy):  # type: ignore[misc]
    """One replica of the model per rank, in step: `with strategy.scope():` around what makes and compiles it.

    Batches are global: each rank takes its share of what is given to `fit` and of what `experimental_distribute_dataset`
    distributes. Started without a launcher there is one replica, and everything runs as it would without a strategy.

    Optimizers made or compiled in the scope reduce gradients (Sum: Keras and `tf.nn.compute_average_loss` divide losses by
    the global batch). Variables start as rank 0's. Metrics are summed over ranks when they are read outside of `run`, which
    all ranks must do. BatchNormalization normalises each rank's share by itself, and its moving averages stay each rank's
    own, of which rank 0's are saved; `hvd.SyncBatchNormalization` normalises the global batch.

    Random operations of TensorFlow get a seed that all ranks share, rank 0's if the script has set one, so that datasets
    shuffle alike; make datasets after the strategy.

    Args:
        devices: how many ranks `launch` starts when no launcher has; a number, or as many as the list is long.
        cross_device_ops: accepted for TensorFlow's sake.
        scale_learning_rate: multiply the learning rates of optimizers by the number of replicas.
    """

    def __init__(self, devices: int | Sequence[str] | None = None, cross_device_ops: Any = None, *,
                 scale_learning_rate: bool = False) -> None:
        del cross_device_ops
        scope.Mirrored.__init__(self, "tf", devices, ReduceOp.SUM, scale_learning_rate)
        gpus = tf.config.list_logical_devices("GPU")
        device = gpus[api.local_rank() % len(gpus)].name if gpus else "/device:CPU:0"
        tf.distribute.Strategy.__init__(self, _Extended(self, device))
        from tensorflow.python.eager import context
        seeds = allgather_object(api.runtime(), context.global_seed(), api.runtime().unnamed("tf", "global_seed"))
        if seeds[0] is None or seeds != seeds[:1] * len(seeds):  # setting it begins the sequence of operations' seeds anew
            tf.random.set_seed(self._seed if seeds[0] is None else seeds[0])

    @contextmanager
    def _entered(self) -> Iterator[MirroredStrategy]:
        with scope.entered(self), super().scope():
            yield self

    def scope(self) -> Any:
        """Return the context in which models, optimizers and datasets are made and compiled."""
        return self._entered()

    def run(self, fn: Callable[..., Any], args: Any = (), kwargs: Any = None, options: Any = None) -> Any:
        """Return what `fn` returns on this rank. All ranks' variables are rank 0's before the first run."""
        self._extended.synchronize()
        return super().run(fn, args, kwargs, options)

    def reduce(self, reduce_op: Any, value: Any, axis: Any = None) -> Any:
        """Return the sum or mean of a value over all ranks, and over a dimension of it where `axis` says so."""
        return super().reduce(reduce_op, value, axis)


class _ReplicaContext(tf.distribute.ReplicaContext):  # type: ignore[misc]
    def __init__(self, strategy: MirroredStrategy) -> None:
        super().__init__(strategy, replica_id_in_sync_group=strategy.rank)

    @property
    def devices(self) -> tuple[str, ...]:
        devices: tuple[str, ...] = self.strategy.extended.worker_devices
        return devices


class _Extended(OneDeviceExtended):  # type: ignore[misc]
    """One device in this process, and other ranks with one each."""

    def __init__(self, strategy: MirroredStrategy, device: str) -> None:
        super().__init__(strategy, device)
        self._strategy = weakref.ref(strategy)
        self._created: list[weakref.ref[Any]] = []
        self._synchronized = False

    @property
    def _mirrored(self) -> MirroredStrategy:
        strategy = self._strategy()
        assert strategy is not None
        return strategy

    def synchronize(self) -> None:
        """Give all variables of the scope rank 0's values, once.

        Raises:
            MismatchError: when ranks have made other variables.
        """
        if self._synchronized or self._num_replicas_in_sync == 1:
            return
        self._synchronized = True
        with tf.init_scope():
            runtime = api.runtime()
            variables = [variable for variable in (reference() for reference in self._created) if variable is not None]
            described = [(variable.name, tuple(variable.shape), variable.dtype.name) for variable in variables]
            everywhere = allgather_object(runtime, described, runtime.unnamed("tf", "scope_variables"))
            for rank, theirs in enumerate(everywhere):
                if [each[1:] for each in theirs] != [each[1:] for each in everywhere[0]]:
                    pairs = zip(everywhere[0], theirs, strict=False)
                    differing = next(((first, other) for first, other in pairs if first[1:] != other[1:]),
                                     (f"{len(everywhere[0])} variables", f"{len(theirs)} variables"))
                    raise MismatchError(f"the scope's variables differ: rank 0 made {differing[0]}, rank {rank} "
                                        f"{differing[1]}; all ranks must make the same ones in the same order")
            broadcast_variables(variables, 0)
            for variable in variables:
                if "seed_generator_state" in variable.name:  # every rank draws its own dropout masks
                    state = variable.numpy()
                    state.flat[0] += self._mirrored.rank
                    variable.assign(state)

    def _create_variable(self, next_creator: Any, **kwargs: Any) -> Any:
        variable = super()._create_variable(next_creator, **kwargs)
        if self._num_replicas_in_sync == 1:
            return variable
        if kwargs.get("synchronization") == tf.VariableSynchronization.ON_READ:
            return values.SyncOnReadVariable(self._mirrored, [variable], kwargs.get("aggregation"))
        self._created.append(weakref.ref(variable))
        return variable

    @property
    def _num_replicas_in_sync(self) -> int:
        return self._mirrored._size

    def variable_created_in_scope(self, v: Any) -> bool:
        """All variables of this process can be used in the scope, wherever they were made."""
        return True

    def _validate_colocate_with_variable(self, colocate_with_variable: Any) -> None:
        pass

    def _call_for_each_replica(self, fn: Any, args: Any, kwargs: Any) -> Any:
        with tf.device(self._device), _ReplicaContext(self._mirrored):
            return fn(*args, **kwargs)

    def _reduce_to(self, reduce_op: Any, value: Any, destinations: Any, options: Any) -> Any:
        del destinations, options
        if isinstance(value, values.SyncOnReadVariable):
            value = value.values[0]
        return ops.allreduce(_ready(reduce_op, value), op=reduction(reduce_op))

    def _batch_reduce_to(self, reduce_op: Any, value_destination_pairs: Any, options: Any) -> Any:
        return self._replica_ctx_all_reduce(reduce_op, [value for value, _ in value_destination_pairs], options)

    def _replica_ctx_all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        del options
        flat = tf.nest.flatten(value)
        if not flat:
            return value
        reduced = ops.grouped_allreduce([_ready(reduce_op, each) for each in flat], op=reduction(reduce_op))
        return tf.nest.pack_sequence_as(value, reduced)

    def _replica_ctx_update(self, var: Any, fn: Any, args: Any = (), kwargs: Any = None, group: bool = True) -> Any:
        return self._update(var, fn, args, kwargs or {}, group)

    def _gather_to_implementation(self, value: Any, destinations: Any, axis: int, options: Any) -> Any:
        del destinations, options
        value = tf.convert_to_tensor(value)
        if axis == 0:
            return ops.allgather(value)
        order = list(range(value.shape.rank))
        order[0], order[axis] = order[axis], order[0]
        return tf.transpose(ops.allgather(tf.transpose(value, order)), order)

    def _use_merge_call(self) -> bool:
        return False

    def _experimental_distribute_dataset(self, dataset: Any, options: Any) -> Any:
        del options
        if self._mirrored.has_local_input or self._num_replicas_in_sync == 1:
            return dataset
        return distributed_dataset(dataset, self._mirrored)

    def _distribute_datasets_from_function(self, dataset_fn: Any, options: Any) -> Any:
        del options
        size = self._num_replicas_in_sync
        return local_dataset(dataset_fn(tf.distribute.InputContext(
            num_input_pipelines=size, input_pipeline_id=self._mirrored.rank, num_replicas_in_sync=size)))

    def _experimental_distribute_values_from_function(self, value_fn: Any) -> Any:
        return value_fn(tf.distribute.experimental.ValueContext(self._mirrored.rank, self._num_replicas_in_sync))

    def read_var(self, replica_local_var: Any) -> Any:
        """Return the value of a variable of the scope, over all ranks when it is one that is summed when it is read."""
        if isinstance(replica_local_var, values.SyncOnReadVariable):
            return replica_local_var._get_cross_replica()
        return super().read_var(replica_local_var)

    def _get_local_replica_id(self, replica_id_in_sync_group: Any) -> int:
        return 0

    @property
    def should_checkpoint(self) -> bool:
        return self._mirrored.rank == 0

    @property
    def should_save_summary(self) -> bool:
        return self._mirrored.rank == 0


def _ready(reduce_op: Any, value: Any) -> Any:
    """Return a value as a tensor or slices; one of integers that are to be averaged as floats, as in TensorFlow."""
    if isinstance(value, tf.IndexedSlices):
        return value
    tensor = tf.convert_to_tensor(value)
    return tf.cast(tensor, tf.float64) if reduction(reduce_op) is ReduceOp.AVERAGE and tensor.dtype.is_integer else tensor
