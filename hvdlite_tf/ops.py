"""Collectives on TensorFlow tensors, eager and inside `tf.function`; differentiable, with Horovod's scaling of gradients.

Inside `tf.function` a collective is one call into Python that blocks until it is complete; several of them run in the order
in which they were traced, so all ranks must trace them in the same order. (Gradients go together: `gradients.py`.)

Where gradients of variables are weighted by samples later, a gradient that comes from another rank's loss needs that rank's
weight. So it is the adjoint of the collective under the weighted inner product, which `hvdlite_torch/gradients/weights.py`
derives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from hvdlite import api, boundaries
from hvdlite.core.array import Array
from hvdlite.core.errors import UnsupportedError
from hvdlite.core.process_set import ProcessSet, global_process_set
from hvdlite.core.types import ReduceOp, reduce_op
from hvdlite.runtime.names import member_names
from hvdlite_tf import gpu
from hvdlite_tf.arrays import check_dtypes, run
from hvdlite_tf.compression import Compression, Compressor
from hvdlite_tf.errors import as_tensorflow, graph_name
from hvdlite_tf.step_weight import weight_of_step

Average, Sum, Adasum = api.Average, api.Sum, api.Adasum
Min, Max, Product = api.Min, api.Max, api.Product
F = TypeVar("F", bound=Callable[..., Any])


def collective(function: F) -> F:
    """Decorate a collective: its errors are TensorFlow's, too.

    Autograph does not convert it, which would slow down every step: no control flow here depends on tensors' values.
    """
    return tf.autograph.experimental.do_not_convert(as_tensorflow(function))


@collective
def allreduce(tensor: Any, average: bool | None = None, device_dense: str = "", device_sparse: str = "",
              compression: type[Compressor] = Compression.none, op: ReduceOp | None = None, prescale_factor: float = 1.0,
              postscale_factor: float = 1.0, name: str | None = None, process_set: ProcessSet = global_process_set,
              ignore_name_scope: bool = False) -> Any:
    """Return the reduction of a tensor over all ranks. Differentiable.

    Args:
        tensor: the same shape and dtype on all ranks; or `tf.IndexedSlices`, whose rows are gathered (Average and Sum).
        average: deprecated; use `op`.
        device_dense, device_sparse, ignore_name_scope: accepted for compatibility with Horovod.
        compression: dtype on the wire for float32 and float64.
        op: Average (default), Sum, Product, Min, Max or Adasum.
        prescale_factor: factor on every rank's values before the reduction.
        postscale_factor: factor on the result.
        name: the same on all ranks; unnamed calls are matched by their order.
        process_set: the ranks that take part.

    Raises:
        MismatchError: on all ranks, when they disagree; it is a `tf.errors.FailedPreconditionError`, too (errors.py).
        NotImplementedError: for IndexedSlices with another op or factors.
    """
    operation = reduce_op(op, average)
    if isinstance(tensor, tf.IndexedSlices):
        if operation not in (Average, Sum) or prescale_factor != 1.0 or postscale_factor != 1.0:
            raise NotImplementedError("IndexedSlices are gathered: use op Average or Sum and no factors, or make them dense")
        return _gathered_slices(tensor, operation, name, process_set)
    compressed, context = compression.compress(tf.convert_to_tensor(tensor))
    where = _name("allreduce", name, process_set)
    arguments = (operation, prescale_factor, postscale_factor, process_set)

    @tf.custom_gradient
    def reduce(x: tf.Tensor) -> Any:
        return _allreduce(x, where, *arguments), _pull_back(
            where, lambda upstream: [_allreduce(upstream, f"{where}.gradient", *arguments)])
    return compression.decompress(reduce(compressed), context)


@collective
def grouped_allreduce(tensors: Sequence[Any], average: bool | None = None, device_dense: str = "", device_sparse: str = "",
                      compression: type[Compressor] = Compression.none, op: ReduceOp | None = None,
                      prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                      process_set: ProcessSet = global_process_set, ignore_name_scope: bool = False,
                      name: str | None = None) -> list[Any]:
    """Like `allreduce`, of several tensors that are negotiated as one; IndexedSlices among them are gathered."""
    operation = reduce_op(op, average)
    results: list[Any] = list(tensors)
    dense = [index for index, each in enumerate(results) if not isinstance(each, tf.IndexedSlices)]
    for index, each in enumerate(results):
        if isinstance(each, tf.IndexedSlices):
            results[index] = allreduce(each, op=operation, name=f"{name}.{index}" if name else None, process_set=process_set,
                                       prescale_factor=prescale_factor, postscale_factor=postscale_factor)
    if not dense:
        return results
    pairs = [compression.compress(tf.convert_to_tensor(results[index])) for index in dense]
    where = _name("grouped_allreduce", name, process_set)
    arguments = (operation, prescale_factor, postscale_factor, process_set)

    @tf.custom_gradient
    def reduce(*given: tf.Tensor) -> Any:
        return (reduce_together(given, where, *arguments),
                _pull_back(where, lambda *upstream: reduce_together(upstream, f"{where}.gradient",
                                                                       *arguments)))
    for index, (_, context), reduced in zip(dense, pairs, reduce(*(each for each, _ in pairs)), strict=True):
        results[index] = compression.decompress(reduced, context)
    return results


@collective
def allgather(tensor: Any, name: str | None = None, ignore_name_scope: bool = False,
              process_set: ProcessSet = global_process_set, *, horovod_gradient: bool = True) -> tf.Tensor:
    """Return all ranks' tensors concatenated along the first dimension, which may differ between ranks. Differentiable.

    Args:
        tensor: at least 1-D, of any dtype; the same on all ranks but for the number of rows.
        horovod_gradient: average the gradients of all ranks' results, as Horovod does; False: sum them, which is exact.

    Raises:
        UnsupportedError: for a scalar; otherwise like `allreduce`.
    """
    tensor = tf.convert_to_tensor(tensor)
    where = _name("allgather", name, process_set)

    @tf.custom_gradient
    def gather(x: tf.Tensor) -> Any:
        result, begin = run(lambda array: _gathered(array, where, process_set), [x], [x.dtype, tf.int64],
                            [_any_rows(x), tf.TensorShape([])], on_gpu=True)

        def adjoint(upstream: tf.Tensor) -> list[tf.Tensor]:
            whole = _allreduce(upstream, f"{where}.gradient", Average if horovod_gradient else Sum, 1.0, 1.0, process_set)
            own = tf.slice(whole, tf.concat([[begin], tf.zeros([tf.rank(whole) - 1], tf.int64)], 0),
                           tf.shape(x, out_type=tf.int64))
            own.set_shape(x.shape)
            return [own]
        return result, _pull_back(where, adjoint)
    return gather(tensor)


@collective
def grouped_allgather(tensors: Sequence[Any], name: str | None = None, ignore_name_scope: bool = False,
                      process_set: ProcessSet = global_process_set, *, horovod_gradient: bool = True) -> list[tf.Tensor]:
    """Like `allgather`, of several tensors."""
    names = [None] * len(tensors) if name is None else member_names(name, len(tensors))
    return [allgather(tensor, each, ignore_name_scope, process_set, horovod_gradient=horovod_gradient)
            for tensor, each in zip(tensors, names, strict=True)]


@collective
def broadcast(tensor: Any, root_rank: int, name: str | None = None, ignore_name_scope: bool = False,
              process_set: ProcessSet = global_process_set, *, horovod_gradient: bool = True) -> tf.Tensor:
    """Return rank `root_rank`'s tensor; all ranks pass one of the same shape and dtype. Differentiable.

    Args:
        tensor: any dtype and shape, the same on all ranks.
        root_rank: the rank, in the numbering of the job.
        horovod_gradient: as in `allgather`.

    Raises:
        UnsupportedError: for a root that does not exist, or is not in the set; otherwise like `allreduce`.
    """
    tensor = tf.convert_to_tensor(tensor)
    where = _name("broadcast", name, process_set)
    check_dtypes(where, [tensor])

    @tf.custom_gradient
    def send(x: tf.Tensor) -> Any:
        def adjoint(upstream: tf.Tensor) -> list[tf.Tensor]:
            whole = _allreduce(upstream, f"{where}.gradient", Average if horovod_gradient else Sum, 1.0, 1.0, process_set)
            return [whole if api.rank() == root_rank else tf.zeros_like(whole)]
        (result,) = run(lambda array: _broadcast_all([array], root_rank, where, process_set), [x], [x.dtype], [x.shape],
                        on_gpu=True)
        return result, _pull_back(where, adjoint)
    return send(tensor)


@collective
def broadcast_(variables: Sequence[tf.Variable], root_rank: int, name: str | None = None,
               process_set: ProcessSet = global_process_set) -> list[tf.Tensor]:
    """Overwrite variables with rank `root_rank`'s, and return their values.

    Args:
        variables: the same number, shapes and dtypes on all ranks.
        root_rank: the rank, in the numbering of the job.

    Raises:
        UnsupportedError: like `broadcast`.
    """
    variables = list(variables)
    if not variables:
        return []
    where = _name("broadcast_", name, process_set)
    check_dtypes(where, variables)
    values = run(lambda *arrays: _broadcast_all(arrays, root_rank, where, process_set),
                 [tf.convert_to_tensor(variable) for variable in variables], [variable.dtype for variable in variables],
                 [variable.shape for variable in variables], on_gpu=True)
    if api.rank() != root_rank:
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)
    return values


@collective
def alltoall(tensor: Any, splits: Any = None, name: str | None = None, ignore_name_scope: bool = False,
             process_set: ProcessSet = global_process_set) -> Any:
    """Send rows to each rank and return those received, in rank order; with `splits` also how many came from each.

    Args:
        tensor: at least 1-D; the rows for rank 0 first, then those for rank 1, and so on.
        splits: the number of rows for each rank; default: equal parts. Differentiable.

    Raises:
        UnsupportedError: for splits that do not fit, or rows that cannot be divided equally; otherwise like `allreduce`.
    """
    tensor = tf.convert_to_tensor(tensor)
    where = _name("alltoall", name, process_set)
    given = [] if splits is None else [tf.cast(splits, tf.int64)]

    @tf.custom_gradient
    def exchange(x: tf.Tensor, *counts: tf.Tensor) -> Any:
        received, rows = _alltoall(x, counts, where, process_set)

        def adjoint(upstream: tf.Tensor) -> list[tf.Tensor]:
            back, _ = _alltoall(upstream, [rows], f"{where}.gradient", process_set)
            kept = tf.zeros(tf.concat([[tf.shape(x)[0] - tf.shape(back)[0]], tf.shape(x)[1:]], 0), back.dtype)
            own = tf.concat([back, kept], 0)
            own.set_shape(x.shape)
            return [own]
        pull_back = _pull_back(where, adjoint)
        return (received, rows), lambda upstream, _: [pull_back(upstream), *(None for _ in counts)]
    received, rows = exchange(tensor, *given)
    return received if splits is None else (received, tf.cast(rows, tf.int32))


@collective
def reducescatter(tensor: Any, device_dense: str = "", compression: type[Compressor] = Compression.none,
                  op: ReduceOp = Average, name: str | None = None, process_set: ProcessSet = global_process_set,
                  ignore_name_scope: bool = False, prescale_factor: float = 1.0, postscale_factor: float = 1.0, *,
                  horovod_gradient: bool = True) -> tf.Tensor:
    """Return this rank's rows of the reduction over all ranks. Differentiable for Average and Sum.

    Args:
        tensor: at least 1-D; the same shape and dtype on all ranks. Rows are divided as evenly as possible, the first ranks
            get one more.
        op: Average (default), Sum, Product, Min or Max.
        horovod_gradient: multiply the gradient by the number of ranks, as Horovod does; False: the exact gradient.

    Raises:
        UnsupportedError: for a scalar; otherwise like `allreduce`.
    """
    compressed, context = compression.compress(tf.convert_to_tensor(tensor))
    where = _name("reducescatter", name, process_set)

    @tf.custom_gradient
    def reduce(x: tf.Tensor) -> Any:
        def scatter(array: Array) -> list[Array]:
            return [gpu.finished(api.runtime().reducescatter(where, array, op, prescale=prescale_factor,
                                                             postscale=postscale_factor,
                                                             process_set=api.set_id(process_set)))]

        def adjoint(upstream: tf.Tensor) -> list[tf.Tensor]:
            size = process_set.size() or 1
            factor = prescale_factor * postscale_factor * (size if horovod_gradient else 1) / (size if op is Average else 1)
            whole, _ = run(lambda array: _gathered(array, f"{where}.gradient", process_set), [upstream],
                           [upstream.dtype, tf.int64], [x.shape, tf.TensorShape([])], on_gpu=True)
            return [whole * tf.cast(factor, whole.dtype)]
        return run(scatter, [x], [x.dtype], [_any_rows(x)], op, on_gpu=True)[0], _pull_back(where, adjoint)
    return compression.decompress(reduce(compressed), context)


@collective
def grouped_reducescatter(tensors: Sequence[Any], device_dense: str = "", compression: type[Compressor] = Compression.none,
                          op: ReduceOp = Average, process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0,
                          postscale_factor: float = 1.0, *, horovod_gradient: bool = True) -> list[tf.Tensor]:
    """Like `reducescatter`, of several tensors."""
    return [reducescatter(tensor, device_dense, compression, op, None, process_set, False, prescale_factor, postscale_factor,
                          horovod_gradient=horovod_gradient) for tensor in tensors]


@collective
def join() -> tf.Tensor:
    """Wait until all ranks have called this, contributing zeros to their collectives; return the last rank (int32)."""
    return int32_tensor(lambda: boundaries.join(api.runtime()))


def int32_tensor(value: Any) -> tf.Tensor:
    """Return the number that a function returns when the graph runs."""
    return run(lambda: [np.array(value(), np.int32)], [], [tf.int32], [tf.TensorShape([])])[0]


def _name(kind: str, name: str | None, process_set: ProcessSet) -> str:
    if name is None and not tf.executing_eagerly():
        return graph_name(kind, api.set_id(process_set))
    return api.runtime().names.of_call("tf", kind, name, api.set_id(process_set))


def _pull_back(name: str, adjoint: Callable[..., list[tf.Tensor]]) -> Callable[..., Any]:
    """Return the gradient of a collective, made of its adjoint, which returns one gradient for each upstream gradient.

    The weights are the numbers of samples, because a common factor cancels. 16-bit gradients could overflow with it.
    """
    samples = weight_of_step()

    def weighted(*upstream: tf.Tensor) -> list[tf.Tensor]:
        wide = [tf.cast(each, tf.float32 if each.dtype.size == 2 else each.dtype) for each in upstream]
        weights = [tf.cast(samples, each.dtype) for each in wide]
        pulled = adjoint(*(each * weight for each, weight in zip(wide, weights, strict=True)))
        return [tf.cast(each / weight, given.dtype) for each, weight, given in zip(pulled, weights, upstream, strict=True)]

    def fail(*_: Any) -> Any:
        raise UnsupportedError(f"the gradient of '{name}' has no gradient: collectives on TensorFlow have first derivatives "
                               "only; stop it with tf.stop_gradient")

    @tf.custom_gradient
    def pull_back(*upstream: tf.Tensor) -> Any:
        own = adjoint(*upstream) if samples is None else weighted(*upstream)
        return own[0] if len(own) == 1 else own, fail
    return pull_back


def _any_rows(tensor: tf.Tensor) -> tf.TensorShape:
    return tf.TensorShape([None, *tensor.shape[1:]]) if tensor.shape.rank else tf.TensorShape(None)


def _allreduce(tensor: tf.Tensor, name: str, op: ReduceOp, prescale: float, postscale: float,
               process_set: ProcessSet) -> tf.Tensor:
    return reduce_together([tensor], name, op, prescale, postscale, process_set)[0]


def reduce_together(tensors: Sequence[tf.Tensor], name: str, op: ReduceOp, prescale: float, postscale: float,
                    process_set: ProcessSet) -> list[tf.Tensor]:
    """Return the reductions of tensors that are negotiated as one."""
    check_dtypes(name, tensors)

    def reduce(*arrays: Any) -> Sequence[Any]:
        runtime, process_set_id = api.runtime(), api.set_id(process_set)
        outputs = [gpu.empty_like(array) for array in arrays]
        if len(arrays) == 1:
            gpu.finished(runtime.allreduce(name, arrays[0], outputs[0], op, prescale=prescale, postscale=postscale,
                                           process_set=process_set_id, blocking=True))
        else:
            gpu.finished(runtime.grouped_allreduce(name, arrays, outputs, op, prescale=prescale, postscale=postscale,
                                                   process_set=process_set_id))
        return outputs
    return run(reduce, tensors, [tensor.dtype for tensor in tensors], [tensor.shape for tensor in tensors], op, on_gpu=True)


def _gathered(array: Array, name: str, process_set: ProcessSet) -> list[Array]:
    """Return all ranks' rows, and the index of this rank's first row."""
    runtime, process_set_id = api.runtime(), api.set_id(process_set)
    handle = runtime.allgather(name, array, process_set=process_set_id, blocking=True)
    result = gpu.finished(handle)
    before = sum(handle.rows[:runtime.members(process_set_id).index(runtime.world.rank)])
    return [result, np.array(before, np.int64)]


def _broadcast_all(arrays: Sequence[Any], root_rank: int, name: str, process_set: ProcessSet) -> list[Any]:
    runtime, process_set_id = api.runtime(), api.set_id(process_set)
    outputs = [gpu.copied(array) for array in arrays]
    handles = [runtime.broadcast(f"{name}.{index}", output, root_rank, process_set=process_set_id,
                                 blocking=len(outputs) == 1)
               for index, output in enumerate(outputs)]
    for handle in handles:
        gpu.finished(handle)
    return outputs


def _alltoall(tensor: tf.Tensor, splits: Sequence[tf.Tensor], name: str, process_set: ProcessSet) -> list[tf.Tensor]:
    def exchange(array: Array, *counts: Array) -> Sequence[Array]:
        return gpu.finished(api.runtime().alltoall(name, array, counts[0].tolist() if counts else None,
                                                   process_set=api.set_id(process_set), blocking=True))
    shapes = [_any_rows(tensor), tf.TensorShape([None])]
    if tf.executing_eagerly():  # counts are used by the host, wherever the tensor is
        counts = [each.numpy() for each in splits]
        return run(lambda array: exchange(array, *counts), [tensor], [tensor.dtype, tf.int64], shapes, on_gpu=True)
    return run(exchange, [tensor, *splits], [tensor.dtype, tf.int64], shapes, on_gpu=not splits)


def _gathered_slices(slices: tf.IndexedSlices, op: ReduceOp, name: str | None, process_set: ProcessSet) -> tf.IndexedSlices:
    values = allgather(slices.values, None if name is None else f"{name}.values", process_set=process_set)
    indices = allgather(slices.indices, None if name is None else f"{name}.indices", process_set=process_set)
    if op is Average:
        values = values / tf.cast(process_set.size(), values.dtype)
    return tf.IndexedSlices(values, indices, slices.dense_shape)
