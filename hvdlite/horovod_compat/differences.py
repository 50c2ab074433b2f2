"""What hvdlite does differently, by the names of Horovod that a script uses; for `hvdrun --horovod-check`.

Only what cannot be seen in the modules themselves is listed here. Names and arguments that do not exist, and arguments
without effect, are found in the modules and their docstrings. docs/migrating-from-horovod.md has the whole list.
"""

from __future__ import annotations

import dataclasses
from fnmatch import fnmatchcase
from typing import Final

from hvdlite.core.config import Config
from hvdlite.core.launch_contract import COORDINATES, ELASTIC, HOSTNAME

DIFFERENCES: Final = (
    ("horovod.torch.DistributedOptimizer", "returns the optimizer itself, with its state, defaults and hooks"),
    ("horovod.torch.broadcast_optimizer_state", "makes no optimizer step to create the state; LBFGS works, too"),
    ("horovod.torch.SyncBatchNorm", "works on CPUs, too, and with batches of different sizes"),
    ("horovod.*keras.DistributedOptimizer", "returns the optimizer itself; on TensorFlow, XLA is off"),
    ("horovod.*keras.load_model", "a saved model contains the plain optimizer, and this wraps it again"),
    ("horovod.*keras.callbacks.LearningRate*", "corrects the momentum in eager mode only: for Keras 3 it is a constant"),
    ("horovod.tensorflow.DistributedOptimizer", "takes a Keras 3 optimizer, and returns it; XLA is off"),
    ("horovod.tensorflow.SyncBatchNormalization", "works with batches of different sizes and with masks"),
    ("horovod.*.join", "joined ranks contribute no rows to allgather, alltoall and broadcast; in Horovod these are errors"),
    ("horovod.*.start_timeline", "writes the events of all ranks, and needs no HOROVOD_TIMELINE"),
    ("horovod.*.add_process_set", "needs no HOROVOD_DYNAMIC_PROCESS_SETS"),
    ("horovod.*_built", "tells what is installed: hvdlite is not built"),
    ("horovod.*elastic.run", "keeps the processes of ranks that survive: docs/elastic.md, \"From Horovod\""),
    ("horovod.run", "starts the ranks with hvdrun, and signs what it pickles"),
)
"""Patterns of full names, and what is different; the first one that matches counts."""

METHODS: Final = {
    "skip_synchronize": "is not needed: gradients that were reduced are not reduced again",
    "synchronize": "is needed only where a rank may have no backward() in a step",
}
"""Methods of a distributed optimizer, and what is different."""


def difference(name: str) -> str:
    """Return what is different about a full name, such as `horovod.torch.join`; "" for nothing."""
    return next((text for pattern, text in DIFFERENCES if fnmatchcase(name, pattern)), "")


def variable_without_effect(variable: str) -> bool:
    """Return whether hvdlite neither reads nor sets an environment variable of Horovod's."""
    known = {f"HOROVOD_{alias}" for field in dataclasses.fields(Config) for alias in field.metadata["horovod"]}
    known |= {name.replace("HVDLITE_", "HOROVOD_") for name in COORDINATES}
    return variable not in known | {HOSTNAME, ELASTIC, "HOROVOD_ELASTIC_TIMEOUT"}
