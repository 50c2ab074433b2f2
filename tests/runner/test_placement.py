"""Hosts, host files, and which rank is placed where."""

from __future__ import annotations

import re

import pytest

from hvdlite.core.errors import LaunchError
from hvdlite.core.world import Hosts, World
from hvdlite_runner.placement import (
    Host,
    assign_slots,
    check_is_alone,
    cores_for,
    parse_hostfile,
    parse_hosts,
    rename_local_hosts,
)


def test_hosts() -> None:
    assert parse_hosts("a:2, b,[::1]:3,me@c:4,a:1") == [Host("a", 3), Host("b"), Host("::1", 3), Host("me@c", 4)]
    assert Host("me@c").address == "c"
    for text in ("", "a:0", "a:x", ":2", "fd00::2", "-oProxyCommand=x:1", "a b"):
        with pytest.raises(LaunchError):
            parse_hosts(text)
    here = {"one", "localhost"}
    assert rename_local_hosts(parse_hosts("one:2,b,localhost:1"), here.__contains__) == [Host("localhost", 3), Host("b")]


def test_a_hostfile_in_everybodys_format() -> None:
    text = "# ours\na slots=2  # two\n\nb:3\nc\nfd00::2 slots=4 max_slots=8\na\n"
    assert parse_hostfile(text, "f") == [Host("a", 3), Host("b", 3), Host("c"), Host("fd00::2", 4)]
    for text, told in (("a\nb slots=x", "f, line 2: 'slots=x' is not slots=N"), ("a slots=0", "a has no slots"),
                       ("a cpu=2", "'cpu=2' is not slots=N"), ("# none", "names no host")):
        with pytest.raises(LaunchError, match=re.escape(told)):
            parse_hostfile(text, "f")


def test_ranks_are_placed_by_slots_and_know_their_place_on_uneven_hosts() -> None:
    slots = assign_slots(5, parse_hosts("a:1,b:3,c:4"))
    assert list(slots.items()) == [("a", 1), ("b", 3), ("c", 1)]
    layout = Hosts.of([name for name, count in slots.items() for _ in range(count)])
    assert layout.ranks_by_host == ((0,), (1, 2, 3), (4,))
    assert [layout.world(rank) for rank in range(5)] == [
        World(0, 5, 0, 1, 0, 3), World(1, 5, 0, 3, 1, 3), World(2, 5, 1, 3, 0, 1), World(3, 5, 2, 3, 0, 1),
        World(4, 5, 0, 1, 2, 3)]
    assert assign_slots(None, parse_hosts("a:2,b:2")) == {"a": 2, "b": 2}
    assert assign_slots(2, parse_hosts("a:2,b:2")) == {"a": 2}
    with pytest.raises(LaunchError, match="-np 9 is more than the 8 slots of a:1,b:3,c:4"):
        assign_slots(9, parse_hosts("a:1,b:3,c:4"))


def test_cores_are_shared_evenly_or_taken_in_turn() -> None:
    assert [cores_for(rank, 2, [0, 1, 2, 3, 4]) for rank in range(2)] == [[0, 1], [2, 3]]
    assert [cores_for(rank, 3, [4, 5]) for rank in range(3)] == [[4], [5], [4]]


@pytest.mark.parametrize("text", ["a:99999999999999999999", "a:" + "9" * 5000, "a:1048577"])
def test_more_slots_than_any_host_has_are_a_mistake(text: str) -> None:
    with pytest.raises(LaunchError, match=r"a cannot have \d+(\.\.\.)? slots; at most 1,048,576"):
        parse_hosts(text)


def test_many_hosts_with_many_slots_are_placed_as_far_as_ranks_need_them() -> None:
    hosts = parse_hosts(",".join(f"h{number}:1000000" for number in range(1000)))
    assert assign_slots(2, hosts) == {"h0": 2}
    with pytest.raises(LaunchError, match="1,000,000,000 slots"):
        assign_slots(None, hosts)


@pytest.mark.parametrize(("environ", "instead"), [
    ({"HVDLITE_RANK": "1", "HVDLITE_SIZE": "2"}, "Run one: hvdrun -np 2 python 'a b.py'. If you want them all"),
    ({"HVDLITE_RANK": "1", "HVDLITE_SIZE": "2"}, "or HVDLITE_RANK and HVDLITE_SIZE are left over from another job, unset"),
    ({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}, "hvdrun -np 2 python 'a b.py' in the script of sbatch"),
    ({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}, "srun python 'a b.py' without hvdrun"),
    ({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}, "one task with srun -n1 --pty. If you want them all, or"),
])
def test_a_job_in_each_of_several_tasks_is_refused(environ: dict[str, str], instead: str) -> None:
    with pytest.raises(LaunchError, match=r"runs this hvdrun 2 times, here as number 1") as refused:
        check_is_alone(environ, ["python", "a b.py"])
    assert instead in str(refused.value)
    with pytest.raises(LaunchError, match="hvdrun -np 7 python"):
        check_is_alone(environ, ["python", "a b.py"], 7)


@pytest.mark.parametrize("environ", [
    {},
    {"HVDLITE_RANK": "0", "HVDLITE_SIZE": "1"},
    {"HVDLITE_RANK": "1", "HVDLITE_SIZE": "2", "HVDLITE_JOINED": "77"},
    {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"},
    {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
])
def test_a_job_that_is_started_once_is_not_refused(environ: dict[str, str]) -> None:
    """The shell of salloc and the script of sbatch are one task, and a rank may start other jobs."""
    check_is_alone(environ, ["python", "train.py"])
