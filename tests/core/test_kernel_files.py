"""Systems that refuse to make eventfds, memfds and pidfds: an old kernel, gVisor, a filter of a container."""

from __future__ import annotations

import errno
import os
import platform
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from hvdlite.control.doorbell import Doorbell
from hvdlite.core.errors import LaunchError
from hvdlite.core.kernel_files import anonymous_file
from hvdlite.core.launch_contract import NO_STACK_DUMP
from hvdlite.diagnostics.process_probe import enable_stack_dump
from hvdlite.memory.fence import Fence, fence_file
from hvdlite.memory.shared import SharedMemory
from hvdlite_runner.host.reaper import kill_all, process_table
from tests.chaos.programs import refusing
from tests.worlds import HANGS_SECONDS, HVDRUN, PYTHON_PATH, ROOT, clean_environment

CALLS = ((os, "eventfd"), (os, "memfd_create"), (os, "pidfd_open"), (signal, "pidfd_send_signal"))


def refuse(monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    def refused(*_: object) -> None:
        raise OSError(error, os.strerror(error))

    for module, name in CALLS:
        monkeypatch.setattr(module, name, refused, raising=False)


@pytest.fixture(params=["ENOSYS", "EPERM", "EACCES", "absent"])
def _refused(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param != "absent":
        refuse(monkeypatch, getattr(errno, request.param))
        return
    for module, name in CALLS:
        monkeypatch.delattr(module, name, raising=False)


@pytest.mark.usefixtures("_refused")
def test_a_doorbell_is_a_pipe() -> None:
    ours = Doorbell()
    theirs = Doorbell([os.dup(descriptor) for descriptor in ours.descriptors])
    theirs.ring()
    theirs.ring()
    assert select.select([ours], [], [], HANGS_SECONDS)[0] == [ours]
    ours.clear()
    assert select.select([ours], [], [], 0)[0] == []
    ours.close()
    theirs.close()


@pytest.mark.usefixtures("_refused")
def test_the_shared_file_is_a_temporary_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                            caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    file, fence = anonymous_file(), fence_file()
    status = os.fstat(file)
    assert not status.st_nlink and status.st_mode & 0o777 == 0o600, "no other user can open it"
    assert f"the memory that ranks share is a file in {tmp_path}" in caplog.text and not list(tmp_path.iterdir())
    memories = [SharedMemory(os.dup(file), rank, Fence(os.dup(fence))) for rank in range(2)]
    windows = [memory.window(5000, (0, 1)) for memory in memories]
    windows[0][0][...] = 7
    for memory in memories:
        memory.flush()
    assert np.all(windows[1][0] == 7) and not windows[1][1].any()
    for memory in memories:
        memory.close()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    with pytest.raises(LaunchError, match="No such file or directory; name another place with TMPDIR"):
        anonymous_file()


@pytest.mark.usefixtures("_refused")
def test_a_process_without_anonymous_files_writes_no_stacks() -> None:
    assert enable_stack_dump(signal.SIGUSR2) == NO_STACK_DUMP
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL


@pytest.mark.usefixtures("_refused")
def test_processes_are_killed_by_their_ids() -> None:
    with subprocess.Popen(["sleep", "1000"]) as sleeper:
        kill_all(process_table(), [sleeper.pid])
        assert sleeper.wait(HANGS_SECONDS) == -signal.SIGKILL


def test_other_errors_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, errno.EMFILE)
    for make in (Doorbell, anonymous_file, fence_file):
        with pytest.raises(OSError, match="Too many open files"):
            make()


@pytest.mark.skipif(platform.machine() not in refusing.NUMBERS or sys.platform != "linux", reason="no numbers of calls")
@pytest.mark.parametrize("error", [errno.ENOSYS, errno.EPERM])
def test_a_job_works_where_the_kernel_refuses_them(error: int, tmp_path: Path) -> None:
    program = Path(refusing.__file__)
    if subprocess.run([sys.executable, program, "1", "true"], capture_output=True, check=False).returncode:
        pytest.skip("this system has no seccomp")
    ended = subprocess.run([sys.executable, program, str(error), *HVDRUN, "-np", "2", sys.executable, "-m",
                            "tests.chaos.programs.reducing", "100000"],
                           env={**clean_environment(), "PYTHONPATH": PYTHON_PATH, "TMPDIR": str(tmp_path)}, cwd=ROOT,
                           capture_output=True, text=True, timeout=2 * HANGS_SECONDS, check=False)
    assert ended.returncode == 0 and ended.stdout.count("reduced") == 2, ended
    assert ended.stderr.count("the memory that ranks share is a file in") == 1 and "Traceback" not in ended.stderr, ended
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("plane", ["shm", "gloo"])
def test_a_job_works_with_what_a_mac_has(plane: str) -> None:
    path = os.pathsep.join([str(Path(__file__).parent / "macos"), PYTHON_PATH])  # with a sitecustomize
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # a short path: the names of Unix sockets are limited
        ended = subprocess.run([*HVDRUN, "-np", "2", "--cpu-operations", plane, sys.executable, "-m",
                                "tests.chaos.programs.reducing", "100000"],
                               env={**clean_environment(), "PYTHONPATH": path, "TMPDIR": folder}, cwd=ROOT,
                               capture_output=True, text=True, timeout=2 * HANGS_SECONDS, check=False)
        assert not os.listdir(folder)
    assert ended.returncode == 0 and ended.stdout.count("reduced") == 2, ended
    assert ended.stderr.count("the memory that ranks share is a file in") == 1 and "Traceback" not in ended.stderr, ended
