"""What ranks do in test_sharded.py."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

import hvdlite_tf.keras as hvd
from hvdlite.core.errors import HvdliteError, UnsupportedError

X = np.random.default_rng(0).normal(size=(48, 6)).astype("float32")
Y = (X[:, :1] * 2 - X[:, 1:2]).astype("float32")
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    "amsgrad": lambda: keras.optimizers.Adam(amsgrad=True),
    **{name: getattr(keras.optimizers, name) for name in (
        "SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "Nadam", "Ftrl", "Lamb", "Lion", "Adafactor",
        "Muon") if hasattr(keras.optimizers, name)},
}


def model(seed: int = 3) -> Any:
    keras.utils.set_random_seed(seed)
    return keras.Sequential([
        keras.Input((6,)), keras.layers.Dense(9, "tanh", name="first"),
        keras.layers.Dense(5, "tanh", kernel_constraint=keras.constraints.MaxNorm(0.8)), keras.layers.Dense(1)])


def distributed(optimizer: Any, **named: Any) -> Any:
    return hvd.DistributedOptimizer(optimizer, **named)


def fitted(module: Any, optimizer: Any = None, begin: int = 0, epochs: int = 2, callbacks: Any = (), **named: Any) -> Any:
    if optimizer is not None:
        module.compile(optimizer, "mse", **named)
    rank, size = hvd.rank(), hvd.size()
    module.fit(X[rank::size], Y[rank::size], batch_size=4, initial_epoch=begin, epochs=epochs, shuffle=False, verbose=0,
               callbacks=list(callbacks))
    return module


def values(variables: Sequence[Any]) -> list[Any]:
    return [np.array(keras.ops.convert_to_numpy(each)) for each in variables]


def equal(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return len(one) == len(other) and all(map(np.array_equal, one, other))


def error(kind: type[Exception], act: Callable[[], object]) -> str:
    try:
        act()
    except kind as found:
        return str(found)
    raise AssertionError(f"no {kind.__name__}")


def nbytes(optimizer: Any) -> int:
    """Return the bytes of an optimizer's variables that are no scalars."""
    return sum(each.nbytes for each in values(optimizer.variables) if each.shape)


def every_optimizer_trains_as_unsharded() -> None:
    """Bit for bit; the slots of all ranks are those of one process."""
    hvd.init()
    for name, make in OPTIMIZERS.items():
        ways = []
        for sharded in (False, True):
            module, optimizer = model(), distributed(make(), sharded=sharded)
            optimizer.build(module.trainable_variables)
            for step in range(3):
                random = np.random.default_rng(10 * step + hvd.rank())
                optimizer.apply([keras.ops.convert_to_tensor(random.normal(size=each.shape).astype("float32"))
                                 for each in module.trainable_variables], module.trainable_variables)
            ways.append((values(module.trainable_variables), nbytes(optimizer), optimizer))
        assert equal(ways[0][0], ways[1][0]), name
        own = hvd.allgather_object(ways[1][1])
        assert sum(own) == ways[0][1] and (min(own) > 0 or name == "SGD"), (name, own, ways[0][1])
        ways[1][2].consolidate_state(to=None)
        store: dict[str, Any] = {}
        ways[1][2].save_own_variables(store)
        assert equal([*store.values()], values(ways[0][2].variables)), name
    assert hvd.allgather_object(ways[1][0][0].tolist()) == [ways[1][0][0].tolist()] * hvd.size()


def _settings() -> dict[str, Callable[[], tuple[Any, dict[str, Any]]]]:
    rate = keras.optimizers.schedules.ExponentialDecay(0.02, 3, 0.9)

    def excluding(optimizer: Any) -> Any:
        optimizer.exclude_from_weight_decay(var_names=["bias"])
        return optimizer
    steps = {} if keras.backend.backend() == "torch" else {"steps_per_execution": 2}
    return {
        "clipped, averaged": lambda: (excluding(keras.optimizers.AdamW(
            rate, weight_decay=0.1, global_clipnorm=0.3, use_ema=True, ema_overwrite_frequency=3)), steps),
        "accumulating": lambda: (keras.optimizers.Adam(0.02, clipnorm=0.2, use_ema=True, gradient_accumulation_steps=3), {}),
        "accumulating, averaged": lambda: (keras.optimizers.SGD(
            0.02, momentum=0.5, use_ema=True, ema_overwrite_frequency=2, gradient_accumulation_steps=2), {}),
        "scaled": lambda: (keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.02), initial_scale=2.0 ** 126), {}),
    }


def fit_trains_as_unsharded() -> None:
    """With what Keras' optimizers do beside their update; variables and the whole state, bit for bit."""
    hvd.init()
    for name, make in _settings().items():
        ways = []
        for sharded in (False, True):
            optimizer, named = make()
            module = fitted(model(), distributed(optimizer, sharded=sharded), **named)
            if sharded:
                getattr(optimizer, "inner_optimizer", optimizer).consolidate_state(to=None)
            store: dict[str, Any] = {}
            getattr(optimizer, "inner_optimizer", optimizer).save_own_variables(store)
            assert sharded or store["0"] > 3
            rates = values([each for each in optimizer.variables if not tuple(each.shape)])
            accumulated = {id(each) for each in getattr(optimizer, "_accumulated_gradients", ())}
            state = [each for variable, each in zip(optimizer.variables, store.values(), strict=False)
                     if id(variable) not in accumulated]
            ways.append((values(module.trainable_variables), rates, state))
        for one, other in zip(*ways, strict=True):
            assert equal(one, other), (name, one, other)


def half_on_these_ranks(directory: str, resumes: bool) -> None:
    """Train two epochs and save; or load, on another number of ranks, and train two more; sharded and not."""
    hvd.init()
    ways = {}
    for sharded, scaled in ((False, False), (True, False), (False, True), (True, True)):
        path = f"{directory}/{sharded}-{scaled}"
        module = model(seed=3 + hvd.rank() + resumes)
        optimizer = distributed(keras.optimizers.Adam(0.02), sharded=sharded)
        module.compile(keras.optimizers.LossScaleOptimizer(optimizer, 2.0) if scaled else optimizer, "mse")
        if resumes:
            module.optimizer.build(module.trainable_variables)
            module.load_weights(f"{path}.weights.h5")
        begin = 2 if resumes else 0
        fitted(module, begin=begin, epochs=begin + 2, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
        if sharded:
            optimizer.consolidate_state()
        if hvd.rank() == 0 and not resumes:
            module.save_weights(f"{path}.weights.h5")
            module.save(f"{path}.keras")
            loaded = keras.models.load_model(f"{path}.keras")
            ways[f"loaded {sharded} {scaled}"] = values([*loaded.trainable_variables, *loaded.optimizer.variables])
        ways[f"trained {sharded} {scaled}"] = values(module.trainable_variables)
        if sharded:  # durable, on any number of ranks
            if resumes:
                hvd.load(f"{path}-durable", model=module, optimizer=module.optimizer)
            else:
                hvd.save(f"{path}-durable", model=module, optimizer=module.optimizer)
            fitted(module, begin=2, epochs=4)
            ways[f"durable {scaled}"] = values(module.trainable_variables)
    for scaled in (False, True):
        trained = ways[f"trained True {scaled}"]
        assert equal(ways[f"trained False {scaled}"], trained), scaled
        if resumes:
            assert equal(ways[f"durable {scaled}"], trained), (ways[f"durable {scaled}"], trained)
        elif hvd.rank() == 0:
            loaded = ways[f"loaded True {scaled}"]
            assert equal(ways[f"loaded False {scaled}"], loaded) and sum(map(np.size, loaded)) > 100


def refused() -> None:
    """What a sharded optimizer does not do says so, and so do ranks that are not alike."""
    hvd.init()
    in_step = Exception if keras.backend.backend() == "jax" else HvdliteError  # JAX has errors of its own, with the text
    rank, is_tensorflow = hvd.rank(), keras.backend.backend() == "tensorflow"
    module = model()
    optimizer = distributed(keras.optimizers.Adam(0.01), sharded=True)
    optimizer.consolidate_state()
    optimizer.save_own_variables({})
    fitted(module, optimizer, run_eagerly=keras.backend.backend() != "jax", epochs=1)
    told = error(UnsupportedError, lambda: optimizer.save_own_variables({}))
    assert told == (f"rank {rank}: a sharded optimizer has the state of its own variables only; call "
                    f"optimizer.consolidate_state(to={rank}) on all ranks, after the step and before it is saved"), told
    optimizer.consolidate_state()
    if rank:
        assert "(the last call gathered it on rank 0)" in error(UnsupportedError, lambda: optimizer.save_own_variables({}))
    else:
        optimizer.save_own_variables({})
    assert "the optimizer's state is on ranks 0, 1" in error(ValueError, lambda: optimizer.consolidate_state(to=7))
    fitted(module, epochs=1)
    assert error(UnsupportedError, lambda: optimizer.save_own_variables({}))
    if is_tensorflow:
        import tensorflow as tf
        assert "use hvd.save" in error(UnsupportedError, lambda: tf.train.Checkpoint(optimizer=optimizer).write("/dev/null"))
    assert not pickle.loads(pickle.dumps(optimizer)).built  # noqa: S301
    assert "cannot be part of an elastic state" in error(UnsupportedError, lambda: hvd.elastic.KerasState(module))
    assert "give the optimizer itself" in error(HvdliteError, lambda: hvd.save("/dev/null", o=optimizer.variables))
    assert "has been built, with its whole state" in error(UnsupportedError, lambda: distributed(_built(), sharded=True))
    for wrong in (lambda: optimizer.register_local_var(module.trainable_variables[0]),
                  lambda: hvd.PartialDistributedOptimizer(keras.optimizers.SGD(), local_layers=module.layers[0],
                                                          sharded=True)):
        assert "left to each rank have no owner" in error(UnsupportedError, wrong)
    if hasattr(keras.optimizers, "MultiOptimizer"):
        several = keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(keras.optimizers.SGD()))
        assert "optimizers of its own" in error(UnsupportedError, lambda: distributed(several, sharded=True))
    if hasattr(keras.optimizers, "ScheduleFreeAdamW"):
        copying = distributed(keras.optimizers.ScheduleFreeAdamW(), sharded=True)
        assert "begins its state with the values" in error(UnsupportedError,
                                                           lambda: copying.build(module.trainable_variables))
    with hvd.MirroredStrategy().scope():
        assert "before it came into a MirroredStrategy's scope" in error(
            ValueError, lambda: keras.Sequential([keras.Input((6,))]).compile(optimizer, "mse"))
    unlike = model(seed=rank)
    forgotten = distributed(keras.optimizers.SGD(0.1), sharded=True)
    told = error(in_step, lambda: forgotten.apply([keras.ops.ones(each.shape) for each in
                                                                unlike.trainable_variables], unlike.trainable_variables))
    assert "replicas differ in 'variable.0 (" in told and "first/kernel)' and 2 of the other 6" in told, told
    assert "call broadcast_variables before the first step" in told
    loaded = distributed(keras.optimizers.Adam(), sharded=True)
    loaded.build(module.trainable_variables)
    if rank == 0:
        loaded.load_own_variables({str(index): each for index, each in enumerate(_whole_state(module))})
    hvd.broadcast_variables(loaded.variables, 0)
    told = error(in_step, lambda: loaded.apply([keras.ops.ones(each.shape) for each in
                                                             module.trainable_variables]))
    assert "replicas differ in 'iterations'" in told, told
    optimizer.consolidate_state(to=None)
    saved: dict[str, Any] = {}
    optimizer.save_own_variables(saved)
    hvd.shutdown()
    hvd.init()
    told = error(in_step, lambda: optimizer.apply([keras.ops.ones(each.shape) for each in
                                                            module.trainable_variables]))
    assert "of an earlier world has a part of its state only" in told, told
    assert "after init(), on all ranks, compile it with a new sharded optimizer, call optimizer.build(" in told, told
    later = distributed(keras.optimizers.Adam(), sharded=True)
    later.build(module.trainable_variables)
    later.load_own_variables(saved)
    hvd.broadcast_variables(module.variables, 0)  # the step that failed has changed them
    later.apply([keras.ops.ones(each.shape) for each in module.trainable_variables])
    assert int(later.iterations) == int(saved["0"]) + 1


def _built() -> Any:
    optimizer = keras.optimizers.SGD(momentum=0.9)
    optimizer.build(model().trainable_variables)
    return optimizer


def _whole_state(module: Any) -> list[Any]:
    plain = keras.optimizers.Adam()
    plain.build(module.trainable_variables)
    plain.iterations.assign(5)
    return values(plain.variables)


def some_ranks() -> None:
    """Owners are the ranks of the process set; on the other rank the optimizer trains alone."""
    hvd.init()
    pair = hvd.add_process_set([0, 2])
    module, optimizer = model(), distributed(keras.optimizers.Adam(), process_set=pair, sharded=True)
    for step in range(2):
        optimizer.apply([keras.ops.ones(each.shape) * (1 + hvd.rank() + step) for each in module.trainable_variables],
                        module.trainable_variables)
    counts = hvd.allgather_object(nbytes(optimizer))
    assert counts[0] + counts[2] == counts[1] and min(counts) > 0, counts
    optimizer.consolidate_state(to=2)
    if hvd.rank() != 0:
        optimizer.save_own_variables({})


def only_one_is_sharded() -> None:
    """The error names what the one rank waits for."""
    hvd.init()
    module, optimizer = model(), distributed(keras.optimizers.SGD(0.1, momentum=0.9), sharded=hvd.rank() == 1)
    for _ in range(3):
        optimizer.apply([keras.ops.ones(each.shape) for each in module.trainable_variables], module.trainable_variables)


def more_ranks_than_variables() -> None:
    """A rank that owns nothing takes part; so does the only one that owns something."""
    hvd.init()
    ways = []
    for sharded in (False, True):
        keras.utils.set_random_seed(1)
        module = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1, use_bias=False)])
        ways.append(fitted(module, distributed(keras.optimizers.Adam(0.1), sharded=sharded)))
    assert equal(*(values(each.trainable_variables) for each in ways))
    assert hvd.allgather_object(nbytes(ways[1].optimizer)) == [48, 0]
