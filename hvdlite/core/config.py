"""Every knob, declared once. Environment name, alias, type check, default and help all follow from its line.

Precedence: argument of `init`, then `HVDLITE_<NAME>`, then `HOROVOD_<alias>`, then the default.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from typing import Any

from hvdlite.core import launch_contract
from hvdlite.core.errors import ConfigError

KIB, MIB = 1 << 10, 1 << 20


def _positive(kind: type[int] | type[float]) -> Callable[[str], float]:
    def parse(text: str) -> float:
        value = kind(text)
        if value < 0:
            raise ValueError("must not be negative")
        return value
    return parse


def _size(text: str) -> int:
    """Parse a number of bytes, with an optional suffix K, M or G (powers of 1024)."""
    scale = {"K": KIB, "M": MIB, "G": KIB * MIB}.get(text[-1:].upper(), 1)
    value = int(text[:-1] if scale > 1 else text)
    if value < 0:
        raise ValueError("must not be negative")
    return value * scale


def _level(text: str) -> str:
    """Accept Horovod's level names; `trace` is Python's debug, `fatal` its critical."""
    name = {"TRACE": "DEBUG", "FATAL": "CRITICAL", "WARN": "WARNING"}.get(text.upper(), text.upper())
    if name not in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"):
        raise ValueError("must be trace, debug, info, warning, error or fatal")
    return name


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError("must be at least 1")
    return value


def _count_or_zero(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError("must not be negative")
    return value


def _flag(text: str) -> bool:
    value = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    if text.lower() not in value:
        raise ValueError("must be 1 or 0 (or true, false, yes, no, on, off)")
    return value[text.lower()]


def _control(text: str) -> str:
    if text not in ("auto", "unix", "tcp"):
        raise ValueError("must be auto, unix or tcp")
    return text


def knob(default: Any, parse: Callable[[str], Any], text: str, *, horovod: str | None = None) -> Any:
    """Declare a knob; `horovod` is the Horovod variable read as an alias (without its prefix)."""
    return dataclasses.field(default=default, metadata={"parse": parse, "help": text, "horovod": horovod})


@dataclasses.dataclass(frozen=True)
class Config:
    """The settings of one runtime; equal on all ranks except `log_level`."""

    fusion_threshold: int = knob(64 * MIB, _size, "largest fused response, in bytes; 0 turns fusion off",
                                 horovod="FUSION_THRESHOLD")
    bucket_size: int = knob(25 * MIB, _size, "largest learned bucket of gradients, in bytes; 0 turns learning off")
    bucket_edge: int = knob(4 * MIB, _size, "largest first and largest last bucket of a set of gradients, in bytes")
    bucket_layouts: int = knob(64, _count, "sets of gradients whose buckets are remembered at a time")
    gradient_as_bucket_view: bool = knob(True, _flag, "whether reduced gradients are views of their bucket's shared memory")
    join_divides_by_active: bool = knob(False, _flag, "whether Average divides by the ranks that have not joined, "
                                        "instead of by all")
    eager_limit: int = knob(8 * KIB, _size, "up to this many bytes a tensor travels inside its control message")
    spin_microseconds: int = knob(80, _count_or_zero, "how long the runtime thread looks for news before it sleeps, "
                                  "while the script is blocked in a wait; 0 turns that off")
    shm_slot: int = knob(4 * MIB, _size, "staging memory of one rank in the shm plane, in bytes (two are used)")
    shm_chunk: int = knob(512 * KIB, _size, "bytes reduced per NumPy call in the shm plane (one GIL release each)")
    shm_direct: int = knob(512 * KIB, _size, "up to this many bytes every rank reduces everything: one barrier less")
    control: str = knob("auto", _control, "how ranks of one host speak to rank 0: auto, unix or tcp")
    start_timeout: float = knob(60.0, _positive(float), "seconds to wait for all ranks in init()",
                                horovod="START_TIMEOUT")
    shutdown_timeout: float = knob(60.0, _positive(float), "seconds rank 0 waits in shutdown() for the others to leave")
    stall_check_time_seconds: float = knob(60.0, _positive(float),
                                           "warn when a tensor waits this long for other ranks; 0 turns it off",
                                           horovod="STALL_CHECK_TIME_SECONDS")
    heartbeat_timeout: float = knob(60.0, _positive(float), "seconds of silence after which a rank on TCP is lost")
    frame_limit: int = knob(64 * MIB, _size, "longest control message accepted, in bytes")
    log_level: str = knob("WARNING", _level, "least severe message logged", horovod="LOG_LEVEL")

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
                near = difflib.get_close_matches(variable, known, n=1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise ConfigError(f"unknown environment variable {variable}{hint}")
        values: dict[str, object] = dict(arguments)
        for name, field in fields.items():
            if name in values:
                continue
            alias = field.metadata["horovod"]
            for variable in (environment_name(name), f"HOROVOD_{alias}" if alias else ""):
                if variable in environ:
                    values[name] = _parsed(field, variable, environ[variable])
                    break
        return cls(**values)  # type: ignore[arg-type]


def environment_name(knob_name: str) -> str:
    """Return the environment variable of a knob."""
    return f"HVDLITE_{knob_name.upper()}"


def _parsed(field: dataclasses.Field[Any], variable: str, text: str) -> object:
    try:
        return field.metadata["parse"](text)
    except ValueError as error:
        raise ConfigError(f"{variable}={text!r} is not valid: {error} ({field.metadata['help']}; "
                          f"default {field.default})") from None
