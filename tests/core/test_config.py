"""Knobs: from files, the environment and arguments, with their aliases and precedence."""

from __future__ import annotations

import dataclasses
import math
import re
import signal
from pathlib import Path

import pytest

from hvdlite.core.config import Config, socket_timeout, timeout_or_inf
from hvdlite.core.errors import ConfigError


def test_in_elastic_jobs_a_stall_ends_the_missing_ranks() -> None:
    def shutdown_time(**given: str) -> float:
        return Config.from_environment({"HVDLITE_MEMBER": "0", **given}).stall_shutdown_time_seconds

    assert Config.from_environment({}).stall_shutdown_time_seconds == 0 and shutdown_time() == 600
    assert shutdown_time(HVDLITE_STALL_SHUTDOWN_TIME_SECONDS="0") == 0
    assert shutdown_time(HOROVOD_STALL_SHUTDOWN_TIME_SECONDS="0") == 0
    assert shutdown_time(HVDLITE_STALL_CHECK_TIME_SECONDS="900") == 900, "not before the warning"


def test_a_config_file_by_names_and_in_horovods_sections(tmp_path: Path) -> None:
    file = tmp_path / "knobs.yaml"
    file.write_text("fusion_threshold: 2M\nshm-slot: 1M\ndeterministic: true\ntimeline: {filename: /tmp/t.json}\n"
                    "params: {fusion_threshold_mb: 7, cycle_time_ms: 3}\nstall_check: {enabled: false}\n"
                    "library_options: {gloo_timeout_seconds: 7, num_nccl_streams: 2}\n"
                    "logging: {level: info, with_timestamp: false}\n")
    environment = {"HVDLITE_CONFIG_FILE": str(file), "HVDLITE_SHM_SLOT": "3M"}
    config = Config.from_environment(environment)
    assert (config.fusion_threshold, config.shm_slot, config.deterministic) == (2 << 20, 3 << 20, True)
    assert (config.timeline, config.stall_check_time_seconds, config.log_level) == ("/tmp/t.json", 0, "INFO")
    assert config.log_hide_time and config.gloo_timeout == 7.0
    for content, told in (("fusion_treshold: 1", "unknown key fusion_treshold; did you mean fusion_threshold"),
                          ("shm_slot: big", "knobs.yaml: shm_slot='big' is not valid"), ("[1, 2", "not valid YAML"),
                          ("- 1", "must contain keys and values")):
        file.write_text(content)
        with pytest.raises(ConfigError, match=re.escape(told)):
            Config.from_environment({"HVDLITE_CONFIG_FILE": str(file)})
    with pytest.raises(ConfigError, match="cannot be read"):
        Config.from_environment({"HVDLITE_CONFIG_FILE": str(tmp_path / "none")})


@pytest.mark.parametrize(("variable", "hint"), [
    ("HVDLITE_FUSION_TRESHOLD", "; did you mean HVDLITE_FUSION_THRESHOLD?"), ("HVDLITE_NCCL_WINDOWS", ""), ("HVDLITE_", "")])
def test_an_unknown_variable_is_told_with_the_nearest_if_one_is_near(variable: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=f"^unknown environment variable {variable}{re.escape(hint)}$"):
        Config.from_environment({variable: "1"})


def test_horovods_other_ways_to_say_it() -> None:
    assert Config.from_environment({"HOROVOD_STALL_CHECK_DISABLE": "1"}).stall_check_time_seconds == 0
    assert Config.from_environment({"HOROVOD_STALL_CHECK_DISABLE": "0"}).stall_check_time_seconds == 60
    assert Config.from_environment({"HOROVOD_TIMELINE": "DYNAMIC"}).timeline == ""
    assert Config.from_environment({"HVDLITE_REPORT_SIGNAL": "SIGUSR1"}).report_signal == signal.SIGUSR1
    with pytest.raises(ConfigError, match="HOROVOD_STALL_CHECK_DISABLE='maybe'"):
        Config.from_environment({"HOROVOD_STALL_CHECK_DISABLE": "maybe"})
    with pytest.raises(ConfigError, match="shutdown time, 5 s, must not be less"):
        Config.from_environment({"HVDLITE_STALL_SHUTDOWN_TIME_SECONDS": "5"})
    for text in ("USR9", "9999", "x y"):
        with pytest.raises(ConfigError, match="name or the number of a signal"):
            Config.from_environment({"HVDLITE_REPORT_SIGNAL": text})


def test_knobs_are_read_with_their_aliases_and_precedence() -> None:
    config = Config.from_environment({"HOROVOD_FUSION_THRESHOLD": "7", "HVDLITE_SHM_SLOT": "2M", "HOME": "/"})
    assert (config.fusion_threshold, config.shm_slot) == (7, 2 << 20)
    both = {"HOROVOD_FUSION_THRESHOLD": "7", "HVDLITE_FUSION_THRESHOLD": "8"}
    assert Config.from_environment(both).fusion_threshold == 8
    assert Config.from_environment(both, fusion_threshold=9).fusion_threshold == 9
    assert Config.from_environment({"HVDLITE_LOG_LEVEL": "trace"}).log_level == "DEBUG"
    for name, value in (("FUSION_THRESHOLD", "-1"), ("LOG_LEVEL", "loud"), ("CONTROL", "smoke"), ("SHM_SLOT", ""),
                        ("SHM_CHUNK", "3Q"), ("BUCKET_LAYOUTS", "0"), ("FRAME_LIMIT", "65535"), ("SHM_CHUNK", "4095"),
                        ("AGENT_TIMEOUT", "2.9"), ("AGENT_TIMEOUT", "-1")):
        with pytest.raises(ConfigError, match=f"HVDLITE_{name}"):
            Config.from_environment({f"HVDLITE_{name}": value})


def test_of_every_knob_in_bytes_0_has_a_meaning_or_is_refused() -> None:
    sizes = [field for field in dataclasses.fields(Config) if "bytes" in field.metadata["help"]]
    assert len(sizes) == 9
    for field in sizes:
        variable = f"HVDLITE_{field.name.upper()}"
        with pytest.raises(ConfigError, match=f"{variable}='-1' is not valid: must be a number of bytes"):
            Config.from_environment({variable: "-1"})
        if re.search(r"\b0 (turns|is)\b", field.metadata["help"]):
            assert getattr(Config.from_environment({variable: "0"}), field.name) == 0
        else:
            with pytest.raises(ConfigError, match=f"{variable}='0' is not valid: must be at least [0-9]+ bytes"):
                Config.from_environment({variable: "0"})


def test_of_every_knob_in_seconds_0_is_never() -> None:
    seconds = [field for field in dataclasses.fields(Config) if isinstance(field.default, float)]
    assert len(seconds) == 8 and all("; 0 is never" in field.metadata["help"] for field in seconds)
    assert timeout_or_inf(0.0) == math.inf and timeout_or_inf(1.5) == 1.5
    assert socket_timeout(math.inf) is None and socket_timeout(1.5) == 1.5


@pytest.mark.parametrize(("content", "told"), [
    (b"\xff\xfe: 1\n", "is not UTF-8 (byte 0)"),
    (b"a: &a\n  b: *a\n", "a.b must be one value, not a section"),
    (b"a: " + b"[" * 5000, "is nested too deeply"),
    (b"a: &a [x, x]\nfusion-threshold: [*a, *a]\n", "a must be one value, not a list"),
    (b"a: 2026-99-99\n", "is not valid YAML"),
    (b"1: 2\n", "has an unknown key 1"),
])
def test_a_config_file_that_is_hostile_is_one_line(tmp_path: Path, content: bytes, told: str) -> None:
    (tmp_path / "knobs.yaml").write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        Config.from_environment({}, config_file=str(tmp_path / "knobs.yaml"))
    assert told in str(caught.value)


@pytest.mark.parametrize(("text", "seconds"), [("inf", 0.0), ("1e300", 0.0), ("1e3", 1000.0), ("nan", None), ("-inf", None)])
def test_times_that_no_clock_reaches(text: str, seconds: float | None) -> None:
    if seconds is None:
        with pytest.raises(ConfigError, match="must be a number of seconds from 0"):
            Config.from_environment({"HVDLITE_START_TIMEOUT": text})
    else:
        assert Config.from_environment({"HVDLITE_START_TIMEOUT": text}).start_timeout == seconds
