"""Starts an orphan, and allreduces without end."""

import subprocess
import sys

import numpy as np

import hvdlite as hvd

subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True, env={})
hvd.init()
for step in range(10**9):
    hvd.allreduce(np.ones(100_000, np.float32), name="gradient")
    if step == 20:
        print("ready", flush=True)
