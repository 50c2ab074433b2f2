"""What a training is made of."""

from __future__ import annotations

import dataclasses
import random

SHARES = {"torch": 0.9, "tensorflow": 0.06, "jax": 0.04}
"""Of all draws, by backend; most on torch, where no function is compiled."""
BACKENDS = tuple(SHARES)
MODELS = ("dense", "deep", "embedding", "two inputs", "two outputs", "shared layer", "regularized", "frozen", "convolution",
          "subclass", "own train_step", "unused layer")
OPTIMIZERS = ("SGD", "momentum", "Adam", "AdamW", "RMSprop", "Adagrad")
LOSSES = ("mse", "huber", "function", "mae", "sum")  # the last one in a scope only: an average of sums is no sum
SETTINGS = ("clipnorm", "global_clipnorm", "clipvalue", "ema", "accumulation", "loss_scale_factor", "schedule", "scaled")
DATA = {"tensorflow": ("arrays", "tf.data", "PyDataset", "generator"), "torch": ("arrays", "DataLoader", "PyDataset"),
        "jax": ("arrays", "PyDataset", "tf.data")}


@dataclasses.dataclass(frozen=True)
class Training:
    """One training.

    Attributes:
        scoped: whether in the scope of a strategy, with global batches; else each rank has its part.
        rows: samples in all; without a scope a multiple of the global batch.
        batch: the global batch.
        weighted: whether samples have weights.
        steps: calls into the compiled function do so many steps.
        again: whether the model is compiled and fitted a second time.
    """

    seed: int
    backend: str
    scoped: bool
    model: str
    optimizer: str
    settings: tuple[str, ...]
    loss: str
    data: str
    rows: int
    batch: int
    epochs: int
    weighted: bool
    validated: bool
    eager: bool
    steps: int
    again: bool


def draw(seed: int, backend: str) -> Training:
    """Return the training of a seed."""
    rng = random.Random(f"{seed} {backend}")
    scoped = rng.random() < 0.6
    batch = 2 * rng.randint(2, 6)
    rows = rng.randint(2 * batch, 6 * batch) if scoped else batch * rng.randint(2, 6)
    if rows % batch == 1:  # a batch with fewer samples than ranks counts once per rank in the logs of fit, as documented
        rows += 1
    model = rng.choice(MODELS)
    data = rng.choice(DATA[backend]) if scoped else "arrays"
    settings = rng.sample(SETTINGS, rng.choice((0, 0, 1, 1, 2)))
    clips = [each for each in settings if each.startswith(("clip", "global"))]
    settings = [each for each in settings if each not in clips[1:]]  # Keras takes one
    eager = rng.random() < 0.3 and backend != "jax"
    training = Training(
        seed=seed, backend=backend, scoped=scoped, model=model, optimizer=rng.choice(OPTIMIZERS), settings=tuple(settings),
        loss=rng.choice(LOSSES if scoped else LOSSES[:-1]), data=data, rows=rows, batch=batch, epochs=rng.randint(1, 3),
        weighted=scoped and data in ("arrays", "tf.data") and rng.random() < 0.3, validated=scoped and rng.random() < 0.3,
        eager=eager, steps=1 if eager or backend == "torch" else rng.choice((1, 1, 2, 3)), again=rng.random() < 0.2)
    if backend == "tensorflow" and training.model == "subclass" and not scoped:  # ranks begin alike after the first batch
        training = dataclasses.replace(training, model="dense")
    if backend == "tensorflow" and training.model == "embedding":  # Keras cannot scale losses of sparse gradients there
        training = dataclasses.replace(training, settings=tuple(name for name in settings if name != "loss_scale_factor"))
    if training.loss == "function":  # which returns one number: times a weight of each sample it is no mean over samples
        return dataclasses.replace(training, weighted=False)
    return training
