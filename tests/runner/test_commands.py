"""Command lines for ssh, srun and MPI's launchers, and what schedulers say, to the letter: nothing is started."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hvdlite.core.errors import LaunchError
from hvdlite_runner.agents.remote_agent import BOOTSTRAP, SSH_DEFAULTS, Shell, explain, forwarded
from hvdlite_runner.mpirun import INTEL, MPICH, OPEN_MPI, mpirun_command
from hvdlite_runner.placement import Allocation, Host, expand_nodes, find_allocation, repeat_counts

OPTIONS = ["-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "LogLevel=ERROR", "-o", "ServerAliveInterval=0"]


def test_ssh() -> None:
    assert Shell(python="/venv/bin/python").command("me@node1") == [
        "ssh", "-T", "-F", SSH_DEFAULTS, *OPTIONS, "--", "me@node1", f"/venv/bin/python -c '{BOOTSTRAP}'"]
    shell = Shell("/usr/bin/ssh", 2222, "/keys/id", ("-J", "gateway"), "/my venv/bin/python")
    assert shell.command("fd00::2") == ["/usr/bin/ssh", "-T", "-J", "gateway", "-p", "2222", "-i", "/keys/id", "-F",
                                        SSH_DEFAULTS, *OPTIONS, "--", "fd00::2", f"'/my venv/bin/python' -c '{BOOTSTRAP}'"]
    assert SSH_DEFAULTS not in Shell(arguments=("-F", "/my/config")).command("b")


@pytest.mark.skipif(shutil.which("ssh") is None, reason="needs ssh")
@pytest.mark.parametrize(("setting", "effective"), [("yes", "true"), ("ask", "ask"), ("no", "false"), (None, "accept-new")])
def test_only_what_the_users_ssh_configuration_leaves_open_has_a_default(tmp_path: Path, setting: str | None,
                                                                         effective: str) -> None:
    """`StrictHostKeyChecking yes` was replaced by accept-new: an unknown host, or somebody in between, was let in."""
    (tmp_path / "config").write_text("Host b\n" + (f"  StrictHostKeyChecking {setting}\n" if setting else "")
                                     + "Host alias\n  HostName 10.77.0.2\n")
    text = Path(SSH_DEFAULTS).read_text(encoding="utf-8")
    assert "Include ~/.ssh/config\n" in text
    (tmp_path / "defaults").write_text(text.replace("~/.ssh/config", str(tmp_path / "config")))
    found = subprocess.run(["ssh", "-G", "-T", "-F", str(tmp_path / "defaults"), "b"], capture_output=True, text=True,
                           check=True)
    assert f"stricthostkeychecking {effective}\n" in found.stdout


def test_srun() -> None:
    assert Shell("srun", python="python3").command("gpu07") == [
        "srun", "--nodes=1", "--ntasks=1", "--nodelist=gpu07", "--overlap", "--mem=0", "--cpu-bind=none", "--mpi=none",
        "--quiet", "--unbuffered", "python3", "-c", BOOTSTRAP]


def test_a_program_like_ssh() -> None:
    assert Shell("/etc/mpi/kubexec.sh").command("worker-0") == ["/etc/mpi/kubexec.sh", "worker-0",
                                                                f"python3 -c '{BOOTSTRAP}'"]


ENVIRON = {"PATH": "/bin", "LANG": "C", "HOME": "/root", "HVDLITE_LOG_LEVEL": "info", "SSH_AUTH_SOCK": "/s", "PMI_RANK": "1",
           "CUDA_VISIBLE_DEVICES": "0", "AWS_SECRET": "hidden"}


def test_open_mpi() -> None:
    with_grace = mpirun_command(OPEN_MPI, "mpirun", 2, [], ENVIRON, ["python", "train.py"], grace=9.5)
    assert with_grace[-5:] == ["-mca", "odls_base_sigkill_timeout", "10", "python", "train.py"]
    assert mpirun_command(OPEN_MPI, "mpirun", 2, [], ENVIRON, ["python", "train.py"]) == [
        "mpirun", "--tag-output", "-np", "2", "--oversubscribe", "-bind-to", "none", "-map-by", "slot",
        "-x", "AWS_SECRET", "-x", "HVDLITE_LOG_LEVEL", "-x", "LANG", "-x", "PATH", "python", "train.py"]
    hosts = [Host(f"n{number}", 2) for number in range(64)]
    long = mpirun_command(OPEN_MPI, "/opt/mpirun", 128, hosts, {"PATH": "/bin"}, ["./a"], arguments=["-mca", "pml", "ob1"],
                          binding=["-bind-to", "core"], ssh=["-p", "2222", "-i", "/k"], interfaces=["ib0", "eth1"],
                          root=True, output_directory="/out", prefix=False)
    assert long == ["/opt/mpirun", "--allow-run-as-root", "-np", "128", "-H",
                    ",".join(f"n{number}:2" for number in range(64)), "-bind-to", "core",
                    "-mca", "plm_rsh_no_tree_spawn", "true", "-mca", "plm_rsh_num_concurrent", "64",
                    "-mca", "plm_rsh_args", "-p 2222 -i /k", "-mca", "btl_tcp_if_include", "ib0,eth1", "-mca",
                    "oob_tcp_if_include", "ib0,eth1", "--output-filename", "/out", "-x", "PATH", "-mca", "pml", "ob1", "./a"]


def test_mpich_and_intel_mpi() -> None:
    hosts = [Host("a", 2), Host("b", 1)]
    assert mpirun_command(MPICH, "mpiexec.hydra", 3, hosts, ENVIRON, ["python", "train.py"], interfaces=["eth1"],
                          root=True) == [
        "mpiexec.hydra", "-np", "3", "-hosts", "a:2,b:1", "-iface", "eth1", "-prepend-rank", "-genvlist",
        "AWS_SECRET,HVDLITE_LOG_LEVEL,LANG,PATH", "python", "train.py"]
    assert "-l" in mpirun_command(INTEL, "mpiexec.hydra", 3, hosts, ENVIRON, ["a"])
    with pytest.raises(LaunchError, match="ssh/config"):
        mpirun_command(MPICH, "mpiexec", 3, hosts, ENVIRON, ["a"], ssh=["-p", "22"])


def test_values_never_stand_on_a_command_line() -> None:
    for flavour in (OPEN_MPI, MPICH, INTEL):
        assert not any("hidden" in word for word in mpirun_command(flavour, "mpirun", 2, [], ENVIRON, ["a"]))


def test_what_belongs_to_this_host_is_not_forwarded() -> None:
    assert forwarded(ENVIRON) == {"PATH": "/bin", "LANG": "C", "HVDLITE_LOG_LEVEL": "info", "AWS_SECRET": "hidden"}
    kept = {"TERMINAL": "x", "SHELLCHECK": "1", "STYLEGAN_DIR": "/x", "GPGPU_ARCH": "sm_90", "OMPIRE": "1", "SSHD": "1"}
    gone = ["SLURM_PROCID", "SLURMD_NODENAME", "BASH_FUNC_f%%", "STY", "TMUX", "TMUX_PANE", "SSH_AUTH_SOCK", "OMPI_MCA_btl"]
    assert forwarded({**kept, **dict.fromkeys(gone, "x")}) == kept


def test_the_agent_imports_nothing_from_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('imported')")
    source = "import json, sys; print('' in sys.path, json.dumps(1))"
    ended = subprocess.run([sys.executable, "-c", BOOTSTRAP], input=repr(source).encode() + b"\n", cwd=tmp_path,
                           capture_output=True, check=False)
    assert ended.stdout == b"False 1\n", ended.stderr


@pytest.mark.parametrize(("errors", "told"), [
    ("ssh: Could not resolve hostname b: Name or service not known", "host b cannot be resolved"),
    ("ssh: connect to host b port 7: Connection refused", "host b refuses connections to port 7"),
    ("ssh: connect to host b port 7: Connection timed out", "host b does not answer at port 7"),
    ("@@@\n@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.", "ssh-keygen -R b"),
    ("No ED25519 host key is known for b and you have requested strict checking.\nHost key verification failed.",
     "host b is not in known_hosts, and your ssh configuration does not let hvdrun add it"),
    ("me@b: Permission denied (publickey,password).", "host b does not let you in"),
    ("ssh: connect to host b port 22: No route to host", "no route"),
    ("bash: line 1: /py: No such file or directory", "host b has no /py"),
    ("hello\n\nhvdlite: has hvdlite 1\n", "host b has hvdlite 1"),
    ("Traceback:\nKeyError: 1", "host b cannot be reached by ssh (exit code 96): KeyError: 1"),
    ("", "it said nothing"),
])
def test_why_a_host_cannot_be_reached(errors: str, told: str) -> None:
    line = explain(Shell(port=7, python="/py"), "b", 96, errors)
    assert told in line and "\n" not in line


def test_slurms_lists() -> None:
    assert expand_nodes("gpu[01-03,7],login,r[1-2]c[3-4]x") == ["gpu01", "gpu02", "gpu03", "gpu7", "login", "r1c3x", "r1c4x",
                                                                "r2c3x", "r2c4x"]
    assert repeat_counts("4(x2),1", 3) == [4, 4, 1]
    for text, nodes in (("4(x2)", 3), ("4x2", 2)):
        with pytest.raises(ValueError):
            repeat_counts(text, nodes)


FILES = {"/pbs": "a\na\nb\na\n", "/ge": "a 2 main@a UNDEFINED\nb 1 main@b UNDEFINED\n", "/mpi": "w-0 slots=2\nw-1 slots=2\n"}


@pytest.mark.parametrize(("environ", "expected"), [
    ({}, None),
    ({"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "2,1"},
     Allocation("Slurm", [Host("n1", 2), Host("n2")], "srun")),
    ({"SLURM_JOB_NODELIST": "n1", "SLURM_JOB_CPUS_PER_NODE": "16"}, Allocation("Slurm", [Host("n1", 16)], "srun")),
    ({"LSB_MCPU_HOSTS": "batch 1 n1 4 n2 4"}, Allocation("LSF", [Host("n1", 4), Host("n2", 4)], "blaunch")),
    ({"LSB_MCPU_HOSTS": "n1 4"}, Allocation("LSF", [Host("n1", 4)], "blaunch")),
    ({"PBS_NODEFILE": "/pbs"}, Allocation("PBS", [Host("a", 3), Host("b")])),
    ({"PE_HOSTFILE": "/ge"}, Allocation("Grid Engine", [Host("a", 2), Host("b")])),
    ({"OMPI_MCA_orte_default_hostfile": "/mpi", "OMPI_MCA_plm_rsh_agent": "/etc/mpi/kubexec.sh"},
     Allocation("Kubeflow's MPI operator", [Host("w-0", 2), Host("w-1", 2)], "/etc/mpi/kubexec.sh")),
])
def test_allocations(environ: dict[str, str], expected: Allocation | None) -> None:
    assert find_allocation(environ, FILES.__getitem__) == expected


def test_an_allocation_that_makes_no_sense() -> None:
    for environ in ({"SLURM_JOB_NODELIST": "n[1-2]"}, {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "2"},
                    {"PBS_NODEFILE": "/nowhere"}, {"LSB_MCPU_HOSTS": "n1 four"}):
        with pytest.raises(LaunchError, match=r"cannot be determined.*list them with -H"):
            find_allocation(environ, FILES.__getitem__)
