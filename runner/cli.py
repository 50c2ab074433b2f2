"""The entry point of `hvdrun`: options become a job, a report or a check.

Most of the time in which a job starts goes into imports, so what reports need is imported where one is asked for.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import math
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from hvdlite.core.config import Config, environment_name, file_knobs, timeout_or_inf
from hvdlite.core.errors import ConfigError, LaunchError
from hvdlite.core.launch_contract import COORDINATES, TORCH_COORDINATES
from hvdlite.core.own_programs import module_command
from hvdlite.core.system_limits import reserve_descriptors
from hvdlite.core.texts import printable
from hvdlite.membership.events import Limits
from hvdlite_runner import mpirun, placement
from hvdlite_runner.agents.remote_agent import Shell
from hvdlite_runner.foreign_options import HOROVOD_FLAGS, MEANINGLESS_FLAGS
from hvdlite_runner.host.commands import CommandError, check_input, current_directory, is_python, resolve_command
from hvdlite_runner.host.polled_program import discover_once
from hvdlite_runner.job.loop import run_job
from hvdlite_runner.job.settings import JobSettings
from hvdlite_runner.options import ELASTIC_ONLY, USAGE_ERROR, elastic_limits, is_elastic, misplaced, parser
from hvdlite_runner.output.console import OutputSettings
from hvdlite_runner.output.job_output import Observers, ProgressObserver
from hvdlite_runner.output.streams import prepare_standard_streams
from hvdlite_runner.placement import LOCAL, Host

_DESCRIPTORS = 10
"""What a job needs without its ranks: the reaper, the job's directory, wake-up pipes, selectors."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    prepare_standard_streams()
    options = parser().parse_args(arguments)
    try:
        with reserve_descriptors(_DESCRIPTORS, "hvdrun", spare=0):
            return _run(options, os.environ)
    except CommandError as error:
        print(printable(f"hvdrun: {error}"), file=sys.stderr)
        return error.code
    except (LaunchError, ConfigError) as error:
        for line in str(error).splitlines():
            print(printable(f"hvdrun: {line}"), file=sys.stderr)
        return USAGE_ERROR


def _run(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    if options.check_build:
        flags = [flag for flag, given in (("--json", options.json), ("--verbose", options.verbose)) if given]
        return subprocess.run([*module_command("hvdlite.diagnose"), *flags], check=False).returncode
    if options.horovod_check:
        return _check_scripts(options, environ)
    if options.report is not None and (options.report.endswith((".jsonl", ".json")) or (
            os.path.isfile(options.report) and not options.report.isdigit())):
        from hvdlite_runner.reports.record import show_record
        return show_record(options.report, as_json=options.json)
    if options.report is not None:
        from hvdlite_runner.reports.report import show_report
        return show_report(options.report, as_json=options.json)
    if options.leave is not None:
        from hvdlite_runner.reports.report import leave
        return leave(options.leave, options.job)
    if options.doctor:
        from hvdlite_runner.reports.doctor import run_doctor
        hosts, shell = _hosts(options, environ)
        allocation = placement.find_allocation(environ, _read)
        return run_doctor(_rename_local(hosts, environ) or [Host(LOCAL)], shell,
                          options.working_directory or current_directory(), environ,
                          allocation.scheduler if allocation else "", options.json)
    if options.until is not None and options.sweep is None and options.scaling is None:
        raise LaunchError("--until compares runs: give --sweep too, such as --sweep batch-size=64,128, or --scaling 1,2,4")
    if sum([options.scaling is not None, options.sweep is not None, options.profile]) > 1:
        raise LaunchError("give only one of --scaling, --sweep and --profile")
    placement.check_is_alone(environ, _command(options), options.np)
    compares = options.scaling is not None or options.sweep is not None
    if (options.record or options.metrics) and (compares or options.profile or (options.mpi and not is_elastic(options))):
        raise LaunchError("--record and --metrics are about one job whose ranks hvdrun starts itself: leave out --scaling, "
                          "--sweep, --profile and --mpi")
    if compares:
        return _compare(options, environ)
    if options.profile:
        from hvdlite_runner.reports.scaling import profile
        return profile(job_settings(options, environ), environ, options.results or "profile")
    if options.mpi and not is_elastic(options):
        command = mpi_command(options, environ)
        for line in [*options_without_effect(options), *([shlex.join(command)] if options.verbose else [])]:
            print(f"hvdrun: {line}", file=sys.stderr)
        os.execvpe(command[0], command, {**environ, "PYTHONUNBUFFERED": "1", **_environment(options, environ)})
    settings = job_settings(options, environ)
    observer, code = _observer(options), None
    try:
        code = run_job(settings, environ, observer)
    finally:
        observer.closed(code)
    return code


def _compare(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    from hvdlite_runner.reports import scaling
    from hvdlite_runner.reports.comparison import Comparison
    from hvdlite_runner.reports.time_to_target import MetricTarget, compare_times
    name = ""
    if options.scaling is not None:
        jobs = scaling.with_equal_threads([(str(size), job_settings(options, environ, size))
                                           for size in sorted(options.scaling)])
    else:
        name, values = scaling.parse_sweep(options.sweep)
        jobs = [(value, job_settings(options, environ, more=[f"--{name}", value])) for value in values]
    compared = Comparison(name, jobs, environ, options.results or ("sweep" if name else "scaling"), options.repeat)
    if options.until is not None:
        return compare_times(compared, MetricTarget.parse(options.until))
    return scaling.sweep(compared) if name else scaling.compare_sizes(compared)


def _check_scripts(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    scripts = [word for word in _command(options) if word.endswith(".py")]
    if not scripts:
        raise LaunchError("--horovod-check needs a script: hvdrun --horovod-check train.py")
    for line in options_without_effect(options):
        print(f"hvdrun: {line}", file=sys.stderr)
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "TF_ENABLE_ONEDNN_OPTS": "0"}  # frameworks are imported
    return subprocess.run([*module_command("hvdlite.horovod_compat.check"), *scripts], check=False,
                          env={**environ, **quiet}).returncode


def _observer(options: argparse.Namespace) -> ProgressObserver:
    """Return what watches a job: a table, a record, a server of metrics.

    Raises:
        LaunchError: for a file or a port that cannot be used.
    """
    observers: list[ProgressObserver] = []
    if options.monitor:
        from hvdlite_runner.reports.monitor import Monitor
        observers.append(Monitor(lambda text: print(text, end="", file=sys.stderr, flush=True), sys.stderr.isatty()))
    if options.record or options.metrics:
        from hvdlite_runner.reports.metrics import MetricsServer
        from hvdlite_runner.reports.record import Recorder, RecordFile
        metrics = MetricsServer(options.metrics) if options.metrics else None
        observers.append(Recorder(_command(options), RecordFile(options.record) if options.record else None, metrics))
    return Observers(observers)


def job_settings(options: argparse.Namespace, environ: Mapping[str, str], size: int | None = None,
                 more: Sequence[str] = ()) -> JobSettings:
    """Return the job that the options describe.

    Args:
        size: the number of ranks, instead of the options'.
        more: arguments after the command's own.

    Raises:
        LaunchError: when there is no command, the hosts have too few slots, or options contradict each other.
        ConfigError: for an invalid knob, before any rank is started.
        CommandError: for a command that cannot be started here, if the job is one of this host.
    """
    command = [*_command(options), *more]
    hosts, shell = _hosts(options, environ)
    settings = _environment(options, environ)
    if is_elastic(options):
        limits, slots = elastic_limits(options, {**environ, **settings}, hosts)
    else:
        slots = _assign_slots(_rename_local(hosts, environ), size or options.np, command)
        ranks = sum(slots.values())
        limits = Limits(ranks, ranks, ranks, elastic_timeout=math.inf, hosts_are_fixed=True, one_world=True)
        first = next(iter(slots))
        if options.stdin and first != LOCAL:
            raise LaunchError(f"--stdin: rank 0 runs on host {first}, and only a rank of this host can have the standard "
                              "input of hvdrun")
    control, variables = environment_name("control"), {**environ, **settings}
    made = JobSettings(
        command, limits, slots, options.host_discovery_script if is_elastic(options) else None, options.slots_per_host or 1,
        environ.get("SLURMD_NODENAME", ""), settings, shell, working_directory=options.working_directory or "",
        start_timeout=timeout_or_inf(Config.from_environment(variables).start_timeout),
        grace=options.grace, interfaces=_interfaces(options), coordinator_port=options.coordinator_port,
        over_tcp=variables.get(control) == "tcp", share_cores=int("OMP_NUM_THREADS" not in variables),
        output=OutputSettings(options.output_filename, options.prefix, options.timestamps, options.show, options.fold,
                              options.quiet),
        bind=options.bind, has_input=options.stdin and not is_elastic(options), verbose=options.verbose,
        task_directory=options.task_directory, preemption_script=options.preemption_script or "",
        notice="\n".join(options_without_effect(options)))
    if any(made.is_local(name) for name in slots):
        resolve_command(command, environ.get("PATH"))  # each host repeats this check
    return made


def options_without_effect(options: argparse.Namespace) -> list[str]:
    """Return a line for each option that has no effect in this job. None is an error: Horovod accepts them in any job."""
    lines = []
    if not is_elastic(options):
        lines += [f"--{name.replace('_', '-')} does nothing in a job that is not elastic: give --min-np too"
                  for name in ELASTIC_ONLY if getattr(options, name) is not None]
    elif options.stdin:
        lines.append("--stdin does nothing in an elastic job: its ranks change")
    elif options.slots_per_host is not None and not options.host_discovery_script:
        lines.append("--slots-per-host does nothing without --host-discovery-script: give the slots with -H host:slots")
    if options.nproc_per_node is not None and options.host_discovery_script:
        lines.append("--nproc-per-node does nothing with --host-discovery-script: give --slots-per-host")
    lines += [f"--{name} does nothing here: {why}" for name, (_, why) in MEANINGLESS_FLAGS.items()
              if getattr(options, f"meaningless_{name}") is not None]
    if options.repeat > 1 and options.sweep is None and options.scaling is None:
        lines.append("--repeat does nothing without --scaling or --sweep")
    if options.job:
        lines.append("--job does nothing without --leave")
    if not options.mpi:
        lines += [f"--{name} does nothing without --mpi" for name in ("mpi-args", "binding-args")
                  if getattr(options, name.replace("-", "_"))]
    return lines


def mpi_command(options: argparse.Namespace, environ: Mapping[str, str]) -> list[str]:
    """Return the command line of `hvdrun --mpi`: an MPI library's launcher and its arguments.

    Raises:
        LaunchError: like `job_settings`.
    """
    command = resolve_command(_command(options), environ.get("PATH"))
    hosts, shell = _hosts(options, environ)
    slots = _assign_slots(hosts, options.np, command)
    flavour = mpirun.flavour_of(options.mpirun)
    remote = any(host.name != LOCAL for host in _rename_local(hosts, environ))
    return mpirun.mpirun_command(
        flavour, options.mpirun, sum(slots.values()), hosts if remote else [],
        {**environ, **_environment(options, environ)}, command, arguments=shlex.split(options.mpi_args),
        binding=shlex.split(options.binding_args), ssh=shell.ssh_arguments,
        interfaces=_interfaces(options), root=os.geteuid() == 0, output_directory=options.output_filename,
        prefix=options.prefix, grace=options.grace)


def _command(options: argparse.Namespace) -> list[str]:
    command: list[str] = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        raise LaunchError("there is no command to run; for example: hvdrun -np 2 python train.py")
    if options.is_module:
        if command[0].endswith(".py"):
            name = command[0][:-len(".py")].removeprefix("./").replace("/", ".")
            raise LaunchError(f"-m {command[0]}: -m takes the name of a module, -m {name}; or run the file: python "
                              f"{command[0]}")
        if is_python(command[0]):
            raise LaunchError(f"-m {command[0]}: -m takes the name of a module, and hvdrun starts Python itself; leave "
                              f"{command[0]} out")
        return [sys.executable, "-m", *command]
    if not options.mpi and (is_elastic(options) or not options.stdin):  # mpirun gives rank 0 the input by itself
        check_input(command)
    return command


def _assign_slots(hosts: Sequence[Host], size: int | None, command: Sequence[str]) -> dict[str, int]:
    if not hosts and size is None:
        hint = misplaced(command)
        raise LaunchError("pass the number of ranks with -np N" + (f"; {hint}" if hint else ""))
    return placement.assign_slots(size, hosts or [Host(LOCAL, size or 1)])


def _hosts(options: argparse.Namespace, environ: Mapping[str, str]) -> tuple[list[Host], Shell]:
    """Return the hosts by the names that the user or scheduler gave, if any, and the way to reach them."""
    hosts: list[Host] = []
    program = options.remote_shell
    if options.hosts:
        hosts = placement.parse_hosts(",".join(options.hosts))
    elif options.hostfile:
        hosts = placement.parse_hostfile(_read(options.hostfile), options.hostfile)
    elif options.host_discovery_script and options.doctor:
        hosts = [Host(*each) for each in discover_once(options.host_discovery_script, options.slots_per_host or 1).items()]
    allocation = placement.find_allocation(environ, _read)
    if allocation is not None:
        hosts = hosts or allocation.hosts
        program = program or (allocation.shell if allocation.shell != "srun" or shutil.which("srun") else "ssh")
    if options.nproc_per_node is not None:
        hosts = [Host(host.name, options.nproc_per_node) for host in hosts] or [Host(LOCAL, options.nproc_per_node)]
        count = sum(host.slots for host in hosts)
        if options.np is not None and options.np < count and not is_elastic(options):
            raise LaunchError(f"-np {options.np} is less than the {count} ranks that --nproc-per-node "
                              f"{options.nproc_per_node} starts: leave one of them out")
    shell = Shell(program or "ssh", options.ssh_port, options.ssh_identity_file, tuple(shlex.split(options.ssh_args)),
                  options.remote_python,
                  timeout_or_inf(Config.from_environment({**environ, **knob_environment(options)}).agent_timeout))
    return hosts, shell


def _rename_local(hosts: Sequence[Host], environ: Mapping[str, str]) -> list[Host]:
    """Return the hosts with this machine called `LOCAL`."""
    here = environ.get("SLURMD_NODENAME")  # a node's name in Slurm may not be a network name
    return placement.rename_local_hosts(hosts, lambda name: name == here or placement.is_local(name))


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise LaunchError(f"cannot read the list of hosts {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise LaunchError(f"cannot read the list of hosts {path}: it is not UTF-8 (byte {error.start})") from None


def _interfaces(options: argparse.Namespace) -> list[str]:
    return [name for names in options.interfaces for name in names.split(",")]


def _environment(options: argparse.Namespace, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables for the ranks that follow from the options, after checks."""
    settings = knob_environment(options)
    for word in options.variables:
        name, equals, value = word.partition("=")
        if name.split() != [name]:
            raise LaunchError(f"-x {shlex.quote(word)}: {name!r} is not the name of a variable")
        if name in TORCH_COORDINATES or name.replace("HOROVOD_", "HVDLITE_") in COORDINATES:
            raise LaunchError(f"-x {word}: hvdrun gives each rank its own {name}; leave it out")
        if not equals and name not in environ:
            raise LaunchError(f"-x {word}: no variable {name!r} is set here; give its value too, -x VAR=VALUE")
        settings[name] = value if equals else environ[name]
    Config.from_environment({**environ, **settings})
    if options.horovod_compat:
        settings["PYTHONPATH"] = os.pathsep.join(filter(None, [
            _compat_path(), settings.get("PYTHONPATH", environ.get("PYTHONPATH", ""))]))
    interfaces = _interfaces(options)
    if interfaces:
        settings |= {"NCCL_SOCKET_IFNAME": ",".join(interfaces), "GLOO_SOCKET_IFNAME": interfaces[0],
                     environment_name("gloo_interface"): interfaces[0]}
    return settings


def knob_environment(options: argparse.Namespace) -> dict[str, str]:
    """Return the environment variables of the knobs' flags."""
    given = {field.name: getattr(options, f"knob_{field.name}") for field in dataclasses.fields(Config)}
    for knob, metavar in HOROVOD_FLAGS.values():
        value = getattr(options, f"horovod_{knob}")
        if value is not None and given[knob] is None:
            given[knob] = f"{value}M" if metavar == "MB" else value
    if options.verbose and given["full_tracebacks"] is None:
        given["full_tracebacks"] = "1"
    for name in file_knobs():  # the ranks may be on other hosts
        if given[name]:
            given[name] = os.path.normpath(os.path.join(current_directory(), given[name]))
    return {environment_name(name): value for name, value in given.items() if value is not None}


def _compat_path() -> str:
    """Return the folder that contains hvdlite's `horovod` package."""
    spec = importlib.util.find_spec("hvdlite")
    assert spec is not None and spec.origin is not None
    return str(Path(spec.origin).parent / "horovod_compat" / "path")


if __name__ == "__main__":
    sys.exit(main())
