"""hvdrun's command line, and the options of horovodrun."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hvdlite.core.config import Config
from hvdlite.core.errors import LaunchError
from hvdlite.core.world import Hosts, World
from hvdlite.membership.events import Limits
from hvdlite_runner.cli import job_settings, main, options_without_effect
from hvdlite_runner.job.settings import JobSettings
from hvdlite_runner.options import SHORT_HELP, misplaced, parser

PATH = f"/usr/bin:/bin:{Path(sys.executable).parent}"
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


NATIVE = functools.partial(Limits, cooldown=(10.0, 600.0))


def parsed(*arguments: str) -> JobSettings:
    return job_settings(parser().parse_args(arguments), {"PATH": PATH, "OMP_NUM_THREADS": "1"})


def worlds(settings: JobSettings) -> list[World]:
    layout = Hosts.of([name for name, count in settings.slots.items() for _ in range(count)])
    return [layout.world(rank) for rank in range(settings.limits.start_np)]


def test_the_command_line() -> None:
    settings = parsed("-np", "3", "-H", "localhost:4", "--start-timeout", "9", "--stall-check-warning-time-seconds", "5",
                      "--log-level", "debug", "--fusion-threshold-mb", "0", "--bind", "--no-prefix",
                      "sh", "-c", "true", "-np", "7")
    assert worlds(settings) == [World(rank, 3, rank, 3) for rank in range(3)]
    assert settings.command == ["sh", "-c", "true", "-np", "7"]  # what follows the command is the command's
    assert settings.bind and not settings.output.prefix
    assert settings.environment == {
        "HVDLITE_START_TIMEOUT": "9", "HVDLITE_STALL_CHECK_TIME_SECONDS": "5", "HVDLITE_LOG_LEVEL": "debug",
        "HVDLITE_FUSION_THRESHOLD": "0M"}


def test_the_number_of_ranks_follows_from_the_slots() -> None:
    assert len(worlds(parsed("-H", "localhost:4", "sh"))) == 4


def test_the_help_is_one_screen_and_names_options_that_exist() -> None:
    known = parser()._option_string_actions
    assert len(SHORT_HELP.splitlines()) <= 40 and max(map(len, SHORT_HELP.splitlines())) < 80
    named = re.findall(r"(?<![\w-])-{1,2}[a-zA-Z][\w-]*", SHORT_HELP.replace("--lr", ""))
    assert len(named) > 25 and not set(named) - set(known)


def test_the_spellings_of_torchrun_and_mpirun() -> None:
    assert len(worlds(parsed("--np", "3", "sh"))) == 3
    assert parsed("--nproc-per-node", "2", "--host", "localhost,127.0.0.1:7", "sh").slots == {"localhost": 4}
    assert parsed("--nproc_per_node", "2", "sh").slots == {"localhost": 2}
    assert parsed("-np", "2", "-m", "package.train", "--lr", "3").command == [
        sys.executable, "-m", "package.train", "--lr", "3"]
    given = parsed("-np", "2", "-x", "A=b=c", "-x", "PATH", "-x", "OMP_NUM_THREADS=", "-q", "sh")
    assert given.environment == {"A": "b=c", "PATH": PATH, "OMP_NUM_THREADS": ""} and given.output.quiet
    assert len(worlds(parsed("-np3", "sh"))) == 3
    assert parsed("-H", "localhost:1", "--host", "localhost:2", "sh").slots == {"localhost": 3}


@pytest.mark.parametrize(("arguments", "told"), [
    (("-x", "NOT_SET", "sh"), "-x NOT_SET: no variable 'NOT_SET' is set here"),
    (("-x", "A B=1", "sh"), "-x 'A B=1': 'A B' is not the name of a variable"),
    (("-x", "RANK=1", "sh"), "-x RANK=1: hvdrun gives each rank its own RANK"),
    (("-x", "HOROVOD_SIZE=1", "sh"), "hvdrun gives each rank its own HOROVOD_SIZE"),
    (("--nproc-per-node", "3", "sh"), "-np 2 is less than the 3 ranks that --nproc-per-node 3 starts"),
    (("-m", "./pkg/sub.py"), "-m takes the name of a module, -m pkg.sub; or run the file: python ./pkg/sub.py"),
    (("-m", "python3", "pkg"), "leave python3 out"),
])
def test_options_that_cannot_be_meant_are_refused(arguments: tuple[str, ...], told: str) -> None:
    with pytest.raises(LaunchError, match=re.escape(told)):
        parsed("-np", "2", *arguments)


def test_numbers_that_torchrun_finds_itself_are_to_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed("--nproc-per-node", "gpu", "sh")
    assert "hvdrun does not count cores or GPUs: give their number instead of 'gpu'" in capsys.readouterr().err


def test_options_that_stand_after_the_command_are_the_commands(capfd: pytest.CaptureFixture[str]) -> None:
    assert misplaced(["python", "train.py", "--lr", "3", "-n", "--results=out"]).startswith("-n is an argument of the ")
    assert misplaced(["python", "-m", "train", "-x", "3", "--own", "words -np"]) == ""
    assert main(["sh", "-c", "exit 0", "-np", "2"]) == 2
    assert "pass the number of ranks with -np N; -np is an argument of the command there" in capfd.readouterr().err


def test_every_knob_has_a_flag() -> None:
    helped = parser().format_help()
    for field in dataclasses.fields(Config):
        assert re.search(rf"--{field.name.replace('_', '-')}\s", helped), field.name


def test_horovods_flags_that_mean_nothing_are_accepted_and_explained() -> None:
    settings = parsed("-np", "2", "--cycle-time-ms", "3", "--hierarchical-allreduce", "--reset-limit", "1", "sh")
    assert settings.command == ["sh"]
    assert settings.notice.splitlines() == [
        "--reset-limit does nothing in a job that is not elastic: give --min-np too",
        "--cycle-time-ms does nothing here: hvdlite does not work in cycles",
        "--hierarchical-allreduce does nothing here: the plane chooses the algorithm"]


def test_options_without_effect_are_told_with_mpi_too() -> None:
    options = parser().parse_args(["--mpi", "--mpi-args", "x", "--elastic-timeout", "9", "--cycle-time-ms", "3", "sh"])
    assert [line.partition(":")[0] for line in options_without_effect(options)] == [
        "--elastic-timeout does nothing in a job that is not elastic", "--cycle-time-ms does nothing here"]


def test_every_option_of_horovodrun_is_taken() -> None:
    options = parser().parse_args(["-np", "2", "-H", "localhost:2", *HOROVODRUN.split(), "sh"])
    settings = job_settings(options, {"PATH": PATH})
    notice = settings.notice
    assert options.command == ["sh"] and "--cycle-time-ms does nothing here" in notice
    assert settings.limits == Limits(2, 1, 2, 3, 9.0, cooldown=(1.0, 9.0), hosts_are_fixed=True, stall_shutdown=2.0)
    assert "--mpi-args does nothing without --mpi" in notice
    assert "--slots-per-host does nothing without --host-discovery-script" in notice
    for other in (["-hostfile", "f"], ["--hostfile", "f"], ["--host-discovery-script", "f"], ["--mpi"], ["-cb"],
                  ["--check-build"], ["--num-proc", "3"]):
        parser().parse_args([*other, "sh"])


def elastic(*arguments: str, **environ: str) -> JobSettings:
    return job_settings(parser().parse_args(arguments), {"PATH": PATH, "OMP_NUM_THREADS": "1", **environ})


def test_an_elastic_job() -> None:
    given = elastic("-np", "3", "--min-np", "2", "-H", "localhost:2,127.0.0.1:2", "sh")
    assert given.slots == {"localhost": 2, "127.0.0.1": 2}, "names are kept apart, even of one machine"
    assert given.limits == NATIVE(3, 2, hosts_are_fixed=True)
    assert elastic("-np", "2", "--max-np", "4", "sh").slots == {"localhost": 4}
    given = elastic("--min-np", "2", "-H", "localhost:4", "sh")
    assert given.limits == NATIVE(2, 2, hosts_are_fixed=True, starts_with_all=True)
    assert elastic("--min-np", "2", "--max-np", "4", "sh").limits.starts_with_all
    assert not elastic("-np", "2", "--max-np", "4", "sh").limits.starts_with_all
    assert elastic("-np", "2", "--max-np", "4", "--horovod-compat", "sh").limits.starts_with_all
    assert elastic("-H", "localhost:4", "--max-np", "3", "sh").limits == NATIVE(3, 3, 3, hosts_are_fixed=True)
    found = elastic("--host-discovery-script", "printf 'a:2\\nb\\n'", "--slots-per-host", "3", "sh")
    assert found.limits == NATIVE(5, 5) and found.slots == {}
    given = elastic("-np", "2", "--min-np", "1", "--horovod-compat", "sh", HOROVOD_ELASTIC_TIMEOUT="30")
    assert given.limits == Limits(2, 1, elastic_timeout=30.0, whole_host=True, hosts_are_fixed=True,
                                  ends_at_reset_limit=True, starts_with_all=True)
    assert not elastic("-np", "2", "--min-np", "1", "--horovod-compat", "--blacklist", "slot", "sh").limits.whole_host


def test_when_what_has_failed_is_used_again() -> None:
    def cooldown(*arguments: str) -> object:
        return elastic("-np", "2", "--min-np", "1", *arguments, "sh", "never").limits.cooldown

    assert cooldown() == (10.0, 600.0) and cooldown("--blacklist-cooldown-range", "1", "9") == (1.0, 9.0)
    for never in (["--blacklist-for-good"], ["--horovod-compat"], ["--blacklist", "host"],
                  ["--horovod-compat", "--blacklist", "slot"]):
        assert cooldown(*never) is None
    assert cooldown("--horovod-compat", "--blacklist-cooldown-range", "1", "9") == (1.0, 9.0)
    command = ["sh", "--blacklist-cooldown-range", "never", "--blacklist-for-good"]
    assert parser().parse_args(["-np", "2", *command]).command == command


@pytest.mark.parametrize(("arguments", "told"), [
    ("-np 2 --min-np 3 sh", "--min-np 3 is more than -np 2"),
    ("-np 3 --max-np 2 sh", "--max-np 2 is less than -np 3"),
    ("--min-np 3 --max-np 2 sh", "--max-np 2 is less than --min-np 3"),
    ("--min-np 3 -H localhost:2 sh", "--min-np 3 is more than the 2 slots of localhost:2"),
    ("-np 3 --min-np 1 -H localhost:2 sh", "-np 3 is more than the 2 slots of localhost:2"),
    ("-np 2 --min-np 1 --mpi sh", "--mpi excludes elastic training: an MPI job ends when one of its processes ends"),
    ("-np 2 --min-np 1 --cpu-operations mpi sh", "HVDLITE_CPU_OPERATIONS=mpi excludes elastic training"),
    ("--scaling 1,2 --min-np 1 sh", "--scaling and --sweep compare jobs of fixed sizes"),
    ("-np 2 --min-np 1 --blacklist-cooldown-range 9 1 sh", "--blacklist-cooldown-range 9 1: the first number"),
    ("-np 2 --min-np 1", "no command"),
    ("--host-discovery-script false sh", "--host-discovery-script false failed with code 1"),
    ("--host-discovery-script true sh", "pass the number of ranks to start with: -np N"),
])
def test_options_of_elastic_jobs_that_contradict_each_other(arguments: str, told: str) -> None:
    with pytest.raises(LaunchError, match=re.escape(told)):
        elastic(*arguments.split())


@pytest.mark.parametrize(("arguments", "told"), [
    ("--mpi -np 2 --min-np 1 true", "--mpi excludes elastic training"),
    ("--scaling 1,2 --min-np 1 true", "--scaling and --sweep compare jobs of fixed sizes"),
    ("--until a=1 -np 2 true", "--until compares runs: give --sweep too"),
    ("--scaling 1,2 --profile -np 2 true", "give only one of --scaling, --sweep and --profile"),
])
def test_jobs_that_exclude_each_other_are_refused_before_anything_starts(
        arguments: str, told: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(arguments.split()) == 2 and capfd.readouterr().err.startswith(f"hvdrun: {told}")


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
    for given, told in (("--fusion-treshold", "did you mean --fusion-threshold?"), ("--map_by", "; -H a:4,b:4 is filled in"),
                        ("--lr", "--lr; if it is the script's, put it after the script")):
        with pytest.raises(SystemExit) as ended:
            parser().parse_args(["-np", "2", given, "sh"])
        assert ended.value.code == 2 and told in capsys.readouterr().err
    assert parser().parse_args(["-n", "2", "sh"]).np == 2


def test_signals_for_ranks_do_not_end_hvdrun_before_there_are_any() -> None:
    program = ("import os, signal, sys\nimport hvdlite_runner.cli as cli\nfrom hvdlite_runner.__main__ import main\n"
               "cli.main = lambda: os.kill(os.getpid(), signal.SIGUSR1) or os.kill(os.getpid(), signal.SIGUSR2) or 7\n"
               "sys.exit(main())")
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 7
