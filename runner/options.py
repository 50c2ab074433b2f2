"""The command line of `hvdrun`: its parser. One flag for every knob follows from `core/config.py`."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final, NoReturn

from hvdlite._version import __version__
from hvdlite.core.config import MOST_SECONDS, Config, timeout_or_inf
from hvdlite.core.errors import LaunchError
from hvdlite.core.launch_contract import MEMBER
from hvdlite.membership.events import Limits
from hvdlite_runner.foreign_options import HOROVOD_FLAGS, MEANINGLESS_FLAGS, OTHER_LAUNCHERS
from hvdlite_runner.host.polled_program import discover_once
from hvdlite_runner.placement import LOCAL, MOST_SLOTS, Host

USAGE_ERROR: Final = 2
_COOLDOWN: Final = (10.0, 600.0)
"""Seconds: when a failed slot is used again for the first time, and how long the wait becomes at most."""
_NEVER: Final = (math.inf, math.inf)
_SIMILAR: Final = 0.8
"""The least similarity, of at most 1, of an unknown option to one that it may be a misspelling of."""
ELASTIC_ONLY: Final = ("slots_per_host", "preemption_script", "elastic_timeout", "reset_limit", "failures_without_progress",
                       "blacklist", "blacklist_cooldown_range")
"""Options that have an effect in elastic jobs only."""


SHORT_HELP: Final = """usage: hvdrun -np N [options] command [argument ...]
       hvdrun -np N [options] -m module [argument ...]

Run N ranks of a training command, on this host or several, and end them
together. Options of hvdrun come before the command:

    hvdrun -np 2 python train.py --lr 0.1

one job:
  -np N                    number of ranks (default: the number of slots)
  --nproc-per-node N       number of ranks on each host, as in torchrun
  -H HOST:SLOTS,...        hosts (--hostfile FILE; default: the scheduler's)
  -m MODULE                run a Python module, as python -m does
  -x VAR[=VALUE]           set an environment variable of the ranks
  --bind                   bind each rank to its part of the host's cores
  --horovod-compat         make `import horovod...` import hvdlite
  --min-np N, --max-np N   elastic: survive losses, scale with the hosts

output:
  --show rank0 | errors    only rank 0's output, or only standard error
  --fold                   show a line that several ranks print once
  -q, --verbose            less, and more, of hvdrun's own lines
  --output-filename DIR    write each rank's output to DIR/rank.N
  --monitor                a table: steps/s, waits, memory, the slow rank
  --record FILE.jsonl      the same figures, once a second, in a file

instead of one job:
  --doctor [-H HOST,...]   check hosts, and the links between them
  --check-build            what is installed here, and what works with it
  --horovod-check FILE.py  what is different from Horovod, line by line
  --report [JOB]           which ranks of a running job wait for which
  --profile                where the time of each rank goes
  --scaling N,N,...        speedup and efficiency by the number of ranks
  --sweep OPTION=V,V,...   throughput by batch size or another option
  --until METRIC=VALUE     with these two: the time to an accuracy or a loss

All options, and the knobs of the runtime: hvdrun --help-all"""
"""One screen: what people use. A test compares it with the parser's options."""


class _Parser(argparse.ArgumentParser):
    """A parser that prints errors as one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        unknown = [word.partition("=")[0] for word in message.partition("unrecognized arguments: ")[2].split()]
        hint = "see hvdrun --help"
        if unknown:
            near = difflib.get_close_matches(unknown[0], self._option_string_actions, n=1, cutoff=_SIMILAR)
            hint = OTHER_LAUNCHERS.get(unknown[0].lstrip("-").replace("_", "-")) or (
                f"did you mean {near[0]}?" if near else "if it is the script's, put it after the script; see hvdrun --help")
        print(f"hvdrun: {message}; {hint}", file=sys.stderr)
        raise SystemExit(USAGE_ERROR)


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    result = _Parser("hvdrun", usage="hvdrun -np N [options] command [argument ...]", allow_abbrev=False, add_help=False,
                     formatter_class=argparse.RawDescriptionHelpFormatter,  # for `SHORT_HELP`
                     description="Run N ranks of a training command, on this host or several, and end them together.")
    result.add_argument("-h", "--help", action="version", version=SHORT_HELP, help="show the options that most jobs need")
    result.add_argument("--help-all", "--help-knobs", action="help", help="show all options, and the knobs of the runtime")
    result.add_argument("-v", "--version", action="version", version=__version__, help="show the version")
    result.add_argument("-np", "-n", "--np", "--num-proc", dest="np", type=_ranks, metavar="N",
                        help="number of ranks (default: the number of slots)")
    result.add_argument("--nproc-per-node", "--nproc_per_node", type=_per_node, metavar="N", help="number of ranks on each "
                        "host, as in torchrun; -H needs no slots then")
    result.add_argument("-m", dest="is_module", action="store_true", help="the command is a module, as in torchrun: "
                        "hvdrun -np 2 -m package.train; it is run by the Python of hvdrun")
    result.add_argument("-x", dest="variables", action="append", default=[], metavar="VAR[=VALUE]", help="set an "
                        "environment variable of the ranks, on all hosts; without a value, to the one that it has here")
    result.add_argument("--bind", action="store_true", help="bind each rank to an equal part of its host's cores")
    result.add_argument("--stdin", action="store_true", help="give rank 0, which must be on this host, the standard input "
                        "of hvdrun; that of the other ranks is empty")
    result.add_argument("--grace", type=_seconds, metavar="S", help="seconds that the ranks have to end when hvdrun gets a "
                        "signal, before they are killed (default: 5 after Ctrl-C, 30 after SIGTERM and SIGHUP)")
    result.add_argument("--horovod-compat", action="store_true", help="make `import horovod...` in the script import "
                        "hvdlite")
    result.add_argument("--task-directory", help=argparse.SUPPRESS)  # of hvdlite.run
    _add_instead(result.add_argument_group("instead of one job"))
    _add_hosts(result.add_argument_group("hosts", "default: the allocation of the scheduler, or this host"))
    _add_elastic(result.add_argument_group("elastic training", "with --min-np, --max-np or --host-discovery-script, a job\n"
                                           "survives the loss of ranks and scales with the hosts"))
    _add_output(result.add_argument_group("output"))
    _add_mpi(result.add_argument_group("data plane"))
    _add_horovods(result)
    knobs = result.add_argument_group("knobs", "settings of the runtime; each can also be set by the environment variable\n"
                                      "HVDLITE_<NAME>")
    for field in dataclasses.fields(Config):
        _add_knob(knobs, field)
    result.add_argument("command", nargs=argparse.REMAINDER, help="the command that every rank runs, such as: python "
                        "train.py")
    return result


def misplaced(command: Sequence[str]) -> str:
    """Return a hint where a command has an option of ours among its arguments, where it is the command's; else ""."""
    known = parser()._option_string_actions
    found = [word for word in command[1:] if word.startswith(("--", "-n", "-H")) and word.partition("=")[0] in known]
    return f"{found[0]} is an argument of the command there: options of hvdrun come before the command, such as " \
           "hvdrun -np 2 python train.py" if found else ""


def _add_instead(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--scaling", metavar="N,N,...", type=_numbers, help="run the command at each number of ranks, and "
                       "print samples/s, speedup and efficiency; write them as CSV and PNG too")
    group.add_argument("--sweep", metavar="OPTION=V,V,...", help="run the command with --OPTION V for each value, and print "
                       "the throughputs and where they saturate; write them as CSV and PNG too")
    group.add_argument("--until", metavar="METRIC=VALUE", help="with --sweep or --scaling: print instead after how many "
                       "epochs and seconds each run reached the value of a metric that the script records with "
                       "hvd.record_metrics, such as accuracy=0.88 or 'loss<=0.3'; every run goes on to its end")
    group.add_argument("--repeat", type=_positive, metavar="N", default=1, help="with --scaling or --sweep: run each job N "
                       "times, and print the median run, the least and the greatest figure")
    group.add_argument("--profile", action="store_true", help="run the command, and print where each rank's time went: "
                       "input, forward, backward, waits, optimizer (with torch); write it as CSV and PNG too")
    group.add_argument("--results", metavar="NAME", help="write the results of --scaling, --sweep or --profile to NAME.csv "
                       "and NAME.png (default: scaling, sweep or profile)")
    group.add_argument("--report", nargs="?", const="", metavar="JOB", help="show which ranks wait for which in your "
                       "running job on this host; JOB is the process id of its hvdrun, or its directory. With a file of "
                       "--record: what it tells of its jobs")
    group.add_argument("--leave", metavar="HOST", help="let the ranks on a host leave your running elastic job at the next "
                       "boundary, and wait until they have; its hvdrun runs on this host")
    group.add_argument("--job", metavar="JOB", default="", help="with --leave: the process id of its hvdrun, or its "
                       "directory, if several run")
    group.add_argument("-cb", "--check-build", action="store_true", help="show what is installed here and what works with "
                       "it")
    group.add_argument("--horovod-check", action="store_true", help="read the Python scripts of the command without running "
                       "them, and say line by line what is different from Horovod")
    group.add_argument("--doctor", action="store_true", help="check this host and the hosts of -H: versions, planes, launch "
                       "environment, interfaces, ssh, limits, GPUs and their connections, and latency and bandwidth between "
                       "every two hosts")
    group.add_argument("--json", action="store_true", help="with --report, --check-build and --doctor: print JSON")


def _add_hosts(group: argparse._ArgumentGroup) -> None:
    which = group.add_mutually_exclusive_group()
    which.add_argument("-H", "--hosts", "--host", action="append", metavar="HOST:SLOTS,...", help="hosts and their slots, "
                       "filled in order; IPv6: [address]:slots")
    which.add_argument("-hostfile", "--hostfile", metavar="FILE", help="read hosts from a file, one per line: host slots=4")
    which.add_argument("--host-discovery-script", metavar="PROGRAM", help="run a program every second and read "
                       "hosts from its output, one per line: host:4 (elastic)")
    group.add_argument("-p", "--ssh-port", type=_positive, metavar="PORT", help="port of ssh on the other hosts")
    group.add_argument("-i", "--ssh-identity-file", metavar="FILE", help="private key for ssh")
    group.add_argument("--ssh-args", metavar="'ARGS'", default="", help="more options for ssh, such as: '-J gateway'")
    group.add_argument("--remote-shell", metavar="PROGRAM", help="use this instead of ssh: srun, or a program that takes "
                       "ssh's arguments")
    group.add_argument("--remote-python", metavar="PATH", default=sys.executable, help="Python on the other hosts (default: "
                       "the same path as on this host)")
    group.add_argument("--working-directory", metavar="DIR", help="working directory on the other hosts (default: the "
                       "same path as on this host)")
    group.add_argument("--network-interface", "--network-interfaces", "--nics", dest="interfaces", action="append",
                       metavar="NAME,...", default=[], help="network interfaces to use (default: chosen by route)")
    group.add_argument("--coordinator-port", type=_positive, metavar="PORT", default=0, help="port on which rank 0 "
                       "listens for the other hosts (default: any free port)")


def _add_elastic(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--min-np", "--min-num-proc", dest="min_np", type=_positive, metavar="N", help="number of ranks with "
                       "which training goes on (default: -np); with fewer it waits for others")
    group.add_argument("--max-np", "--max-num-proc", dest="max_np", type=_positive, metavar="N", help="greatest number of "
                       "ranks (default: the number of slots)")
    group.add_argument("--slots-per-host", type=_positive, metavar="N", help="slots of a host for which the discovery "
                       "program prints none (default: 1)")
    group.add_argument("--preemption-script", metavar="PROGRAM", help="run a program every 5 seconds on each host with "
                       "ranks; it prints in how many seconds the machine is taken away, and the ranks leave before")
    group.add_argument("--elastic-timeout", type=_seconds, metavar="S", help="seconds to wait for enough slots, at the "
                       "start and later (default: 600)")
    group.add_argument("--reset-limit", type=_count, metavar="N", help="number of times that the ranks of a running job may "
                       "change (default: any)")
    group.add_argument("--failures-without-progress", type=_positive, metavar="N", help="end the job when so many worlds in "
                       "a row were lost by failures, and none reached a later boundary than those before (default: "
                       f"{Limits.failures_without_progress})")
    group.add_argument("--blacklist", choices=["slot", "host"], help="what is not used any more after a failure: the slot "
                       "of the rank, and the host after three failures in ten minutes; or the host at once, as in Horovod "
                       "(default: slot; host with --horovod-compat)")
    again = group.add_mutually_exclusive_group()
    again.add_argument("--blacklist-cooldown-range", type=_seconds, nargs=2, metavar=("LO", "HI"), help="use a slot or "
                       "host again LO seconds after a failure, then 2 LO, 4 LO, ... up to HI (default: "
                       f"{_COOLDOWN[0]:g} {_COOLDOWN[1]:g})")
    again.add_argument("--blacklist-for-good", dest="blacklist_cooldown_range", action="store_const", const=_NEVER,
                       help="use it again only when discovery has lost it and finds it again (the default with --blacklist "
                       "host or --horovod-compat)")


def _add_output(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--output-filename", "--output-directory", metavar="DIR",
                       help="write each rank's output to DIR/rank.N/stdout and stderr, on this host")
    group.add_argument("-prefix-timestamp", "--prefix-timestamp", "--prefix-output-with-timestamp", action="store_true",
                       dest="timestamps", help="put the time before each line")
    group.add_argument("--no-prefix", action="store_false", dest="prefix", help="do not put [rank]<stream>: before lines")
    group.add_argument("--show", choices=["all", "rank0", "errors"], default="all", help="show all output, only rank 0's, "
                       "or only standard error; the last lines of a rank that fails are always shown")
    group.add_argument("--fold", action="store_true", help="show a line that several ranks print once: [0-7] ... (x8)")
    group.add_argument("--monitor", action="store_true", help="show a table of the ranks: steps/s, samples/s, waits, "
                       "which ranks wait for which, memory, GPU")
    group.add_argument("--record", metavar="FILE.jsonl", help="add to a file, as lines of JSON, once a second: samples/s, "
                       "waits, memory; and worlds, slow ranks, failures; hvdrun --report FILE.jsonl prints what it tells")
    group.add_argument("--metrics", metavar="[ADDRESS:]PORT", help="let Prometheus read the same figures at "
                       "http://ADDRESS:PORT/metrics while the job runs (default: on this host only, 127.0.0.1)")
    group.add_argument("-q", "--quiet", action="store_true", help="of hvdrun's own lines, print only failures")
    group.add_argument("--verbose", action="store_true", help="print what hvdrun starts, and whole tracebacks; with "
                       "--check-build, which dtypes each operation takes on each plane")


def _add_mpi(group: argparse._ArgumentGroup) -> None:
    which = group.add_mutually_exclusive_group()
    which.add_argument("--mpi", action="store_true", help="start the ranks with mpirun, and use MPI between hosts")
    which.add_argument("--gloo", action="store_true", help="start the ranks without mpirun, and use Gloo between "
                       "hosts (the default)")
    group.add_argument("--mpirun", metavar="PROGRAM", default="mpirun", help="with --mpi: the program to run (default: "
                       "mpirun)")
    group.add_argument("--mpi-args", metavar="'ARGS'", default="", help="with --mpi: more options for mpirun")
    group.add_argument("--binding-args", metavar="'ARGS'", default="", help="with --mpi: options of mpirun that bind "
                       "ranks to cores")


def _add_horovods(result: argparse.ArgumentParser) -> None:
    for name, (metavar, why) in MEANINGLESS_FLAGS.items():
        if metavar:
            values = len(metavar.split())
            result.add_argument(f"--{name}", dest=f"meaningless_{name}", help=argparse.SUPPRESS,
                                nargs=values if values > 1 else None)
        else:
            result.add_argument(f"--{name}", dest=f"meaningless_{name}", help=argparse.SUPPRESS, action="store_const",
                                const=why)
    for name, (knob, metavar) in HOROVOD_FLAGS.items():
        if metavar:
            result.add_argument(f"--{name}", metavar=metavar, dest=f"horovod_{knob}", help=f"Horovod's name for "
                                f"--{knob.replace('_', '-')}")
        else:
            result.add_argument(f"--{name}", action="store_const", const="0", dest=f"horovod_{knob}",
                                help=f"Horovod's way to set --{knob.replace('_', '-')} to 0")


def _add_knob(group: argparse._ArgumentGroup, field: dataclasses.Field[Any]) -> None:
    flag, help_text = field.name.replace("_", "-"), f"{field.metadata['help']} (default {field.default!r})"
    if isinstance(field.default, bool):
        group.add_argument(f"--{flag}", dest=f"knob_{field.name}", action="store_const", const="1", help=help_text)
        group.add_argument(f"--no-{flag}", dest=f"knob_{field.name}", action="store_const", const="0", help=f"turn "
                           f"--{flag} off")
    else:
        group.add_argument(f"--{flag}", dest=f"knob_{field.name}", metavar="VALUE", help=help_text)


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"the number must be at least 1, not {value}")
    if value > MOST_SLOTS:
        raise argparse.ArgumentTypeError(f"the number must be at most {MOST_SLOTS:,}")
    return value


def _ranks(text: str) -> int:
    return _positive(text.removeprefix("p"))  # -np4, which argparse reads as -n p4


def _per_node(text: str) -> int:
    if text in ("auto", "cpu", "gpu"):
        raise argparse.ArgumentTypeError(f"hvdrun does not count cores or GPUs: give their number instead of {text!r}")
    return _positive(text)


def _count(text: str) -> int:
    return 0 if text.strip() == "0" else _positive(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds") from None
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"the number of seconds must be above 0 and finite, not {text}")
    return min(value, MOST_SECONDS)


def _numbers(text: str) -> list[int]:
    return [_positive(part.strip()) for part in text.split(",")]


def is_elastic(options: argparse.Namespace) -> bool:
    """Return whether the options ask for an elastic job."""
    return bool(options.host_discovery_script or options.min_np or options.max_np)


def elastic_limits(options: argparse.Namespace, environ: Mapping[str, str], hosts: Sequence[Host]) -> tuple[
        Limits, dict[str, int]]:
    """Return what an elastic job may do, and the slots of the user's hosts; these are empty with a discovery program.

    Args:
        environ: the environment of its ranks.
        hosts: those that the user or the scheduler has given, if any.

    Raises:
        LaunchError: for options that contradict each other.
    """
    script, least = options.host_discovery_script, options.min_np
    _refuse(options, environ)
    slots = {} if script else {host.name: host.slots for host in hosts}
    size = options.np or least
    if size is None:
        offered = discover_once(script, options.slots_per_host or 1) if script else slots
        size = min(sum(offered.values()), options.max_np or sum(offered.values()))
        if not size:
            raise LaunchError("pass the number of ranks to start with: -np N")
    least = least or size
    if least > size:
        raise LaunchError(f"--min-np {least} is more than -np {size}")
    if options.max_np is not None and options.max_np < size:
        raise LaunchError(f"--max-np {options.max_np} is less than {'-np' if options.np else '--min-np'} {size}")
    if not script and not slots:
        slots = {LOCAL: options.max_np or size}
    if slots and size > sum(slots.values()):
        offered_slots = ",".join(f"{name}:{count}" for name, count in slots.items())
        asked = f"{'-np' if options.np else '--min-np'} {size}"
        raise LaunchError(f"{asked} is more than the {sum(slots.values())} slots of {offered_slots}")
    rule = options.blacklist or ("host" if options.horovod_compat else "slot")
    never = rule == "host" or options.horovod_compat
    cooldown = tuple(options.blacklist_cooldown_range or (_NEVER if never else _COOLDOWN))
    if cooldown[0] > cooldown[1]:
        raise LaunchError(f"--blacklist-cooldown-range {cooldown[0]:g} {cooldown[1]:g}: the first number is the smaller one")
    timeout = options.elastic_timeout or _timeout_of(environ)
    config = Config.from_environment({**environ, MEMBER: ""})
    limits = Limits(size, least, options.max_np, options.reset_limit, timeout,
                    heartbeat=timeout_or_inf(config.heartbeat_timeout),
                    stall_shutdown=timeout_or_inf(config.stall_shutdown_time_seconds),
                    cooldown=None if cooldown == _NEVER else cooldown, whole_host=rule == "host",
                    grace=options.grace or Limits.grace,
                    failures_without_progress=options.failures_without_progress or Limits.failures_without_progress,
                    hosts_are_fixed=not script, ends_at_reset_limit=options.horovod_compat,
                    starts_with_all=options.horovod_compat or (options.np is None and options.min_np is not None))
    return limits, slots


def _refuse(options: argparse.Namespace, environ: Mapping[str, str]) -> None:
    """Raise an error for what an elastic job cannot do."""
    if options.scaling is not None or options.sweep is not None:
        raise LaunchError("--scaling and --sweep compare jobs of fixed sizes: leave out --min-np, --max-np and "
                          "--host-discovery-script")
    if options.mpi or Config.from_environment(environ).cpu_operations == "mpi":
        what = "--mpi" if options.mpi else "HVDLITE_CPU_OPERATIONS=mpi"
        raise LaunchError(f"{what} excludes elastic training: an MPI job ends when one of its processes ends")


def _timeout_of(environ: Mapping[str, str]) -> float:
    """Return Horovod's variable for `--elastic-timeout`, or the default."""
    text = environ.get("HOROVOD_ELASTIC_TIMEOUT", "")
    try:
        return _seconds(text or "600")
    except argparse.ArgumentTypeError as error:
        raise LaunchError(f"HOROVOD_ELASTIC_TIMEOUT: {error}") from None
