"""Programs of test_optimizers.py."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import hvdlite_tf
import hvdlite_tf.keras as hvd
from hvdlite_tf.keras import hooks
from tests.raising import raises
from tests.tf.programs.models import X, Y, begin, close, fit, make, shares
from tests.tf.reference import once


def trained(shared: bool, make_optimizer: Callable[[], Any]) -> Any:
    """Fit with an optimizer that is wrapped after the first steps."""
    if not shared and hvd.rank():
        return None
    model = make(1)
    model.compile(make_optimizer(), "mse")
    model.fit(X[:32], Y[:32], batch_size=16, shuffle=False, verbose=0)  # the same on all ranks
    if shared:
        hvd.DistributedOptimizer(model.optimizer)
    for _ in range(2):
        fit_on(model, shared)
    return model


def twice(shared: bool, freeze: bool) -> Any:
    """Fit, and again with another optimizer, while the first one is referenced."""
    if not shared and hvd.rank():
        return None
    model, kept = make(1), []
    for rate in (0.05, 0.02):
        optimizer = keras.optimizers.SGD(rate)
        kept.append(hvd.DistributedOptimizer(optimizer) if shared else optimizer)
        model.compile(kept[-1], "mse")
        fit_on(model, shared)
        model.layers[0].trainable = not freeze
    return model


def fit_on(model: Any, shared: bool) -> None:
    x, y = (shares(8, X), shares(8, Y)) if shared else (X, Y)
    model.fit(x, y, batch_size=8 if shared else 16, shuffle=False, verbose=0)


def moved(model: Any, batches: int = 2) -> list[Any]:
    """Train on some batches; return by how much each variable has changed."""
    before = [keras.ops.convert_to_numpy(variable).copy() for variable in model.trainable_variables]
    for _ in range(batches):
        model.train_on_batch(X[:8], Y[:8])
    return [keras.ops.convert_to_numpy(variable) - value
            for variable, value in zip(model.trainable_variables, before, strict=True)]


def states(variables: Sequence[Any]) -> list[list[Any]]:
    """Return both ranks' random states, after asserting that all other variables are equal."""
    everywhere = hvd.allgather_object({str(number): keras.ops.convert_to_numpy(variable).copy()
                                       for number, variable in enumerate(variables)})
    random = {str(number) for number, variable in enumerate(variables) if variable.path.endswith("generator_state")}
    assert len(random) == 2, random
    assert all((everywhere[0][key] == everywhere[1][key]).all() for key in everywhere[0].keys() - random)
    return [[values[key].tolist() for key in sorted(random)] for values in everywhere]


def scaled(shared: bool, passes: int = 1, averages: bool = False, rate: float = 0.05, overflow: bool = False) -> Any:
    """Fit with losses that are scaled; return the model, the steps and the scale."""
    if not shared and hvd.rank():
        return None, once(None)
    model = make(1)
    if shared:
        inner = keras.optimizers.SGD(rate, momentum=0.9)
        options: dict[str, Any] = dict(backward_passes_per_step=passes, average_aggregated_gradients=averages)
        scale = functools.partial(keras.optimizers.LossScaleOptimizer, initial_scale=64.0)
        optimizer = (scale(hvd.DistributedOptimizer(inner, **options)) if overflow else
                     hvd.DistributedOptimizer(scale(inner), **options))
    else:
        inner = keras.optimizers.SGD(rate, momentum=0.9, gradient_accumulation_steps=passes if passes > 1 else None)
        optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=64.0)
    model.compile(optimizer, "mse")
    y = Y.copy()
    if overflow:
        y[24 + 2] = np.inf  # in the second global batch, on rank 1
    model.fit(*((shares(8, X), shares(8, y)) if shared else (X, y)), batch_size=8 if shared else 16, epochs=2,
              shuffle=False, verbose=0)
    counts = [int(keras.ops.convert_to_numpy(number)) for number in (inner.iterations, optimizer.dynamic_scale)]
    assert not shared or hvd.allgather_object(counts) == [counts] * 2
    return model, counts if shared else once(lambda: counts)


def optimizers_that_scale_accumulate_and_are_wrapped_saved_and_used_late(folder: str) -> None:
    rank, _ = begin()
    _losses_are_scaled()
    _batches_accumulate()
    _optimizers_are_wrapped_late_and_copied(rank)
    _accumulating_optimizers_are_saved_and_loaded(os.path.join(folder, f"accumulating.{rank}.keras"))
    _some_variables_stay_local()
    _random_states_differ(rank)


def _losses_are_scaled() -> None:
    asked: list[Any] = []
    module: Any = hooks
    all_ranks_true = module.all_ranks_true

    def noted(*arguments: Any) -> Any:
        asked.append(arguments[1])
        return all_ranks_true(*arguments)
    module.all_ranks_true = noted
    for overflow in (False, True):
        (one, counts), (other, expected) = scaled(True, overflow=overflow), scaled(False, overflow=overflow)
        close(one, other)
        assert counts == expected == ([10, 16] if overflow else [12, 64]), counts
    assert not asked, "reduced gradients are the same everywhere: no rank asks the others"

    for averages, overflow in ((True, False), (False, True)):
        one, counts = scaled(True, passes=3, averages=averages, overflow=overflow, rate=0.05 if averages else 0.02)
        other, expected = scaled(False, passes=3, overflow=overflow, rate=0.05 if averages else 0.06)
        close(one, other)
        assert counts == expected == ([3, 16] if overflow else [4, 64]), counts
    assert asked, "what accumulates is not reduced yet"
    assert one.optimizer.inner_optimizer.gradient_accumulation_steps == 3


def _batches_accumulate() -> None:
    model = make(1)  # a batch at a time: nothing moves before the third
    model.compile(hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01)),
                                           backward_passes_per_step=3), "mse")
    steps = [any(change.any() for change in moved(model, 1)) for _ in range(6)]
    assert steps == [False, False, True] * 2, steps

    if keras.backend.backend() == "torch":  # torch.compile looks methods up in the class that `__class__` names
        import torch
        model = make(1)
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05), backward_passes_per_step=2)

        def step(x: Any) -> None:
            model.zero_grad()
            (model(x) ** 2).mean().backward()
            optimizer.apply([each.value.grad for each in model.trainable_variables], model.trainable_variables)
        for _ in range(2):
            torch.compile(step, backend="eager")(torch.as_tensor(X[hvd.rank():hvd.rank() + 4]))
        found = hvd.allgather_object([np.array(each) for each in model.get_weights()])
        assert all(map(np.array_equal, found[0], found[1])), found
    if keras.backend.backend() == "jax":  # gradients travel once a step
        from hvdlite_tf.keras.backends import jax as jax_backend
        calls: list[int] = []
        call = jax_backend.call

        def counted(function: Any, tensors: Any, *like: Any, **named: Any) -> Any:
            def calling(arrays: Any) -> Any:
                calls.append(1)
                return function(arrays)
            return call(calling, tensors, *like, **named)
        jax_backend.call = counted
        close(fit(keras.optimizers.SGD(0.05), True, backward_passes_per_step=3, average_aggregated_gradients=True),
              fit(keras.optimizers.SGD(0.05, gradient_accumulation_steps=3), False))
        assert len(calls) == 12 / 3, len(calls)


def _optimizers_are_wrapped_late_and_copied(rank: int) -> None:
    for optimizer in (lambda: keras.optimizers.SGD(0.05, momentum=0.9),
                      lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05), initial_scale=8.0)):
        close(trained(True, optimizer), trained(False, optimizer))

    mean = hvd.allreduce(1.0 + rank)
    assert keras.ops.is_tensor(mean) and float(mean) == 1.5 and keras.backend.standardize_dtype(mean.dtype) == "float32"
    assert np.array(hvd.allgather([rank])).tolist() == [0, 1] and int(hvd.broadcast(rank, 1)) == 1
    assert np.array(hvd.reducescatter(np.ones((2, 3), "float32"), op=hvd.Sum)).tolist() == [[2.0] * 3]

    first = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.5))
    again = type(first).from_config(first.get_config())
    assert again is not first and again.get_config() == first.get_config() and isinstance(again, keras.optimizers.SGD)
    model = make(1)
    model.compile(again, "mse")
    model.fit(shares(8, X), shares(8, Y), batch_size=8, shuffle=False, verbose=0)
    close(model, fit(keras.optimizers.SGD(0.1, momentum=0.5), False, epochs=1))

    for freeze in (False, True):
        close(twice(True, freeze), twice(False, freeze))


def _accumulating_optimizers_are_saved_and_loaded(path: str) -> None:
    for averages in (False, True):
        model = make(1)
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01), backward_passes_per_step=2,
                                               average_aggregated_gradients=averages), "mse")
        moved(model)
        model.save(path)
        loaded = hvd.load_model(path, backward_passes_per_step=2, average_aggregated_gradients=averages)
        for mine, theirs in zip(moved(loaded), moved(model), strict=True):
            np.testing.assert_allclose(mine, theirs, atol=1e-6)
    raises(ValueError, "accumulates 2 backward passes", lambda: hvd.load_model(path))
    kept = hvd.load_model(path, backward_passes_per_step=1)  # Keras' own accumulation, of averages
    loaded = hvd.load_model(path, backward_passes_per_step=2, average_aggregated_gradients=True)
    for mine, theirs in zip(moved(kept), moved(loaded), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-6)
    longer = hvd.load_model(path, backward_passes_per_step=4).optimizer
    assert (longer.gradient_accumulation_steps, int(longer.iterations), int(longer._iterations)) == (4, 1, 4)
    plain = make(1)
    plain.compile(keras.optimizers.SGD(0.01), "mse")
    plain.train_on_batch(X[:8], Y[:8])
    raises(ValueError, "has been built", lambda: hvd.DistributedOptimizer(plain.optimizer, backward_passes_per_step=2))


def _some_variables_stay_local() -> None:
    model = make(1)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=8.0))
    for variable in model.layers[1].trainable_variables:
        optimizer.inner_optimizer.register_local_var(variable)
    model.compile(optimizer, "mse")
    model.fit(shares(8, X), shares(8, Y), batch_size=8, verbose=0, shuffle=False)
    kernels = hvd.allgather_object([keras.ops.convert_to_numpy(variable) for variable in model.trainable_variables])
    assert (kernels[0][0] == kernels[1][0]).all() and (kernels[0][2] != kernels[1][2]).any()
    raises(ValueError, "comes too late", lambda: optimizer.inner_optimizer.register_local_var(model.trainable_variables[0]))
    raises(ValueError, "no list", lambda: hvd.DistributedOptimizer(keras.optimizers.SGD()).register_local_var([]))


def _random_states_differ(rank: int) -> None:
    cases = [(1, 0), (1 + 7 * rank, 1), (1, 1), (1 + 7 * rank, 0)]
    if keras.backend.backend() == "tensorflow":  # which makes a function for each; the other backends have all cases
        cases = cases[:2]
    for seed, root in cases:
        keras.utils.set_random_seed(seed)
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dropout(0.5), keras.layers.Dense(130, use_bias=False),
                                  keras.layers.Dense(130), keras.layers.GaussianNoise(0.1), keras.layers.Dense(2)])
        model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse")
        own = [keras.ops.convert_to_numpy(variable).tolist() for variable in model.variables
               if variable.path.endswith("generator_state")]
        hvd.broadcast_variables(model.variables, root)
        zero, one = states(model.variables)
        assert all(a != b for a, b in zip(zero, one, strict=True)) and (rank != root or own == (zero, one)[root])
        callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(root)]
        model.second = keras.optimizers.SGD(0.1 + rank)  # as GANs have
        model.fit(shares(8, X), shares(8, Y), batch_size=8, verbose=0, callbacks=callbacks)
        assert abs(float(keras.ops.convert_to_numpy(model.second.learning_rate)) - 0.1 - root) < 1e-6
        zero, one = states([*model.variables, *model.optimizer.variables])
        assert all(a != b for a, b in zip(zero, one, strict=True)), (zero, one)


def warm_up_with_several_batches_in_one_call_reaches_the_rate() -> None:
    rank, _ = begin()

    def rates(steps: int, callback: Callable[[], Any]) -> list[float]:
        model = make(1)
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.04)), "mse", steps_per_execution=steps)
        history = model.fit(shares(8, X), shares(8, Y), batch_size=8, epochs=3, verbose=0, callbacks=[callback()]).history
        return [*history["lr"], float(model.optimizer.learning_rate)]

    def warm_up() -> Any:
        return hvd.callbacks.LearningRateWarmupCallback(0.08, warmup_epochs=2)

    def schedule() -> Any:
        return hvd.callbacks.LearningRateScheduleCallback(0.06, lambda epoch: 1 - epoch / 2, end_epoch=2, staircase=False)
    for callback, expected in ((warm_up, [0.06, 0.08, 0.08, 0.08]), (schedule, [0.035, 0.005, 0.005, 0.005])):
        for steps in (1, 6, 4):
            np.testing.assert_allclose(rates(steps, callback), expected, rtol=1e-5)
    np.testing.assert_allclose(rates(6, lambda: hvd.callbacks.LearningRateWarmupCallback(
        0.08, warmup_epochs=2, first_lr=0.02)), [0.05, 0.08, 0.08, 0.08], rtol=1e-5)

    _names_of_hvdlite_tf(rank)
    _ranks_with_other_variables_are_told(rank)


def _names_of_hvdlite_tf(rank: int) -> None:
    assert float(tf.function(lambda x: hvd.allreduce(x, name="in_graph", op=hvd.Sum))(tf.constant(2.0))) == 4.0
    assert hvdlite_tf.gpu_available("tensorflow") is False

    a, b = tf.Variable(2.0), tf.Variable(3.0)
    with tf.GradientTape() as tape:
        loss = a * (rank + 1) + b * (rank + 3)
    distributed = hvdlite_tf.DistributedGradientTape(tape)
    distributed.register_local_source(b)
    (local,), (shared,) = distributed.get_local_and_global_gradients(loss, [a, b])
    assert local[0] is b and float(local[1]) == (rank + 3) / 2 and shared[0] is a and float(shared[1]) == 1.5

    legacy = type("SGD", (), {"__module__": "tf_keras.src.optimizers.sgd"})
    raises(ValueError, "TF_USE_LEGACY_KERAS", lambda: hvd.DistributedOptimizer(legacy()))
    assert hvdlite_tf.DistributedOptimizer(keras.optimizers.SGD(), use_locking=False)

    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dropout(0.5), keras.layers.Dense(2)])
    hvdlite_tf.broadcast_variables(model.variables, 1)
    zero, one = hvd.allgather_object([variable.numpy().tolist() for variable in model.variables])
    assert zero[0] != one[0] and zero[1:] == one[1:], (zero, one)


def _ranks_with_other_variables_are_told(rank: int) -> None:
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2 + rank, name="head")])
    raises(Exception, f"head/kernel (6, {2 + rank})", lambda: hvd.broadcast_variables(model.variables, 0))
    model = keras.Sequential([keras.Input((2 + rank,)), keras.layers.Dense(3 - rank, use_bias=False, name="turned")])
    if rank:
        raises(Exception, "rank 1 has other variables than another rank: ",
               lambda: hvd.broadcast_variables(model.variables, 0))
    else:
        hvd.broadcast_variables(model.variables, 0)


def a_missing_broadcast_is_told_and_one_after_the_first_batch_is_in_time() -> None:
    rank, _ = begin()
    told: list[str] = []

    def keep(record: logging.LogRecord) -> bool:
        told.append(record.getMessage())
        return False

    logging.getLogger("hvdlite").addFilter(keep)
    for callbacks in ([], [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]):
        model = make(1 + rank)
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)), "mse")
        model.fit(X, Y, batch_size=16, verbose=0, callbacks=callbacks)
        hvd.barrier()
        model.fit(X, Y, batch_size=16, verbose=0)  # the answer is there
    assert len(told) == (rank == 0), told
    assert all("/dense" in each and "BroadcastGlobalVariablesCallback(0)" in each for each in told), told
    if keras.backend.backend() == "tensorflow":
        variable = tf.Variable([1.0 + rank, 2.0])
        for step in range(4):
            with hvdlite_tf.DistributedGradientTape(tf.GradientTape()) as tape:
                loss = tf.reduce_sum(variable ** 2)
            variable.assign_sub(0.1 * tape.gradient(loss, [variable])[0])
            if step == 0:
                hvdlite_tf.broadcast_variables([variable], 0)
        assert len(told) == (rank == 0), told
