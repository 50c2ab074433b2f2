"""The job directory when other users of the host are in the way: they can guess its name, and write to /tmp."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from pathlib import Path

import pytest

from hvdlite.bootstrap.descriptors import recv_fds, send_fds
from hvdlite.bootstrap.job_directory import JobDirectory
from hvdlite.bootstrap.rendezvous import Address, connect_to_rank_0
from hvdlite.core.errors import LaunchError
from tests.bootstrap.meeting import LIMIT, meet, rank_info
from tests.bootstrap.other_user import as_other_user, needs_root, other_user, shared_by_all
from tests.worlds import HANGS_SECONDS


def test_ranks_find_the_directory_that_the_first_one_makes(tmp_path: Path) -> None:
    with contextlib.closing(JobDirectory(str(tmp_path / "job"), agreed=True)) as first, \
            contextlib.closing(JobDirectory(str(tmp_path / "job"), agreed=True)) as second:
        with pytest.raises(FileNotFoundError):
            second.socket_path("control.sock")
        (tmp_path / "job.older").mkdir(mode=0o700)
        first.make()
        first.make()
        Path(first.socket_path("control.sock")).touch()
        assert Path(second.socket_path("control.sock")).exists()
        assert len(list(tmp_path.iterdir())) == 1, "what earlier jobs have left is removed"
    assert not list(tmp_path.iterdir())


def test_ranks_meet_in_a_directory_that_was_left_by_another_job(tmp_path: Path) -> None:
    """The other ranks come first, and find the directory of a job that was killed while its ranks met."""
    left = tmp_path / "job.left"
    left.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(left / "control.sock"))
    first, second = (JobDirectory(str(tmp_path / "job"), agreed=True) for _ in range(2))
    with contextlib.closing(first), contextlib.closing(second):
        joined: list[object] = []
        address = Address(path="job", locate=lambda: second.socket_path("control.sock"))
        rank_1 = threading.Thread(target=lambda: joined.append(connect_to_rank_0(address, rank_info(1, 2), timeout=30,
                                                                                 frame_limit=LIMIT)))
        rank_1.start()
        first.make()
        assert meet(Address(path="job", locate=lambda: first.socket_path("control.sock")), [rank_info(0, 2)])
        rank_1.join(30)
        assert joined
        joined[0][0].close()  # type: ignore[index]


def test_a_directory_that_is_renamed_is_still_used(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir(mode=0o700)
    with contextlib.closing(JobDirectory(str(tmp_path / "job"))) as directory:
        (tmp_path / "job").rename(tmp_path / "moved")
        (tmp_path / "job").mkdir(mode=0o700)
        Path(directory.socket_path("control.sock")).touch()
    assert (tmp_path / "moved/control.sock").exists() and not list((tmp_path / "job").iterdir())


def test_a_symbolic_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir(mode=0o700)
    (tmp_path / "job").symlink_to(tmp_path / "mine")
    with pytest.raises(LaunchError, match=r"HVDLITE_JOB_DIRECTORY=.*symbolic link"):
        JobDirectory(str(tmp_path / "job"))


@needs_root
def test_another_user_cannot_take_the_name(tmp_path: Path) -> None:
    """Neither with directories nor with links to a directory of ours, which it exchanges later."""
    shared = shared_by_all(tmp_path)
    mine = tmp_path / "mine"
    mine.mkdir(mode=0o700)
    with other_user():
        (shared / "job").mkdir()
        (shared / "job.aaaaaaaa").mkdir(mode=0o700)
        (shared / "job.bbbbbbbb").symlink_to(mine)
    first, second = (JobDirectory(str(shared / "job"), agreed=True) for _ in range(2))
    with contextlib.closing(first), contextlib.closing(second):
        with pytest.raises(FileNotFoundError):
            second.socket_path("control.sock")
        first.make()
        with other_user():
            (shared / "job.cccccccc").mkdir(mode=0o700)
        Path(first.socket_path("control.sock")).touch()
        assert Path(second.socket_path("control.sock")).exists()


@needs_root
def test_another_user_that_listens_is_no_rank(tmp_path: Path) -> None:
    path = str(shared_by_all(tmp_path) / "control.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        with other_user():
            listener.bind(path)
            listener.listen()
        with pytest.raises(LaunchError, match="belongs to user 65534"):
            connect_to_rank_0(Address(path=path), rank_info(1), timeout=0.1, frame_limit=LIMIT)
        with pytest.raises(LaunchError, match="belongs to user 65534"):
            recv_fds(lambda: path, 0, 5.0)
        listener.settimeout(5)
        for _ in range(2):
            with listener.accept()[0] as heard:
                assert heard.recv(1) == b"", "nothing is sent to it"


def connected(path: str) -> socket.socket:
    """Connect to a socket that is about to listen."""
    while True:
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.connect(path)
            return sock
        except ConnectionRefusedError:
            sock.close()


@needs_root
def test_another_user_that_connects_gets_nothing(tmp_path: Path) -> None:
    path = str(shared_by_all(tmp_path) / "memory.sock")
    file = os.memfd_create("memory")
    sender = threading.Thread(target=send_fds, args=(path, [file], [[]], HANGS_SECONDS))
    sender.start()

    def attack() -> None:
        with connected(path) as sock, contextlib.suppress(ConnectionError):
            sock.sendall(bytes(4))
            assert socket.recv_fds(sock, 100, 5)[:2] == (b"", [])

    while not os.path.exists(path):
        pass
    os.chmod(path, 0o777)
    as_other_user(attack)
    (received,) = recv_fds(lambda: path, 0, HANGS_SECONDS)
    sender.join(HANGS_SECONDS)
    os.close(received)
    os.close(file)
