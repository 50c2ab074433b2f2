"""Ignores signals, and starts processes in sessions of their own."""

import os
import signal
import subprocess
import sys
import time

signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
if os.fork() == 0:
    os.setsid()
print("ready", flush=True)
time.sleep(1000)
