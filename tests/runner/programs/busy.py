"""Starts an orphan and sleeps, or fails on the rank that the argument names."""

import os
import subprocess
import sys
import time

subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True, env={})
print("ready", flush=True)
if len(sys.argv) > 1 and sys.argv[1] == os.environ["HVDLITE_RANK"]:
    sys.exit(7)
time.sleep(1000)
