"""hvdrun on three hosts: placement, what goes over the wire and what does not, and every way in which a host can fail."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvdlite_runner.agents.remote_agent import AGENT_TIMEOUT
from tests.runner.elastic_jobs import HostsFile, Job
from tests.runner.networks import Hosts, unavailable
from tests.worlds import HANGS_SECONDS

WHY_NOT = unavailable()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]
ROOT = Path(__file__).resolve().parent.parent.parent
CALL, WITH_ORPHAN, BUSY = (str(Path(__file__).parent / f"programs/{name}.py") for name in ("call", "with_orphan", "busy"))


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with Hosts("abc", tmp_path_factory.mktemp("hosts")) as hosts:
        yield hosts


@pytest.fixture(autouse=True)
def nothing_is_left(network: Hosts) -> Iterator[None]:
    yield
    network.wait_until_empty(10)
    assert not list((network.directory / "tmp").glob("hvdlite-*"))


def hvdrun(network: Hosts, *arguments: str, on: str = "a") -> subprocess.CompletedProcess[str]:
    return subprocess.run(network.hvdrun(*arguments, on=on), env=network.environment(), capture_output=True, text=True,
                          timeout=100, check=False, cwd=ROOT)


class Running:
    """An hvdrun in the background, whose links may be silent for 5 s."""

    def __init__(self, network: Hosts, *arguments: str) -> None:
        self.process = subprocess.Popen(network.hvdrun(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                        env={**network.environment(), AGENT_TIMEOUT: "5"}, text=True, cwd=ROOT)

    def wait_for(self, text: str, times: int) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            times -= text in line
            if not times:
                return
        raise AssertionError(f"{text!r} did not come: {self.process.communicate()}")

    def end(self) -> tuple[int, str]:
        _, errors = self.process.communicate(timeout=HANGS_SECONDS)
        return self.process.returncode, errors


ALL = "10.77.0.1:1,10.77.0.2:2,10.77.0.3:1"
PLACE = ["sh", "-c", "echo $(hostname) $HVDLITE_RANK/$HVDLITE_SIZE $HVDLITE_LOCAL_RANK/$HVDLITE_LOCAL_SIZE "
         "$HVDLITE_CROSS_RANK/$HVDLITE_CROSS_SIZE $GREETING $(pwd)"]


def test_ranks_are_placed_by_slots_in_the_same_directory_and_environment(network: Hosts,
                                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GREETING", 'a "quoted" $(text)')
    ended = hvdrun(network, "--no-prefix", "-H", ALL, *PLACE)
    assert ended.returncode == 0, ended.stderr
    greeting = f'a "quoted" $(text) {ROOT}'
    assert sorted(ended.stdout.splitlines()) == [f"a 0/4 0/1 0/3 {greeting}", f"b 1/4 0/2 1/3 {greeting}",
                                                 f"b 2/4 1/2 0/1 {greeting}", f"c 3/4 0/1 2/3 {greeting}"]


def test_ipv6_a_hostfile_and_a_launcher_that_takes_no_part(network: Hosts, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("fd77::2 slots=2\nfd77::3 slots=1\n")
    ended = hvdrun(network, "--verbose", "--no-prefix", "--hostfile", str(tmp_path / "hosts"), *PLACE)
    assert ended.returncode == 0, ended.stderr
    assert [line.split()[:2] for line in sorted(ended.stdout.splitlines())] == [["b", "0/3"], ["b", "1/3"], ["c", "2/3"]]
    assert re.search(r"rank 0 listens at \[fd77::2\]:\d+", ended.stderr), ended.stderr


def test_no_secret_stands_on_a_command_line(network: Hosts) -> None:
    run = Running(network, "-H", ALL, sys.executable, "-c", "import os, time; print('key', os.environ['HVDLITE_SECRET'], "
                  "flush=True); time.sleep(1000)")
    assert run.process.stdout is not None
    secret = run.process.stdout.readline().split()[-1]
    lines = [Path(f"/proc/{pid}/cmdline").read_bytes() for name in "abc" for pid in network.processes(name)]
    run.process.send_signal(signal.SIGINT)
    assert run.end()[0] == 130 and len(secret) == 64 and len(lines) > 6
    assert not any(secret.encode() in line for line in lines)


def fake_python(tmp_path: Path, first: str) -> str:
    """Return a Python that does something before it does what it is told."""
    path = tmp_path / "python"
    path.write_text(f'#!/bin/sh\nshift\nexec {sys.executable} -c "import sys; {first}; $1"\n')
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(("first", "told"), [
    ("sys.version_info = (3, 9, 2)", r"host 10.77.0.2 runs Python 3\.9 \(.*\), but the launcher 3\.\d+; .*--remote-python"),
    ("import hvdlite._version as v; v.__version__ = '0.0.9'", r"host 10.77.0.2 has hvdlite 0\.0\.9, but the launcher .*pip"),
    ("sys.modules['hvdlite'] = None", r"host 10.77.0.2: .* cannot import hvdlite: .*pip install hvdlite=="),
    ("print('Welcome to b!'); import os; os.environ['PATH'] = '/nowhere'", ""),
])
def test_another_python_or_hvdlite_is_one_line(network: Hosts, tmp_path: Path, first: str, told: str) -> None:
    ended = hvdrun(network, "-H", "10.77.0.2:1", "--remote-python", fake_python(tmp_path, first), "sh", "-c", "echo fine")
    if told:
        assert ended.returncode == 2 and ended.stdout == "" and ended.stderr.count("\n") == 1
        assert re.search(told, ended.stderr), ended.stderr
    else:
        assert ended.stdout == "[0]<stdout>:fine\n", ended.stderr  # greetings of login shells do no harm


@pytest.mark.parametrize(("options", "told"), [
    (["-H", "no-such-host.invalid:2"], "host no-such-host.invalid cannot be resolved"),
    (["-H", "10.77.0.2", "-i", "/no/key", "--ssh-args=-o UserKnownHostsFile=/dev/null"],
     "host 10.77.0.2 does not let you in"),
    (["-H", "10.77.0.2", "--remote-python", "/no/python"], "host 10.77.0.2 has no /no/python"),
    (["-H", "10.77.0.2", "--working-directory", "/no/folder"], "cannot enter the working directory /no/folder"),
    (["-H", "10.77.0.9"], "host 10.77.0.9 cannot be reached: no route"),
    (["-H", "10.77.0.2:1", "-p", "2222"], "host 10.77.0.2 refuses connections to port 2222"),
    (["-H", "10.77.0.2,nowhere.invalid", "-p", "2222"], "host nowhere.invalid cannot be resolved"),
    (["-H", "10.77.0.2,10.77.0.1", "--network-interface", "eth7"], "has no address on eth7"),
])
def test_a_host_that_cannot_be_had_is_one_line_that_names_it(network: Hosts, options: list[str], told: str) -> None:
    ended = hvdrun(network, *options, "true")
    assert ended.returncode == 2 and told in ended.stderr, ended.stderr
    assert ended.stderr.count("\n") == ended.stderr.count("hvdrun: host"), ended.stderr
    if "nowhere" in options[1]:
        assert "host 10.77.0.2 refuses" in ended.stderr, "all hosts are checked at a time"


def test_a_command_that_one_host_lacks(network: Hosts) -> None:
    ended = hvdrun(network, "-H", ALL, "/proc/self/root/tmp/../no-such-program")
    assert ended.returncode == 127
    here = network.directory / "only-here"
    ended = hvdrun(network, "-H", "10.77.0.2", str(here))
    assert ended.returncode == 127 and f"host 10.77.0.2: '{here}': no such command" in ended.stderr


def test_a_refused_ssh_and_a_wrong_host_key() -> None:
    import tempfile
    with tempfile.TemporaryDirectory() as directory, Hosts("ab", Path(directory)) as hosts:
        hosts.new_host_key("b")
        ended = hvdrun(hosts, "-H", "10.77.0.2:1", "true")
        assert ended.returncode == 2 and ended.stderr.count("\n") == 1
        assert "host 10.77.0.2 shows another key" in ended.stderr and "ssh-keygen -R 10.77.0.2" in ended.stderr
        hosts.stop_sshd("b")
        ended = hvdrun(hosts, "-H", "10.77.0.1:1,10.77.0.2:1", "true")
        assert ended.returncode == 2 and "host 10.77.0.2 refuses connections to port 22: is sshd running" in ended.stderr


def test_a_filtered_port_of_ssh_and_of_rank_0(network: Hosts) -> None:
    remove = network.filter("b", "tcp dport 22 drop")
    try:
        ended = hvdrun(network, "--ssh-args=-o ConnectTimeout=1 " + network.ssh_arguments(), "-H", "10.77.0.2:1", "true")
    finally:
        remove()
    assert ended.returncode == 2 and "host 10.77.0.2 does not answer at port 22" in ended.stderr, ended.stderr
    remove = network.filter("a", "tcp dport != 22 ct state new drop")
    try:
        ended = hvdrun(network, "-H", ALL, "true")
    finally:
        remove()
    assert ended.returncode == 2 and ended.stderr.count("\n") == 2
    for host in ("10.77.0.2", "10.77.0.3"):
        told = f"host {host} cannot reach rank 0 on this host at 10.77.0.1, port [0-9]+: no answer .*--coordinator-port"
        assert re.search(told, ended.stderr), ended.stderr


def test_when_one_address_does_not_work_another_is_used(network: Hosts) -> None:
    remove = network.filter("a", "ip saddr 10.77.0.3 tcp dport != 22 ct state new drop")
    try:
        ended = hvdrun(network, "--verbose", "-H", ALL, "true")
    finally:
        remove()
    assert ended.returncode == 0 and "rank 0 listens at [fd77::1]" in ended.stderr, ended.stderr


def mpirun(network: Hosts) -> list[str]:
    """Return hvdrun's options for the launcher of the MPI library that mpi4py loads here."""
    asked = subprocess.run([sys.executable, "-c", "from mpi4py import MPI; print(MPI.get_vendor()[0])"], capture_output=True,
                           text=True, check=False)
    flavour = asked.stdout.strip()
    own = Path(sys.executable).with_name("mpiexec")
    program = shutil.which({"Open MPI": "mpirun.openmpi", "MPICH": str(own) if own.exists() else "mpiexec.hydra"}.get(
        flavour, "none"))
    if program is None:
        pytest.skip(f"mpi4py has {flavour or 'no MPI library'} here, and there is no launcher of it")
    if flavour == "Open MPI":
        return ["--mpi", "--mpirun", program, f"--ssh-args={network.ssh_arguments()}"]
    shell = network.directory / "ssh"  # MPICH takes no arguments for ssh
    shell.write_text(f'#!/bin/sh\nexec ssh {network.ssh_arguments()} "$@"\n')
    shell.chmod(0o755)
    return ["--mpi", "--mpirun", program, "--ssh-args=", f"--mpi-args=-launcher ssh -launcher-exec {shell}"]


@pytest.mark.slow
@pytest.mark.parametrize("plane", ["gloo", pytest.param("mpi", marks=pytest.mark.long)])
def test_training_across_uneven_hosts(network: Hosts, small: Path, plane: str) -> None:
    pytest.importorskip("torch")
    launcher = mpirun(network) if plane == "mpi" else []
    ended = hvdrun(network, *launcher, "-H", "a:1,b:2,c:1", "--cpu-operations", plane, "--log-level", "info", sys.executable,
                   "examples/pytorch_fashion_mnist.py", "--data-dir", str(small), "--epochs", "1", "--batch-size", "16")
    assert ended.returncode == 0 and "on 4 ranks" in ended.stdout, ended.stderr
    assert f"tensors in host memory travel by {plane}" in ended.stderr, ended.stderr


def test_a_function_on_several_hosts(network: Hosts) -> None:
    command = network.command("a", [sys.executable, CALL, "10.77.0.1:1,10.77.0.2:2", network.ssh_arguments()])
    ended = subprocess.run(command, env=network.environment(), capture_output=True, text=True,
                           timeout=HANGS_SECONDS, check=False)
    assert ended.stdout.splitlines() == ["[('a', 0, 30), ('b', 0, 30), ('b', 1, 30)]", "raised 'bad batch' on rank 1:"], (
        ended.stderr)


def test_a_host_that_is_slow_to_come_does_not_lose_the_others(network: Hosts, tmp_path: Path) -> None:
    slow = fake_python(tmp_path, "import os, time; time.sleep(7 * (os.uname().nodename == 'c'))")
    ended = hvdrun(network, "-H", "10.77.0.2:1,10.77.0.3:1", "--remote-python", slow, "true")
    assert ended.returncode == 0, ended.stderr


def test_an_interrupt_while_hosts_are_reached(network: Hosts, tmp_path: Path) -> None:
    slow = fake_python(tmp_path, "import time; time.sleep(1000)")
    run = Running(network, "-H", "10.77.0.2:1", "--remote-python", slow, "true")
    while not network.processes("b"):
        assert run.process.poll() is None
    run.process.send_signal(signal.SIGINT)
    assert run.end()[0] == 130
    for pid in network.processes("b"):  # sshd leaves what does not read its input
        os.kill(pid, signal.SIGKILL)


def test_a_link_cut_in_mid_training_ends_the_job_everywhere(network: Hosts) -> None:
    run = Running(network, "-H", ALL, sys.executable, WITH_ORPHAN)
    run.wait_for("ready", 4)
    network.cut("c")
    try:
        begun = time.monotonic()
        code, errors = run.end()
        network.wait_until_empty(max(0.1, 10 - (time.monotonic() - begun)))
    finally:
        network.mend("c")
    assert code == 1 and re.search(r"hvdrun: host 10.77.0.3 was lost: .* \(with ranks 3\)", errors), errors


def test_a_failing_rank_is_named_with_its_host(network: Hosts) -> None:
    ended = hvdrun(network, "-H", ALL, sys.executable, BUSY, "3")
    assert ended.returncode == 7 and "hvdrun: rank 3 on 10.77.0.3 failed first: exit code 7" in ended.stderr


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_launcher_that_ends_takes_everything_along(network: Hosts, number: int) -> None:
    run = Running(network, "-H", ALL, sys.executable, BUSY)
    run.wait_for("ready", 4)
    run.process.send_signal(number)
    network.wait_until_empty(10)
    assert run.end()[0] == (-9 if number == signal.SIGKILL else 128 + number)


def test_a_launcher_killed_behind_a_cut_link(network: Hosts) -> None:
    run = Running(network, "-H", ALL, sys.executable, BUSY)
    run.wait_for("ready", 4)
    network.cut("b")
    try:
        run.process.kill()
        network.wait_until_empty(10)
    finally:
        network.mend("b")
        run.end()


def test_a_killed_agent_is_a_lost_host_and_its_reaper_ends_the_ranks(network: Hosts) -> None:
    run = Running(network, "--verbose", "-H", ALL, sys.executable, BUSY)
    run.wait_for("ready", 4)
    (agent,) = [pid for pid in network.processes("b") if b"stdin.buffer.raw" in Path(f"/proc/{pid}/cmdline").read_bytes()
                and Path(f"/proc/{pid}/comm").read_text().startswith("python")]
    os.kill(agent, signal.SIGKILL)
    network.wait_until_empty(10)
    code, errors = run.end()
    assert code == 1 and "hvdrun: host 10.77.0.2 was lost" in errors and "(with ranks 1-2)" in errors, errors


def test_a_blocked_terminal_does_not_end_the_job(network: Hosts) -> None:
    """The launcher cannot write, so it does not read either; its pings go on, and the ranks wait in their writes."""
    run = Running(network, "--no-prefix", "-H", "10.77.0.2:1", sys.executable, "-c",
                  "import sys\nfor _ in range(300000): print('x' * 99)\nprint('end')")
    time.sleep(6.5)  # longer than a link may be silent
    assert run.process.poll() is None
    out, errors = run.process.communicate(timeout=HANGS_SECONDS)
    assert run.process.returncode == 0 and out.count("\n") == 300001 and out.endswith("end\n"), errors


def test_the_doctor_sees_every_host_and_every_pair(network: Hosts) -> None:
    import json
    ended = hvdrun(network, "--doctor", "--json", "-H", "10.77.0.1,10.77.0.2,10.77.0.3,nowhere.invalid")
    found = json.loads(ended.stdout)
    assert ended.returncode == 1 and found["problems"] == found["unreachable"] and "nowhere.invalid" in found["problems"][0]
    assert sorted(found["hosts"]) == ["10.77.0.2", "10.77.0.3", "localhost"]
    assert found["hosts"]["10.77.0.2"]["hostname"] == "b" and found["hosts"]["10.77.0.2"]["build"]["planes"]["shm"]
    assert len(found["pairs"]) == 3 and all(pair["bytes_per_second"] > 1e6 for pair in found["pairs"]), found["pairs"]


@pytest.mark.long
def test_an_elastic_job_goes_on_without_a_host_that_is_cut_off_and_takes_it_back(network: Hosts) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        hosts = HostsFile(folder)
        hosts.write("10.77.0.1:1", "10.77.0.2:2", "10.77.0.3:1")
        flags = ("-np", "4", "--min-np", "1", "--blacklist-cooldown-range", "1", "1", *hosts.flags)
        with Job(folder, *flags, launcher=network.hvdrun(), environment=network.environment()) as job:
            job.wait_for("begun", 4)
            network.cut("b")
            job.wait_for("host 10.77.0.2 was lost")
            left = job.wait_for("world 2, 2 ranks").partition("; left: ")[2]
            assert left.startswith("rank 1 on 10.77.0.2 (") and "), rank 2 on 10.77.0.2 (" in left, left
            network.wait_until_empty(15, "b")
            network.mend("b")
            job.wait_for(", 4 ranks, goes on where training stopped")
            for member in (0, 3, 4, 5):
                job.tell(member, "finish")
            assert job.end() == 0, job.text
