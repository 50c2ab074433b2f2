"""Starts a process without environment in a session of its own; sleeps for as many seconds as the second argument says."""

import subprocess
import sys
import time

subprocess.Popen([sys.executable, "-S", "-c", "import time; print('bare', flush=True); time.sleep(1000)", sys.argv[1]],
                 env={}, start_new_session=True)
if len(sys.argv) > 2:
    time.sleep(float(sys.argv[2]))
