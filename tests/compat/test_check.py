"""`hvdrun --horovod-check`: what is different for a script, line by line, without running it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compat.programs import checking
from tests.tf.support import ENVIRONMENT, imported
from tests.worlds import HVDRUN, PYTHON_PATH, TORCH, processes

pytest.importorskip("torch")
needs_tensorflow = pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed")


def test_names_arguments_and_variables_are_looked_up() -> None:
    processes(1, checking.names_arguments_and_variables_are_looked_up, imported=TORCH)


def test_names_mean_what_their_scope_says() -> None:
    processes(1, checking.names_mean_what_their_scope_says, imported=TORCH)


def test_conditions_that_ask_for_a_name_guard_it() -> None:
    processes(1, checking.conditions_that_ask_for_a_name_guard_it, imported=TORCH)


def test_methods_of_classes_need_no_instance() -> None:
    processes(1, checking.methods_of_classes_need_no_instance, imported=TORCH)


@needs_tensorflow
def test_what_newer_frameworks_lack_is_looked_up() -> None:
    processes(1, checking.what_newer_frameworks_lack_is_looked_up, imported=imported("tensorflow"), environment=ENVIRONMENT)


@needs_tensorflow
def test_scripts_that_run_are_said_to_run() -> None:
    processes(1, checking.scripts_that_run_are_said_to_run, imported=imported("tensorflow"), environment=ENVIRONMENT)


@needs_tensorflow
def test_every_name_with_a_difference_exists() -> None:
    processes(1, checking.every_name_with_a_difference_exists, imported=imported("tensorflow"), environment=ENVIRONMENT)


def test_frameworks_that_are_not_installed_are_named() -> None:
    processes(1, checking.frameworks_that_are_not_installed_are_named)


def test_the_command_reads_scripts_and_does_not_run_them(tmp_path: Path) -> None:
    good, bad, broken = tmp_path / "good.py", tmp_path / "bad.py", tmp_path / "broken.py"
    good.write_text("import horovod.torch as hvd\nraise SystemExit('was run')\n")
    bad.write_text("import horovod.torch as hvd\nhvd.no_such_name()\n")
    broken.write_text("print 'Python 2'\n")

    def checked(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*HVDRUN, "--horovod-check", *command], capture_output=True, text=True,
                              env={**os.environ, "PYTHONPATH": PYTHON_PATH})
    ended = checked("-np", "2", "--cycle-time-ms", "3", sys.executable, str(good), "--lr", "3")
    assert (ended.returncode, ended.stdout) == (0, f"{good}: no difference found\n"), ended
    assert "--cycle-time-ms does nothing here" in ended.stderr
    ended = checked(str(good), str(bad))
    assert ended.returncode == 1 and f"{bad}:2: horovod.torch.no_such_name fails: " in ended.stdout, ended
    ended = checked(str(broken))
    assert ended.returncode == 2 and f"{broken} cannot be read: " in ended.stderr and "Traceback" not in ended.stderr, ended
    assert checked("train").returncode == 2
    deep = tmp_path / "deep.py"
    deep.write_text("if x == 0:\n    y = 0\n" + 3000 * "elif x == 1:\n    y = 1\n")
    ended = checked(str(deep), str(broken), str(good))
    assert ended.returncode == 2 and ended.stdout == f"{good}: no difference found\n", ended
    assert [line.partition(" ")[2].partition(":")[0] for line in ended.stderr.splitlines()] == [
        f"{deep} is not checked", f"{broken} cannot be read"], ended
