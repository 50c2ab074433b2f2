"""Errors, deaths and Ctrl-C inside `fit` and `tf.function`: told, and over soon."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.tf.support import ENVIRONMENT, imported
from tests.worlds import PYTHON_PATH, Processes

FIT = """
    import os, signal, sys
    import numpy as np, keras, hvdlite_tf.keras as hvd
    hvd.init()
    class Fault(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 3:
                print("there", flush=True)
                if hvd.rank() == 1 and sys.argv[1] == "raise":
                    raise RuntimeError("out of paper")
                if hvd.rank() == 1 and sys.argv[1] == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
    model.fit(np.ones((800_000, 6)), np.ones((800_000, 2)), batch_size=8, verbose=0, callbacks=[Fault()])
"""


@pytest.mark.parametrize(("fault", "told"), [("raise", "rank 1 failed with RuntimeError: out of paper"),
                                             ("kill", "rank 1 was lost")])
def test_the_others_end_soon_and_say_why(fault: str, told: str) -> None:
    with Processes(2, FIT, fault, environment=ENVIRONMENT, imported=imported("tensorflow")) as world:
        world.wait_for(1, "there")
        begun = time.monotonic()
        assert world.ranks[0].wait(30) != 0
        assert time.monotonic() - begun < 20
        assert told in world.told(0).stderr


def test_ctrl_c_ends_a_job_in_fit(tmp_path: Path) -> None:
    script = tmp_path / "fit.py"
    script.write_text(textwrap.dedent(FIT))
    hvdrun = [sys.executable, "-m", "hvdlite_runner.cli", "-np", "2", "--no-prefix"]
    job = subprocess.Popen([*hvdrun, sys.executable, str(script), "run on"], stdout=subprocess.PIPE,
                           stderr=subprocess.PIPE, text=True,
                           env={**os.environ, **ENVIRONMENT, "PYTHONPATH": PYTHON_PATH})
    assert job.stdout is not None
    assert [job.stdout.readline(), job.stdout.readline()] == ["there\n", "there\n"]
    job.send_signal(signal.SIGINT)
    begun = time.monotonic()
    job.communicate(timeout=30)
    assert job.returncode == 130 and time.monotonic() - begun < 15
