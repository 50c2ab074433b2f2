"""A job takes as many descriptors as it needs, up to the hard limit, and says what is missing beyond it."""

from __future__ import annotations

import errno
import multiprocessing
import os
import resource
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hvdlite.bootstrap.admission import accept_ranks
from hvdlite.bootstrap.descriptors import recv_fds, send_fds
from hvdlite.bootstrap.rendezvous import Address, listen
from hvdlite.core.errors import LaunchError
from hvdlite.core.system_limits import SPARE, reserve_descriptors
from tests.bootstrap.meeting import LIMIT, meet, rank_info
from tests.worlds import HANGS_SECONDS


@pytest.fixture(autouse=True)
def same_limits_afterwards() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def lower_soft_limit() -> int:
    """Leave this process 20 descriptors, and return how many that is in all."""
    limit = len(os.listdir("/proc/self/fd")) + 20
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    return limit


def in_a_child(function: Callable[[Any], None], path: str) -> str:
    """Run a function in a process whose hard limit is 60, and return what `LaunchError` it raises."""
    context = multiprocessing.get_context("spawn")
    reader, writer = context.Pipe()
    child = context.Process(target=_with_low_hard_limit, args=(function, path, writer))
    child.start()
    assert reader.poll(HANGS_SECONDS)
    told: str = reader.recv()
    child.join(HANGS_SECONDS)
    assert child.exitcode == 0
    return told


def _with_low_hard_limit(function: Callable[[str], None], path: str, writer: Any) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (60, 60))
    try:
        function(path)
        writer.send("nothing was raised")
    except LaunchError as error:
        writer.send(str(error))


def test_more_ranks_meet_than_the_soft_limit_allows(tmp_path: Path) -> None:
    before = lower_soft_limit()
    size = 40
    for welcome in meet(Address(path=str(tmp_path / "s")), [rank_info(rank, size) for rank in range(size)]):
        assert len(welcome.pids) == size
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > before


def _receive_too_many(path: str) -> None:
    address = Address(path=path)
    with listen(address) as listener:
        accept_ranks(listener, address, rank_info(0, 1000), timeout=5, frame_limit=LIMIT)


def test_a_hard_limit_that_is_too_low_is_named_with_what_is_needed(tmp_path: Path) -> None:
    told = in_a_child(_receive_too_many, str(tmp_path / "s"))
    assert told.startswith("rank 0 of a job of 1000 ranks needs 999 more file descriptors")
    assert "the hard limit is 60" in told and "ulimit -n" in told and "LimitNOFILE=" in told


def test_the_limit_is_raised_as_far_as_needed_only() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (4 * SPARE, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    with reserve_descriptors(10, "a test"):
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 4 * SPARE
    with reserve_descriptors(4 * SPARE, "a test"):
        assert 5 * SPARE < resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 6 * SPARE


@pytest.mark.parametrize(("code", "told"), [(errno.EMFILE, "LimitNOFILE"), (errno.ENFILE, "fs.file-max")])
def test_an_exhausted_limit_is_explained(code: int, told: str) -> None:
    with pytest.raises(LaunchError, match=told), reserve_descriptors(3, "a test"):
        raise OSError(code, os.strerror(code))


def test_other_errors_pass_through() -> None:
    with pytest.raises(FileNotFoundError), reserve_descriptors(3, "a test"):
        open("/there/is/no/such/file")  # noqa: SIM115


@pytest.mark.parametrize("count", [3, 600])  # the system's limit is 253 in one message
def test_every_receiver_gets_what_is_shared_and_its_own(tmp_path: Path, count: int) -> None:
    path = str(tmp_path / "fds")
    files = [os.memfd_create(f"{number}") for number in range(count)]
    own = [os.memfd_create(f"own {index}") for index in range(2)]
    received: dict[int, list[int]] = {}

    def receive(index: int) -> None:
        received[index] = recv_fds(lambda: path, index, 10.0)

    receivers = [threading.Thread(target=receive, args=(index,)) for index in range(2)]
    for receiver in receivers:
        receiver.start()
    send_fds(path, files, [[descriptor] for descriptor in own], 10.0)
    for receiver in receivers:
        receiver.join(30)
    for index in range(2):
        given = [os.fstat(descriptor).st_ino for descriptor in (*files, own[index])]
        assert [os.fstat(descriptor).st_ino for descriptor in received[index]] == given
    for descriptor in (*files, *own, *received[0], *received[1]):
        os.close(descriptor)


def _take_too_many(path: str) -> None:
    with reserve_descriptors(1, "a test"):
        recv_fds(lambda: path, 0, 10.0)


def test_descriptors_that_do_not_fit_are_an_error_at_the_receiver(tmp_path: Path) -> None:
    path = str(tmp_path / "fds")
    file = os.memfd_create("one of many")

    def giver() -> None:
        with pytest.raises(LaunchError, match="ended while it received"):
            send_fds(path, [file] * 200, [[]], 30.0)
        refused.append(True)

    refused: list[bool] = []
    thread = threading.Thread(target=giver)
    thread.start()
    assert "the hard limit is 60" in in_a_child(_take_too_many, path)
    thread.join(30)
    assert refused
    os.close(file)
