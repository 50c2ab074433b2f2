"""The job directory when other users of the host are in the way: they can guess its name, and write to /tmp."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import threading
from pathlib import Path

import pytest

from hvdlite.bootstrap.descriptors import recv_fds, send_fds
from hvdlite.bootstrap.job_directory import JobDirectory, agreed_prefix
from hvdlite.bootstrap.rendezvous import Address, connect_to_rank_0
from hvdlite.core.errors import LaunchError
from hvdlite.core.sockets import short_socket_path
from tests.bootstrap.meeting import LIMIT, meet, rank_info
from tests.bootstrap.other_user import as_other_user, needs_root, other_user, shared_by_all
from tests.worlds import HANGS_SECONDS

PREFIX = f"hvdlite-0-{'ab' * 16}"


def bound(path: Path) -> None:
    """Make a socket's name whose process has ended."""
    with socket.socket(socket.AF_UNIX) as dead, short_socket_path(str(path)) as short:
        dead.bind(short)


def test_ranks_find_the_directory_that_the_first_one_makes(tmp_path: Path) -> None:
    with contextlib.closing(JobDirectory(str(tmp_path / PREFIX), agreed=True)) as first, \
            contextlib.closing(JobDirectory(str(tmp_path / PREFIX), agreed=True)) as second:
        with pytest.raises(FileNotFoundError):
            second.socket_path("control.sock")
        (tmp_path / f"{PREFIX}.older000").mkdir(mode=0o700)
        first.make()
        first.make()
        bound(Path(first.socket_path("control.sock")))
        assert Path(second.socket_path("control.sock")).exists()
        assert len(list(tmp_path.iterdir())) == 1, "what earlier jobs have left is removed"
    assert not list(tmp_path.iterdir())


def test_ranks_meet_in_a_directory_that_was_left_by_another_job(tmp_path: Path) -> None:
    """The other ranks come first, and find the directory of a job that was killed while its ranks met."""
    left = tmp_path / f"{PREFIX}.left0000"
    left.mkdir(mode=0o700)
    bound(left / "control.sock")
    first, second = (JobDirectory(str(tmp_path / PREFIX), agreed=True) for _ in range(2))
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


def test_only_what_a_job_has_left_is_removed(tmp_path: Path) -> None:
    """Neither the directory of a job that meets now, nor anything that is no socket, nor any other name."""
    (tmp_path / f"{PREFIX}.left0000").mkdir(mode=0o700)
    bound(tmp_path / f"{PREFIX}.left0000/control.sock")
    for name in (".notes", ".LEFT0000", "-x.left0000", ".left0000.old", ".0000file"):
        (tmp_path / f"{PREFIX}{name}").mkdir(mode=0o700)
    (tmp_path / f"{PREFIX}.0000file/thesis.tex").touch()
    before = set(tmp_path.iterdir())
    with contextlib.closing(JobDirectory(str(tmp_path / PREFIX), agreed=True)) as one, \
            contextlib.closing(JobDirectory(str(tmp_path / PREFIX), agreed=True)) as another:
        one.make()
        bound(Path(one.socket_path("control.sock")))
        another.make()
        assert Path(one.socket_path("control.sock")).exists(), "a job that meets now"
    assert set(tmp_path.iterdir()) == before - {tmp_path / f"{PREFIX}.left0000"}
    assert (tmp_path / f"{PREFIX}.0000file/thesis.tex").exists()


@pytest.mark.parametrize("path", [".", "/", "", ".ssh", "hvdlite-0-", f"{PREFIX}/..", f"{PREFIX}x"])
def test_a_prefix_that_is_not_hvdlites_removes_and_finds_nothing(path: str, tmp_path: Path,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".ssh").mkdir(mode=0o700)
    (tmp_path / ".ssh/id_ed25519").touch()
    with contextlib.closing(JobDirectory(path, agreed=True)) as directory:
        with pytest.raises(ValueError, match="no prefix of job directories"):
            directory.make()
        with pytest.raises(ValueError, match="no prefix of job directories"):
            directory.socket_path("control.sock")
    assert (tmp_path / ".ssh/id_ed25519").exists()


def test_a_directory_that_is_removed_before_it_is_locked_is_made_again(tmp_path: Path,
                                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    """Another job may find it meanwhile: before it is open, before it is locked, or while the other one holds the lock."""
    lock, opening, removed = fcntl.flock, os.open, []

    def removes(when: str, path: str) -> None:
        if when not in removed and path.startswith(str(tmp_path / PREFIX)):
            removed.append(when)
            os.rmdir(path)

    def opens(path: str, *others: int, **named: int) -> int:
        removes("before it is open", path)
        return opening(path, *others, **named)

    def locks(descriptor: int, operation: int) -> None:
        removes("before it is locked", os.readlink(f"/proc/self/fd/{descriptor}"))
        if "while it is locked" not in removed:
            removed.append("while it is locked")
            raise BlockingIOError
        lock(descriptor, operation)

    monkeypatch.setattr(os, "open", opens)
    monkeypatch.setattr(fcntl, "flock", locks)
    with contextlib.closing(JobDirectory(str(tmp_path / PREFIX), agreed=True)) as directory:
        directory.make()
        assert sorted(removed) == ["before it is locked", "before it is open", "while it is locked"]
        assert os.path.isdir(directory.socket_path(""))


def test_without_locks_nothing_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not every file system of a network has any."""
    def refused(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    left = tmp_path / f"{PREFIX}.left0000"
    left.mkdir(mode=0o700)
    monkeypatch.setattr(fcntl, "flock", refused)
    with contextlib.closing(JobDirectory(str(tmp_path / PREFIX), agreed=True)) as first:
        first.make()
        bound(Path(first.socket_path("control.sock")))
    assert list(tmp_path.iterdir()) == [left]


def test_the_prefix_differs_between_containers_and_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert agreed_prefix("torchrun", "none", "29500") == agreed_prefix("torchrun", "none", "29500")
    assert len({agreed_prefix("a", "b"), agreed_prefix("a", "c"), agreed_prefix("b", "a")}) == 3
    before = agreed_prefix("torchrun", "none", "29500")
    with monkeypatch.context() as patch:
        patch.setattr(socket, "gethostname", lambda: "another")
        assert agreed_prefix("torchrun", "none", "29500") != before
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", lambda *_: "another boot")
        assert agreed_prefix("torchrun", "none", "29500") != before
    links = os.readlink
    for namespace in ("pid", "net"):
        before = agreed_prefix("torchrun", "none", "29500")
        monkeypatch.setattr(os, "readlink",
                            lambda path, other=f"/proc/self/ns/{namespace}": "another" if path == other else links(path))
        assert agreed_prefix("torchrun", "none", "29500") != before
        monkeypatch.setattr(os, "readlink", links)


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
        (shared / PREFIX).mkdir()
        (shared / f"{PREFIX}.aaaaaaaa").mkdir(mode=0o700)
        (shared / f"{PREFIX}.bbbbbbbb").symlink_to(mine)
    first, second = (JobDirectory(str(shared / PREFIX), agreed=True) for _ in range(2))
    with contextlib.closing(first), contextlib.closing(second):
        with pytest.raises(FileNotFoundError):
            second.socket_path("control.sock")
        first.make()
        with other_user():
            (shared / f"{PREFIX}.cccccccc").mkdir(mode=0o700)
        bound(Path(first.socket_path("control.sock")))
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
