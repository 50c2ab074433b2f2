"""Scripts for `torch.distributed` under launchers, and how the backend becomes known to torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hvdlite.bootstrap.admission import MissingRanks
from hvdlite_torch.distributed.errors import as_backend_error
from hvdlite_torch.distributed.registration import check_torch
from tests.mpis import MPIS, Mpi, mpiexec
from tests.torch.distributed.programs import launched
from tests.worlds import HANGS_SECONDS, HVDRUN, PYTHON_PATH, ROOT, clean_environment

SCRIPT = str(Path(launched.__file__))
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
EXPECTED = {f"rank {rank} of 2, local {rank}: 3" for rank in range(2)}


def output(command: list[str], **environment: str) -> str:
    """Run a command as a script's user does; return its output."""
    given = clean_environment("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "TORCH_")
    ended = subprocess.run(command, env={**given, "PYTHONPATH": PYTHON_PATH, "OMP_NUM_THREADS": "1", **environment},
                           capture_output=True, text=True, timeout=HANGS_SECONDS, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.slow
@pytest.mark.parametrize("command", [[*HVDRUN, "-np", "2", sys.executable], TORCHRUN], ids=["hvdrun", "torchrun"])
def test_launchers_that_set_torchs_variables(command: list[str]) -> None:
    said = output([*command, SCRIPT])
    assert {line.rpartition(">:")[2] for line in said.splitlines()} == EXPECTED, said


@pytest.mark.slow
@pytest.mark.parametrize("mpi", [pytest.param(*MPIS[0].values, id=MPIS[0].id, marks=[*MPIS[0].marks, pytest.mark.long]),
                                 *MPIS[1:]])
def test_mpiexec(mpi: Mpi) -> None:
    ended = mpiexec(mpi, 2, [SCRIPT, "--ours"], timeout=HANGS_SECONDS)
    assert ended.returncode == 0 and set(ended.stdout.splitlines()) == EXPECTED, ended


def test_the_entry_point_is_the_function_that_registers() -> None:
    """And it loads nothing of the runtime, which each `import torch` would wait for."""
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    assert '"torch.backends": ["hvdlite = hvdlite_torch.distributed.registration:register"]' in setup
    said = output([sys.executable, "-c", "import torch, sys; from hvdlite_torch.distributed.registration import register\n"
                   "register(); register()\n"
                   "print(sorted(name for name in sys.modules if name.startswith('hvdlite')))\n"
                   "print(torch.distributed.Backend._plugins['HVDLITE'].extended_api)"], TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    modules, is_registered = said.splitlines()
    assert set(ast.literal_eval(modules)) - {"hvdlite"} == {
        "hvdlite_torch", "hvdlite_torch.distributed", "hvdlite_torch.distributed.registration"}
    assert is_registered == "True"


BEFORE_TORCH = """
import sys
class Changes:
    def find_spec(self, name, path, target=None):
        if name == {module!r}:
{change}
sys.meta_path.insert(0, Changes())
import torch
"""


def test_torch_without_distributed_is_imported() -> None:
    """As on NVIDIA's Jetson boards: `is_available()` asks for these names."""
    change = """
            for each in ("_c10d_init", "_rpc_init", "_dist_autograd_init"):
                delattr(sys.modules["torch._C"], each)"""
    program = BEFORE_TORCH.format(module="torch.distributed", change=change)
    assert output([sys.executable, "-c", program + "print(torch.distributed.is_available())"]) == "False\n"


def test_a_torch_that_does_not_accept_the_backend_is_imported_and_warns_once_when_it_is_asked_for() -> None:
    change = """
            import torch.distributed as d
            d.Backend.register_backend = None"""
    program = BEFORE_TORCH.format(module="hvdlite_torch", change=change)
    ended = subprocess.run([sys.executable, "-c", program + """
from torch.distributed import Backend
print("imported", file=sys.stderr)
print(Backend("gloo"), Backend("hvdlite"), Backend("hvdlite"))
"""], capture_output=True, text=True, timeout=HANGS_SECONDS)
    assert ended.stdout == "gloo hvdlite hvdlite\n", ended.stderr
    before, after = ended.stderr.split("imported\n")
    assert not before and after.count("does not accept the backend") == 1 and "NoneType" in after


def test_the_error_of_ranks_that_do_not_connect_is_one_of_torchs() -> None:
    error = as_backend_error(MissingRanks("ranks [1] did not connect", [1]))
    assert isinstance(error, MissingRanks) and isinstance(error, dist.DistBackendError)
    assert str(error) == "ranks [1] did not connect" and error.ranks == (1,)


def test_an_older_torch_is_refused_with_both_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("2.13.0+cpu", "2.15.0", "3.0.0a0"):
        check_torch(version)
    monkeypatch.setattr(torch, "__version__", "2.4.0+cu121")
    with pytest.raises(ImportError, match=r"needs torch 2\.13 or newer, and 2\.4\.0\+cu121 is installed"):
        dist.init_process_group("hvdlite", store=dist.HashStore(), rank=0, world_size=1)
    assert not dist.is_initialized()
