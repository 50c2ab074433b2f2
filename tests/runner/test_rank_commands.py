"""A rank's environment and command."""

from __future__ import annotations

import errno
import sys
from pathlib import Path

import pytest

from hvdlite.core.world import World
from hvdlite_runner.host.commands import CommandError, check_input, rank_environment, refused, resolve_command

PATH = f"/usr/bin:/bin:{Path(sys.executable).parent}"


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
                                (["missing.py"], 127, "the script 'missing.py' does not exist"),
                                (["B=2", "python"], 127, "-x once for each variable, -x B=2"),
                                (["python a.py"], 127, "do not quote a command with its arguments: python a.py"),
                                ([str(tmp_path)], 126, "is a directory"),
                                (["python3", "missing.py"], 127, "missing.py")):
        with pytest.raises(CommandError, match=told) as caught:
            resolve_command(command, PATH)
        assert caught.value.code == code and "\n" not in str(caught.value)
    without_interpreter = OSError(errno.ENOEXEC, "Exec format error")
    assert str(refused(["./a.py"], without_interpreter)).endswith("start it with python: python ./a.py")
    assert str(refused(["./a"], without_interpreter)).endswith("name an interpreter (#!/bin/sh)?")


def test_an_executable_script_is_run_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("#!/usr/bin/env python3")
    (tmp_path / "train.py").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    assert resolve_command(["train.py", "--fast"], PATH) == ["./train.py", "--fast"]
    assert resolve_command(["./train.py"], PATH) == ["./train.py"]
    assert resolve_command(["sh", "-c", "true"], PATH) == ["sh", "-c", "true"]
    (tmp_path / "plain.py").write_text("")
    assert resolve_command(["plain.py", "--fast"], PATH) == [sys.executable, "plain.py", "--fast"]


def test_torch_finds_the_ranks() -> None:
    settings = {"MASTER_ADDR": "h", "MASTER_PORT": "1"}
    coordinates = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    world = World(1, 2, 0, 1)
    assert rank_environment(world, "/job", {}, settings).items() >= {**settings, **coordinates}.items()
    assert not rank_environment(world, "/job", {}, {}).keys() & coordinates.keys(), "an elastic job has other ranks later"
    users = {"RANK": "7", "LOCAL_RANK": "5", "WORLD_SIZE": "9"}  # of a pod, say
    assert rank_environment(world, "/job", users, settings).items() >= {**settings, **coordinates}.items()
    in_a_rank = {**users, "HVDLITE_RANK": "7", "MASTER_PORT": "2"}
    assert rank_environment(world, "/job", in_a_rank, settings).items() >= {**settings, **coordinates}.items()
    assert not rank_environment(world, "/job", in_a_rank, {}).keys() & coordinates.keys()


def test_a_python_that_would_read_its_program_from_standard_input_is_refused(tmp_path: Path) -> None:
    python = sys.executable
    for words in ((), ("-",), ("-u", "-"), ("-W", "error", "-X", "dev"), ("-", "--fast"), ("/dev/stdin",)):
        for before in ((), ("env", "A=1"), ("/usr/bin/env",)):
            with pytest.raises(CommandError, match="standard input, and ranks have none") as caught:
                check_input([*before, python, *words])
            assert caught.value.code == 126
    (tmp_path / "train.py").touch()
    for words in (("-c", "pass"), ("-m", "site"), ("-um", "site"), ("-V",), ("--version",),
                  (str(tmp_path / "train.py"), "-"), ("-W", "error", str(tmp_path / "train.py"))):
        check_input([python, *words])
        check_input(["env", "A=1", python, *words])
    check_input(["env"])
