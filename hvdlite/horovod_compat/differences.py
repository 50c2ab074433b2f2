"""What hvdlite and Keras 3 do differently, by the names that a script for Horovod uses; for `hvdrun --horovod-check`.

Only what cannot be seen in the modules themselves is listed here. Names and arguments that do not exist, and arguments
without effect, are found in the modules and their docstrings. docs/migrating-from-horovod.md has the whole list.
"""

from __future__ import annotations

import dataclasses
import enum
from fnmatch import fnmatchcase
from typing import Final

from hvdlite.core.config import Config
from hvdlite.core.launch_contract import COORDINATES, ELASTIC, HOSTNAME


class Effect(str, enum.Enum):
    """What a difference means for the script, the worst first."""

    FAILS = "fails"
    DIFFERS = "differs"
    IGNORED = "has no effect"
    UNKNOWN = "is not checked"

    def __str__(self) -> str:
        return self.value


DIFFERENCES: Final = (
    ("horovod.torch.DistributedOptimizer", "returns the optimizer itself, with its state, defaults and hooks"),
    ("horovod.torch.DistributedOptimizer().skip_synchronize",
     "is not needed: gradients that were reduced are not reduced again"),
    ("horovod.torch.DistributedOptimizer().synchronize", "is needed only where a rank may have no backward() in a step"),
    ("horovod.torch.broadcast_optimizer_state", "makes no optimizer step to create the state; LBFGS works, too"),
    ("horovod.torch.SyncBatchNorm", "works on CPUs, too, and with batches of different sizes"),
    ("horovod.*keras.DistributedOptimizer", "returns the optimizer itself; on TensorFlow, XLA is off"),
    ("horovod.*keras.load_model", "a saved model contains the plain optimizer, and this wraps it again"),
    ("horovod.*keras.callbacks.LearningRate*Callback",
     "corrects the momentum in eager mode only: for Keras 3 it is a constant"),
    ("horovod.tensorflow.DistributedOptimizer", "takes a Keras 3 optimizer, and returns it; XLA is off"),
    ("horovod.tensorflow.SyncBatchNormalization", "works with batches of different sizes and with masks"),
    ("horovod.*.join", "joined ranks contribute no rows to allgather, alltoall and broadcast; in Horovod these are errors"),
    ("horovod.*.start_timeline", "writes the events of all ranks, and needs no HOROVOD_TIMELINE"),
    ("horovod.*.add_process_set", "needs no HOROVOD_DYNAMIC_PROCESS_SETS"),
    ("horovod.*_built", "tells what is installed: hvdlite is not built"),
    ("horovod.*elastic.run", "keeps the processes of ranks that survive: docs/elastic.md, \"From Horovod\""),
    ("horovod.run", "starts the ranks with hvdrun, and signs what it pickles"),
)
"""Patterns of full names, and what is different; the first one that matches counts. `()` stands for a call's result."""

GONE: Final = (
    ("*(experimental_run_tf_function=)", "Keras 3 does not take it"),
    ("*.optimizers.*(lr=)", "Keras 3 takes learning_rate, which may be a schedule"),
    ("*.optimizers.*(decay=)", "Keras 3 takes a schedule as learning_rate"),
    ("*.optimizers.*().lr", "Keras 3 calls it learning_rate"),
    ("*model.optimizer.lr", "Keras 3 calls it learning_rate"),
)
"""The same for arguments and attributes that Keras 3 does not have, which is not seen in its classes."""


def difference(name: str) -> tuple[Effect, str] | None:
    """Return what is different about a full name, such as `horovod.torch.join`."""
    for effect, table in ((Effect.FAILS, GONE), (Effect.DIFFERS, DIFFERENCES)):
        for pattern, text in table:
            if fnmatchcase(name, pattern):
                return effect, text
    return None


def variable_without_effect(variable: str) -> bool:
    """Return whether hvdlite neither reads nor sets an environment variable of Horovod's."""
    known = {f"HOROVOD_{alias}" for field in dataclasses.fields(Config) for alias in field.metadata["horovod"]}
    known |= {name.replace("HVDLITE_", "HOROVOD_") for name in COORDINATES}
    return variable not in known | {HOSTNAME, ELASTIC, "HOROVOD_ELASTIC_TIMEOUT"}
