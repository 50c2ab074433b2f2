"""`tf.distribute.Strategy` on hvdlite: one replica per rank.

It is a subclass of TensorFlow's strategy, so Keras' trainer, `tf.nn.compute_average_loss` and
`tf.distribute.get_replica_context()` recognize it. TensorFlow allows other packages to write strategies, but does not
guarantee the interface: README's table of versions has those with which the tests of this one pass.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import values
from tensorflow.python.distribute.one_device_strategy import OneDeviceExtended

from hvdlite import api
from hvdlite.core.types import ReduceOp
from hvdlite.training.mirrored.scopes import parse_reduce_op
from hvdlite.training.objects import allgather_object
from hvdlite_tf import ops, step_weight
from hvdlite_tf.keras import scope, step
from hvdlite_tf.keras.shards import distributed_dataset, local_dataset
from hvdlite_tf.variables import RANDOM_STATE

_log = logging.getLogger("hvdlite")


class MirroredStrategy(scope.BaseStrategy, tf.distribute.Strategy):  # type: ignore[misc]
    """Trains one replica of the model on each rank, in step: create and compile the model in `with strategy.scope():`.

    Batches are global: each rank takes its shard of the data for `fit` and of datasets that
    `experimental_distribute_dataset` distributes. Without a launcher there is one replica, as without a strategy.

    Optimizers that are created or compiled in the scope reduce gradients. In `fit` and `train_on_batch` Keras sees one
    replica, and gradients are averaged, weighted by samples. In `run` gradients are summed: divide losses by the global
    batch size (`tf.nn.compute_average_loss`). In other loops they are averaged. Variables start with rank 0's values.
    Metrics are summed over ranks when they are read outside of `run`; all ranks must read them. BatchNormalization
    normalizes each rank's shard separately, each rank has its own moving averages, and rank 0's are saved;
    `hvd.SyncBatchNormalization` normalizes the global batch.

    Random operations of TensorFlow get the same seed on all ranks, rank 0's if the script has set one, so that datasets
    shuffle equally; create datasets after the strategy.

    The arguments are those of `scope.BaseStrategy`.
    """

    def _set_up(self) -> None:
        tf.distribute.Strategy.__init__(self, _Extended(self, own_device(api.local_rank())))
        self._has_unequal_datasets = False
        with tf.device("CPU:0"):
            self._samples = tf.Variable(1.0, trainable=False)
        from tensorflow.python.eager import context
        seeds = allgather_object(api.runtime(), context.global_seed(), api.runtime().names.unnamed("tf", "global_seed"))
        if seeds[0] is None or seeds != seeds[:1] * len(seeds):  # setting it restarts the sequence of operations' seeds
            tf.random.set_seed(self._seed if seeds[0] is None else seeds[0])

    @contextmanager
    def scope(self) -> Iterator[MirroredStrategy]:
        """Return the context in which to create and compile models, optimizers and datasets."""
        is_inside = tf.distribute.get_strategy() is self and tf.distribute.in_cross_replica_context()
        with scope.entered(self), nullcontext() if is_inside else super().scope():
            yield self

    def run(self, fn: Callable[..., Any], args: Any = (), kwargs: Any = None, options: Any = None) -> Any:
        """Call `fn` on this rank and return its result. Variables have rank 0's values, also those that it creates."""
        self.variable_mirror.mirror_pending(must_match=True)
        with nullcontext() if self.variable_mirror.is_deferred else scope.making(self), step.summing():
            return super().run(fn, args, kwargs, options)

    def making(self) -> AbstractContextManager[Any]:
        """Return a context in which new variables get rank 0's values immediately."""
        return tf.variable_creator_scope(self._extended.create_broadcast)  # type: ignore[no-any-return]

    @contextmanager
    def building(self) -> Iterator[None]:
        """Return a context in which an optimizer of the scope can be built: TensorFlow requires the strategy's scope."""
        if tf.distribute.get_strategy() is self:
            yield
            return
        with scope.making(self), super().scope():
            yield

    @contextmanager
    def weighted_step(self, samples: Any, variables: Callable[[], Sequence[Any]]) -> Iterator[None]:
        """Like the base class's. The step begins when it has its data: at the end of a tf.data.Dataset there is none.

        Otherwise TensorFlow runs what does not depend on the data, such as a metric's count of batches, before it notices.
        """
        current = step.current()
        data = [] if current is None else current.tensors
        with step_weight.kept_in(self._samples), tf.control_dependencies(data):
            if samples is None:
                yield
                return
            self._samples.assign(tf.cast(tf.maximum(samples, 1), tf.float32))
            yield
            self._samples.assign(1.0)

    def is_summed_on_read(self, variable: Any) -> bool:
        """Like the base class's."""
        return isinstance(getattr(variable, "_value", variable), values.SyncOnReadVariable)

    def check_applies(self) -> None:
        """Raise where gradients cannot be applied; warn once where they are averaged though shards have different sizes.

        Raises:
            RuntimeError: in the scope but outside of `run`, where Keras divides losses by the number of replicas.
        """
        if self._size > 1 and tf.distribute.get_strategy() is self and tf.distribute.in_cross_replica_context():
            raise RuntimeError("gradients are applied inside strategy.scope() but outside of strategy.run(), where Keras' "
                               "losses are divided by the number of replicas: call the training step with "
                               "strategy.run(step, args=...), or outside of the scope")
        if self._has_unequal_datasets and step.current() is None and not step.is_summing():
            self._has_unequal_datasets = False
            _log.warning("MirroredStrategy(shares=...): outside of strategy.run, gradients are averaged over ranks with "
                         "equal weights, but shards of experimental_distribute_dataset can have different sizes. Call "
                         "the step with strategy.run(step, args=...), and divide its loss by the global batch size: "
                         "tf.nn.compute_average_loss(losses, global_batch_size=...)")

    def reduce(self, reduce_op: Any, value: Any, axis: Any = None) -> Any:
        """Return the sum or mean of a value over all ranks, and over the dimension `axis` unless it is None."""
        return super().reduce(reduce_op, value, axis)


class _ReplicaContext(tf.distribute.ReplicaContext):  # type: ignore[misc]
    def __init__(self, strategy: MirroredStrategy) -> None:
        super().__init__(strategy, replica_id_in_sync_group=strategy.rank)

    @property
    def devices(self) -> tuple[str, ...]:
        return self.strategy.extended.worker_devices


class _Extended(OneDeviceExtended):  # type: ignore[misc]
    """The strategy's implementation: one device in this process, and one on each other rank."""

    def __init__(self, strategy: MirroredStrategy, device: str) -> None:
        super().__init__(strategy, device)
        self._strategy = weakref.ref(strategy)
        workers = [f"rank{rank}" for rank in range(strategy._size)]  # names: TensorFlow does not connect the ranks
        self._cluster_resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec({"worker": workers}), task_type="worker", task_id=strategy.rank)

    @property
    def _mirrored(self) -> MirroredStrategy:
        strategy = self._strategy()
        assert strategy is not None
        return strategy

    def _create_variable(self, next_creator: Any, **kwargs: Any) -> Any:
        variable = super()._create_variable(next_creator, **kwargs)
        if self._num_replicas_in_sync == 1:
            return variable
        if _is_on_read(kwargs):
            return values.SyncOnReadVariable(self._mirrored, [variable], kwargs.get("aggregation"))
        if not self._mirrored.variable_mirror.mirrors_immediately:
            self._mirrored.variable_mirror.created(variable)
        return variable

    def create_broadcast(self, next_creator: Any, **kwargs: Any) -> Any:
        """Create a variable with rank 0's initial value."""
        replicas, initial = self._mirrored.variable_mirror, kwargs.get("initial_value")
        if not replicas.mirrors_immediately or initial is None or _is_on_read(kwargs):
            return next_creator(**kwargs)
        is_seed = str(kwargs.get("name")).endswith(RANDOM_STATE)
        if not callable(initial) and not hasattr(initial, "numpy"):  # a tensor of the traced function
            kwargs["initial_value"] = ops.broadcast(tf.convert_to_tensor(initial, kwargs.get("dtype")), 0)
            return next_creator(**kwargs)
        with tf.init_scope():
            value = tf.convert_to_tensor(initial() if callable(initial) else initial, kwargs.get("dtype"))
            first = replicas.broadcast_value(value.numpy(), is_seed)
        kwargs["initial_value"] = lambda: tf.constant(first, value.dtype)
        return next_creator(**kwargs)

    @property
    def _num_replicas_in_sync(self) -> int:
        return self._mirrored._size

    def variable_created_in_scope(self, v: Any) -> bool:
        """Return True: all variables of this process can be used in the scope, wherever they were created."""
        return True

    def _validate_colocate_with_variable(self, colocate_with_variable: Any) -> None:
        pass

    def _call_for_each_replica(self, fn: Any, args: Any, kwargs: Any) -> Any:
        with tf.device(self._device), _ReplicaContext(self._mirrored):
            return fn(*args, **kwargs)

    def _reduce_to(self, reduce_op: Any, value: Any, destinations: Any, options: Any) -> Any:
        if isinstance(value, values.SyncOnReadVariable):
            value = value.values[0]
        return ops.allreduce(_ready(reduce_op, value), op=parse_reduce_op(reduce_op))

    def _batch_reduce_to(self, reduce_op: Any, value_destination_pairs: Any, options: Any) -> Any:
        return self._replica_ctx_all_reduce(reduce_op, [value for value, _ in value_destination_pairs], options)

    def _replica_ctx_all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        flat = tf.nest.flatten(value)
        if not flat:
            return value
        reduced = ops.grouped_allreduce([_ready(reduce_op, each) for each in flat], op=parse_reduce_op(reduce_op))
        return tf.nest.pack_sequence_as(value, reduced)

    def _replica_ctx_update(self, var: Any, fn: Any, args: Any = (), kwargs: Any = None, group: bool = True) -> Any:
        return self._update(var, fn, args, kwargs or {}, group)

    def _gather_to_implementation(self, value: Any, destinations: Any, axis: int, options: Any) -> Any:
        value = tf.convert_to_tensor(value)
        if axis == 0:
            return ops.allgather(value)
        order = list(range(value.shape.rank))
        order[0], order[axis] = order[axis], order[0]
        return tf.transpose(ops.allgather(tf.transpose(value, order)), order)

    def _use_merge_call(self) -> bool:
        return False

    def _experimental_distribute_dataset(self, dataset: Any, options: Any) -> Any:
        if self._mirrored.has_local_input or self._num_replicas_in_sync == 1:
            return dataset
        first = self._mirrored.shares.first
        self._mirrored._has_unequal_datasets |= len(set(first.shares)) > 1 or first.limits is not None
        return distributed_dataset(dataset, self._mirrored)

    def _distribute_datasets_from_function(self, dataset_fn: Any, options: Any) -> Any:
        size = self._num_replicas_in_sync
        return local_dataset(dataset_fn(tf.distribute.InputContext(
            num_input_pipelines=size, input_pipeline_id=self._mirrored.rank, num_replicas_in_sync=size)))

    def _experimental_distribute_values_from_function(self, value_fn: Any) -> Any:
        return value_fn(tf.distribute.experimental.ValueContext(self._mirrored.rank, self._num_replicas_in_sync))

    def read_var(self, replica_local_var: Any) -> Any:
        """Return the value of a variable of the scope; the sum over all ranks for a variable that is summed on read."""
        if isinstance(replica_local_var, values.SyncOnReadVariable):
            return replica_local_var._get_cross_replica()
        return super().read_var(replica_local_var)

    def _get_local_replica_id(self, replica_id_in_sync_group: Any) -> int:
        return 0

    @property
    def should_checkpoint(self) -> bool:
        return self._mirrored.rank == 0

    should_save_summary = should_checkpoint


def own_device(local_rank: int) -> str:
    """Return the device of a rank; if possible make only this GPU visible, so that TensorFlow reserves no other memory."""
    visible = tf.config.get_visible_devices("GPU")
    if len(visible) > 1:
        try:
            tf.config.set_visible_devices(visible[local_rank % len(visible)], "GPU")
        except RuntimeError:  # TensorFlow has initialized all of them already
            return str(tf.config.list_logical_devices("GPU")[local_rank % len(visible)].name)
    return "/device:GPU:0" if visible else "/device:CPU:0"


def _is_on_read(kwargs: dict[str, Any]) -> bool:
    """Return whether a new variable has each rank's part, which are combined when it is read: a metric's, in Keras.

    Before Keras 3.10 metrics ask for the sum only.
    """
    if kwargs.get("synchronization") == tf.VariableSynchronization.ON_READ:
        return True
    is_sum = kwargs.get("aggregation") == tf.VariableAggregation.SUM and kwargs.get("trainable") is False
    return is_sum and scope.METRICS_ASK_FOR_SUMS


def _ready(reduce_op: Any, value: Any) -> Any:
    """Return a value as a tensor or slices; integers to be averaged become floats, as in TensorFlow."""
    if isinstance(value, tf.IndexedSlices):
        return value
    tensor = tf.convert_to_tensor(value)
    return tf.cast(tensor,
                   tf.float64) if parse_reduce_op(reduce_op) is ReduceOp.AVERAGE and tensor.dtype.is_integer else tensor
