"""Programs of test_keras.py: `model.fit` on two ranks."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np

import hvdlite_tf.keras as hvd
from tests.raising import raises
from tests.tf.programs.models import OPTIMIZERS, X, Y, begin, close, fit, make, rng, shares

TRAIN_ALONE = """
import sys, keras, numpy as np
model = keras.models.load_model(sys.argv[1])
assert type(model.optimizer).__module__.startswith("keras") and "hvdlite" not in sys.modules
model.fit(np.ones((8, 6)), np.ones((8, 2)), verbose=0)
model.save(sys.argv[2])
"""


class Halving(keras.optimizers.SGD):
    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        super().update_step(gradient, variable, learning_rate / 2)


@keras.saving.register_keras_serializable(package="mine")
class Registered(Halving):
    pass


def fit_equals_one_process_with_the_global_batch() -> None:
    begin()
    for optimizer in OPTIMIZERS.values():
        close(fit(optimizer(), True), fit(optimizer(), False))


def fit_with_every_option_equals_one_process_or_is_refused() -> None:
    rank, _ = begin()
    _options_equal_one_process()
    _wrong_options_are_refused()
    summed = hvd.allreduce(np.full(3, rank + 0.25), op=hvd.Sum, compression=hvd.Compression.bf16)
    assert summed.dtype == np.float64 and summed.numpy().tolist() == [1.5] * 3


def _options_equal_one_process() -> None:
    adam = fit(OPTIMIZERS["adam"](), False)
    close(fit(OPTIMIZERS["adam"](), True, options=dict(steps_per_execution=3)), adam)
    close(fit(OPTIMIZERS["adam"](), True, options=dict(run_eagerly=True)), adam)
    for averages in (True, False):  # Horovod sums what accumulates, unless it is told to average
        accumulating = fit(keras.optimizers.SGD(0.05), True, backward_passes_per_step=2,
                           average_aggregated_gradients=averages)
        assert accumulating.optimizer.gradient_accumulation_steps == 2
        close(accumulating, fit(keras.optimizers.SGD(0.05 if averages else 0.1, gradient_accumulation_steps=2), False))
    for groups in (2, "layers"):
        model = make(1)
        optimizer = keras.optimizers.Adam(0.01)
        layers = [model.layers[1].trainable_variables]
        model.compile(hvd.DistributedOptimizer(optimizer, groups=groups if groups == 2 else layers), "mse")
        model.fit(shares(8, X), shares(8, Y), batch_size=8, epochs=2, shuffle=False, verbose=0)
        close(model, adam)
    sgd = fit(keras.optimizers.SGD(0.05), False, epochs=1)
    for compression in (hvd.Compression.fp16, hvd.Compression.bf16):
        model = make(1)
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05), compression=compression), "mse")
        model.fit(shares(8, X), shares(8, Y), batch_size=8, shuffle=False, verbose=0)
        close(model, sgd, 2e-2)


def _wrong_options_are_refused() -> None:
    model = make(1)
    raises(ValueError, "groups must be", lambda: hvd.DistributedOptimizer(keras.optimizers.SGD(), groups="all"))
    raises(ValueError, "more than once", lambda: hvd.DistributedOptimizer(
        keras.optimizers.SGD(), groups=[2 * model.layers[1].trainable_variables]))
    raises(ValueError, "must be positive",
           lambda: hvd.DistributedOptimizer(keras.optimizers.SGD(), gradient_predivide_factor=0))
    raises(ValueError, "jit_compile=True", lambda: make(1).compile(hvd.DistributedOptimizer(keras.optimizers.SGD()), "mse",
                                                                   jit_compile=True))
    raises(ValueError, "distributed already",
           lambda: hvd.DistributedOptimizer(hvd.DistributedOptimizer(keras.optimizers.SGD())))
    raises(ValueError, "Average or Sum", lambda: hvd.DistributedOptimizer(keras.optimizers.SGD(), op=hvd.Max))
    raises(ValueError, "Keras 3 optimizer", lambda: hvd.DistributedOptimizer("sgd"))
    wrong: Any = ("sum", "fp16", 1.5)
    raises(ValueError, "not 'sum'", lambda: hvd.DistributedOptimizer(keras.optimizers.SGD(), op=wrong[0]))
    raises(ValueError, "hvd.Compression.none",
           lambda: hvd.DistributedOptimizer(keras.optimizers.SGD(), compression=wrong[1]))
    raises(ValueError, "not 1.5",
           lambda: hvd.DistributedOptimizer(keras.optimizers.SGD(), backward_passes_per_step=wrong[2]))
    raises(ValueError, "no Sequential", lambda: hvd.broadcast_variables(make(1), 0))
    raises(ValueError, "no ndarray", lambda: hvd.broadcast_variables([np.ones(2)], 0))
    raises(RuntimeError, "BroadcastGlobalVariablesCallback", lambda: hvd.broadcast_global_variables(0))


def sparse_embeddings_and_local_layers() -> None:
    begin()
    words = rng.integers(0, 11, (96, 3)).astype("int32")

    def train(shared: bool, dense: bool = False) -> Any:
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((3,), dtype="int32"), keras.layers.Embedding(11, 4), keras.layers.Flatten(),
                                  keras.layers.Dense(2)])
        optimizer = keras.optimizers.Adam(0.01)
        model.compile(hvd.DistributedOptimizer(optimizer, sparse_as_dense=dense) if shared else optimizer, "mse")
        model.fit(shares(8, words) if shared else words, shares(8, Y) if shared else Y, batch_size=8 if shared else 16,
                  shuffle=False, verbose=0)
        return model
    close(train(True), train(False))

    model = make(1)
    local = model.layers[1]
    model.compile(hvd.PartialDistributedOptimizer(keras.optimizers.SGD(0.1), local_layers=local), "mse")
    model.fit(shares(8, X), shares(8, Y), batch_size=8, verbose=0, shuffle=False)
    kernels = hvd.allgather_object([variable.numpy() for variable in model.trainable_variables])
    assert (kernels[0][0] == kernels[1][0]).all() and (kernels[0][2] != kernels[1][2]).any()
    raises(ValueError, "Keras layers", lambda: hvd.PartialDistributedOptimizer(keras.optimizers.SGD(), local_layers=[1]))
    raises(ValueError, "build the model first",
           lambda: hvd.PartialDistributedOptimizer(keras.optimizers.SGD(), local_layers=keras.layers.Dense(2)))


def an_overflow_on_a_process_set_is_its_members_business() -> None:
    rank, _ = begin()
    own = hvd.add_process_set([0, 1])
    if rank < 2:  # rank 2 does not train, and is not asked
        model = make(1, dtype="mixed_float16")
        alone = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01), process_set=own)
        scaled = keras.optimizers.LossScaleOptimizer(alone, initial_scale=64.0)
        model.compile(scaled, "mse")
        y = Y[:32].copy()
        y[10] = np.inf if rank else 0
        model.fit(X[:32], y, batch_size=8, shuffle=False, verbose=0)
        assert int(alone.iterations.numpy()) == 3 and float(scaled.dynamic_scale.numpy()) == 32.0


def mixed_precision_and_optimizers_of_the_users_own(folder: str) -> None:
    rank, _ = begin()
    for policy in ("mixed_bfloat16", "mixed_float16"):
        close(fit(keras.optimizers.SGD(0.05, momentum=0.9), True, dtype=policy),
              fit(keras.optimizers.SGD(0.05, momentum=0.9), False, dtype=policy), 2e-2)
    for kind, custom in ((Registered, None), (Halving, [Halving])):
        model = fit(kind(0.1, momentum=0.9), True)
        close(model, fit(keras.optimizers.SGD(0.05, momentum=0.9), False))
        path = os.path.join(folder, f"{kind.__name__}.{rank}.keras")
        model.save(path)
        again = hvd.load_model(path, custom_optimizers=custom)
        assert isinstance(again.optimizer, kind)
        for target in (model, again):
            target.fit(shares(8, X), shares(8, Y), batch_size=8, verbose=0, shuffle=False)
        close(again, model)


def callbacks_average_warm_up_and_keep_the_best(folder: str) -> None:
    rank, _ = begin()
    model = make(rank)
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01, momentum=0.9)), "mse", metrics=["mae"])
    best = hvd.callbacks.BestModelCheckpoint(monitor="loss")
    best.filepath = os.path.join(folder, f"best.{rank}.keras")
    logged: dict[int, dict[str, float]] = {}
    writer = SimpleNamespace(log_metrics=lambda values, step: logged.update({step: values}))
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback(),
                 hvd.callbacks.LearningRateWarmupCallback(0.08, warmup_epochs=2),
                 hvd.callbacks.LearningRateScheduleCallback(0.08, 0.5, start_epoch=2), best,
                 hvd.callbacks.SlownessCallback(writer)]
    history = model.fit(shares(8, X), shares(8, Y), batch_size=8, epochs=4, verbose=0, callbacks=callbacks).history
    everywhere = hvd.allgather_object(history)
    assert everywhere[0] == everywhere[1]
    np.testing.assert_allclose(history["lr"], [0.06, 0.08, 0.08, 0.04], rtol=1e-5)
    assert os.path.exists(best.filepath)
    assert list(logged) == ([] if rank else [0, 1, 2, 3]) and all("hvdlite/slow_rank" in each for each in logged.values())
    raises(ValueError, "initial_lr", lambda: hvd.callbacks.LearningRateScheduleCallback(None, 0.5))

    # Saved on two ranks, loaded on one (and without hvdlite), trained on; and the other way round.
    path = os.path.join(folder, "model.keras")
    if rank == 0:
        model.save(path)
    hvd.allgather_object(None)
    again = hvd.load_model(path)
    assert int(again.optimizer.iterations.numpy()) == int(model.optimizer.iterations.numpy()) > 0
    for target in (model, again):
        target.fit(shares(8, X), shares(8, Y), batch_size=8, verbose=0, shuffle=False)
    close(again, model)
    if rank == 0:
        subprocess.run([sys.executable, "-c", TRAIN_ALONE, path, path + ".alone.keras"], check=True,
                       env={**os.environ, "PYTHONPATH": ""})
    hvd.allgather_object(None)
    from_one = hvd.load_model(path + ".alone.keras")
    from_one.fit(shares(8, X), shares(8, Y), batch_size=8, verbose=0)
    config = pickle.loads(pickle.dumps(model.optimizer)).get_config()  # noqa: S301 its own
    assert config == model.optimizer.get_config() and isinstance(model.optimizer, keras.optimizers.SGD)


def on_torch_gradients_are_final_when_backward_returns() -> None:
    import torch
    rank, _ = begin()
    x, y = torch.tensor(shares(8, X)[:8]), torch.tensor(shares(8, Y)[:8])

    def steps(way: str, built: bool = True, shared: bool = True, **distribution: Any) -> Any:
        model = make(1)
        plain = keras.optimizers.SGD(0.05, momentum=0.9)
        optimizer = hvd.DistributedOptimizer(plain, **distribution) if shared else plain
        if built:
            optimizer.build(model.trainable_variables)
        images, labels = (x, y) if shared else (torch.tensor(X[:16]), torch.tensor(Y[:16]))
        for step in range(5):
            tensors = [variable.value for variable in model.trainable_variables]
            loss = ((model(images) - labels) ** 2).mean()
            gradients: Sequence[torch.Tensor]
            if way == "autograd.grad":
                gradients = torch.autograd.grad(loss, tensors)
            else:
                model.zero_grad()
                loss.backward()
                gradients = [tensor.grad for tensor in tensors]
                if shared and (built or step):
                    everywhere = hvd.allgather_object([gradient.numpy() for gradient in gradients])
                    assert all((one == other).all() for one, other in zip(*everywhere, strict=True)), step
            if way == "derived" and (built or step):
                gradients = [gradient * 1 for gradient in gradients]
            with torch.no_grad():
                optimizer.apply(gradients, model.trainable_variables)
        return model

    expected = None if rank else steps("backward", shared=False)
    for way in ("backward", "autograd.grad", "derived"):
        for built in (True, False):
            close(steps(way, built), expected)
    close(steps("backward", groups=2), expected)
    close(steps("backward", compression=hvd.Compression.bf16), expected, 2e-2)
    close(steps("autograd.grad", compression=hvd.Compression.bf16), expected, 2e-2)

    model = make(1)  # a gradient that one rank does not have counts as zeros there
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.build(model.trainable_variables)
    before = model.trainable_variables[-1].numpy()
    model.zero_grad()
    (model(x)[:, 0].sum() if rank else model.layers[0](x).sum()).backward()
    gradients = [variable.value.grad for variable in model.trainable_variables]
    optimizer.apply(gradients, model.trainable_variables)
    np.testing.assert_allclose(before - model.trainable_variables[-1].numpy(), [4.0, 0.0], atol=1e-6)


def beside_torch_in_one_process() -> None:
    import torch

    import hvdlite_torch
    begin()
    assert hvdlite_torch.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [2, 2]
    close(fit(OPTIMIZERS["adam"](), True), fit(OPTIMIZERS["adam"](), False))
