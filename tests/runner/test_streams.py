"""Readers of hvdrun's output that are slow, gone or full, on pipes and terminals of this process."""

from __future__ import annotations

import os
import select
import selectors
import termios
import threading
import time
import tty
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvdlite.core.errors import LaunchError
from hvdlite.core.launch_contract import OUTPUT_LOST
from hvdlite_runner.messages import Output
from hvdlite_runner.output.console import OutputSettings
from hvdlite_runner.output.job_output import JobOutput, ProgressObserver
from hvdlite_runner.output.streams import FULL, OutputTarget, Streams
from tests.worlds import HANGS_SECONDS


class Owner:
    """The owner of streams to two descriptors: it collects what they tell."""

    def __init__(self, stdout: int, stderr: int) -> None:
        self.loads: list[bool] = []
        self.failures: list[OutputTarget] = []
        self.streams = Streams(self.loads.append, self.failures.append, stdout, stderr)
        self.selector = selectors.DefaultSelector()
        self.streams.watch(self.selector)

    def wait_for_event(self) -> None:
        """Wait until the owner's loop wakes up, and handle what has happened."""
        ready = self.selector.select(HANGS_SECONDS)
        assert ready, "nothing has happened"
        ready[0][0].data()


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    yield reader, writer
    for descriptor in (reader, writer):
        try:
            os.close(descriptor)
        except OSError:
            pass  # the test has closed it


def drain(reader: int, size: int) -> bytes:
    """Read this many bytes."""
    content = bytearray()
    while len(content) < size:
        assert select.select([reader], [], [], HANGS_SECONDS)[0], "nothing more comes"
        content += os.read(reader, 1 << 16)
    return bytes(content)


@pytest.mark.parametrize("blocking", [True, False])
def test_a_slow_reader_gets_everything_and_stops_the_reading_from_the_ranks(pipe: tuple[int, int], blocking: bool) -> None:
    reader, writer = pipe
    os.set_blocking(writer, blocking)
    owner = Owner(writer, writer)
    piece = b"".join(b"line %d\n" % number for number in range(9000))
    count = 0
    while not owner.loads:
        owner.streams.write("stdout", piece)
        count += 1
    assert owner.loads == [True] and len(piece) * count > FULL, "the writer does not wait"
    assert drain(reader, len(piece) * count) == piece * count
    owner.wait_for_event()
    assert owner.loads == [True, False]
    assert owner.streams.flush(HANGS_SECONDS, lambda: False) and owner.streams.lost() == 0
    owner.streams.close()


def test_standard_output_and_error_of_one_pipe_keep_their_order(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    twin = os.dup(writer)
    owner = Owner(writer, twin)
    for number in range(100):
        owner.streams.write(("stdout", "stderr")[number % 2], b"%03d\n" % number)
    assert drain(reader, 400) == b"".join(b"%03d\n" % number for number in range(100))
    assert owner.streams.flush(HANGS_SECONDS, lambda: False)
    owner.streams.close()
    os.close(twin)


def test_standard_error_does_not_wait_for_the_reader_of_standard_output(pipe: tuple[int, int], tmp_path: Path) -> None:
    _, writer = pipe
    errors = os.open(tmp_path / "errors", os.O_RDWR | os.O_CREAT)
    owner = Owner(writer, errors)
    owner.streams.write("stdout", bytes(FULL * 2))
    owner.streams.write("stderr", b"hvdrun: still here\n")
    while owner.streams.is_busy("stderr"):
        time.sleep(0.01)
    assert (tmp_path / "errors").read_bytes() == b"hvdrun: still here\n"
    assert not owner.streams.flush(HANGS_SECONDS, lambda: True), "given up"
    assert 0 < owner.streams.lost() < FULL * 2
    os.close(pipe[0])  # ends the blocked write
    os.close(errors)


def closed_reader(pipe: tuple[int, int]) -> int:
    os.close(pipe[0])
    return pipe[1]


def full_disk(pipe: tuple[int, int]) -> int:
    return os.open("/dev/full", os.O_WRONLY)


def read_only(pipe: tuple[int, int]) -> int:
    return os.open(os.devnull, os.O_RDONLY)


def gone_terminal(pipe: tuple[int, int]) -> int:
    master, slave = os.openpty()
    os.close(master)
    return slave


@pytest.mark.parametrize(("target", "reason"), [
    (closed_reader, "its reader has gone"), (full_disk, "No space left on device"), (read_only, "it is closed"),
    (gone_terminal, "its terminal has gone")])
def test_a_target_that_fails_is_told_once_and_loses_bytes(pipe: tuple[int, int], target: object, reason: str) -> None:
    assert callable(target)
    owner = Owner(target(pipe), pipe[1])
    for _ in range(3):
        owner.streams.write("stdout", b"hello\n")
        owner.streams.flush(HANGS_SECONDS, lambda: False)
    assert [each.reason() for each in owner.failures] == [reason] and owner.streams.lost() == 18
    owner.streams.close()


def test_a_stopped_terminal_blocks_until_it_goes_on() -> None:
    master, slave = os.openpty()
    tty.setraw(slave)
    termios.tcflow(slave, termios.TCOOFF)  # Ctrl-S
    owner = Owner(slave, slave)
    owner.streams.write("stdout", b"hello\n")
    asked: list[bool] = []

    def gives_up() -> bool:
        asked.append(True)
        if len(asked) == 3:
            termios.tcflow(slave, termios.TCOON)  # Ctrl-Q
        return False

    assert owner.streams.flush(HANGS_SECONDS, gives_up) and len(asked) >= 3
    assert os.read(master, 100) == b"hello\n"
    owner.streams.close()


def job_output(directory: Path | None, stdout: int, stderr: int) -> JobOutput:
    settings = OutputSettings(None if directory is None else str(directory))
    return JobOutput(settings, ProgressObserver(), stdout=stdout, stderr=stderr)


def test_a_full_disk_ends_the_files_and_not_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = os.open(tmp_path / "shown", os.O_RDWR | os.O_CREAT)
    output = job_output(tmp_path / "out", shown, shown)
    monkeypatch.setattr(Streams, "open_file",
                        lambda self, folder, name, label: OutputTarget(os.open("/dev/full", os.O_WRONLY), label))
    for rank in (0, 1):
        output.open_files(rank, f"rank.{rank}")
    for rank in (0, 1):
        output.feed(Output(rank, "stdout", b"hello\n"))
    output.finish()
    assert output.close(0, 0, lambda: 0) == OUTPUT_LOST
    text = (tmp_path / "shown").read_text()
    assert "[0]<stdout>:hello\n[1]<stdout>:hello\n" in text and text.count("hvdrun: ") == 1
    assert (f"hvdrun: --output-filename {tmp_path}/out: rank.0/stdout: No space left on device; the file ends here, and "
            "others may too\n") in text
    os.close(shown)


@pytest.mark.parametrize(("code", "expected"), [(0, OUTPUT_LOST), (3, 3)])
def test_lost_lines_end_with_a_code_of_their_own_unless_the_job_failed(tmp_path: Path, code: int, expected: int) -> None:
    shown = os.open(tmp_path / "shown", os.O_RDWR | os.O_CREAT)
    full = os.open("/dev/full", os.O_WRONLY)
    output = job_output(None, full, shown)
    output.feed(Output(0, "stdout", b"hello\n"))
    output.finish()
    assert output.close(code, 0, lambda: 0) == expected
    assert (tmp_path / "shown").read_text() == ("hvdrun: standard output: No space left on device; the job goes on without "
                                                "it\n")
    os.close(shown)
    os.close(full)


def test_a_wait_given_up_when_all_is_written_tells_of_no_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Streams, "flush", lambda *args: False)
    with open(tmp_path / "shown", "wb") as shown:
        assert job_output(None, shown.fileno(), shown.fileno()).close(3, 2, lambda: 0) == 3
    assert (tmp_path / "shown").read_text() == ""


def test_the_users_signal_ends_the_wait_for_a_reader(pipe: tuple[int, int], tmp_path: Path) -> None:
    shown = os.open(tmp_path / "shown", os.O_RDWR | os.O_CREAT)
    output = job_output(None, pipe[1], shown)
    output.feed(Output(0, "stdout", b"x" * (1 << 18) + b"\n"))
    output.finish()
    calls: list[int] = []

    def user_signal() -> int:
        calls.append(0)
        return 2 if len(calls) > 3 else 0

    assert output.close(0, 0, user_signal) == 130
    assert "bytes of output were not read, and are lost" in (tmp_path / "shown").read_text()
    os.close(pipe[0])
    os.close(shown)


def test_links_of_other_people_are_not_followed_and_pipes_do_not_block(tmp_path: Path) -> None:
    (tmp_path / "rank.0").mkdir()
    (tmp_path / "rank.0/stdout").symlink_to(tmp_path / "precious")
    output = job_output(tmp_path, 1, 2)
    with pytest.raises(LaunchError, match=r"rank\.0/stdout is a symbolic link"):
        output.open_files(0, "rank.0")
    assert not (tmp_path / "precious").exists()
    (tmp_path / "rank.1").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").mkdir()
    with pytest.raises(LaunchError, match=r"rank\.1 is a symbolic link"):
        output.open_files(1, "rank.1")
    (tmp_path / "rank.2").mkdir()
    os.mkfifo(tmp_path / "rank.2/stdout")
    with pytest.raises(LaunchError, match=r"rank\.2/stdout: No such device"):
        output.open_files(2, "rank.2")


def test_threads_and_descriptors_of_the_output_end_with_the_job(tmp_path: Path) -> None:
    shown = os.open(tmp_path / "shown", os.O_RDWR | os.O_CREAT)
    before = {thread.ident for thread in threading.enumerate() if thread.name == "hvdrun-output"}
    for _ in range(3):
        output = job_output(tmp_path / "out", shown, shown)
        output.open_files(0, "rank.0")
        output.feed(Output(0, "stdout", b"hello\n"))
        output.finish()
        assert output.close(0, 0, lambda: 0) == 0
    deadline = time.monotonic() + HANGS_SECONDS
    while left := {each.ident for each in threading.enumerate() if each.name == "hvdrun-output"} - before:
        assert time.monotonic() < deadline, left
        time.sleep(0.01)
    assert (tmp_path / "out/rank.0/stdout").read_text() == "hello\n"
    os.close(shown)
