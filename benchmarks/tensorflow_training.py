"""Images/s of training on 2 ranks: hvdlite's tape and Keras `fit`, TensorFlow's own strategy, and (almost) no communication.

    python -m benchmarks.tensorflow_training                      # starts the ranks itself; a few minutes
    python -m benchmarks.tensorflow_training --groups features    # what Keras' features cost

Every mode trains a CNN on the same random images, 64 a rank, in processes of its own, in turns; medians over the rounds.
The strategy is `tf.distribute.MultiWorkerMirroredStrategy` (mwms) with a custom loop: with Keras 3 its `fit` does not work
on several workers. A ceiling is the same training on two ranks that do not communicate. Beside each rate stands the CPU
time of a step on one rank, in all its threads; other processes on the machine change it less.

- "loops" trains the example's CNN (421,642 parameters). "in step" is the ceiling with an ideal barrier after each step,
  because two cores never take equally long. "one number" reduces a single number a step: what it costs to leave TensorFlow.
- "features" trains a CNN of ten convolutions, each with a batch normalization: local ones, synchronized ones, and the
  strategy's; and the example's CNN in `fit` with dynamic loss scaling, and with gradients that are accumulated over four
  batches.
- "compiled" trains the example's CNN in two parts that XLA compiles: the gradients, and their use. The exchange between
  them is not compiled, because XLA cannot call Python.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

GROUPS = {
    "loops": ("ceiling", "in step", "one number", "tape", "fit ceiling", "fit", "mwms"),
    "features": ("batch norm ceiling", "batch norm tape", "sync batch norm tape", "sync batch norm mwms",
                 "scaled fit ceiling", "scaled fit", "accumulated fit ceiling", "accumulated fit"),
    "compiled": ("ceiling", "compiled ceiling", "compiled"),
}
MODES = tuple(mode for modes in GROUPS.values() for mode in modes)
RATIOS = (("tape", "mwms"), ("tape", "ceiling"), ("tape", "in step"), ("in step", "ceiling"), ("one number", "ceiling"),
          ("fit", "mwms"), ("fit", "fit ceiling"),
          ("batch norm tape", "batch norm ceiling"), ("sync batch norm tape", "batch norm tape"),
          ("sync batch norm tape", "sync batch norm mwms"), ("scaled fit", "scaled fit ceiling"),
          ("accumulated fit", "accumulated fit ceiling"),
          ("compiled", "compiled ceiling"), ("compiled ceiling", "ceiling"))
BATCH, WARMUP, STEPS = 64, 30, 200


def rank_main(mode: str, steps: int) -> None:
    """Train on one rank, and print its images/s, and the milliseconds of CPU time of a step."""
    import numpy as np
    import tensorflow as tf
    strategy = tf.distribute.MultiWorkerMirroredStrategy() if mode.endswith("mwms") else None
    import keras
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
    import keras_fashion_mnist

    import hvdlite_tf as hvd
    from benchmarks.harness import IdealBarrier
    from benchmarks.keras_fit import tensorflow_batches
    if strategy is None:
        hvd.init()
    keras.utils.set_random_seed(1)
    x = np.random.default_rng(0).normal(size=(BATCH * 50, 28, 28, 1)).astype("float32")
    y = np.random.default_rng(1).integers(0, 10, BATCH * 50)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum_over_batch_size")
    accumulated = 4 if mode.startswith("accumulated") else None
    optimizer = keras.optimizers.SGD(0.01, momentum=0.9, gradient_accumulation_steps=accumulated)
    if mode.startswith("scaled"):
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)

    def build() -> keras.Model:
        if "batch norm" not in mode:
            return keras_fashion_mnist.build()
        return _normalized(keras, hvd.SyncBatchNormalization if mode == "sync batch norm tape" else
                           lambda: keras.layers.BatchNormalization(synchronized=strategy is not None))
    if "fit" in mode:
        model = build()
        model.compile(optimizer if mode.endswith("ceiling") else hvd.keras.DistributedOptimizer(optimizer), loss,
                      jit_compile=False, steps_per_execution=10)
        data = tensorflow_batches(x, y, BATCH)
        model.fit(data, epochs=1, verbose=0)
        begun, used = time.perf_counter(), time.process_time()
        model.fit(data, epochs=steps // 50, verbose=0)
    else:
        if strategy is None:
            model, variables, velocity = _variables(tf, build)
        else:
            with strategy.scope():
                model, variables, velocity = _variables(tf, build)

        def part(function: object) -> object:
            return tf.function(function, jit_compile=True) if mode.startswith("compiled") else function

        def differentiate(images: tf.Tensor, labels: tf.Tensor) -> list[tf.Tensor]:
            with tf.GradientTape() as tape:
                value = loss(labels, model(images, training=True))
            if mode.endswith("tape"):
                tape = hvd.DistributedGradientTape(tape)
            gradients = tape.gradient(value, variables)
            if mode == "one number":
                gradients[-1] += 0.0 * hvd.allreduce(value, name="one")
            return gradients

        def use(gradients: list[tf.Tensor]) -> None:
            for variable, speed, gradient in zip(variables, velocity, gradients, strict=True):
                speed.assign(0.9 * speed - 0.01 * gradient)
                variable.assign_add(speed)
        differentiate, use = part(differentiate), part(use)

        def step(images: tf.Tensor, labels: tf.Tensor) -> None:
            gradients = differentiate(images, labels)
            if mode == "compiled":
                gradients = hvd.grouped_allreduce(gradients, name="gradients")
            if strategy is not None:
                context = tf.distribute.get_replica_context()
                gradients = context.all_reduce(tf.distribute.ReduceOp.MEAN, gradients)
            use(gradients)
        train = tf.function(step if strategy is None else lambda images, labels: strategy.run(step, (images, labels)))
        meet = IdealBarrier(hvd.rank(), hvd.size()).meet if mode == "in step" else lambda: None
        begun = used = 0.0
        for turn in range(WARMUP + steps):
            if turn == WARMUP:
                begun, used = time.perf_counter(), time.process_time()
            batch = slice(turn % 50 * BATCH, (turn % 50 + 1) * BATCH)
            train(tf.constant(x[batch]), tf.constant(y[batch]))
            meet()
    seconds, used = time.perf_counter() - begun, time.process_time() - used
    print(f"images/s {2 * steps * BATCH / seconds:.1f} {used / steps * 1e3:.2f}", flush=True)


def _normalized(keras: object, normalization: object) -> object:
    """Return a model of ten convolutions, with a normalization after each."""
    layers = keras.layers  # type: ignore[attr-defined]
    body = [layer for width in (8,) * 5 + (16,) * 5
            for layer in (layers.Conv2D(width, 3, strides=2 if width == 16 else 1, padding="same", use_bias=False),
                          normalization(), layers.ReLU())]  # type: ignore[operator]
    return keras.Sequential([keras.Input((28, 28, 1)), *body, layers.Flatten(), layers.Dense(10)])  # type: ignore[attr-defined]


def _variables(tf: object, build: object) -> tuple[object, list[object], list[object]]:
    """Return a model, its variables as TensorFlow's, and as many zeros for their momentum."""
    model = build()  # type: ignore[operator]
    variables = [variable.value for variable in model.trainable_variables]
    return model, variables, [tf.Variable(tf.zeros(variable.shape)) for variable in variables]  # type: ignore[attr-defined]


def measure(mode: str, steps: int) -> tuple[float, float]:
    """Start two ranks in one mode; return their images/s, and the milliseconds of CPU time of a step on one of them."""
    command = [sys.executable, "-m", "benchmarks.tensorflow_training", "--rank", mode, "--steps", str(steps)]
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "TF_NUM_INTRAOP_THREADS": "1", "OMP_NUM_THREADS": "1",
                   "BENCH_PORT": str(_free_port())}
    if not mode.endswith("mwms"):
        ended = subprocess.run([sys.executable, "-m", "hvdlite_runner.cli", "-np", "2", "--no-prefix", *command],
                               capture_output=True, text=True, env=environment, timeout=300)
        outputs = [ended.stdout]
    else:
        ports = [_free_port() for _ in range(2)]
        workers = [f"127.0.0.1:{port}" for port in ports]
        cluster = {"worker": workers}
        tasks = [json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}}) for index in (0, 1)]
        ranks = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                  env={**environment, "TF_CONFIG": task}) for task in tasks]
        outputs = [rank.communicate(timeout=300)[0] for rank in ranks]
    found = [line.split()[1:] for output in outputs for line in output.splitlines() if line.startswith("images/s")]
    if len(found) != 2:
        raise SystemExit(f"mode {mode} failed:\n{outputs}\n{ended.stderr if not mode.endswith('mwms') else ''}")
    return min(float(rate) for rate, _ in found), statistics.mean(float(used) for _, used in found)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", choices=MODES, help=argparse.SUPPRESS)
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=["loops", "features"])
    parser.add_argument("--steps", type=int, default=STEPS, help="a multiple of 50")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--record", type=Path, help="write the figures here, as JSON")
    arguments = parser.parse_args()
    if arguments.rank:
        rank_main(arguments.rank, arguments.steps)
        return
    rates: dict[str, list[float]] = {mode: [] for group in arguments.groups for mode in GROUPS[group]}
    used: dict[str, list[float]] = {mode: [] for mode in rates}
    for _ in range(arguments.rounds):
        for mode in rates:
            rate, milliseconds = measure(mode, arguments.steps)
            rates[mode].append(rate)
            used[mode].append(milliseconds)
    medians = {mode: statistics.median(found) for mode, found in rates.items()}
    for mode, median in medians.items():
        runs = ", ".join(f"{rate:.0f}" for rate in rates[mode])
        print(f"{mode:24} {median:8.0f} images/s   ({runs}), {statistics.median(used[mode]):6.2f} ms of CPU time a step")
    for mode, peer in RATIOS:
        if mode in medians:
            print(f"{mode} / {peer}: {medians[mode] / medians[peer]:.3f}")
    if arguments.record:
        figures = {"ranks": 2, "images_per_second": rates, "medians": medians, "cpu_milliseconds_of_a_step": used}
        arguments.record.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
