"""The launcher's decisions: no processes."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from pathlib import Path

import pytest

from hvdlite.core.config import Config
from hvdlite.core.errors import LaunchError
from hvdlite.core.launch_contract import FailureRecord
from hvdlite.core.world import World
from hvdlite_runner.cli import job_settings
from hvdlite_runner.commands import CommandError, rank_environment, resolve_command
from hvdlite_runner.failures import Exit, root_cause
from hvdlite_runner.job import JobSettings
from hvdlite_runner.options import parser
from hvdlite_runner.output import Console
from hvdlite_runner.placement import Host, assign_ranks, cores_for, parse_hostfile, parse_hosts, rename_local_hosts
from hvdlite_runner.reaper import Process, members

PATH = f"/usr/bin:/bin:{Path(sys.executable).parent}"


class Screen:
    """Collects what the console writes."""

    def __init__(self, **console: object) -> None:
        self.text = ""
        self.console = Console(self._write, lambda ranks, name: f"[{ranks}]<{name}>:", **console)

    def _write(self, name: str, text: str) -> None:
        self.text += text


def test_lines_are_prefixed_and_never_torn() -> None:
    screen = Screen()
    screen.console.feed(0, "stdout", b"hel")
    screen.console.feed(1, "stderr", b"other\n")
    screen.console.feed(0, "stdout", b"lo\nworld\nend")
    screen.console.finish()
    assert screen.text == "[1]<stderr>:other\n[0]<stdout>:hello\n[0]<stdout>:world\n[0]<stdout>:end\n"


def test_identical_lines_of_several_ranks_become_one_in_the_order_of_each_rank() -> None:
    now = [0.0]
    screen = Screen(fold=3, clock=lambda: now[0])
    for rank in (0, 2, 1):
        screen.console.feed(rank, "stdout", b"hello\n")
    assert screen.text == "[0-2]<stdout>:hello (x3)\n", "all have said it: nothing to wait for"
    screen.text = ""
    screen.console.feed(0, "stdout", b"a\nb\na\n")
    screen.console.feed(2, "stdout", b"b\na\n")
    screen.console.feed(0, "stderr", b"a\n")
    assert screen.text == "" and screen.console.flush_due() == pytest.approx(0.3)
    now[0] = 1.0
    assert screen.console.flush_due() is None
    assert screen.text == "[0]<stdout>:a\n[0,2]<stdout>:b (x2)\n[0,2]<stdout>:a (x2)\n[0]<stderr>:a\n"
    screen.console.feed(1, "stdout", b"late\n")
    screen.console.note("hvdrun: over")
    assert screen.text.endswith("[1]<stdout>:late\nhvdrun: over\n")


def test_what_is_not_shown_can_be_revealed() -> None:
    screen = Screen(shown=lambda rank, name: rank == 0)
    screen.console.feed(0, "stdout", b"zero\n")
    screen.console.feed(1, "stderr", b"".join(b"line %d\n" % line for line in range(100)))
    assert screen.text == "[0]<stdout>:zero\n"
    screen.console.reveal(1)
    screen.console.reveal(1)
    assert screen.text.splitlines()[1:] == [f"[1]<stderr>:line {line}" for line in range(60, 100)]


def test_characters_split_between_reads_survive_and_broken_ones_do_not_stop_us() -> None:
    screen = Screen()
    for byte in "é€\n".encode():
        screen.console.feed(0, "stdout", bytes([byte]))
    screen.console.feed(0, "stdout", b"\xff\n")
    assert screen.text == "[0]<stdout>:é€\n[0]<stdout>:�\n"


def test_a_progress_bar_is_overwritten_in_place_by_its_own_rank_only() -> None:
    screen = Screen()
    screen.console.feed(0, "stderr", b"\r 10%\r 20%\r")
    screen.console.feed(0, "stderr", b" 30%\r")
    screen.console.feed(1, "stdout", b"between\n")
    screen.console.feed(0, "stderr", b" 40%\n")
    assert screen.text == ("[0]<stderr>: 10%\r[0]<stderr>: 20%\r\n[1]<stdout>:between\n"
                           "[0]<stderr>: 30%\r[0]<stderr>: 40%\n")


def test_windows_line_ends_are_line_ends() -> None:
    screen = Screen()
    screen.console.feed(0, "stdout", b"a\r")
    screen.console.feed(0, "stdout", b"\nb\r\n")
    assert screen.text == "[0]<stdout>:a\n[0]<stdout>:b\n"


def record(rank: int, origin: int, when: float) -> FailureRecord:
    return FailureRecord(rank, origin, when, "ValueError", "boom", "Traceback:\n  here")


def test_a_killed_rank_is_the_cause_although_another_exited_first() -> None:
    cause = root_cause([Exit(0, 1), Exit(2, -9)], {0: record(0, 2, 5.0)})
    assert cause is not None and cause.exit.rank == 2 and cause.exit.shell_code == 137
    assert cause.describe() == ["rank 2 failed first: killed by signal 9 (SIGKILL)", "rank 0 ended as a consequence"]


def test_a_rank_that_raised_is_the_cause_with_its_traceback() -> None:
    cause = root_cause([Exit(0, 1), Exit(2, 1), Exit(1, 3)],
                       {0: record(0, 1, 2.0), 1: record(1, 1, 1.0), 2: record(2, 1, 2.0)})
    assert cause is not None and cause.exit.rank == 1 and cause.exit.shell_code == 3
    assert cause.describe() == ["rank 1 failed first: ValueError: boom (exit code 3)", "Traceback:", "  here",
                                "ranks 0, 2 ended as a consequence"]


def test_blame_is_followed_to_its_end() -> None:
    """Rank 0 only saw rank 1 go, which went because of rank 2."""
    cause = root_cause([Exit(0, 1), Exit(1, 1), Exit(2, -9)], {0: record(0, 1, 2.0), 1: record(1, 2, 1.0)})
    assert cause is not None and cause.exit.rank == 2 and cause.consequences == (0, 1)


def test_ranks_that_blame_each_other_do_not_hang_the_report() -> None:
    cause = root_cause([Exit(1, 1), Exit(0, 1)], {0: record(0, 1, 2.0), 1: record(1, 0, 2.0)})
    assert cause is not None and cause.exit.rank == 1
    cause = root_cause([Exit(1, 1), Exit(0, 1), Exit(2, 4)],
                       {0: record(0, 1, 2.0), 1: record(1, 0, 2.0), 2: record(2, 2, 3.0)})
    assert cause is not None and cause.exit.rank == 2


def test_of_two_own_failures_the_earlier_wins() -> None:
    cause = root_cause([Exit(0, 1), Exit(1, 1)], {0: record(0, 0, 2.0), 1: record(1, 1, 1.0)})
    assert cause is not None and cause.exit.rank == 1


def test_without_records_the_first_exit_wins_but_not_one_we_ended() -> None:
    cause = root_cause([Exit(1, -15, ended_by_us=True), Exit(0, 7)], {})
    assert cause is not None and cause.exit.rank == 0


def test_nobody_failed() -> None:
    assert root_cause([Exit(0, 0), Exit(1, 0)], {}) is None


def test_records_survive_the_disk(tmp_path: Path) -> None:
    record(3, 1, 2.0).write(str(tmp_path))
    assert FailureRecord.read(str(tmp_path), 3) == record(3, 1, 2.0)
    assert FailureRecord.read(str(tmp_path), 4) is None
    FailureRecord.path(str(tmp_path), 4).write_text("{half")
    assert FailureRecord.read(str(tmp_path), 4) is None
    record(3, 1, 2.0).write(str(tmp_path / "gone"))  # nobody is left to read it


def test_hosts() -> None:
    assert parse_hosts("a:2, b,[::1]:3,me@c:4,a:1") == [Host("a", 3), Host("b"), Host("::1", 3), Host("me@c", 4)]
    assert Host("me@c").address == "c"
    for text in ("", "a:0", "a:x", ":2", "fd00::2", "-oProxyCommand=x:1", "a b"):
        with pytest.raises(LaunchError):
            parse_hosts(text)
    here = {"one", "localhost"}
    assert rename_local_hosts(parse_hosts("one:2,b,localhost:1"), here.__contains__) == [Host("localhost", 3), Host("b")]


def test_a_hostfile_in_everybodys_format() -> None:
    text = "# ours\na slots=2  # two\n\nb:3\nc\nfd00::2 slots=4 max_slots=8\na\n"
    assert parse_hostfile(text, "f") == [Host("a", 3), Host("b", 3), Host("c"), Host("fd00::2", 4)]
    for text, told in (("a\nb slots=x", "f, line 2"), ("a cpu=2", "'cpu=2' is not slots=N"), ("# none", "names no host")):
        with pytest.raises(LaunchError, match=re.escape(told)):
            parse_hostfile(text, "f")


def test_ranks_are_placed_by_slots_and_know_their_place_on_uneven_hosts() -> None:
    assignment = assign_ranks(5, parse_hosts("a:1,b:3,c:4"))
    assert [(host_ranks.host.name, host_ranks.ranks) for host_ranks in assignment] == [("a", (0,)), ("b", (1, 2, 3)),
                                                                                       ("c", (4,))]
    assert [world for host_ranks in assignment for world in host_ranks.worlds] == [
        World(0, 5, 0, 1, 0, 3), World(1, 5, 0, 3, 1, 3), World(2, 5, 1, 3, 0, 1), World(3, 5, 2, 3, 0, 1),
        World(4, 5, 0, 1, 2, 3)]
    assert len(assign_ranks(None, parse_hosts("a:2,b:2"))[1].worlds) == 2
    assert [host_ranks.host.name for host_ranks in assign_ranks(2, parse_hosts("a:2,b:2"))] == ["a"]
    with pytest.raises(LaunchError, match="-np 9 is more than the 8 slots of a:1,b:3,c:4"):
        assign_ranks(9, parse_hosts("a:1,b:3,c:4"))


def test_cores_are_shared_evenly_or_taken_in_turn() -> None:
    assert [cores_for(rank, 2, [0, 1, 2, 3, 4]) for rank in range(2)] == [[0, 1], [2, 3]]
    assert [cores_for(rank, 3, [4, 5]) for rank in range(3)] == [[4], [5], [4]]


def test_a_ranks_environment() -> None:
    environment = rank_environment(World(1, 2, 1, 2), "/job", {"HOME": "/h", "HVDLITE_RANK": "9", "HVDLITE_SECRET": "old",
                                                               "HOROVOD_SIZE": "7", "HVDLITE_LOG_LEVEL": "info"},
                                   {"OMP_NUM_THREADS": "1"})
    assert environment == {
        "HOME": "/h", "HVDLITE_LOG_LEVEL": "info", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1",
        "HVDLITE_JOB_DIRECTORY": "/job",
        **{f"{family}_{name}": value for family in ("HVDLITE", "HOROVOD")
           for name, value in (("RANK", "1"), ("SIZE", "2"), ("LOCAL_RANK", "1"), ("LOCAL_SIZE", "2"),
                               ("CROSS_RANK", "0"), ("CROSS_SIZE", "1"))},
    }


def test_commands_that_cannot_start_say_what_to_type(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("pass")
    for command, code, told in ((["no-such-thing"], 127, "no such command"),
                                ([str(tmp_path)], 126, "is a directory"),
                                (["python3", "missing.py"], 127, "missing.py")):
        with pytest.raises(CommandError, match=told) as caught:
            resolve_command(command, PATH)
        assert caught.value.code == code and "\n" not in str(caught.value)


def test_an_executable_script_is_run_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("#!/usr/bin/env python3")
    (tmp_path / "train.py").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    assert resolve_command(["train.py", "--fast"], PATH) == ["./train.py", "--fast"]
    assert resolve_command(["./train.py"], PATH) == ["./train.py"]
    assert resolve_command(["sh", "-c", "true"], PATH) == ["sh", "-c", "true"]
    (tmp_path / "plain.py").write_text("")
    assert resolve_command(["plain.py", "--fast"], PATH) == [sys.executable, "plain.py", "--fast"]


def table(*rows: tuple[int, int, int, str]) -> dict[int, Process]:
    """Build a process table of (pid, parent, session, state); the host_ranks is the session."""
    return {pid: Process(parent, session, session, state) for pid, parent, session, state in rows}


def test_a_job_is_its_ranks_their_sessions_and_their_descendants() -> None:
    processes = table((1, 0, 1, "S"), (10, 1, 10, "S"), (11, 10, 11, "S"),  # init, the launcher, the reaper
                      (20, 10, 20, "Z"), (21, 1, 20, "S"),  # a rank that has ended, and an orphan of its session
                      (30, 10, 30, "S"), (31, 30, 31, "S"), (32, 31, 31, "R"),  # a rank, a child with a session, its child
                      (40, 1, 40, "S"), (41, 10, 10, "S"))  # strangers
    assert members(processes, ranks={20, 30}) == {21, 30, 31, 32}


def test_orphans_that_the_launcher_adopted_belong_to_the_job_but_not_its_own_children() -> None:
    processes = table((10, 1, 10, "S"), (11, 10, 11, "S"), (12, 10, 10, "S"), (13, 12, 10, "S"),
                      (50, 10, 50, "S"), (51, 50, 51, "S"), (52, 10, 52, "Z"))
    assert members(processes, ranks=set(), subreaper=10, excluded={11, 12}) == {50, 51}


def parsed(*arguments: str) -> JobSettings:
    return job_settings(parser().parse_args(arguments), {"PATH": PATH, "OMP_NUM_THREADS": "1"})


def worlds(settings: JobSettings) -> list[World]:
    return [world for host_ranks in settings.hosts for world in host_ranks.worlds]


def test_the_command_line() -> None:
    settings = parsed("-np", "3", "-H", "localhost:4", "--start-timeout", "9", "--stall-check-warning-time-seconds", "5",
                      "--log-level", "debug", "--fusion-threshold-mb", "0", "--bind", "--no-prefix",
                      "sh", "-c", "true", "-np", "7")
    assert worlds(settings) == [World(rank, 3, rank, 3) for rank in range(3)]
    assert settings.command == ["sh", "-c", "true", "-np", "7"]  # what follows the command is the command's
    assert settings.bind and not settings.prefix
    assert settings.environment == {
        "HVDLITE_START_TIMEOUT": "9", "HVDLITE_STALL_CHECK_TIME_SECONDS": "5", "HVDLITE_LOG_LEVEL": "debug",
        "HVDLITE_FUSION_THRESHOLD": "0M"}


def test_the_number_of_ranks_follows_from_the_slots() -> None:
    assert len(worlds(parsed("-H", "localhost:4", "sh"))) == 4


def test_every_knob_has_a_flag() -> None:
    helped = parser().format_help()
    for field in dataclasses.fields(Config):
        assert re.search(rf"--{field.name.replace('_', '-')}\s", helped), field.name


def test_horovods_flags_that_mean_nothing_are_accepted_and_explained() -> None:
    settings = parsed("-np", "2", "--cycle-time-ms", "3", "--hierarchical-allreduce", "--min-np", "1", "sh")
    assert settings.command == ["sh"]
    assert settings.notice.splitlines() == [
        "--cycle-time-ms does nothing here: hvdlite does not work in cycles",
        "--hierarchical-allreduce does nothing here: the plane chooses the algorithm",
        "--min-np does nothing here: elastic training is not implemented"]


HOROVODRUN = """--disable-cache --start-timeout 9 --network-interfaces eth0,eth1 --network-interface eth0 --output-filename d
--verbose --config-file /dev/null -p 22 -i key --fusion-threshold-mb 1 --cycle-time-ms 1 --cache-capacity 1
--hierarchical-allreduce --no-hierarchical-allgather --torus-allreduce --no-torus-allreduce --autotune --no-autotune
--autotune-log-file f --autotune-warmup-samples 1 --autotune-steps-per-sample 2 --autotune-bayes-opt-max-samples 3
--autotune-gaussian-process-noise 0.5 --min-np 1 --min-num-proc 1 --max-np 2 --max-num-proc 2 --slots-per-host 1
--elastic-timeout 9 --reset-limit 3 --blacklist-cooldown-range 1 9 --timeline-filename t --timeline-mark-cycles
--no-timeline-mark-cycles --stall-check --no-stall-check --stall-check-warning-time-seconds 1
--stall-check-shutdown-time-seconds 2 --mpi-threads-disable --no-mpi-threads-disable --mpi-args x --tcp --binding-args x
--num-nccl-streams 1 --thread-affinity 0 --gloo-timeout-seconds 30 --log-level TRACE --log-with-timestamp
--log-without-timestamp --log-hide-timestamp --no-log-hide-timestamp -prefix-timestamp --prefix-output-with-timestamp
--gloo --jsrun"""


def test_every_option_of_horovodrun_is_taken() -> None:
    options = parser().parse_args(["-np", "2", "-H", "localhost:2", *HOROVODRUN.split(), "sh"])
    notice = job_settings(options, {"PATH": PATH}).notice
    assert options.command == ["sh"] and "--blacklist-cooldown-range does nothing here" in notice
    assert "--mpi-args does nothing without --mpi" in notice
    for other in (["-hostfile", "f"], ["--hostfile", "f"], ["--host-discovery-script", "f"], ["--mpi"], ["-cb"],
                  ["--check-build"], ["--num-proc", "3"]):
        parser().parse_args([*other, "sh"])


def test_horovods_other_names_of_knobs() -> None:
    settings = parsed("-np", "2", "--timeline-filename", "t.json", "--no-stall-check", "--autotune",
                      "--autotune-log-file", "a.csv", "--autotune-bayes-opt-max-samples", "7",
                      "--timeline-mark-cycles", "--horovod-compat", "sh")
    given = settings.environment
    assert given["HVDLITE_TIMELINE"] == os.path.abspath("t.json") and given["HVDLITE_STALL_CHECK_TIME_SECONDS"] == "0"
    assert given["HVDLITE_AUTOTUNE"] == "1" and given["HVDLITE_AUTOTUNE_MAX_SAMPLES"] == "7"
    assert given["HVDLITE_AUTOTUNE_LOG_FILE"] == os.path.abspath("a.csv") and given["HVDLITE_TIMELINE_MARK_CYCLES"] == "1"
    assert given["PYTHONPATH"].split(os.pathsep)[0].endswith("hvdlite/horovod_compat/path")


def test_an_option_that_does_not_exist_is_told_with_the_nearest_one(capsys: pytest.CaptureFixture[str]) -> None:
    for given, told in (("--fusion-treshold", "did you mean --fusion-threshold?"), ("--qqqqqqqq", "see hvdrun --help")):
        with pytest.raises(SystemExit) as ended:
            parser().parse_args(["-np", "2", f"{given}=3", "sh"])
        assert ended.value.code == 2 and told in capsys.readouterr().err
    assert parser().parse_args(["-n", "2", "sh"]).np == 2
