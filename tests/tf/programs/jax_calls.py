"""Programs of test_jax_calls.py."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

import hvdlite_tf.keras as hvd
from hvdlite import api
from hvdlite.core.types import ReduceOp
from hvdlite_tf.keras.backends import create_step_reducer
from hvdlite_tf.keras.backends import jax as backend
from tests.raising import raises

SHAPES = [(5, 7, 3, 16), (), (300, 70), *[(64,)] * 155, (7000,), (0, 4), (33, 3)]
"""161 tensors, some of them larger than what is copied for the function, one scalar and one empty."""


def both_paths(program: Callable[[], object]) -> list[Any]:
    """Return what a program returns by buffer callbacks, and by `io_callback`."""
    assert backend.buffer_callback is not None
    results = [program()]
    present, backend.buffer_callback = backend.buffer_callback, None
    try:
        return [*results, program()]
    finally:
        backend.buffer_callback = present


def calls_are_equal_on_both_paths() -> None:
    hvd.init()
    for program in (many_gradients, order_of_calls, mismatch):
        by_buffers, by_copies = both_paths(program)
        for one, other in zip(by_buffers, by_copies, strict=True):
            np.testing.assert_array_equal(one, other)


def many_gradients() -> list[Any]:
    """Return the averages of four steps of one compiled function; from the second one on, buckets are learned."""
    variables = [keras.Variable(np.zeros(shape, np.float32)) for shape in SHAPES]
    reducer = create_step_reducer()
    steps = jax.jit(lambda values: reducer.reduce(values, variables))
    averages = []
    for step in range(4):
        random = np.random.default_rng(10 * step + hvd.rank())
        averages += steps([jnp.asarray(random.normal(size=shape), jnp.float32) for shape in SHAPES])
    return [np.asarray(average) for average in averages]


def summed(name: str) -> Callable[[Sequence[Any]], list[Any]]:
    """Return a function of arrays that sums the first one over all ranks."""
    def function(arrays: Sequence[Any]) -> list[Any]:
        result = np.empty_like(arrays[0])
        api.runtime().allreduce(name, arrays[0], result, ReduceOp.SUM).wait()
        return [result]
    return function


def order_of_calls() -> list[Any]:
    """Return the sums of calls that do not depend on each other, in a loop and a branch too; all have one name."""
    def several(x: Any) -> Any:
        sums = [backend.call(summed("same"), [x * factor])[0] for factor in range(12)]
        last, _ = jax.lax.scan(lambda carry, _: (backend.call(summed("same"), [carry])[0] + 1, None), x, None, length=3)
        return *sums, last, jax.lax.cond(x[0] >= 0, lambda x: backend.call(summed("same"), [x])[0], lambda x: x, x)
    return [np.asarray(each) for each in jax.jit(several)(jnp.arange(4.0) + hvd.rank())]


def mismatch() -> list[Any]:
    """Return the sum after an error: it reaches the script, and the next step works."""
    failing = jax.jit(lambda x: backend.call(summed("shape"), [x])[0])
    raises(jax.errors.JaxRuntimeError, "MismatchError: ranks disagree about the shape of 'shape'",
           lambda: jax.block_until_ready(failing(jnp.ones(2 + hvd.rank()))))
    return [np.asarray(jax.jit(lambda x: backend.call(summed("later"), [x])[0])(jnp.ones(3)))]


def until_a_rank_is_lost() -> None:
    hvd.init()
    step = jax.jit(lambda x: backend.call(summed("sum"), [x])[0])
    jax.block_until_ready(step(jnp.ones(100_000)))
    if hvd.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    raises(RuntimeError, "PeerLostError: rank 1 was lost", lambda: jax.block_until_ready(step(jnp.ones(100_000))))
    print("told", flush=True)


def several_devices() -> None:
    """With several devices in a process a call is made once, and not once a device."""
    os.environ["XLA_FLAGS"] += " --xla_force_host_platform_device_count=2"  # JAX has not computed yet
    calls: list[None] = []

    def function(arrays: Sequence[Any]) -> Sequence[Any]:
        calls.append(None)
        return arrays
    assert jax.local_device_count() == 2
    sharding = jax.sharding.NamedSharding(jax.make_mesh((2,), ("x",)), jax.sharding.PartitionSpec("x"))
    jax.block_until_ready(jax.jit(lambda x: backend.call(function, [x])[0])(jax.device_put(jnp.ones(4), sharding)))
    assert len(calls) == 1


def on_one_cpu() -> None:
    """Calls with large arguments that depend on each other, dispatched asynchronously to JAX's only thread."""
    assert jax.config.values["jax_cpu_enable_async_dispatch"]

    def same(tensors: Sequence[Any]) -> list[Any]:
        return backend.call(lambda arrays: [array.copy() for array in arrays], tensors)
    step = jax.jit(lambda x: same([x * 2, x + same([x * 3])[0]])[1].sum())
    for number in range(20):
        last = step(jnp.ones(1_000_000) * number)
    assert float(last) == 4 * 19 * 1_000_000
