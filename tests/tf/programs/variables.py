"""Programs of test_variables.py."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

import hvdlite_tf.keras as hvd
from hvdlite.training.step_reducer import weighing
from tests.raising import raises
from tests.tf.programs.models import X, Y, begin, close, make, shares


class Experts(keras.Model):
    """Rank 0 trains one of two layers, rank 1 the other one, and none trains the third one."""

    def __init__(self) -> None:
        super().__init__()
        keras.utils.set_random_seed(3)
        self.layers_of = [keras.layers.Dense(2) for _ in range(3)]

    def build(self, shape: Any) -> None:
        for layer in self.layers_of:
            layer.build(shape)

    def call(self, x: Any) -> Any:
        return self.layers_of[hvd.rank()](x)


def keras_optimizers_with_other_variables_in_other_steps() -> None:
    rank, _ = begin()

    def frozen_and_thawed(shared: bool) -> Any:
        if not shared and rank:
            return None
        model = make(1)
        optimizer = keras.optimizers.Adam(0.01)
        optimizer = hvd.DistributedOptimizer(optimizer) if shared else optimizer
        x, y = (shares(8, X), shares(8, Y)) if shared else (X, Y)
        for trainable in (True, False, True):
            model.layers[0].trainable = trainable
            model.compile(optimizer, "mse")
            model.fit(x, y, batch_size=8 if shared else 16, epochs=2, shuffle=False, verbose=0)
        return model
    close(frozen_and_thawed(True), frozen_and_thawed(False))

    def subsets_in_turn(shared: bool) -> Any:
        model = make(1)
        optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
        optimizer = hvd.DistributedOptimizer(optimizer) if shared else optimizer
        optimizer.build(model.trainable_variables)
        for turn in range(6):
            variables = model.layers[turn % 2].trainable_variables
            rows = slice(8 * rank, 8 * rank + 8) if shared else slice(16)
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(model(X[rows]) - Y[rows]))
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return model
    close(subsets_in_turn(True), subsets_in_turn(False))

    _each_rank_trains_another_layer()
    for steps in (0, 1):
        _only_rank_0_trains_the_second_layer(rank, steps)


def _each_rank_trains_another_layer() -> None:
    model = Experts()
    model.build((None, 6))
    start = [keras.ops.convert_to_numpy(variable) for variable in model.trainable_variables]
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    model.fit(X[:16], Y[:16], batch_size=16, epochs=1, shuffle=False, verbose=0)
    x, y = X[:16], Y[:16]
    for index in range(3):
        kernel, bias = start[2 * index:2 * index + 2]
        error = 2 * (x @ kernel + bias - y) / y.size / 2 * (index < 2)  # half of a mean's gradient: the other rank has none
        now = [keras.ops.convert_to_numpy(variable) for variable in model.layers_of[index].trainable_variables]
        np.testing.assert_allclose(now[0], kernel - 0.1 * x.T @ error, atol=1e-5)
        np.testing.assert_allclose(now[1], bias - 0.1 * error.sum(0), atol=1e-5)


def _only_rank_0_trains_the_second_layer(rank: int, steps: int) -> None:
    """From the beginning, or after some steps."""
    model = make(1)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    optimizer.build(model.trainable_variables)

    def step(variables: Any) -> None:
        optimizer.apply([tf.ones_like(variable) for variable in variables], variables)
    for _ in range(steps):
        step(model.trainable_variables)
    if steps == 0 and rank == 0:
        raises(hvd.HorovodInternalError, "rank 1: does not have it", lambda: step(model.trainable_variables))
    elif rank == 0:
        step(model.trainable_variables)
    elif steps == 0:
        step(model.trainable_variables[:2])
    else:
        raises(hvd.HorovodInternalError, "rank 1: another rank has gradients for 2 variables",
               lambda: step(model.trainable_variables[:2]))


def elsewhere(shared: bool, passes_through: str | None) -> Any:
    """Gradients of autograd.grad, also after another backward pass has gone through the model."""
    import torch
    model = make(1)
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer) if shared else optimizer
    optimizer.build(model.trainable_variables)
    rows = slice(8 * hvd.rank(), 8 * hvd.rank() + 8) if shared else slice(16)
    x, y = torch.tensor(X[rows]), torch.tensor(Y[rows])
    for turn in range(6):
        model.zero_grad()
        if passes_through:
            inputs = x.clone().requires_grad_()
            model(inputs).sum().backward()
            if passes_through == "cleared":
                model.zero_grad()
        own = [variable.value.grad for variable in model.trainable_variables]
        loss = ((model(x) - y) ** 2).mean()
        gradients = list(torch.autograd.grad(loss, [variable.value for variable in model.trainable_variables]))
        kept = [gradient.clone() for gradient in gradients]  # the caller's stay what they are
        with torch.no_grad():
            optimizer.apply(gradients, model.trainable_variables)
        assert all(torch.equal(one, other) for one, other in zip(gradients, kept, strict=True)), turn
        assert all(variable.value.grad is before for variable, before in zip(model.trainable_variables, own, strict=True))
    return model


def two_optimizers(shared: bool) -> Any:
    """Compiled again while the first optimizer is alive; then the first one again."""
    model, alive = make(1), []
    for rate in (0.05, 0.02, None):
        if rate:
            optimizer = keras.optimizers.Adam(rate)
            alive.append(hvd.DistributedOptimizer(optimizer) if shared else optimizer)
        model.compile(alive[-1] if rate else alive[0], "mse")
        model.fit(shares(8, X) if shared else X, shares(8, Y) if shared else Y, batch_size=8 if shared else 16,
                  shuffle=False, verbose=0)
        model.layers[0].trainable = rate is None or rate == 0.02
    return model


def experts(shared: bool, turn: int) -> list[Any]:
    """Rank r uses layer r only, or all ranks layer 1."""
    import torch
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Dense(2) for _ in range(3)]
    for layer in layers:
        layer.build((None, 6))
    variables = [variable for layer in layers for variable in layer.trainable_variables]
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer) if shared else optimizer
    optimizer.build(variables)
    for step in range(6):
        for variable in variables:
            variable.value.grad = None
        used = [hvd.rank()] if shared else [0, 1]
        used = [1] if step % 3 == turn else used
        x, y = torch.tensor(X[:8]), torch.tensor(Y[:8])
        (sum(((layers[index](x) - y) ** 2).mean() for index in used) / (1 if shared or used == [1] else 2)).backward()
        with torch.no_grad():
            optimizer.apply([variable.value.grad for variable in variables], variables)
    return [keras.ops.convert_to_numpy(variable) for variable in variables]


def gradients_on_torch_wherever_they_come_from() -> None:
    rank, _ = begin()
    for passes_through in (None, "cleared", "kept"):
        close(elsewhere(True, passes_through), elsewhere(False, passes_through))
    close(two_optimizers(True), two_optimizers(False))
    for one, other in zip(experts(True, 2), experts(False, 2), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    _with_sum_derived_gradients_are_refused()
    _ranks_count_unequally_and_one_has_no_backward_pass(rank)
    _a_loop_goes_on_in_another_job(rank)


def _with_sum_derived_gradients_are_refused() -> None:
    """What is summed already cannot be told."""
    import torch
    model = make(1)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), op=hvd.Sum)
    optimizer.build(model.trainable_variables)
    (model(torch.tensor(X[:4])) ** 2).mean().backward()
    raises(Exception, "with op=Sum, apply", lambda: optimizer.apply(
        [variable.value.grad * 2 for variable in model.trainable_variables], model.trainable_variables))


def _ranks_count_unequally_and_one_has_no_backward_pass(rank: int) -> None:
    """Rank 1 has none in the last step."""
    import torch
    model = make(1)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    optimizer.build(model.trainable_variables)
    for turn in range(3):
        with weighing(8 - 4 * rank):
            model.zero_grad()
            if turn < 2 or rank == 0:
                (model(torch.tensor(X[:4])) ** 2).mean().backward()
            with torch.no_grad():
                optimizer.apply([variable.value.grad for variable in model.trainable_variables], model.trainable_variables)
    everywhere = hvd.allgather_object([keras.ops.convert_to_numpy(each) for each in model.trainable_variables])
    for one, other in zip(*everywhere, strict=True):
        np.testing.assert_array_equal(one, other)


def _a_loop_goes_on_in_another_job(rank: int) -> None:
    """Of the same processes."""
    import torch
    model, alone = make(1), make(1)
    optimizer, plain = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)
    for turn in range(4):
        for each, by, rows in ((model, optimizer, slice(8 * rank, 8 * rank + 8)), (alone, plain, slice(16))):
            each.zero_grad()
            ((each(torch.tensor(X[rows])) - torch.tensor(Y[rows])) ** 2).mean().backward()
            with torch.no_grad():
                by.apply([variable.value.grad for variable in each.trainable_variables], each.trainable_variables)
        if turn == 1:
            hvd.shutdown()
            hvd.init()
    close(model, alone)
