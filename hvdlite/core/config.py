"""Every knob, declared once: its environment variable, alias, type check, default and help come from one line.

Precedence: argument of `init`, then `HVDLITE_<NAME>`, then `HOROVOD_<alias>`, then the config file, then the default.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import signal
from collections.abc import Callable, Mapping
from typing import Any, Final

from hvdlite.core import config_file, launch_contract
from hvdlite.core.errors import ConfigError

KIB, MIB = 1 << 10, 1 << 20
MOST_SECONDS: Final = 1e9
"""Thirty years: longer waits are no different from an infinite one, and system calls refuse them."""
_MAX_SOCKET_TIMEOUT: Final = 2_000_000.0
"""In seconds; `socket.settimeout` stores milliseconds in 31 bits."""
_ELASTIC_STALL_SHUTDOWN: Final = 600.0
"""In seconds: the default in elastic jobs."""


def _at_least(least: int, kind: type[int] | type[float] = int) -> Callable[[str], float]:
    def parse(text: str) -> float:
        value = kind(text)
        if value < least:
            raise ValueError(f"must be at least {least}" if least else "must not be negative")
        return value
    return parse


def _seconds(text: str) -> float:
    """Parse a knob in seconds; 0 means never (see `timeout_or_inf`), and so does what no clock reaches."""
    value = float(text)
    if not value >= 0:  # NaN is not
        raise ValueError("must be a number of seconds from 0")
    return value if value < MOST_SECONDS else 0.0


def _silence(text: str) -> float:
    """Parse the seconds after which a link that is pinged every second counts as cut; 0 is never."""
    value = _seconds(text)
    if 0 < value < 3:
        raise ValueError("must be at least 3 seconds, or 0")
    return value


def _one_of(*words: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.lower() not in words:
            raise ValueError(f"must be {', '.join(words[:-1])} or {words[-1]}")
        return text.lower()
    return parse


def _text(text: str) -> str:
    return text


def _file(text: str) -> str:
    """Like `_text`; the value is a file name."""
    return text


def _size(text: str) -> int:
    """Parse a number of bytes, with an optional suffix K, M or G (powers of 1024)."""
    scale = {"K": KIB, "M": MIB, "G": KIB * MIB}.get(text[-1:].upper(), 1)
    number = (text[:-1] if scale > 1 else text).strip()
    if not number.isdecimal():
        raise ValueError("must be a number of bytes, optionally followed by K, M or G")
    return int(number) * scale


def _size_from(least: int) -> Callable[[str], int]:
    """Return a parser like `_size`, for a number of bytes below which nothing works."""
    def parse(text: str) -> int:
        value = _size(text)
        if value < least:
            raise ValueError(f"must be at least {least} bytes")
        return value
    return parse


def _level(text: str) -> str:
    """Parse Horovod's level names; `trace` is Python's debug, `fatal` is critical."""
    name = {"TRACE": "DEBUG", "FATAL": "CRITICAL", "WARN": "WARNING"}.get(text.upper(), text.upper())
    if name not in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"):
        raise ValueError("must be trace, debug, info, warning, error or fatal")
    return name


def _flag(text: str) -> bool:
    value = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    if text.lower() not in value:
        raise ValueError("must be 1 or 0 (or true, false, yes, no, on, off)")
    return value[text.lower()]


def _signal(text: str) -> int:
    """Parse a signal's name or number; "", none and 0 mean no signal."""
    if text.lower() in ("", "none", "0"):
        return 0
    try:
        signum = int(text) if text.isdigit() else signal.Signals[f"SIG{text.upper().removeprefix('SIG')}"].value
    except KeyError:
        signum = -1
    if signum not in signal.valid_signals():
        raise ValueError("must be the name or the number of a signal")
    return signum


Translate = Callable[[str], str | None]
"""Converts a Horovod variable's value to the knob's value; None if it does not determine the knob."""


def knob(default: Any, parse: Callable[[str], Any], text: str, *, tunable: tuple[int, int] | None = None,
         must_match: bool = False, **horovod: Translate) -> Any:
    """Declare a knob.

    Args:
        must_match: whether the knob must be equal on all ranks; this is checked in the rendezvous.
        tunable: the bounds between which autotune searches, on a logarithmic scale.
        horovod: Horovod variables (without prefix) that are aliases, in order of precedence.
    """
    return dataclasses.field(default=default, metadata={"parse": parse, "help": text, "tunable": tunable,
                                                        "must_match": must_match, "horovod": horovod})


def _same(text: str) -> str:
    return text


_TRACEBACK_SIGNAL = signal.SIGRTMAX - 3 if hasattr(signal, "SIGRTMAX") else 0  # no known user


@dataclasses.dataclass(frozen=True)
class Config:
    """The settings of one runtime. Ranks compare those with `must_match` when they connect; set the others alike, too."""

    fusion_threshold: int = knob(
        64 * MIB, _size, "largest total size of tensors that are reduced as one, in bytes; 0 turns fusion off",
        tunable=(MIB, 256 * MIB), FUSION_THRESHOLD=_same)
    bucket_size: int = knob(
        25 * MIB, _size, "largest learned bucket of gradients, in bytes; 0 turns learning off; where both are unset, a set "
        "on the host is one bucket where ranks leave no core free", tunable=(MIB, 128 * MIB))
    bucket_edge: int = knob(
        4 * MIB, _size, "largest size of the first and of the last bucket of a gradient set, in bytes; 0 is one gradient",
        tunable=(64 * KIB, 32 * MIB))
    bucket_layouts: int = knob(
        64, _at_least(1), "number of gradient sets whose buckets are kept; the one that rank 0 released least recently goes")
    gradient_as_bucket_view: bool = knob(
        True, _flag, "make reduced gradients views of their bucket's memory (as in DDP); off: copy them")
    step_parts: bool = knob(
        False, _flag, "count the parts of a training step with torch; hvdrun --profile turns it on, and shows them")
    wait_in: str = knob(
        "backward", _one_of("backward", "step"), "where ranks wait for reduced gradients: backward (gradients are final "
        "when backward() returns) or step (as in Horovod; reading a gradient also waits); the default of "
        "DistributedOptimizer(wait_in=)")
    join_divides_by_active: bool = knob(
        False, _flag, "make Average divide by the number of ranks that have not joined, instead of all ranks")
    eager_limit: int = knob(8 * KIB, _size, "tensors of up to this many bytes travel inside their control message, and "
        "between hosts blocking allreduces of up to 256K / N with N ranks on other hosts than rank 0's; 0 turns this off")
    mailbox_limit: int = knob(
        4 * MIB, _size, "blocking collectives of up to this many bytes that repeat go through mailboxes in shared memory; "
        "4M at most, with N ranks 1M / N from 3 ranks on; 0 turns mailboxes off")
    spin_microseconds: int = knob(
        80, _at_least(0), "microseconds for which the background thread polls before it sleeps, while the script is "
        "blocked in a wait, and a script's thread that blocks in a mailbox or a group, as long as that helps; 0 turns "
        "polling off")
    shm_slot: int = knob(
        4 * MIB, _size, "size of one staging slot in the shm plane, in bytes, rounded up to a multiple of 64K (0 is one); a "
        "rank has three", must_match=True)
    shm_chunk: int = knob(
        512 * KIB, _size_from(4 * KIB), "bytes reduced per NumPy call; each call releases the GIL once",
        tunable=(64 * KIB, 4 * MIB))
    shm_direct: int = knob(
        512 * KIB, _size, "tensors of up to this many bytes are reduced by every rank in full, which saves a barrier; 0 "
        "turns this off",
        must_match=True,
        tunable=(16 * KIB, 4 * MIB))
    control: str = knob(
        "auto", _one_of("auto", "unix", "tcp"),
        "how ranks connect to rank 0: unix (one host only), tcp (every rank), or auto (Unix sockets on "
        "a host, and one TCP connection from each other host)")
    cpu_operations: str = knob(
        "auto", _one_of("auto", "shm", "mpi", "gloo", "hierarchical"),
        "the plane for tensors in host memory: shm, mpi, gloo, hierarchical (shm inside hosts, mpi "
        "or gloo between them), or auto; HVDLITE_LOG_LEVEL=info logs the choice and its reason", must_match=True,
        CPU_OPERATIONS=_same)
    gloo_interface: str = knob(
        "", _text, "name or IP address of the network interface that Gloo uses; by default the one that leads to rank 0",
        GLOO_IFACE=_same)
    gloo_timeout: float = knob(
        300.0, _seconds, "seconds after which an operation of Gloo fails although all ranks are alive; 0 is never",
        GLOO_TIMEOUT_SECONDS=_same)
    shared_gpu: bool = knob(
        False, _flag, "allow several ranks on one GPU, for tests; NCCL before 2.30 also needs a different NCCL_HOSTID for "
        "each rank")
    start_timeout: float = knob(
        60.0, _seconds, "seconds after which init() fails if a rank is missing; 0 is never", START_TIMEOUT=_same)
    shutdown_timeout: float = knob(
        60.0, _seconds, "seconds for which rank 0, and the leader of a host for its ranks, wait in shutdown() for other "
        "ranks to leave; 0 is never")
    stall_check_time_seconds: float = knob(
        60.0, _seconds, "report a tensor that has waited for other ranks for this many seconds; 0 is never",
        STALL_CHECK_DISABLE=lambda text: "0" if _flag(text) else None, STALL_CHECK_TIME_SECONDS=_same)
    stall_shutdown_time_seconds: float = knob(
        0.0, _seconds, "end the job, or in an elastic job the missing ranks, when a tensor has waited for other ranks for "
        "this many seconds, with the stall report as the error; 0 is never; elastic jobs have 600 if it is not set",
        STALL_SHUTDOWN_TIME_SECONDS=_same)
    stall_report_file: str = knob("", _file, "file to which rank 0 also writes each stall report, as JSON")
    silence_check_seconds: float = knob(
        3.0, _seconds, "probe a rank for which others have waited for this many seconds; 0 is never")
    report_signal: int = knob(0, _signal, "signal on which a rank asks rank 0 for a stall report; none by default")
    traceback_signal: int = knob(
        _TRACEBACK_SIGNAL, _signal, "signal that rank 0 sends to a rank that does not answer, to get its stacks; 0 turns "
        "it off")
    timeline: str = knob("", _file, "file for a timeline of all ranks, in Chrome's trace format",
                         TIMELINE=lambda text: None if text.upper() == "DYNAMIC" else text)
    timeline_mark_cycles: bool = knob(
        False, _flag, "also show in the timeline when decisions are applied", TIMELINE_MARK_CYCLES=_same)
    deterministic: bool = knob(
        False, _flag, "make a repeated run give the same bits on every plane: fusion and buckets depend on names, not on "
        "the times at which tensors become ready")
    replica_check_steps: int = knob(
        0, _at_least(0), "compare the parameters of all ranks after every this many steps of an optimizer; 0: only a few "
        "values of each, after the first step, as a warning")
    autotune: bool = knob(
        False, _flag, "search for the best fusion threshold, bucket sizes and sizes of the shm plane while training",
        AUTOTUNE=_same)
    autotune_log_file: str = knob(
        "", _file, "file to which rank 0 writes the settings it has tried, as CSV", AUTOTUNE_LOG=_same)
    autotune_warmup_samples: int = knob(
        3, _at_least(0), "number of samples at the beginning that autotune ignores", AUTOTUNE_WARMUP_SAMPLES=_same)
    autotune_steps_per_sample: int = knob(10, _at_least(1), "training steps per sample", AUTOTUNE_STEPS_PER_SAMPLE=_same)
    autotune_max_samples: int = knob(
        20, _at_least(1), "number of settings that autotune tries before it keeps the best one",
        AUTOTUNE_BAYES_OPT_MAX_SAMPLES=_same)
    heartbeat_timeout: float = knob(
        60.0, _seconds, "seconds of silence after which a rank is lost, if others wait for it or it is connected by "
        "TCP; 0 is never")
    agent_timeout: float = knob(
        30.0, _silence, "seconds of silence after which hvdrun and its agent on another host count each other as lost, and "
        "the ranks there are ended, from 3; 0 is never")
    allow_insecure_store: bool = knob(
        False, _flag, "let groups of `torch.distributed` on several hosts without a job's key send one through torch's "
        "store: whoever can connect to the store can then run code in the ranks")
    frame_limit: int = knob(64 * MIB, _size_from(64 * KIB), "longest control message that is accepted, in bytes")
    log_level: str = knob("WARNING", _level, "lowest level of messages that are logged", LOG_LEVEL=_same)
    full_tracebacks: bool = knob(
        False, _flag, "print hvdlite's own frames in tracebacks, and the traceback of every rank; hvdrun --verbose sets it")
    log_hide_time: bool = knob(False, _flag, "leave the time out of logged lines", LOG_HIDE_TIME=_same)
    config_file: str = knob("", _file, "YAML file with knobs by name, or in the sections of Horovod's config file")

    @classmethod
    def from_environment(cls, environ: Mapping[str, str], **arguments: object) -> Config:
        """Build the settings from `environ`; `arguments` win.

        Raises:
            ConfigError: for an unknown `HVDLITE_*` variable (naming the nearest) or an invalid value.
        """
        fields = {field.name: field for field in dataclasses.fields(cls)}
        known = {environment_name(name) for name in fields} | launch_contract.CONTRACT_VARIABLES
        for variable in environ:
            if variable.startswith("HVDLITE_") and variable not in known:
                knobs = [name.removeprefix("HVDLITE_") for name in known]  # the prefix would make all of them alike
                near = difflib.get_close_matches(variable.removeprefix("HVDLITE_"), knobs, n=1)
                hint = f"; did you mean HVDLITE_{near[0]}?" if near else ""
                raise ConfigError(f"unknown environment variable {variable}{hint}")
        values: dict[str, object] = dict(arguments)
        for name, field in fields.items():
            if name not in values:
                found = _from_environ(field, environ)
                if found is not None:
                    values[name] = _parse(field, *found)
        path = str(values.get("config_file", ""))
        for name, (key, text) in config_file.read(path, list(fields)).items() if path else ():
            if name not in values:
                values[name] = _parse(fields[name], f"{path}: {key}", text)
        config = cls(**values)  # type: ignore[arg-type]
        if launch_contract.MEMBER in environ and "stall_shutdown_time_seconds" not in values:
            config = dataclasses.replace(
                config, stall_shutdown_time_seconds=max(_ELASTIC_STALL_SHUTDOWN, config.stall_check_time_seconds))
        if 0 < config.stall_shutdown_time_seconds < config.stall_check_time_seconds:
            raise ConfigError(f"the stall shutdown time, {config.stall_shutdown_time_seconds:g} s, must not be less than "
                              f"that of the warning, {config.stall_check_time_seconds:g} s")
        return config


def timeout_or_inf(seconds: float) -> float:
    """Return a timeout in seconds: the value of a knob, or infinity for 0."""
    return seconds or math.inf


def socket_timeout(seconds: float) -> float | None:
    """Return a timeout for sockets: None (no timeout) if it exceeds their range."""
    return seconds if seconds < _MAX_SOCKET_TIMEOUT else None


def poll_timeout(seconds: float) -> int | None:
    """Return a timeout for `poll`, in milliseconds: None (no timeout) if it exceeds its range."""
    return math.ceil(1000 * seconds) if seconds < _MAX_SOCKET_TIMEOUT else None


def tunable(config: Config) -> dict[str, tuple[int, int]]:
    """Return the knobs that autotune may change, with their bounds: those that have their default values."""
    return {field.name: field.metadata["tunable"] for field in dataclasses.fields(config)
            if field.metadata["tunable"] and getattr(config, field.name) == field.default}


def matching_knobs(config: Config) -> tuple[tuple[str, str], ...]:
    """Return the environment variables and values of the knobs that must be equal on all ranks."""
    return tuple((environment_name(field.name), str(getattr(config, field.name))) for field in dataclasses.fields(config)
                 if field.metadata["must_match"])


def file_knobs() -> list[str]:
    """Return the names of the knobs whose values are file names."""
    return [field.name for field in dataclasses.fields(Config) if field.metadata["parse"] is _file]


def environment_name(knob_name: str) -> str:
    """Return the environment variable of a knob."""
    return f"HVDLITE_{knob_name.upper()}"


def _from_environ(field: dataclasses.Field[Any], environ: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the environment variable that determines a knob, and its value; None if there is none."""
    own = environment_name(field.name)
    if own in environ:
        return own, environ[own]
    for alias, translate in field.metadata["horovod"].items():
        variable = f"HOROVOD_{alias}"
        try:
            value = translate(environ[variable]) if variable in environ else None
        except ValueError as error:
            raise ConfigError(f"{variable}={environ[variable]!r} is not valid: {error}") from None
        if value is not None:
            return variable, value
    return None


def _parse(field: dataclasses.Field[Any], variable: str, text: str) -> object:
    try:
        return field.metadata["parse"](text)
    except ValueError as error:
        raise ConfigError(f"{variable}={text!r} is not valid: {error} ({field.metadata['help']}; "
                          f"default {field.default!r})") from None
