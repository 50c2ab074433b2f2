"""The job's key: out of the environment once it is read, and not in clear between hosts."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hvdlite.bootstrap import launch_info
from hvdlite.bootstrap.environments import JobKey, read_launch_info
from hvdlite.bootstrap.launch_info import BASE, x25519
from hvdlite.bootstrap.rendezvous import Address
from hvdlite.core.errors import LaunchError
from tests.bootstrap.programs import key_in_environment
from tests.worlds import HANGS_SECONDS, over_tcp, processes


def test_the_key_leaves_the_environment_of_ranks_and_of_their_children() -> None:
    """Also what the kernel shows of it; and the ranks can meet again."""
    assert [rank.result for rank in processes(2, key_in_environment.key_in_environment, environment=over_tcp())] == [[], []]


def test_the_key_is_kept_for_the_same_job_only() -> None:
    environ = {"HVDLITE_SECRET": "ab", "HVDLITE_JOB_DIRECTORY": "/job"}
    key = JobKey(environ)
    key.take()
    key.take()
    assert environ == {"HVDLITE_JOB_DIRECTORY": "/job", "HVDLITE_SECRET_TAKEN": str(os.getpid())}
    assert key.environment()["HVDLITE_SECRET"] == "ab"
    environ["HVDLITE_SECRET"] = "cd"
    assert key.environment()["HVDLITE_SECRET"] == "cd"
    key.take()
    environ["HVDLITE_JOB_DIRECTORY"] = "/another"
    assert "HVDLITE_SECRET" not in key.environment()


def test_a_file_with_the_key_stays_where_it_is(tmp_path: Path) -> None:
    """Unlike a variable: children of a rank read it, too."""
    file = tmp_path / "key"
    file.write_text("ab" * 16)
    file.chmod(0o600)
    environ = {"HVDLITE_SECRET_FILE": str(file), "HVDLITE_RANK": "0", "HVDLITE_SIZE": "2"}
    before = dict(environ)
    JobKey(environ).take()
    assert environ == before and read_launch_info(environ, 1).key == bytes.fromhex("ab" * 16)


def test_each_world_of_an_elastic_job_has_a_key_of_its_own() -> None:
    worlds = [{"HVDLITE_SECRET": "ab" * 16, "HVDLITE_RANK": "0", "HVDLITE_SIZE": "2", "HVDLITE_MEMBER": "0",
               "HVDLITE_EPOCH": str(epoch)} for epoch in (1, 1, 2)]
    first, again, second = (read_launch_info(environ, 1).key for environ in worlds)
    assert first == again != second and bytes.fromhex("ab" * 16) not in (first, second)


@pytest.mark.parametrize("local_size", ["2", "1"])
def test_a_child_of_a_rank_is_told_who_has_the_key(local_size: str) -> None:
    environ = {"HVDLITE_SECRET": "ab" * 16, "HVDLITE_RANK": "0", "HVDLITE_SIZE": "2", "HVDLITE_LOCAL_SIZE": local_size,
               "HVDLITE_LOCAL_RANK": "0", "HVDLITE_COORDINATOR": "localhost:1", "HVDLITE_JOB_DIRECTORY": "/job"}
    JobKey(environ).take()
    with pytest.raises(LaunchError, match=f"process {os.getpid()}, .* has taken the key .* HVDLITE_SECRET before its"):
        info = read_launch_info(environ, 1)
        Address(host="localhost", port=1, how_to_have_a_key=info.how_to_have_a_key)


def test_x25519_against_the_vectors_of_rfc_7748() -> None:
    scalar = bytes.fromhex("a546e36bf0527c9d3b16154b82465edd62144c0ac1fc5a18506a2244ba449ac4")
    point = bytes.fromhex("e6db6867583030db3594c1a424b15f7c726624ec26b3353b10a903a6d0ab1c4c")
    assert x25519(scalar, point).hex() == "c3da55379de9c6908e94ea4df28d084f32eccf03491c71f754b4075577a28552"
    assert x25519(BASE, BASE).hex() == "422c8e7a6227d7bca1350b3e2bb7279f7897b87bb6854b783c60e80311ae3079", "iterated once"
    assert x25519(scalar, x25519(b"b" * 32, BASE)) == x25519(b"b" * 32, x25519(scalar, BASE))


class Communicator:
    """What one thread has of a communicator of MPI; all bytes that travel are kept."""

    def __init__(self, rank: int, sent: list[Any], heard: list[bytes], barrier: threading.Barrier) -> None:
        self._rank, self._sent, self._heard, self._barrier = rank, sent, heard, barrier

    def Get_rank(self) -> int:
        return self._rank

    def Get_size(self) -> int:
        return len(self._sent)

    def Allreduce(self, _: object, value: Any, operation: Callable[[list[Any]], Any]) -> None:
        value[...] = operation(self._exchanged(value))

    def Allgather(self, value: Any, out: Any) -> None:
        out[...] = self._exchanged(value)

    def Scatter(self, values: Any, out: Any, root: int) -> None:
        out[...] = self._exchanged(values)[root][self._rank]

    def Bcast(self, value: Any, root: int) -> None:
        value[...] = self._exchanged(value if self._rank == root else None)[root]

    def _exchanged(self, value: Any) -> list[Any]:
        self._sent[self._rank] = None if value is None else value.copy()
        self._heard.append(b"" if value is None else value.tobytes())
        self._barrier.wait(HANGS_SECONDS)
        sent = list(self._sent)
        self._barrier.wait(HANGS_SECONDS)
        return sent


@pytest.mark.parametrize("own", [b"", b"k" * 32])
def test_who_listens_to_mpi_between_hosts_does_not_learn_the_key(own: bytes) -> None:
    """Three hosts with a rank each, which make a key, or have that of the user."""
    heard: list[bytes] = []
    sent, barrier = [None] * 3, threading.Barrier(3)
    module = SimpleNamespace(IN_PLACE=None, MIN=min)

    def agreed(rank: int) -> bytes:
        everybody = Communicator(rank, sent, heard, barrier)
        alone = Communicator(0, [None], [], threading.Barrier(1))
        return launch_info._agreed_key(module, everybody, alone, everybody, own)

    with ThreadPoolExecutor(3) as pool:
        keys = list(pool.map(agreed, range(3)))
    assert len(set(keys)) == 1 and len(keys[0]) == 32 and (not own or keys[0] == own)
    assert heard and not any(keys[0] in text for text in heard)
    assert not own or {len(text) for text in heard} == {np.int64().nbytes}, "only whether all have one"
