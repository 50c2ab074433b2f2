"""`hvdrun -np N [options] command ...`"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from hvdlite.core import launch_contract
from hvdlite.core.config import Config, environment_name
from hvdlite.core.errors import ConfigError, LaunchError
from hvdlite_runner import placement
from hvdlite_runner.commands import CommandError, resolve_command
from hvdlite_runner.job import JobSettings, run_job
from hvdlite_runner.report import show_report

USAGE_ERROR = 2
HOROVOD_FLAGS = {
    "fusion-threshold-mb": ("fusion_threshold", "MB"), "timeline-filename": ("timeline", "FILE"),
    "stall-check-warning-time-seconds": ("stall_check_time_seconds", "S"),
    "no-stall-check": ("stall_check_time_seconds", ""),
    "stall-check-shutdown-time-seconds": ("stall_shutdown_time_seconds", "S"),
    "autotune-bayes-opt-max-samples": ("autotune_max_samples", "N"),
}
"""Horovod's flags that mean a knob under another name."""
MEANINGLESS_FLAGS = {
    "cycle-time-ms": ("MS", "nothing happens in cycles"), "cache-capacity": ("N", "there is no response cache to size"),
    "hierarchical-allreduce": ("", "one host needs none"), "no-hierarchical-allreduce": ("", "one host needs none"),
    "hierarchical-allgather": ("", "one host needs none"), "no-hierarchical-allgather": ("", "one host needs none"),
    "torus-allreduce": ("", "one host needs none"), "no-torus-allreduce": ("", "one host needs none"),
    "stall-check": ("", "it is on anyway"), "disable-cache": ("", "nothing is cached between jobs"),
    "num-nccl-streams": ("N", "NCCL needs one stream"),
    "autotune-gaussian-process-noise": ("X", "autotune has no such process"),
    "mpi-threads-disable": ("", "MPI is not used"), "no-mpi-threads-disable": ("", "MPI is not used"),
    "thread-affinity": ("CORE", "use --bind"), "gloo-timeout-seconds": ("S", "use --gloo-timeout"),
    "log-with-timestamp": ("", "it is so anyway"), "log-without-timestamp": ("", "use --log-hide-time"),
    "gloo": ("", "tensors travel through shared memory"), "mpi": ("", "tensors travel through shared memory"),
}
"""Horovod's flags that are accepted and do nothing, and why."""


class _Parser(argparse.ArgumentParser):
    """Errors are one line, not a page of usage."""

    def error(self, message: str) -> NoReturn:
        print(f"hvdrun: {message}; see hvdrun --help", file=sys.stderr)
        raise SystemExit(USAGE_ERROR)


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser; one flag for every knob follows from `core/config.py`."""
    result = _Parser("hvdrun", usage="hvdrun -np N [options] command [argument ...]", allow_abbrev=False,
                     description="Start N ranks of a training command and end them together.")
    result.add_argument("-v", "--version", action="version", version=importlib.metadata.version("hvdlite"))
    result.add_argument("-np", "--num-proc", dest="np", type=_positive, metavar="N", help="number of ranks")
    result.add_argument("-H", "--hosts", metavar="HOST:SLOTS", help="hosts and their slots; only this host for now")
    result.add_argument("--output-filename", metavar="DIR", help="keep each rank's output in DIR/rank.N/stdout and stderr")
    result.add_argument("--prefix-output-with-timestamp", "--prefix-timestamp", action="store_true", dest="timestamps",
                        help="put the time before each line")
    result.add_argument("--no-prefix", action="store_false", dest="prefix", help="do not put [rank]<stream>: before lines")
    result.add_argument("--bind", action="store_true", help="bind each rank to its share of the cores")
    result.add_argument("--horovod-compat", action="store_true", help="let `import horovod...` in the script give hvdlite")
    result.add_argument("--verbose", action="store_true", help="say what is started")
    for name, (metavar, why) in MEANINGLESS_FLAGS.items():
        if metavar:
            result.add_argument(f"--{name}", dest=f"meaningless_{name}", help=argparse.SUPPRESS)
        else:
            result.add_argument(f"--{name}", dest=f"meaningless_{name}", help=argparse.SUPPRESS, action="store_const",
                                const=why)
    result.add_argument("--report", nargs="?", const="", metavar="JOB", help="start nothing; say who waits for whom in the "
                        "running job of this user on this host (if there are several: its launcher's process id)")
    result.add_argument("-cb", "--check-build", action="store_true", help="start nothing; say what is installed here and "
                        "what works with it")
    result.add_argument("--json", action="store_true", help="with --report and --check-build: as JSON")
    for name, (knob, metavar) in HOROVOD_FLAGS.items():
        if metavar:
            result.add_argument(f"--{name}", metavar=metavar, dest=f"horovod_{knob}", help=f"Horovod's name of "
                                f"--{knob.replace('_', '-')}")
        else:
            result.add_argument(f"--{name}", action="store_const", const="0", dest=f"horovod_{knob}",
                                help=f"Horovod's way to set --{knob.replace('_', '-')} to 0")
    knobs = result.add_argument_group("knobs", "settings of the runtime; each can also be set as HVDLITE_<NAME>")
    for field in dataclasses.fields(Config):
        _add_knob(knobs, field)
    result.add_argument("command", nargs=argparse.REMAINDER, help="what every rank runs, such as: python train.py")
    return result


def _add_knob(group: argparse._ArgumentGroup, field: dataclasses.Field[Any]) -> None:
    flag, help_text = field.name.replace("_", "-"), f"{field.metadata['help']} (default {field.default!r})"
    if isinstance(field.default, bool):
        group.add_argument(f"--{flag}", dest=f"knob_{field.name}", action="store_const", const="1", help=help_text)
        group.add_argument(f"--no-{flag}", dest=f"knob_{field.name}", action="store_const", const="0", help="the contrary")
    else:
        group.add_argument(f"--{flag}", dest=f"knob_{field.name}", metavar="VALUE", help=help_text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    options = parser().parse_args(arguments)
    try:
        if options.check_build:
            return subprocess.run([sys.executable, "-m", "hvdlite.diagnose", *(["--json"] if options.json else [])],
                                  check=False).returncode
        if options.report is not None:
            return show_report(options.report, as_json=options.json)
        return run_job(job_settings(options, os.environ), os.environ)
    except CommandError as error:
        print(f"hvdrun: {error}", file=sys.stderr)
        return error.code
    except (LaunchError, ConfigError) as error:
        print(f"hvdrun: {error}", file=sys.stderr)
        return USAGE_ERROR


def job_settings(options: argparse.Namespace, environ: Mapping[str, str]) -> JobSettings:
    """Return what to run.

    Raises:
        LaunchError: when there is nothing to run, or it does not fit the hosts.
        ConfigError: for an invalid knob, before any rank is started.
        CommandError: for a command that cannot be started.
    """
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        raise LaunchError("there is no command to run; for example: hvdrun -np 2 python train.py")
    slots = placement.check_local(placement.parse_hosts(options.hosts)) if options.hosts else None
    size = options.np or slots
    if size is None:
        raise LaunchError("say how many ranks to start with -np N")
    if slots is not None and size > slots:
        raise LaunchError(f"-np {size} is more than the {slots} slots of -H {options.hosts}")
    settings = knob_environment(options)
    Config.from_environment({**environ, **settings})
    if options.horovod_compat:
        settings["PYTHONPATH"] = os.pathsep.join(filter(None, [_compat_path(), environ.get("PYTHONPATH", "")]))
    command = resolve_command(command, environ.get("PATH"))
    if settings.get(environment_name("control"), environ.get(environment_name("control"))) == "tcp":
        settings |= {launch_contract.COORDINATOR: f"127.0.0.1:{_free_port()}",
                     launch_contract.SECRET: secrets.token_hex()}
    notice = "".join(f"--{name} does nothing here: {why}\n" for name, (_, why) in MEANINGLESS_FLAGS.items()
                     if getattr(options, f"meaningless_{name}") is not None)
    if "OMP_NUM_THREADS" not in environ:
        settings["OMP_NUM_THREADS"] = str(max(1, _cores() // size))
        notice += (f"OMP_NUM_THREADS={settings['OMP_NUM_THREADS']} ({_cores()} cores for {size} ranks); "
                   "set it yourself to change that")
    return JobSettings(placement.local_worlds(size), command, settings, options.output_filename, options.prefix,
                       options.timestamps, options.bind, options.verbose, notice.rstrip())


def knob_environment(options: argparse.Namespace) -> dict[str, str]:
    """Return the variables that the knobs' flags stand for."""
    given = {field.name: getattr(options, f"knob_{field.name}") for field in dataclasses.fields(Config)}
    for knob, metavar in HOROVOD_FLAGS.values():
        value = getattr(options, f"horovod_{knob}")
        if value is not None and given[knob] is None:
            given[knob] = f"{value}M" if metavar == "MB" else value
    for name in ("timeline", "stall_report_file", "autotune_log_file", "config_file"):  # the ranks may be elsewhere
        if given[name]:
            given[name] = os.path.abspath(given[name])
    return {environment_name(name): value for name, value in given.items() if value is not None}


def _compat_path() -> str:
    """Return the folder whose `horovod` is hvdlite."""
    spec = importlib.util.find_spec("hvdlite")
    assert spec is not None and spec.origin is not None
    return str(Path(spec.origin).parent / "horovod_compat" / "path")


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"it must be at least 1, not {value}")
    return value


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


if __name__ == "__main__":
    sys.exit(main())
