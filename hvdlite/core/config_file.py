"""Knobs from a YAML file: `name: value`, or in the sections of Horovod's config file."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hvdlite.core.errors import ConfigError

_log = logging.getLogger("hvdlite")

HOROVOD_KEYS: dict[str, tuple[str, str]] = {
    "params.fusion_threshold_mb": ("fusion_threshold", "{}M"),
    "timeline.filename": ("timeline", "{}"),
    "timeline.mark_cycles": ("timeline_mark_cycles", "{}"),
    "stall_check.warning_time_seconds": ("stall_check_time_seconds", "{}"),
    "stall_check.shutdown_time_seconds": ("stall_shutdown_time_seconds", "{}"),
    "logging.level": ("log_level", "{}"),
    "autotune.enabled": ("autotune", "{}"),
    "autotune.log_file": ("autotune_log_file", "{}"),
    "autotune.warmup_samples": ("autotune_warmup_samples", "{}"),
    "autotune.steps_per_sample": ("autotune_steps_per_sample", "{}"),
    "autotune.bayes_opt_max_samples": ("autotune_max_samples", "{}"),
    "library_options.gloo_timeout_seconds": ("gloo_timeout", "{}"),
}
"""Horovod's keys for knobs: the knob, and the format of its value."""
MEANINGLESS = frozenset({
    "params.cycle_time_ms", "params.cache_capacity", "params.hierarchical_allreduce", "params.hierarchical_allgather",
    "params.torus_allreduce", "autotune.gaussian_process_noise", "library_options.mpi_threads_disable",
    "library_options.num_nccl_streams", "library_options.thread_affinity", "controller",
})
"""Horovod's keys without effect: there are no cycles, no response cache, and no such choices."""


def read(path: str, knobs: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Return the knobs of a file: for each knob, its key in the file and its value as text.

    Raises:
        ConfigError: if the file cannot be read or has an unknown key (with the most similar key).
    """
    import yaml  # most jobs have no file

    try:
        with open(path, encoding="utf-8") as file:
            content = yaml.safe_load(file)
    except OSError as error:
        raise ConfigError(f"the config file {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"the config file {path} is not UTF-8 (byte {error.start})") from None
    except RecursionError:
        raise ConfigError(f"the config file {path} is nested too deeply") from None
    except (yaml.YAMLError, ValueError) as error:  # a date that does not exist, for instance
        raise ConfigError(f"the config file {path} is not valid YAML: {error}") from None
    if content is not None and not isinstance(content, Mapping):
        raise ConfigError(f"the config file {path} must contain keys and values, not a {type(content).__name__}")
    values: dict[str, tuple[str, str]] = {}
    for key, value in _flat(content or {}, path):
        if isinstance(value, (list, dict, set)):
            raise ConfigError(f"the config file {path}: {key} must be one value, not a {type(value).__name__}")
        text = {True: "1", False: "0", None: ""}.get(value) if isinstance(value, bool) or value is None else str(value)
        assert text is not None
        name = key.replace("-", "_")
        if name in knobs:
            values[name] = (key, text)
        elif name == "stall_check.enabled":
            if text == "0":
                values["stall_check_time_seconds"] = (key, "0")
        elif name == "logging.with_timestamp":
            values["log_hide_time"] = (key, "0" if text == "1" else "1")
        elif name in HOROVOD_KEYS:
            knob, form = HOROVOD_KEYS[name]
            values.setdefault(knob, (key, form.format(text)))
        elif name in MEANINGLESS:
            _log.info("%s: %s has no effect in hvdlite and is ignored", path, key)
        else:
            near = difflib.get_close_matches(name, [*knobs, *HOROVOD_KEYS], n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"the config file {path} has an unknown key {key}{hint}")
    return values


def _flat(content: Mapping[Any, Any], path: str) -> Iterator[tuple[str, Any]]:
    """Yield (key, value) and (section.key, value) of a file: sections are not nested.

    Raises:
        ConfigError: for a section in a section, which may be itself (a YAML alias).
    """
    for section, values in content.items():
        if not isinstance(values, Mapping):
            yield str(section), values
            continue
        for key, value in values.items():
            if isinstance(value, Mapping):
                raise ConfigError(f"the config file {path}: {section}.{key} must be one value, not a section")
            yield f"{section}.{key}", value
