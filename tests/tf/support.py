"""What the TensorFlow and Keras tests start ranks with: quiet, one thread a rank, small pools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.worlds import Ended, processes

ENVIRONMENT = {"TF_CPP_MIN_LOG_LEVEL": "3", "TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1",
               "TF_ENABLE_ONEDNN_OPTS": "0", "CUDA_VISIBLE_DEVICES": "", "KERAS_BACKEND": "tensorflow",
               "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_backend_optimization_level=0"}
"""XLA compiles longer than what it compiles runs."""

EVERY_BACKEND = ("tensorflow", "torch", "jax")


def only(*backends: str) -> list[Any]:
    """Return all of Keras' backends; the others than these are `long`."""
    return [pytest.param(each, marks=[] if each in backends else pytest.mark.long) for each in EVERY_BACKEND]


def pairs(*quick: tuple[str, object]) -> list[Any]:
    """Return each backend with each value of some pairs; the others than these pairs are `long`.

    It is for values that choose the same code on all backends.
    """
    values = [value for index, (_, value) in enumerate(quick) if value not in [each for _, each in quick[:index]]]
    return [pytest.param(backend, value, marks=[] if (backend, value) in quick else pytest.mark.long)
            for value in values for backend in EVERY_BACKEND]


BACKENDS = only("tensorflow", "torch")
"""For what is different code on each of them. The fuzz draws JAX in every run."""

PROGRAMS = "tests.tf.programs"
"""The package of the programs. A test names its program: importing it would import TensorFlow into every test process."""


def imported(backend: str) -> list[str]:
    """Return what a rank begins with whose Keras is on a backend."""
    return list(dict.fromkeys([backend, "tensorflow", "keras"]))  # keras.utils.set_random_seed imports TensorFlow


def run(size: int, program: str, *arguments: object, timeout: float = 150.0, hosts: Sequence[int] = (),
        **environment: str) -> list[Ended]:
    """Run a program on `size` ranks; one that fails fails the test, with its output.

    Args:
        program: "module:function", the module within `PROGRAMS`.
        arguments: of the function, literals.
        hosts: how many ranks each of several hosts has.
    """
    environment = {**ENVIRONMENT, **environment}
    return processes(size, f"{PROGRAMS}.{program}", *arguments, timeout=timeout, environment=environment, hosts=hosts,
                     imported=imported(environment["KERAS_BACKEND"]))
