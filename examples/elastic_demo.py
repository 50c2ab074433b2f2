"""Show an elastic training: two ranks train, one is killed in the second epoch, and another one joins.

    python examples/elastic_demo.py --epochs 4 --minimum-accuracy 0.87

Arguments are passed on to the training script; `--keras` chooses the one for Keras.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent


def main() -> int:
    arguments = [word for word in sys.argv[1:] if word != "--keras"]
    script = HERE / f"elastic_fashion_mnist_{'keras' if '--keras' in sys.argv else 'torch'}.py"
    with tempfile.TemporaryDirectory() as directory:
        hosts = Path(directory) / "hosts"
        hosts.write_text("localhost:2\n", encoding="utf-8")
        command = [sys.executable, "-m", "hvdlite_runner.cli", "-np", "2", "--min-np", "1", "--max-np", "2",
                   "--host-discovery-script", f"cat {shlex.quote(str(hosts))}", sys.executable, str(script), *arguments]
        job = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        return follow(job, hosts)


def follow(job: subprocess.Popen[str], hosts: Path) -> int:
    """Print what the job prints; kill rank 1 after the first epoch, and add a slot once the other rank goes on alone."""
    processes: list[int] = []
    has_killed = has_grown = False
    for line in job.stdout or ():
        print(line, end="", flush=True)
        if found := re.search(r"(\d+) ranks, processes \[([\d, ]+)\]", line):
            processes = [int(each) for each in found[2].split(",")]
            if has_killed and found[1] == "1" and not has_grown:
                has_grown = True
                print("demo: the host has another slot", flush=True)
                hosts.write_text("localhost:3\n", encoding="utf-8")
        if "epoch 1:" in line and len(processes) == 2 and not has_killed:
            has_killed = True
            print(f"demo: kill rank 1, process {processes[1]}", flush=True)
            os.kill(processes[1], signal.SIGKILL)
    code = job.wait()
    if code == 0 and not (has_grown and len(processes) == 2):
        print("demo: training has ended before a rank was lost and another one joined", file=sys.stderr)
        return 1
    return code


if __name__ == "__main__":
    sys.exit(main())
