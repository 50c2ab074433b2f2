"""Starts a process without environment and parent in a session of its own; sleeps as long as the second argument says."""

import subprocess
import sys
import time

subprocess.run(["/bin/sh", "-c", '"$@" &', "sh", sys.executable, "-S", "-c",
                "import time; print('bare', flush=True); time.sleep(1000)", sys.argv[1]],
               env={}, start_new_session=True, check=True)
if len(sys.argv) > 2:
    time.sleep(float(sys.argv[2]))
