"""The same example, unchanged, under real launchers: Slurm, Open MPI, MPICH, torchrun; and hvdrun inside an allocation."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runner import slurm as slurm_daemons
from tests.runner.elastic_jobs import Job
from tests.runner.slurm import Slurm, free_port
from tests.worlds import HVDRUN, PYTHON_PATH, clean_environment

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLE = [sys.executable, str(ROOT / "examples/pytorch_fashion_mnist.py"), "--epochs", "1", "--batch-size", "16",
           "--data-dir"]
# One write a line: MPI launchers forward pieces of lines, and `print` may write each argument by itself.
PLACE = [sys.executable, "-c", "import sys, hvdlite as hvd, numpy as np\nhvd.init()\n"
         "place = hvd.rank(), hvd.size(), hvd.local_rank(), int(hvd.allreduce(np.array(1), op=hvd.Sum))\n"
         "sys.stdout.write('%d %d %d %d\\n' % place)"]
ENVIRONMENT = {**clean_environment(), "OMP_NUM_THREADS": "1"}
WHY_NO_SLURM = slurm_daemons.unavailable()
pytestmark = pytest.mark.slow
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="the example needs torch")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    if WHY_NO_SLURM:
        pytest.skip(WHY_NO_SLURM)
    with Slurm(tmp_path_factory.mktemp("slurm")) as running:
        yield running


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=150, check=False, env=ENVIRONMENT)


def launcher(flavour: str) -> list[str]:
    """Return the real mpirun of a kind; Debian has both under names of their own."""
    program = {"Open MPI": "mpirun.openmpi", "MPICH": "mpiexec.hydra"}[flavour]
    path = shutil.which(program)
    if path is None:
        pytest.skip(f"needs {program} (make test as root installs it)")
    root = ["--allow-run-as-root", "--oversubscribe"] if flavour == "Open MPI" else []
    return [path, *root, "-np", "2"]


@needs_torch
@pytest.mark.long
def test_the_example_under_srun(slurm: Slurm, small: Path) -> None:
    """Other scripts under srun are below, and the example in a batch script."""
    ended = slurm.run("srun", "--ntasks=2", *EXAMPLE, str(small))
    assert ended.returncode == 0 and "on 2 ranks" in ended.stdout, ended.stderr


def test_hvdrun_inside_an_allocation_uses_it_without_being_told(slurm: Slurm) -> None:
    """Nodes' names resolve to nothing here, so the way there is Slurm's own."""
    hvdrun = [*HVDRUN, "--no-prefix"]
    ended = slurm.run("salloc", "--quiet", "--ntasks=3", *hvdrun, *PLACE)
    assert ended.returncode == 0 and sorted(ended.stdout.splitlines()) == ["0 3 0 3", "1 3 1 3", "2 3 2 3"], ended.stderr
    ended = slurm.run("salloc", "--quiet", "--nodes=2", "--ntasks=3", *hvdrun, *PLACE)
    assert ended.returncode == 0 and sorted(ended.stdout.splitlines()) == ["0 3 0 3", "1 3 1 3", "2 3 0 3"], ended.stderr
    ended = slurm.run("salloc", "--quiet", "--ntasks=3", *hvdrun, "-np", "2", "sh", "-c", "exit $((7 * HVDLITE_RANK))")
    assert ended.returncode == 7 and "rank 1 failed first: exit code 7" in ended.stderr, ended.stderr
    ended = slurm.run("salloc", "--quiet", "--ntasks=2", *hvdrun, "-H", "node7", "--remote-shell", "srun", "true")
    assert ended.returncode == 2 and "host node7 takes no step of this Slurm allocation" in ended.stderr, ended.stderr


def test_an_elastic_job_inside_an_allocation(slurm: Slurm) -> None:
    """Rank 0 is lost, and the others meet over two nodes again."""
    program = [sys.executable, "-c", "import sys\nfrom tests.runtime.programs.elastic import train\ntrain(sys.argv[1])"]
    salloc = ["salloc", "--quiet", "--nodes=2", "--ntasks=4", "--ntasks-per-node=2", *HVDRUN]
    with tempfile.TemporaryDirectory() as name:  # a short one, for sockets
        gate = Path(name) / "gate"
        with Job(Path(name), "-np", "4", "--min-np", "2", "--verbose", launcher=salloc, program=[*program, str(gate)],
                 environment={**slurm.environment(), "PYTHONPATH": PYTHON_PATH}) as job:
            job.wait_for("world of 4 as", 4)
            os.kill(int(job.text.partition("member 0 is process ")[2].split()[0]), signal.SIGKILL)
            job.wait_for("world of 3 as", 3)
            gate.touch()
            assert job.end() == 0, job.text
            assert "left: rank 0 on node1 (killed by signal 9 (SIGKILL))" in job.text, job.text


def test_a_batch_script_may_run_alone_or_use_hvdrun(slurm: Slurm, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text('#!/bin/sh\n"$@"\n' + f'{sys.executable} -m hvdlite_runner.cli --no-prefix "$@"\n')
    ended = slurm.batch("--nodes=2", "--ntasks=2", "--output", str(tmp_path / "out"), str(script), *PLACE)
    lines = [line for line in (tmp_path / "out").read_text().splitlines() if not line.startswith("hvdrun:")]
    assert ended == "COMPLETED" and lines[0] == "0 1 0 1" and sorted(lines[1:]) == ["0 2 0 2", "1 2 0 2"], lines


@needs_torch
def test_the_example_of_a_batch_script(slurm: Slurm, small: Path, tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, options in (("python", ""), ("hvdrun", "-m hvdlite_runner")):
        (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} {options} "$@"\n')
        (programs / name).chmod(0o755)
    ended = slurm.batch("--ntasks-per-node=1", "--chdir", str(ROOT), "--output", str(tmp_path / "%x.out"),
                        str(ROOT / "examples/slurm.sbatch"), *EXAMPLE[2:], str(small),
                        environment={"PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": PYTHON_PATH})
    printed = (tmp_path / "fashion-mnist.out").read_text()
    assert ended == "COMPLETED" and "images/s on 2 ranks" in printed, printed


def test_srun_across_nodes_needs_the_key_and_says_so(slurm: Slurm, tmp_path: Path) -> None:
    own = 'TMPDIR=$0/$SLURMD_NODENAME; mkdir -p $TMPDIR; export TMPDIR; exec "$@"'  # real nodes share no files in /tmp
    across = ("srun", "--quiet", "--nodes=2", "--ntasks=3", "sh", "-c", own, str(tmp_path), *PLACE)
    ended = slurm.run(*across)
    assert ended.returncode != 0 and "Slurm: 3 ranks on several hosts" in ended.stderr and "HVDLITE_SECRET" in ended.stderr
    meeting = {"HVDLITE_SECRET": "ab" * 32, "HVDLITE_COORDINATOR": f"127.0.0.1:{free_port()}"}  # node1 has no address
    ended = slurm.run(*across, environment=meeting)
    assert ended.returncode == 0 and sorted(ended.stdout.splitlines()) == ["0 3 0 3", "1 3 1 3", "2 3 0 3"], ended.stderr


@needs_torch
@pytest.mark.long
def test_a_script_for_torch_under_srun(slurm: Slurm) -> None:
    """The nodes' names have no addresses; on one node none is needed."""
    script = ROOT / "tests/torch/distributed/programs/launched.py"
    ended = slurm.run("srun", "--quiet", "--ntasks=2", sys.executable, str(script), "--ours")
    expected = [f"rank {rank} of 2, local {rank}: 3" for rank in range(2)]
    assert ended.returncode == 0 and sorted(ended.stdout.splitlines()) == expected, ended.stderr


def test_srun_with_an_interface_for_mpi_counts_as_srun(slurm: Slurm) -> None:
    ended = slurm.run("srun", "--quiet", "--mpi=pmi2", "--ntasks=2", *PLACE)
    assert ended.returncode == 0 and sorted(ended.stdout.splitlines()) == ["0 2 0 2", "1 2 1 2"], ended.stderr


@needs_torch
@pytest.mark.long
@pytest.mark.parametrize("flavour", ["Open MPI", "MPICH"])
def test_the_example_under_mpirun(flavour: str, small: Path) -> None:
    """Other scripts under mpiexec: tests/bootstrap/test_mpi.py, and with torch tests/torch/distributed/test_launchers.py."""
    ended = run(*launcher(flavour), *EXAMPLE, str(small))
    assert ended.returncode == 0 and "on 2 ranks" in ended.stdout, ended.stderr


@pytest.mark.parametrize("flavour", ["Open MPI", "MPICH"])
def test_hvdrun_with_mpi(flavour: str) -> None:
    program = launcher(flavour)[0]
    ended = run(*HVDRUN, "-np", "2", "--no-prefix", "--mpi", "--mpirun", program, *PLACE)
    assert ended.returncode == 0 and sorted(ended.stdout.splitlines()) == ["0 2 0 2", "1 2 1 2"], ended.stderr


def test_mpi_that_is_not_there() -> None:
    ended = run(*HVDRUN, "-np", "2", "--mpi", "--mpirun", "/no/mpirun", *PLACE)
    assert ended.returncode == 2 and "--mpi needs /no/mpirun" in ended.stderr and ended.stderr.count("\n") == 1
    ended = run(*HVDRUN, "-np", "2", "--mpi", "--mpirun", "/bin/true", *PLACE)
    assert ended.returncode == 2 and "/bin/true is not a launcher of Open MPI, MPICH or Intel MPI" in ended.stderr


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]


@needs_torch
def test_torchrun() -> None:
    ended = run(*TORCHRUN, "--no-python", *PLACE)
    assert ended.returncode == 0 and sorted(ended.stdout.splitlines()) == ["0 2 0 2", "1 2 1 2"], ended.stderr


@needs_torch
@pytest.mark.long
def test_the_example_under_torchrun(small: Path) -> None:
    ended = run(*TORCHRUN, *EXAMPLE[1:], str(small))
    assert ended.returncode == 0 and "on 2 ranks" in ended.stdout, ended.stderr
