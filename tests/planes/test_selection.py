"""Which plane is taken, and what is said when none can be."""

from __future__ import annotations

import pytest

from hvdlite.core.errors import LaunchError
from hvdlite.core.world import Hosts, World
from hvdlite.planes.selection import choose_plane

ONE, TWO, FLAT = (Hosts.of(names) for names in ("aaa", "aabb", "abc"))


@pytest.mark.parametrize(("wanted", "hosts", "lacks", "name", "cross_backend"), [
    ("auto", ONE, {}, "shm", ""),
    ("shm", ONE, {}, "shm", ""),
    ("hierarchical", ONE, {}, "shm", ""),
    ("gloo", ONE, {"mpi": "no"}, "gloo", ""),
    ("auto", TWO, {}, "hierarchical", "mpi"),
    ("auto", TWO, {"mpi": "no"}, "hierarchical", "gloo"),
    ("gloo", TWO, {}, "gloo", ""),
    ("auto", FLAT, {"mpi": "no"}, "gloo", ""),
    ("hierarchical", FLAT, {}, "hierarchical", "mpi"),
])
def test_choice(wanted: str, hosts: Hosts, lacks: dict[str, str], name: str, cross_backend: str) -> None:
    choice = choose_plane(wanted, hosts, lacks)
    assert (choice.name, choice.cross_backend) == (name, cross_backend)
    assert ("not mpi: no" in str(choice)) == (bool(lacks) and wanted == "auto")
    assert (f"HVDLITE_CPU_OPERATIONS={wanted}" in str(choice)) == (wanted != "auto")


@pytest.mark.parametrize(("wanted", "hosts", "lacks", "told"), [
    ("shm", TWO, {}, r"2 hosts of \[2, 2\] ranks"),
    ("mpi", ONE, {"mpi": "pip install mpi4py"}, "mpi is not possible: pip install mpi4py"),
    ("auto", TWO, {"mpi": "no M", "gloo": "no G"}, "mpi: no M; gloo: no G"),
])
def test_what_cannot_be(wanted: str, hosts: Hosts, lacks: dict[str, str], told: str) -> None:
    with pytest.raises(LaunchError, match=told):
        choose_plane(wanted, hosts, lacks)


def test_hosts_tell_coordinates() -> None:
    hosts = Hosts.of(["a", "b", "a", "b", "b", "c"])  # cyclic, as Slurm can place them
    assert hosts.ranks_by_host == ((0, 2), (1, 3, 4), (5,)) and not hosts.is_homogeneous
    assert hosts.world(4) == World(4, 6, 2, 3, 0, 1) and hosts.world(3) == World(3, 6, 1, 3, 1, 2)
    assert hosts.restrict_to([4, 5, 1]).ranks_by_host == ((1, 4), (5,))
