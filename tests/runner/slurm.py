"""A real Slurm on this machine: its daemons, two nodes that both are this host, and a munge of its own.

Needs root and Debian's slurmctld, slurmd, slurm-client and munge; `unavailable()` says what is missing.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from tests.worlds import HANGS_SECONDS, clean_environment, free_port

PATH = "/usr/sbin:/sbin:/usr/bin:/bin"
NODES = ("node1", "node2")
PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "salloc", "sinfo")


def unavailable() -> str:
    """Return why there can be no Slurm here, "" when there can."""
    if os.geteuid() != 0:
        return "needs root, for Slurm's daemons"
    missing = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
    return f"needs {', '.join(missing)} (make test as root installs them)" if missing else ""


class Slurm:
    """Two nodes, called node1 and node2, with 8 CPUs each as far as Slurm knows; both are this machine."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._daemons: list[subprocess.Popen[bytes]] = []

    def environment(self) -> dict[str, str]:
        """Return the environment in which Slurm's commands find this one."""
        return {**clean_environment("SLURM_"), "SLURM_CONF": str(self.directory / "slurm.conf"), "OMP_NUM_THREADS": "1"}

    def run(self, *command: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Run a command with this Slurm."""
        return subprocess.run(command, capture_output=True, text=True, timeout=150, check=False,
                              env={**self.environment(), **(environment or {})})

    def batch(self, *arguments: str, environment: dict[str, str] | None = None) -> str:
        """Run a batch job and return its last state, such as "COMPLETED". (`sbatch --wait` looks after 2, 10 and 42 s.)"""
        submitted = self.run("sbatch", "--parsable", *arguments, environment=environment)
        assert submitted.returncode == 0, submitted.stderr
        deadline = time.monotonic() + HANGS_SECONDS
        while True:
            state = self.run("squeue", "--noheader", "--states=all", "--format=%T", "--jobs", submitted.stdout.strip())
            if state.stdout.strip() not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"):
                return state.stdout.strip()
            assert time.monotonic() < deadline, (state, self._logs())
            time.sleep(0.1)

    def __enter__(self) -> Slurm:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for daemon in reversed(self._daemons):  # munged last: the others' goodbyes are signed
            daemon.send_signal(signal.SIGTERM)
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def _start(self) -> None:
        here = self.directory
        for folder in ("state", "spool"):
            (here / folder).mkdir()
        (here / "munge.key").write_bytes(os.urandom(128))
        (here / "munge.key").chmod(0o400)
        self._daemon("munged", "--foreground", "--force", f"--key-file={here}/munge.key", f"--socket={here}/munge.sock",
                     f"--pid-file={here}/munged.pid", f"--log-file={here}/munged.log", f"--seed-file={here}/munged.seed")
        (here / "slurm.conf").write_text(f"""
ClusterName=test
SlurmctldHost={socket.gethostname()}(127.0.0.1)
SlurmUser=root
SlurmctldPort={free_port()}
AuthInfo=socket={here}/munge.sock,cred_expire=5
CredType=cred/munge
StateSaveLocation={here}/state
SlurmdSpoolDir={here}/spool/%n
SlurmctldPidFile={here}/slurmctld.pid
SlurmdPidFile={here}/slurmd.%n.pid
SlurmctldLogFile={here}/slurmctld.log
SlurmdLogFile={here}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
MpiDefault=none
NodeName=node1 NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 CPUs=8 Port={free_port()} State=UNKNOWN
NodeName=node2 NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 CPUs=8 Port={free_port()} State=UNKNOWN
PartitionName=main Nodes=node[1-2] Default=YES MaxTime=INFINITE State=UP
""")
        (here / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nConstrainCores=no\nConstrainRAMSpace=no\n")
        self._wait_for(lambda: (here / "munge.sock").exists())
        self._daemon("slurmctld", "-D", "-i")
        for node in NODES:
            (here / "spool" / node).mkdir()
            self._daemon("slurmd", "-D", "-N", node)
        self._wait_for(lambda: self.run("sinfo", "-h", "-o", "%T %D").stdout.strip() == f"idle {len(NODES)}")

    def _daemon(self, name: str, *arguments: str) -> None:
        with open(self.directory / f"{name}.out", "ab") as out:
            self._daemons.append(subprocess.Popen([str(shutil.which(name, path=PATH)), *arguments], stdout=out, stderr=out,
                                                  env=self.environment()))

    def _wait_for(self, condition: object) -> None:
        deadline = time.monotonic() + 30
        while not condition():  # type: ignore[operator]
            assert time.monotonic() < deadline and all(daemon.poll() is None for daemon in self._daemons), self._logs()
            time.sleep(0.1)

    def _logs(self) -> Sequence[str]:
        return [f"{path.name}: {path.read_text(errors='replace')[-2000:]}" for path in self.directory.glob("*.out")]
