"""Where too few processes or descriptors are allowed, hvdrun says so in a line; its own threads run before the ranks."""

from __future__ import annotations

import errno
import os
import re
import resource
import selectors
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest

from hvdlite.core.errors import LaunchError
from hvdlite.core.world import World
from hvdlite_runner.agents.remote_agent import Pinger
from hvdlite_runner.host.worker_group import WorkerGroup
from hvdlite_runner.messages import Event, ProcessStart, Start, StartRefused
from hvdlite_runner.output.streams import Streams
from tests.worlds import HANGS_SECONDS, HVDRUN, PYTHON_PATH, clean_environment

NO_THREADS = r"cannot start .*thread.*`ulimit -u` \(RLIMIT_NPROC.*pids.max"
NO_PROCESSES = r"cannot start the process .*`ulimit -u` \(RLIMIT_NPROC.*pids.max"


def no_process(*arguments: Any, **options: Any) -> None:
    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))


def no_thread(self: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_no_thread_for_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Streams(lambda is_overloaded: None, lambda target: None)
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    with selectors.DefaultSelector() as selector, pytest.raises(LaunchError, match=NO_THREADS):
        streams.watch(selector)
    with pytest.raises(LaunchError, match=NO_THREADS):
        Pinger()


def test_output_needs_no_thread_once_the_ranks_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with selectors.DefaultSelector() as selector, open(tmp_path / "out", "wb") as file:
        streams = Streams(lambda is_overloaded: None, lambda target: None, file.fileno(), file.fileno())
        streams.watch(selector)
        monkeypatch.setattr(threading.Thread, "start", no_thread)
        streams.write("stdout", b"line")
        assert streams.flush(10.0, lambda: False)
        streams.close()
    assert (tmp_path / "out").read_bytes() == b"line"


def test_no_process_for_the_reaper_or_for_a_rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    told: list[Event] = []
    with selectors.DefaultSelector() as selector:
        group = WorkerGroup(selector, told.append, dict(os.environ))
        with monkeypatch.context() as full:
            full.setattr(subprocess, "Popen", no_process)
            with pytest.raises(LaunchError, match=NO_PROCESSES):
                group.prepare()
        assert not list(tmp_path.iterdir()), "its directory"
        group.prepare()
        try:
            with monkeypatch.context() as full:
                full.setattr(subprocess, "Popen", no_process)
                group.obey(Start([ProcessStart(0, World(), {})], [b"true"], {}))
        finally:
            group.end()
    (refused,) = told
    assert isinstance(refused, StartRefused) and refused.code == 126
    assert re.match(NO_PROCESSES, refused.reason), refused.reason


@pytest.mark.parametrize("limit", [7, 9, 11, 13, 15, 18])
@pytest.mark.parametrize("flags", [[], ["--min-np", "1"]], ids=["fixed", "elastic"])
def test_too_few_descriptors_for_hvdrun_itself(flags: list[str], limit: int) -> None:
    ended = subprocess.run([*HVDRUN, "-np", "2", *flags, "true"], capture_output=True, text=True, check=False,
                           env={**clean_environment(), "PYTHONPATH": PYTHON_PATH}, timeout=HANGS_SECONDS,
                           preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit)))
    assert ended.returncode in (2, 126) and "Traceback" not in ended.stderr, ended.stderr
    assert re.search(r"hvdrun: .* needs \d+ more file descriptors, .*the hard limit is", ended.stderr), ended.stderr
