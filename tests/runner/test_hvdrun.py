"""`hvdrun` on real processes: output, exit codes, faults, and that nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from hvdlite_runner.host.reaper import marked_processes
from tests.worlds import HANGS_SECONDS, HVDRUN, clean_environment, shared_memory

PYTHON = sys.executable
FAULTY, STUBBORN, DEAF, BARE, HANDLING = (str(Path(__file__).parent / f"programs/{name}.py") for name in (
    "faulty", "stubborn", "deaf", "bare", "handling"))


def hvdrun(*arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(_command(arguments), capture_output=True, text=True, timeout=HANGS_SECONDS,
                          env={**_environment(), **(environment or {})}, check=False)


def _command(arguments: Sequence[str]) -> list[str]:
    return [*HVDRUN, *arguments]


def _environment() -> dict[str, str]:
    return {**clean_environment(), "OMP_NUM_THREADS": "1"}


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give every job a temporary directory and a mark of its own; both must be empty afterwards."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("HVDLITE_TEST_MARK_", "")
    monkeypatch.delenv("HVDLITE_TEST_MARK_")
    monkeypatch.setenv("TEST_JOB", str(tmp_path))  # names alone are the same in every test process
    tempfile.tempdir = None
    shared = shared_memory()
    yield
    tempfile.tempdir = None
    deadline = time.monotonic() + HANGS_SECONDS
    mark = f"TEST_JOB={tmp_path}".encode()
    while (left := marked_processes(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in left]
    while (directories := list(tmp_path.glob("hvdlite-*"))) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not directories
    assert shared_memory() <= shared


def test_every_line_has_its_rank() -> None:
    ended = hvdrun("-np", "2", PYTHON, "-c", "import os, sys; print('out', os.environ['HVDLITE_RANK']); "
                   "print('err', os.environ['HOROVOD_SIZE'], os.environ['HOROVOD_HOSTNAME'], file=sys.stderr)")
    assert ended.returncode == 0
    assert sorted(ended.stdout.splitlines()) == ["[0]<stdout>:out 0", "[1]<stdout>:out 1"]
    assert sorted(ended.stderr.splitlines()) == ["[0]<stderr>:err 2 localhost", "[1]<stderr>:err 2 localhost"]


@pytest.mark.parametrize(("arguments", "code", "told"), [
    (["-np", "0", "true"], 2, "at least 1"),
    (["-np", "abc", "true"], 2, "'abc' is not a number"),
    (["-np", "2"], 2, "no command"),
    (["true"], 2, "-np N"),
    (["-np", "2", "-H", "no-such-host.invalid:2", "true"], 2, "host no-such-host.invalid cannot be resolved"),
    (["-np", "2", "--hostfile", "/no/file", "true"], 2, "/no/file"),
    (["-np", "2", "-H", "localhost:2", "--hostfile", "/no/file", "true"], 2, "not allowed with"),
    (["-np", "2", "--sweep", "batch-size", "true"], 2, "OPTION=VALUE"),
    (["-np", "2", "--sweep", "lr=1,2", "--until", "accuracy", "true"], 2, "METRIC=VALUE"),
    (["-np", "2", "--until", "accuracy=0.9", "true"], 2, "give --sweep too"),
    (["-np", "3", "-H", "localhost:2", "true"], 2, "2 slots"),
    (["-np", "2", "no-such-program"], 127, "no such command"),
    (["-np", "2", "python", "no-such-script.py"], 127, "no-such-script.py"),
    (["-np", "2", "--fusion-threshold", "lots", "true"], 2, "HVDLITE_FUSION_THRESHOLD='lots'"),
    (["-np", "2", "--no-such-option", "true"], 2, "--no-such-option"),
    (["-np", "2", "--output-filename", "/proc/no/where", "true"], 2, "/proc/no/where"),
])
def test_mistakes_are_one_clear_line(arguments: list[str], code: int, told: str) -> None:
    environment = _environment()
    del environment["OMP_NUM_THREADS"]  # what hvdrun says about threads must not come before a mistake
    ended = subprocess.run(_command(arguments), capture_output=True, text=True, timeout=HANGS_SECONDS,
                           env=environment, check=False)
    assert ended.returncode == code and told in ended.stderr and ended.stderr.count("\n") == 1
    assert ended.stdout == ""


def test_a_python_script_without_execute_bit_is_run_with_this_python(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys; print(sys.executable)")
    ended = hvdrun("-np", "1", "--no-prefix", str(script))
    assert ended.returncode == 0 and ended.stdout == f"{PYTHON}\n"


@pytest.mark.parametrize(("content", "code"), [("echo no interpreter line", 126), ("#!/no/such/interpreter", 127)])
def test_a_program_the_system_refuses(tmp_path: Path, content: str, code: int) -> None:
    script = tmp_path / "train"
    script.write_text(content)
    script.chmod(0o755)
    ended = hvdrun("-np", "2", str(script))
    assert ended.returncode == code and str(script) in ended.stderr and ended.stderr.count("\n") == 1


def test_a_character_the_console_lacks_does_not_end_the_job() -> None:
    ended = hvdrun("-np", "1", PYTHON, "-c", "import sys; sys.stdout.buffer.write('10% \u2588\\n'.encode())",
                   environment={"PYTHONIOENCODING": "ascii"})
    assert ended.returncode == 0 and ended.stdout == "[0]<stdout>:10% ?\n"


def test_a_command_that_dies_at_once() -> None:
    ended = hvdrun("-np", "2", PYTHON, "-c", "raise SystemExit(3)")
    assert ended.returncode == 3 and "failed alike: exit code 3" in ended.stderr


def test_threads_are_shared_out_and_that_is_said_once() -> None:
    environment = _environment()
    del environment["OMP_NUM_THREADS"]
    ended = subprocess.run(_command(["-np", "2", PYTHON, "-c", "import os; print(os.environ['OMP_NUM_THREADS'])"]),
                           capture_output=True, text=True, timeout=HANGS_SECONDS, env=environment, check=True)
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    assert ended.stdout.count(f":{share}\n") == 2 and ended.stderr.count("OMP_NUM_THREADS") == 1


def test_knobs_flags_and_files(tmp_path: Path) -> None:
    ended = hvdrun("-np", "1", "--fusion-threshold-mb", "2", "--log-level", "info", "--output-filename",
                   str(tmp_path / "out"), "--prefix-timestamp", PYTHON, "-c",
                   "import os; print(os.environ['HVDLITE_FUSION_THRESHOLD'], os.environ['HVDLITE_LOG_LEVEL'])")
    assert ended.stdout.endswith("[0]<stdout>:2M info\n") and not ended.stdout.startswith("[0]")
    assert (tmp_path / "out/rank.0/stdout").read_text() == "2M info\n"


@pytest.mark.parametrize("size", [2, 4])
def test_an_exception_is_what_the_user_sees_first(size: int) -> None:
    ended = hvdrun("-np", str(size), PYTHON, FAULTY, "raise", "1")
    assert ended.returncode == 1
    lines = ended.stderr.splitlines()
    assert lines[0].startswith("[1]<stderr>:Traceback"), ended.stderr
    summary = next(index for index, line in enumerate(lines) if line.startswith("hvdrun: "))
    assert lines[summary] == "hvdrun: rank 1 failed first: ValueError: bad batch (exit code 1)"
    assert ended.stderr.count("Traceback") == 1, ended.stderr
    for rank in set(range(size)) - {1}:
        assert any(line.startswith(f"[{rank}]") and "rank 1 failed with ValueError" in line for line in lines)


@pytest.mark.parametrize(("fault", "told"), [("die", "killed by signal 9 (SIGKILL)"),
                                             ("raise", "ValueError: bad batch (exit code 1)")])
def test_ranks_that_shut_down_before_they_end_do_not_hide_who_failed_first(fault: str, told: str) -> None:
    ended = hvdrun("-np", "2", PYTHON, FAULTY, fault, "1", "shutdown")
    lines = ended.stderr.splitlines()
    assert [line for line in lines if line.startswith("hvdrun: ")] == [
        f"hvdrun: rank 1 failed first: {told}", "hvdrun: rank 0 ended as a consequence"], ended.stderr
    assert ended.stderr.count("ValueError: bad batch") == 2 * (fault == "raise"), "the rank prints it, and hvdrun names it"
    assert any(line.startswith("[0]<stderr>:rank 0 ended in ") for line in lines) or fault == "raise", ended.stderr


def test_sys_exit_of_one_rank_ends_the_job_with_its_code() -> None:
    ended = hvdrun("-np", "3", PYTHON, FAULTY, "exit", "2")
    assert ended.returncode == 5 and "rank 2 failed first: exit code 5" in ended.stderr
    assert "rank 2 left the job normally" in ended.stderr


def _ignore(number: int) -> Callable[[], object]:
    """Return what makes a started process ignore a signal from its beginning, as `nohup` does."""
    return lambda: signal.signal(number, signal.SIG_IGN)


class Running:
    """An `hvdrun` in the background, started in the tests' environment."""

    def __init__(self, *arguments: str, before: Callable[[], object] | None = None, launcher: Sequence[str] = ()) -> None:
        command = [*launcher, *arguments] if launcher else _command(arguments)
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                        env=_environment(), preexec_fn=before)

    def wait_for(self, text: str, times: int = 1) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            times -= text in line
            if times == 0:
                return line
        raise AssertionError(f"{text!r} was never printed: {self.process.communicate()}")

    def end(self) -> tuple[int, str]:
        _, errors = self.process.communicate(timeout=HANGS_SECONDS)
        return self.process.returncode, errors


@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_rank_is_named_first(victim: int) -> None:
    run = Running("-np", "3", PYTHON, FAULTY, "kill", str(victim))
    pids = {}
    while len(pids) < 3:
        _, rank, pid = run.wait_for("pid").split(":", 1)[1].split()
        pids[int(rank)] = int(pid)
    run.wait_for("ready")
    os.kill(pids[victim], signal.SIGKILL)
    code, errors = run.end()
    assert code == 128 + signal.SIGKILL
    assert f"hvdrun: rank {victim} failed first: killed by signal 9 (SIGKILL)" in errors
    for rank in {0, 1, 2} - {victim}:
        assert any(line.startswith(f"[{rank}]") and f"rank {victim} was lost" in line for line in errors.splitlines())


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_the_users_signals_end_every_rank(number: int, code: int) -> None:
    run = Running("-np", "2", PYTHON, FAULTY, "wait", "0", before=lambda: signal.signal(number, signal.SIG_DFL))
    run.wait_for("ready")
    run.process.send_signal(number)
    assert run.end()[0] == code


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_stubborn_ranks_and_their_own_sessions_end_too(number: int) -> None:
    """SIGKILL cannot be handled: then the reaper ends the job."""
    run = Running("-np", "2", "--grace", "2", PYTHON, STUBBORN)
    run.wait_for("ready")
    run.process.send_signal(number)
    run.process.wait(HANGS_SECONDS)


ENDLESS_PATIENCE = "import sys, hvdlite_runner.cli, hvdlite_runner.job.ending as end; end.INTERRUPT_GRACE = 1000.0; " \
                   "sys.exit(hvdlite_runner.cli.main(sys.argv[1:]))"
def test_a_second_interrupt_kills_at_once() -> None:
    run = Running("-np", "1", PYTHON, DEAF, launcher=[PYTHON, "-c", ENDLESS_PATIENCE])
    run.wait_for("ready")
    run.process.send_signal(signal.SIGINT)
    run.wait_for("asked")
    run.process.send_signal(signal.SIGINT)
    assert run.end() == (130, "hvdrun: ended by SIGINT; killed by a second signal: ranks 0\n")


def test_ranks_that_take_longer_than_the_grace_are_killed() -> None:
    run = Running("-np", "2", "--grace", "0.5", PYTHON, DEAF)
    run.wait_for("ready", 2)
    run.process.send_signal(signal.SIGINT)
    assert run.end() == (137, "hvdrun: ended by SIGINT; killed after 0.5 s (--grace): ranks 0-1\n")


def test_a_rank_that_handles_sigterm_saves_its_state_with_its_workers() -> None:
    run = Running("-np", "2", PYTHON, HANDLING)
    for text, number in (("ready", signal.SIGUSR1), ("told", signal.SIGUSR2)):  # which would end them
        run.wait_for(text, 2)
        run.process.send_signal(number)
    run.process.send_signal(signal.SIGTERM)
    run.wait_for("saved by a worker", 2)
    code, errors = run.end()
    assert code == 128 + signal.SIGTERM and "hvdrun: ended by SIGTERM; all ranks ended in time\n" in errors
    assert "hvdrun: SIGUSR1 goes to the ranks that handle it\n" in errors


def test_a_rank_that_hangs_after_anothers_death_is_ended() -> None:
    ended = hvdrun("-np", "2", PYTHON, "-c", "import os, time; os.environ['HVDLITE_RANK'] == '0' and os._exit(9); "
                   "time.sleep(1000)")
    assert ended.returncode == 9 and "rank 0 failed first" in ended.stderr


def test_workers_that_outlive_a_finished_rank_are_ended() -> None:
    ended = hvdrun("-np", "1", PYTHON, "-c", "import subprocess, sys; subprocess.Popen([sys.executable, '-c', "
                   "'import time; time.sleep(1000)']); print('done')")
    assert ended.returncode == 0 and "done" in ended.stdout


def test_over_tcp() -> None:
    ended = hvdrun("-np", "2", "--control", "tcp", PYTHON, "-c",
                   "import hvdlite as hvd, numpy as np; hvd.init(); print(hvd.allreduce([hvd.rank()], op=hvd.Sum))")
    assert ended.returncode == 0 and ended.stdout.count("[1]\n") == 2


def _left_with(argument: str) -> list[int]:
    """Return the processes that have `argument` on their command line, but for launchers and ranks."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            line = Path(f"/proc/{name}/cmdline").read_bytes()
        except OSError:
            continue
        if argument.encode() in line and b"'bare'" in line and b"subprocess" not in line:
            found.append(int(name))
    return found


def _assert_gone(argument: str) -> None:
    deadline = time.monotonic() + HANGS_SECONDS
    while (left := _left_with(argument)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in left:
        os.kill(pid, signal.SIGKILL)  # a failed test leaves nothing either
    assert not left


def test_an_orphan_without_environment_ends_with_the_job(tmp_path: Path) -> None:
    """Neither parent, nor session, nor environment tell that it is of the job; but its limit does."""
    assert hvdrun("-np", "1", PYTHON, BARE, str(tmp_path)).returncode == 0
    _assert_gone(str(tmp_path))


# docs/protocol.md#nothing-left-behind
def test_a_child_without_environment_ends_with_a_killed_launcher(tmp_path: Path) -> None:
    run = Running("-np", "1", PYTHON, BARE, str(tmp_path), "1000")
    run.wait_for("bare")
    assert _left_with(str(tmp_path))
    run.process.kill()
    run.process.wait(HANGS_SECONDS)
    _assert_gone(str(tmp_path))


def test_nohup_is_respected(tmp_path: Path) -> None:
    go = tmp_path / "go"
    run = Running("-np", "1", PYTHON, "-c", "import os, sys, time\nprint('ready', flush=True)\n"
                  "while not os.path.exists(sys.argv[1]): time.sleep(0.05)\nsys.exit(4)", str(go),
                  before=_ignore(signal.SIGHUP))
    run.wait_for("ready")
    run.process.send_signal(signal.SIGHUP)
    go.touch()
    assert run.end()[0] == 4


def test_ignored_child_signals_do_not_hide_a_failure() -> None:
    run = Running("-np", "2", PYTHON, "-c", "raise SystemExit(3)", before=_ignore(signal.SIGCHLD))
    assert run.end()[0] == 3


def test_ranks_are_bound_to_their_share_of_the_cores() -> None:
    ended = hvdrun("-np", "2", "--no-prefix", "--bind", PYTHON, "-c", "import os; print(sorted(os.sched_getaffinity(0)))")
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // 2
    expected = [str(cores[:share]), str(cores[share:2 * share])] if share else [str(cores)] * 2
    assert sorted(ended.stdout.splitlines()) == sorted(expected)


@pytest.mark.parametrize("name", ["long" * 40, "\udcff"])
def test_a_temporary_directory_of_any_name_is_no_obstacle(tmp_path: Path, name: str) -> None:
    directory = tmp_path / name
    directory.mkdir()
    ended = subprocess.run([*HVDRUN, "-np", "2", sys.executable, "-c",
                            "import hvdlite as hvd; hvd.init(); hvd.barrier(); hvd.shutdown()"],
                           env={**os.environ, "TMPDIR": str(directory)}, capture_output=True, text=True,
                           timeout=HANGS_SECONDS, check=False)
    assert ended.returncode == 0, ended.stderr
    assert not list(directory.iterdir())


def test_an_interrupt_while_modules_are_imported_makes_no_traceback() -> None:
    program = ("import os, runpy, signal, sys\nclass Interrupting:\n    def find_spec(self, name, *rest):\n"
               "        if name == 'hvdlite_runner.cli': os.kill(os.getpid(), signal.SIGINT)\n"
               "sys.meta_path.insert(0, Interrupting())\nrunpy.run_module('hvdlite_runner', run_name='__main__')")
    ended = subprocess.run([PYTHON, "-c", program], capture_output=True, text=True, timeout=HANGS_SECONDS, check=False,
                           preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    assert (ended.returncode, ended.stderr) == (-signal.SIGINT, "")


def test_ctrl_c_ends_a_job_whose_output_nobody_reads(tmp_path: Path) -> None:
    """hvdrun was blocked in a write, and every signal waited for that."""
    full = tmp_path / "full"
    run = Running("-np", "1", PYTHON, "-c", "import pathlib, sys, time\nfor _ in range(512): print('x' * 1000)\n"
                  "pathlib.Path(sys.argv[1]).touch()\ntime.sleep(1000)", str(full))
    while not full.exists():
        time.sleep(0.05)
    run.process.send_signal(signal.SIGINT)
    assert run.process.wait(HANGS_SECONDS) == 130
    _, errors = run.process.communicate()
    assert "hvdrun: ended by SIGINT; all ranks ended in time\n" in errors
    assert "bytes of output were not read, and are lost\n" in errors


def test_a_list_of_hosts_that_is_not_text_and_a_directory_that_is_deleted(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_bytes(b"\xff\n")
    gone = tmp_path / "gone"
    gone.mkdir()
    program = ("import os, sys\nos.rmdir(os.getcwd())\nfrom hvdlite_runner.cli import main\n"
               "print(main(['--hostfile', '../hosts', 'true']),\n"
               "      main(['-np', '1', '-H', 'b:1', '--remote-shell', '/bin/true', 'true']), main(['-np', '1', 'true']))")
    ended = subprocess.run([PYTHON, "-c", program], capture_output=True, text=True, timeout=HANGS_SECONDS, check=False,
                           env=_environment(), cwd=gone)
    assert ended.stdout == "2 2 0\n", ended.stderr
    assert [line.split(":")[1] for line in ended.stderr.splitlines()] == [
        " cannot read the list of hosts ../hosts", " the working directory has been deleted"]


def test_rank_0_reads_the_standard_input_of_hvdrun_if_that_is_wanted() -> None:
    program = [sys.executable, "-c", "import os, sys; print(os.environ['HVDLITE_RANK'], repr(sys.stdin.read()))"]

    def read_by_ranks(*flags: str) -> set[str]:
        ended = subprocess.run([*HVDRUN, "--no-prefix", "-np", "2", *flags, *program], input="a\nb", capture_output=True,
                               text=True, timeout=HANGS_SECONDS, env=_environment(), check=True)
        return set(ended.stdout.splitlines())

    assert read_by_ranks() == {"0 ''", "1 ''"}
    assert read_by_ranks("--stdin") == {"0 'a\\nb'", "1 ''"}
    refused = hvdrun("--stdin", "-H", "no.such.host:1,localhost:1", "true")
    assert refused.returncode == 2 and "rank 0 runs on host no.such.host" in refused.stderr


def test_ranks_of_one_host_have_a_key_of_their_job() -> None:
    """Groups of torch.distributed sign with it what they write to torch's store."""
    keys = [hvdrun("-np", "2", PYTHON, "-c", "import os; print(os.environ['HVDLITE_SECRET'])").stdout.splitlines()
            for _ in range(2)]
    (first, other), (second, _) = ([line.rpartition(" ")[2].rpartition(":")[2] for line in lines] for lines in keys)
    assert first == other != second and len(bytes.fromhex(first)) >= 16


def test_a_discovery_script_cannot_write_to_the_terminal() -> None:
    ended = hvdrun("--min-np", "1", "--host-discovery-script", r"printf '\033]0;owned\007\n'; exit 3", PYTHON, "-c", "")
    assert ended.returncode and "owned" in ended.stderr and "\x1b" not in ended.stderr + ended.stdout
