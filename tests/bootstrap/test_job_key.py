"""The job's key: out of the environment once it is read, and not in clear between hosts."""

from __future__ import annotations

import os

import pytest

from hvdlite.bootstrap.environments import read_launch_info
from hvdlite.bootstrap.job_key import JobKey
from hvdlite.bootstrap.rendezvous import Address
from hvdlite.bootstrap.x25519 import BASE, x25519
from hvdlite.core.errors import LaunchError
from tests.bootstrap.programs import key_in_environment
from tests.worlds import over_tcp, processes


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
