"""Keras on JAX: calls on XLA's buffers have the values, the order and the errors of `io_callback`."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.tf.support import ENVIRONMENT, PROGRAMS, imported, run
from tests.worlds import HANGS_SECONDS, PYTHON_PATH, Processes

pytestmark = pytest.mark.parametrize("backend", ["jax"])


def test_calls_are_equal_on_both_paths(backend: str) -> None:
    run(2, "jax_calls:calls_are_equal_on_both_paths", KERAS_BACKEND=backend)


def test_a_lost_rank_is_told(backend: str) -> None:
    with Processes(2, f"{PROGRAMS}.jax_calls:until_a_rank_is_lost", imported=imported(backend),
                   environment={**ENVIRONMENT, "KERAS_BACKEND": backend}) as world:
        world.wait_for(0, "told")


def test_with_several_devices_a_call_is_made_once(backend: str) -> None:
    run(1, "jax_calls:several_devices", KERAS_BACKEND=backend)


def test_calls_on_one_cpu(backend: str) -> None:
    """By `io_callback` they wait forever there, unless JAX dispatches synchronously."""
    on_one_cpu(backend, "from tests.tf.programs import jax_calls; jax_calls.on_one_cpu()")


def test_without_buffer_callbacks_one_cpu_dispatches_synchronously(backend: str) -> None:
    on_one_cpu(backend, "sys.modules['jax.experimental.buffer_callback'] = None; import hvdlite_tf.keras, jax; "
                        "from hvdlite_tf.keras.backends import jax as backend; assert backend.buffer_callback is None; "
                        "assert not jax.config.values['jax_cpu_enable_async_dispatch']")


def on_one_cpu(backend: str, script: str) -> None:
    """Run a script in a process that has one CPU before it imports JAX."""
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("this system binds no processes to CPUs")
    begin = "import os, sys; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); "
    ended = subprocess.run([sys.executable, "-c", begin + script], capture_output=True, text=True, timeout=HANGS_SECONDS,
                           env={**os.environ, **ENVIRONMENT, "KERAS_BACKEND": backend, "PYTHONPATH": PYTHON_PATH})
    assert ended.returncode == 0, ended.stderr
