"""The 161 gradients of a ResNet-50 (102 MB of float32), averaged by Keras' step reducer inside a function that JAX compiles.

"hvdlite" works on XLA's buffers. "io_callback", which older JAX needs, passes arrays of JAX's. "alone" is the same function
without a reduction.
"""

from __future__ import annotations

import os
from collections.abc import Callable

os.environ["KERAS_BACKEND"] = "jax"

import jax
import jax.numpy as jnp
import keras
import numpy as np

import hvdlite_tf.keras as hvd
from benchmarks.gradients import resnet50_shapes
from benchmarks.harness import Bench, median, say
from hvdlite_tf.keras.backends import create_step_reducer
from hvdlite_tf.keras.backends import jax as backend


def main() -> None:
    bench = Bench.start(__doc__)
    variables = [keras.Variable(np.zeros(shape, np.float32)) for shape in resnet50_shapes()]
    random = np.random.default_rng(hvd.rank())
    gradients = [jnp.asarray(random.normal(size=variable.shape), jnp.float32) for variable in variables]

    def compiled(name: str) -> Callable[[], object]:
        reducer = create_step_reducer()

        def step(values: list[jax.Array]) -> list[jax.Array]:
            scaled = [value * 0.999 for value in values]
            return scaled if name == "alone" else reducer.reduce(scaled, variables)
        function = jax.jit(step)
        present = backend.buffer_callback
        if name == "io_callback":
            backend.buffer_callback = None
        results[name] = [np.asarray(result) for result in function(gradients)]  # traces
        backend.buffer_callback = present
        return lambda: jax.block_until_ready(function(gradients))
    results: dict[str, list[np.ndarray]] = {}
    contenders = {name: compiled(name) for name in ("hvdlite", "io_callback", "alone")}
    for ours, theirs in zip(results["hvdlite"], results["io_callback"], strict=True):
        np.testing.assert_array_equal(ours, theirs)
    seconds = {name: median(values) for name, values in bench.interleave(contenders).items()}
    say("JAX, 161 gradients   " + "  ".join(f"{name} {value * 1e3:.0f} ms" for name, value in seconds.items()))
    bench.finish([{"case": "one call", "seconds": seconds}])


if __name__ == "__main__":
    main()
