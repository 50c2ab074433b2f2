"""Handles SIGUSR1 with a line, and SIGTERM with the help of a worker, which does not handle it."""

import signal
import subprocess
import sys
import time
from typing import Any

worker = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read(); print('saved by a worker', flush=True)"],
                          stdin=subprocess.PIPE)


def save(*_: Any) -> None:
    worker.communicate()
    sys.exit(worker.returncode)


signal.signal(signal.SIGUSR1, lambda number, frame: print("told", flush=True))
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
while True:
    time.sleep(1000)
