"""What ranks do in test_outer.py."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

import hvdlite_tf.keras as hvd
from hvdlite.core.array import Array
from hvdlite.core.errors import HvdliteError, MismatchError, UnsupportedError
from hvdlite.training.outer.schedule import divide
from tests.training.outer.programs import oracle

BACKEND = keras.backend.backend()
STEPS = 14


def model(dtype: str = "float32", has_statistics: bool = False) -> Any:
    """Return a model with the same weights on all ranks."""
    layers: list[Any] = [keras.Input((6,), dtype=dtype), keras.layers.Dense(9, "tanh", dtype=dtype)]
    if has_statistics:
        layers += [keras.layers.BatchNormalization(dtype=dtype), keras.layers.Dropout(0.1, dtype=dtype)]
    made = keras.Sequential([*layers, keras.layers.Dense(5, "tanh", dtype=dtype), keras.layers.Dense(1, dtype=dtype)])
    draw = np.random.default_rng(3)
    for each in made.trainable_variables:
        each.assign(0.3 * draw.standard_normal(each.shape))
    return made


def data(step: int, rank: int, dtype: str = "float32", batches: int = 1) -> tuple[Array, Array]:
    x = np.random.default_rng((step, rank)).standard_normal((4 * batches, 6)).astype(dtype)
    return x, x[:, :1] * 2 - x[:, 1:2]


def adam() -> Any:
    return keras.optimizers.Adam(0.02)


def compiled(outer: Any = None, optimizer: Any = None, module: Any = None, **named: Any) -> Any:
    """Return a model with a distributed optimizer."""
    module = model() if module is None else module
    module.compile(hvd.DistributedOptimizer(adam() if optimizer is None else optimizer, outer=outer, **named), "mse")
    return module


def train(module: Any, steps: Sequence[int], rank: int | None = None) -> None:
    for step in steps:
        module.train_on_batch(*data(step, hvd.rank() if rank is None else rank))


def values(variables: Sequence[Any]) -> list[Array]:
    return [np.array(keras.ops.convert_to_numpy(each)) for each in variables]


def same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return len(one) == len(other) and all(map(np.array_equal, one, other))


def are_equal_everywhere(arrays: Sequence[Array]) -> bool:
    found = hvd.allgather_object([each.tobytes() for each in arrays])
    return all(each == found[0] for each in found)


def trained(module: Any) -> list[Array]:
    return values(module.trainable_variables)


def trains(directory: str) -> None:
    """All that a training does, in one process for each rank."""
    hvd.init()
    for check in (equals_the_oracle, equals_synchronous, fits, accumulates, loops, resumes, refuses):
        try:
            check(f"{directory}/{check.__name__}-{hvd.size()}")
        except BaseException:
            print(f"in {check.__name__}", flush=True)
            raise


def equals_the_oracle(_: str) -> None:
    """Each rank trains all workers in one process, too, with the same optimizer; bit by bit."""
    settings = hvd.DiLoCo(4, workers="rank", fragments=2, delay=0, wire=None)
    module, plain = compiled(settings), [model() for _ in range(hvd.size())]
    train(module, range(1, STEPS + 1))
    for each in plain:
        each.compile(adam(), "mse")
    initial = [each.reshape(-1) for each in trained(plain[0])]

    def learn(worker: int, step: int, arrays: list[Array]) -> None:
        own = plain[worker].trainable_variables
        for variable, array in zip(own, arrays, strict=True):
            variable.assign(array.reshape(variable.shape))
        train(plain[worker], [step], worker)
        for variable, array in zip(own, arrays, strict=True):
            array[:] = values([variable])[0].reshape(-1)

    local, weights = oracle.train(settings, initial, divide([each.size for each in initial], 2), hvd.size(), STEPS, learn)
    own, found = [each.reshape(-1) for each in trained(module)], module.optimizer.global_weights()
    assert [*found] == [each.path for each in module.trainable_variables]
    assert same([each.reshape(-1) for each in found.values()], weights)
    assert same(own, local[hvd.rank()]) and not same(own, local[hvd.rank() - 1])
    assert are_equal_everywhere([*found.values()])


def equals_synchronous(_: str) -> None:
    """LocalSGD(1) with SGD, in `fit`."""
    dtype = "float32" if BACKEND == "jax" else "float64"  # which JAX has only where a script asks for it
    ways = []
    for outer in (None, hvd.LocalSGD(1, workers="rank")):
        module = compiled(outer, keras.optimizers.SGD(0.05), model(dtype))
        module.fit(*data(0, hvd.rank(), dtype, 10), batch_size=4, epochs=2, shuffle=False, verbose=0)
        ways.append(trained(module))
    for one, other in zip(*ways, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6 if BACKEND == "jax" else 1e-12)
    assert not same(ways[0], trained(model(dtype)))


def fits(directory: str) -> None:
    """`fit` merges everything at its end, and before rank 0 saves; other variables, too."""
    module = compiled(hvd.DiLoCo(6, workers="rank", fragments=3, delay=1), module=model(has_statistics=True))
    saved = f"{directory}.weights.h5"
    seen = []

    class Look(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if BACKEND == "jax" and batch == 2:
                assert "call synchronize_outer(model)" in error(UnsupportedError, module.optimizer.synchronize_outer)

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            seen.append(are_equal_everywhere(values(module.trainable_variables)))
    callbacks = [Look(), hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    if hvd.rank() == 0:
        callbacks.append(keras.callbacks.ModelCheckpoint(saved, save_weights_only=True))
    module.fit(*data(0, hvd.rank(), batches=8), batch_size=4, epochs=2, shuffle=False, verbose=0, callbacks=callbacks)
    assert seen == [True, True]
    others = [each for each in module.non_trainable_variables if "seed" not in each.path]
    assert len(others) == 2 and are_equal_everywhere(values([*module.trainable_variables, *others]))
    assert float(abs(values(others)[0]).max()) > 0
    assert are_equal_everywhere([*module.optimizer.global_weights().values()])
    assert same([*module.optimizer.global_weights().values()], trained(module))
    module.fit(*data(1, hvd.rank(), batches=5), batch_size=4, epochs=1, verbose=0, callbacks=[Look()])
    assert seen == [True, True, False], "nobody saves"
    assert are_equal_everywhere(trained(module))
    before = trained(module)
    module.optimizer.synchronize_outer(module)
    assert same(before, trained(module))
    stop = keras.callbacks.EarlyStopping("loss", min_delta=9.0, patience=3, restore_best_weights=True)
    module.fit(*data(2, hvd.rank(), batches=5), batch_size=4, epochs=3, verbose=0,
               callbacks=[hvd.callbacks.MetricAverageCallback(), stop])
    restored = trained(module)
    assert stop.best_epoch == 0 and are_equal_everywhere(restored)
    assert same(restored, [*module.optimizer.global_weights().values()])
    module.optimizer.synchronize_outer(module)
    assert same(restored, trained(module))
    if BACKEND == "torch":
        has_optimizer_in_attribute()


def has_optimizer_in_attribute() -> None:
    """As a GAN's are: `fit` merges, too."""
    class Own(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.module, self.own = model(), hvd.DistributedOptimizer(adam(), outer=hvd.DiLoCo(6, workers="rank"))
            self.built = True

        def train_step(self, given: Any) -> dict[str, Any]:
            _torch_step(self.module, self.own)(*given)
            return {"loss": keras.ops.zeros(())}
    whole = Own()
    whole.compile(None)
    whole.fit(*data(0, hvd.rank(), batches=5), batch_size=4, verbose=0)
    assert int(whole.own.iterations) == 5 and are_equal_everywhere(trained(whole.module))


def accumulates(_: str) -> None:
    """A step is one of the optimizer. Scaled losses work, too, also where all ranks skip a step."""
    module = compiled(hvd.LocalSGD(3, workers="rank"), backward_passes_per_step=2)
    inner = module.optimizer
    for step in range(1, 15):
        train(module, [step])
        assert are_equal_everywhere(trained(module)) is (step // 2 % 3 == 0), step
    assert inner.hvdlite_exchanges.saved()["step"] == 7
    optimizer = hvd.DistributedOptimizer(adam(), outer=hvd.LocalSGD(3, workers="rank"))
    module = model()
    module.compile(keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=2.0 ** 127), "mse")
    train(module, range(1, 10))
    assert 0 < optimizer.hvdlite_exchanges.saved()["step"] == int(optimizer.iterations) < 9
    optimizer.synchronize_outer(module)
    assert are_equal_everywhere(trained(module)) and np.isfinite(trained(module)[0]).all()


def loops(_: str) -> None:
    """Training steps of a script, compiled and not; equal to `train_on_batch`."""
    settings = hvd.DiLoCo(4, workers="rank", fragments=2, delay=1)
    reference = compiled(settings, keras.optimizers.SGD(0.05))
    train(reference, range(1, 8))
    module, optimizer = model(), hvd.DistributedOptimizer(keras.optimizers.SGD(0.05), outer=settings)
    optimizer.build(module.trainable_variables)
    steps: dict[str, Callable[..., Callable[[Any, Any], None]]] = {
        "tensorflow": _tensorflow_step, "torch": _torch_step, "jax": _jax_step}
    step = steps[BACKEND](module, optimizer)
    for number in range(1, 8):
        step(*data(number, hvd.rank()))
    for one, other in zip(trained(module), trained(reference), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-4)  # values in 8 bits may be rounded otherwise
    optimizer.synchronize_outer(module)
    assert are_equal_everywhere(trained(module)) and are_equal_everywhere([*optimizer.global_weights().values()])


def _tensorflow_step(module: Any, optimizer: Any) -> Callable[[Any, Any], None]:
    import tensorflow as tf

    @tf.function
    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((module(x) - y) ** 2)
        optimizer.apply_gradients(zip(tape.gradient(loss, module.trainable_variables), module.trainable_variables,
                                      strict=True))
    return lambda x, y: step(tf.constant(x), tf.constant(y))


def _torch_step(module: Any, optimizer: Any) -> Callable[[Any, Any], None]:
    import torch

    def step(x: Any, y: Any) -> None:
        module.zero_grad()
        ((module(x) - torch.as_tensor(y)) ** 2).mean().backward()
        optimizer.apply([each.value.grad for each in module.trainable_variables], module.trainable_variables)
    return torch.compile(step, backend="eager")  # type: ignore[no-any-return]


def _jax_step(module: Any, optimizer: Any) -> Callable[[Any, Any], None]:
    import jax

    def loss(own: Any, others: Any, x: Any, y: Any) -> Any:
        found, _ = module.stateless_call(own, others, x)
        return ((found - y) ** 2).mean()

    @jax.jit
    def step(own: Any, state: Any, x: Any, y: Any) -> Any:
        return optimizer.stateless_apply(state, jax.grad(loss)(own, [], x, y), own)

    def stepped(x: Any, y: Any) -> None:
        found = step([each.value for each in module.trainable_variables], [each.value for each in optimizer.variables], x, y)
        for variables, new in zip((module.trainable_variables, optimizer.variables), found, strict=True):
            for variable, value in zip(variables, new, strict=True):
                variable.assign(value)
    return stepped


def resumes(directory: str) -> None:
    """From Keras' file of each rank, from rank 0's, and from a checkpoint of `hvd.save`."""
    settings = hvd.DiLoCo(5, workers="rank", fragments=2, delay=2)
    module, path = compiled(settings), f"{directory}-{hvd.rank()}.weights.h5"
    for step in range(1, 9):
        train(module, [step])
    assert any(each["start"] is not None for each in module.optimizer.hvdlite_exchanges.saved()["fragments"])
    module.save_weights(path)
    hvd.save(f"{directory}-durable", other=compiled(settings))
    train(module, range(9, STEPS))

    again = compiled(settings)
    again.optimizer.build(again.trainable_variables)
    again.load_weights(path)
    train(again, range(9, STEPS))
    assert same(trained(module), trained(again)) and not are_equal_everywhere(trained(again))

    plain = model()
    plain.compile(adam(), "mse")
    plain.optimizer.build(plain.trainable_variables)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        plain.load_weights(path)
        plain.save_weights(path + ".plain.weights.h5")
    assert int(plain.optimizer.iterations) == 8
    again.load_weights(path + ".plain.weights.h5")
    assert again.optimizer.hvdlite_exchanges.saved() is None, "they begin anew"

    late = compiled(settings)  # rank 0 loads, and broadcasts
    late.optimizer.build(late.trainable_variables)
    if hvd.rank() == 0:
        late.load_weights(path)
    late.fit(*data(0, hvd.rank(), batches=4), batch_size=4, verbose=0,
             callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    assert late.optimizer.hvdlite_exchanges.saved()["step"] == 12 and are_equal_everywhere(trained(late))

    hvd.save(f"{directory}-durable", model=module, optimizer=module.optimizer)  # which merges
    kept, state = trained(module), values(module.optimizer.variables)
    assert are_equal_everywhere(kept) and not are_equal_everywhere(state)
    for optimizer in (hvd.DistributedOptimizer(adam(), outer=settings), adam()):
        found = model()
        found.compile(optimizer, "mse")
        optimizer.build(found.trainable_variables)
        hvd.load(f"{directory}-durable", model=found, optimizer=optimizer)
        assert same(trained(found), kept) and are_equal_everywhere(values(optimizer.variables))
        assert hvd.rank() or same(values(optimizer.variables), state)
        if hasattr(optimizer, "hvdlite_exchanges"):
            assert optimizer.hvdlite_exchanges.saved()["step"] == STEPS - 1
        train(found, range(STEPS, STEPS + 8))
    module.save(f"{directory}-{hvd.rank()}.keras")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        hvd.load_model(f"{directory}-{hvd.rank()}.keras")
    assert any("was saved with outer=" in str(each.message) for each in found), found
    copied = copy.deepcopy(module.optimizer)
    assert isinstance(copied, keras.optimizers.Adam) and not hasattr(copied, "synchronize_outer")


def refuses(_: str) -> None:
    """What does not go with workers says so."""
    outer = hvd.DiLoCo(4, workers="rank")
    for arguments, what in (({"op": hvd.Adasum}, "op=Adasum"), ({"sharded": True}, "sharded=True")):
        assert f"outer=: {what}" in error(UnsupportedError, functools.partial(compiled, outer, **arguments))
    assert "leave process_set out" in error(ValueError, lambda: compiled(outer, process_set=hvd.ProcessSet([0])))
    assert "not 4" in error(ValueError, lambda: compiled(4))
    assert "use_ema=True" in error(UnsupportedError, lambda: compiled(outer, keras.optimizers.SGD(use_ema=True)))
    assert f"every={4}" in error(MismatchError, lambda: compiled(hvd.DiLoCo(4 + hvd.rank())))
    module = compiled(outer)
    assert "elastic state" in error(UnsupportedError, lambda: hvd.elastic.KerasState(module))
    assert "all variables" in error(UnsupportedError, lambda: module.optimizer.register_local_var(
        module.trainable_variables[0]))
    with hvd.MirroredStrategy().scope():
        assert "before it came into a MirroredStrategy's scope" in error(
            ValueError, lambda: keras.Sequential([keras.Input((6,))]).compile(module.optimizer, "mse"))
    in_step = Exception if BACKEND == "jax" else HvdliteError  # JAX has errors of its own, with the text
    if BACKEND == "tensorflow":
        import tensorflow as tf
        table = keras.Variable(np.ones((4, 2), np.float32))
        rows = tf.IndexedSlices(tf.ones((1, 2)), tf.constant([2]), tf.constant([4, 2]))
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), outer=outer)
        assert "sparse_as_dense=True" in error(UnsupportedError, lambda: optimizer.apply([rows], [table]))
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), outer=outer, sparse_as_dense=True)
        optimizer.apply([rows], [table])
        assert values([table])[0].tolist() == [[1, 1], [1, 1], [0, 0], [1, 1]]
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), outer=outer)
    own = module.trainable_variables[:2 + hvd.rank()]
    told = error(in_step, lambda: optimizer.apply([keras.ops.ones(each.shape) for each in own], own))
    assert "of rank 0: missing; rank" in told, told
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), outer=outer)
    own[0].assign(values(own)[0] + hvd.rank())
    told = error(in_step, lambda: optimizer.apply([keras.ops.ones(each.shape) for each in own[:1]], own[:1]))
    assert "replicas differ in '0 (" in told and "Keras: broadcast_variables" in told, told


def error(kind: type[BaseException], act: Callable[[], object]) -> str:
    try:
        act()
    except kind as found:
        return str(found)
    raise AssertionError(f"no {kind.__name__}")


def workers_of_several_ranks() -> None:
    """Gradients are averaged inside; a worker alone is the plain optimizer; state lives on in the next world."""
    hvd.init()
    module = compiled(hvd.DiLoCo(3, fragments=2, delay=1))  # hosts of ranks 0, 1 and 2
    train(module, range(1, 8))
    found = hvd.allgather_object([each.tobytes() for each in trained(module)])
    assert found[0] == found[1] != found[2]
    hvd.shutdown()
    hvd.init()
    assert are_equal_everywhere([*module.optimizer.global_weights().values()])
    train(module, range(8, 12))
    assert module.optimizer.hvdlite_exchanges.saved()["step"] == 11
    module.optimizer.synchronize_outer(module)
    assert are_equal_everywhere(trained(module))


def one_worker() -> None:
    """It is the plain distributed optimizer."""
    hvd.init()
    ways = []
    for outer in (None, hvd.DiLoCo(3)):
        module = compiled(outer)
        train(module, range(1, 6))
        ways.append(trained(module))
    module.optimizer.synchronize_outer(module)
    assert same(*ways) and same(trained(module), [*module.optimizer.global_weights().values()])


def a_rank_skips_a_step() -> None:
    """The others are told, and nobody waits for ever."""
    hvd.init()
    module = compiled(hvd.LocalSGD(3, workers="rank"))

    def act() -> None:
        train(module, [step for step in range(1, 9) if hvd.rank() or step != 2])
        module.optimizer.synchronize_outer()
    told = error(Exception, act)
    print(f"told {told}", flush=True)
