"""What a training is made of."""

from __future__ import annotations

import dataclasses
import random

SHARES = {"torch": 0.9, "tensorflow": 0.06, "jax": 0.04}
"""Of all draws, by backend; most on torch, where no function is compiled."""
BACKENDS = tuple(SHARES)
MODELS = ("dense", "deep", "embedding", "two inputs", "two outputs", "shared layer", "regularized", "frozen", "convolution",
          "subclass", "own train_step", "unused layer", "sparse", "no call")
ONLY = {"sparse": ("tensorflow", "torch"), "no call": ("tensorflow",)}
"""Models that Keras has on some backends only."""
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
        wide: whether the arrays have floats of 64 bits; Keras casts them.
        counted: whether there are a metric that has its own state, and one that is a number for a batch.
        decides: whether a callback decides by the loss of one output, or of the model.
        shares: whether the ranks' shares are others in each batch of a scope.
        first_rows: of a batch, the rows of rank 0, where ranks weigh their gradients by rows; 0: both have as many.
        steps: calls into the compiled function do so many steps.
        again: whether the model is compiled and fitted a second time.
        sharded: whether each rank has the optimizer state of some variables only; outside of a scope.
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
    wide: bool
    counted: bool
    decides: bool
    shares: bool
    first_rows: int = 0
    sharded: bool = False

    @property
    def has_equal_shards(self) -> bool:
        """Whether both ranks have equally many samples of every batch."""
        return self.rows % self.batch % 2 == 0 and not self.shares


def models_of(backend: str) -> list[str]:
    """Return the models of a backend."""
    return [model for model in MODELS if backend in ONLY.get(model, BACKENDS)]


def draw(seed: int, backend: str) -> Training:
    """Return the training of a seed."""
    rng = random.Random(f"{seed} {backend}")
    scoped = rng.random() < 0.6
    batch = 2 * rng.randint(2, 6)
    rows = rng.randint(2 * batch, 6 * batch) if scoped else batch * rng.randint(2, 6)
    if rows % batch == 1:  # a batch with fewer samples than ranks counts once per rank in the logs of fit, as documented
        rows += 1
    model = rng.choice(models_of(backend))
    data = rng.choice(DATA[backend]) if scoped else "arrays"
    settings = rng.sample(SETTINGS, rng.choice((0, 0, 1, 1, 2)))
    clips = [each for each in settings if each.startswith(("clip", "global"))]
    settings = [each for each in settings if each not in clips[1:]]  # Keras takes one
    eager = rng.random() < 0.3 and backend != "jax"
    training = Training(
        seed=seed, backend=backend, scoped=scoped, model=model, optimizer=rng.choice(OPTIMIZERS), settings=tuple(settings),
        loss=rng.choice(LOSSES if scoped else LOSSES[:-1]), data=data, rows=rows, batch=batch, epochs=rng.randint(1, 3),
        weighted=scoped and data in ("arrays", "tf.data") and rng.random() < 0.3, validated=scoped and rng.random() < 0.3,
        eager=eager, steps=1 if eager or backend == "torch" else rng.choice((1, 1, 2, 3)), again=rng.random() < 0.2,
        wide=scoped and data == "arrays" and rng.random() < 0.4, counted=scoped and rng.random() < 0.4,
        decides=scoped and rng.random() < 0.4, shares=scoped and rng.random() < 0.4,
        sharded=not scoped and rng.random() < 0.5)
    if training.model == "no call" and not scoped:
        training = dataclasses.replace(training, model="own train_step")
    if (training.model == "own train_step" and not scoped and backend == "tensorflow"
            and not {"accumulation", "scaled"}.intersection(settings)):
        training = dataclasses.replace(training, first_rows=rng.randint(1, batch - 1))
    if training.model == "no call":
        training = dataclasses.replace(training, counted=False, validated=False, weighted=False)
    if training.model == "sparse" and not (scoped and data == "arrays"):
        training = dataclasses.replace(training, model="dense")
    if training.model == "own train_step" and backend == "tensorflow":  # Keras: the metric has not been built
        training = dataclasses.replace(training, counted=False)
    reports_itself = training.model in ("own train_step", "no call")  # the mean over ranks
    if "schedule" in settings or (reports_itself and not training.has_equal_shards):
        training = dataclasses.replace(training, decides=False)
    if backend == "tensorflow" and training.model == "subclass" and not scoped:  # ranks begin alike after the first batch
        training = dataclasses.replace(training, model="dense")
    if backend == "tensorflow" and training.model == "embedding":  # Keras cannot scale losses of sparse gradients there
        training = dataclasses.replace(training, settings=tuple(name for name in settings if name != "loss_scale_factor"))
    if training.loss == "function":  # which returns one number: times a weight of each sample it is no mean over samples
        return dataclasses.replace(training, weighted=False)
    return training
