"""Failpoints: a member fails at a named point of a world's end, of the next one's beginning, or of recovery.

Each point is a function of the product; `programs/failing.py` puts the failure around it. A scenario brings the
member there:

- `loss`: the last of three members is killed, and the two others begin another world. Roles: the donor and the survivor.
- `hosts`: the same, with the donor on one host and the survivor on another one.
- `growth`: a joiner is taken in by two members. Roles: the donor, the survivor and the joiner.
- `end`: training ends on three members.

What is expected of all: the members that have not failed finish the training as one world, and hvdrun ends with 0. After a
notice nothing is done again; a member that gets it too late finishes with the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from tests.elastic.jobs import Job
from tests.runner.elastic_jobs import HostsFile

_OLD = ("donor", "survivor")
KINDS = ("kill", "stop", "raise", "exit", "notice")
ROLES = {"loss": _OLD, "hosts": _OLD, "growth": ("donor", "survivor", "joiner"),
         "end": _OLD}
MEMBERS = {"donor": 0, "survivor": 1, "joiner": 2}

_MEMBER = "hvdlite.bootstrap.member_client:MemberClient"
_WORLDS = "hvdlite.runtime.worlds:Worlds"
_MEETING = "hvdlite.runtime.meeting"
_STATE = "hvdlite.training.elastic.state:ObjectState"


@dataclasses.dataclass(frozen=True)
class Point:
    """A function of the product.

    Attributes:
        name: what the member is doing, for people.
        target: `module:name` of the function.
        when: `before` it, `after` it, or when it has `raised`.
        scenarios: those in which a member passes it.
        roles: of the members that pass it; empty for all of the scenario.
        argument: the type of an argument; empty for any call.
        holds: whether survivors do something else until then, so that they hear of the loss from the launcher alone.
    """

    name: str
    target: str
    when: str
    scenarios: tuple[str, ...]
    roles: tuple[str, ...] = ()
    argument: str = ""
    holds: bool = False


_CHANGES = ("loss", "growth")

POINTS = (
    # the end of a world
    Point("hears that the world ends", f"{_MEMBER}._receive", "before", ("loss",), argument="StopNow", holds=True),
    Point("has been asked for its boundary", f"{_MEMBER}._receive", "before", ("growth",), _OLD, "PrepareStop"),
    Point("has told its boundary", f"{_MEMBER}._receive", "after", ("growth",), _OLD, "PrepareStop"),
    Point("has heard at which boundary to stop", f"{_MEMBER}._receive", "after", ("growth",), _OLD, "StopAt"),
    Point("has stopped at the boundary", f"{_MEMBER}.boundary", "raised", ("growth",), _OLD),
    Point("is to close its world", f"{_WORLDS}.end_world", "before", _CHANGES),
    Point("has closed its runtime", "hvdlite.runtime.runtime:Runtime.end", "after", _CHANGES),
    Point("is to say that it is idle", f"{_MEMBER}.idle", "before", _CHANGES, _OLD),
    Point("has said that it is idle", f"{_MEMBER}.idle", "after", _CHANGES, _OLD),
    # the beginning of a world
    Point("is to say that it is ready", f"{_MEMBER}.ready", "before", ("growth",), ("joiner",)),
    Point("has said that it is ready", f"{_MEMBER}.ready", "after", ("growth",), ("joiner",)),
    Point("has been ordered into a world", f"{_MEMBER}._receive", "after", _CHANGES, argument="WorldOrder"),
    Point("is to enter a world", f"{_WORLDS}.begin_world", "before", _CHANGES),
    Point("is to meet the others", f"{_MEETING}:Meeting.ranks", "before", (*_CHANGES, "hosts")),
    Point("is to tell where it listens", f"{_MEMBER}.announce_coordinator", "before", ("hosts",), ("donor",)),
    Point("has told where it listens", f"{_MEMBER}.announce_coordinator", "after", ("hosts",), ("donor",)),
    Point("asks where rank 0 listens", f"{_MEMBER}.coordinator", "before", ("hosts",), ("survivor",)),
    Point("knows where rank 0 listens", f"{_MEMBER}.coordinator", "after", ("hosts",), ("survivor",)),
    Point("has met the others", f"{_MEETING}:Meeting.ranks", "after", (*_CHANGES, "hosts")),
    Point("shares the host's memory", f"{_MEETING}:Meeting.shared", "after", _CHANGES),
    Point("is to start its runtime", "hvdlite.runtime.runtime:Runtime.start", "before", _CHANGES),
    Point("is to say that it has met the others", f"{_MEMBER}.met", "before", _CHANGES),
    Point("has said that it has met the others", f"{_MEMBER}.met", "after", _CHANGES),
    Point("lets followers take part", "hvdlite.runtime.followers:Followers.world_began", "before", _CHANGES),
    # recovery
    Point("goes back to its commit", f"{_STATE}.restore", "before", ("loss",)),
    Point("adapts to the world", "tests.elastic.programs.counting:adapt", "before", _CHANGES),
    Point("is to synchronise the state", f"{_STATE}.sync", "before", _CHANGES),
    Point("has sent or received the state", "hvdlite.training.objects:broadcast_object", "after", _CHANGES),
    Point("has synchronised the state", f"{_STATE}.sync", "after", _CHANGES),
    Point("is to commit", f"{_STATE}.save", "before", ("loss",)),
    Point("has copied its state for a commit", f"{_STATE}.save", "after", ("loss",)),
    Point("has committed", f"{_STATE}.check_host_updates", "before", ("loss",)),
    Point("is to save what it has received", f"{_STATE}.save", "before", ("growth",), ("joiner",)),
    Point("has committed for the first time", f"{_STATE}.check_host_updates", "before", ("growth",), ("joiner",)),
    Point("is to say that it has finished", f"{_MEMBER}.finish", "before", ("end",)),
)


@dataclasses.dataclass(frozen=True)
class Case:
    """A failure at a point."""

    point: Point
    scenario: str
    role: str
    kind: str

    def __str__(self) -> str:
        return f"{self.scenario}: the {self.role} {self.point.name}: {self.kind}"


def cases() -> Iterator[Case]:
    """Return all failures at all points."""
    for point in POINTS:
        for scenario in point.scenarios:
            for role in point.roles or ROLES[scenario]:
                yield from (Case(point, scenario, role, kind) for kind in KINDS)


def run_case(case: Case, folder: Path) -> None:
    """Run the job of a case.

    Raises:
        AssertionError: when it does not end as it should.
    """
    point, member = case.point, MEMBERS[case.role]
    trouble = {"loss": "2:30:kill", "hosts": "2:30:kill", "growth": "0:30:grow", "end": "0:30:arm"}[case.scenario]
    environment = {"FAILPOINT": f"{member}|{point.target}|{point.when}|{point.argument}|{case.kind}", "TROUBLE": trouble}
    if case.scenario != "end":
        environment["UNTIL"] = "fired"
    if point.holds:
        environment["HOLD"] = "30"
    if case.kind == "stop":
        environment |= {"HVDLITE_HEARTBEAT_TIMEOUT": "6", "HVDLITE_START_TIMEOUT": "8"}
    job = Job(_flags(case.scenario, folder), folder, 50, environment, program="failing")
    try:
        told = job.succeed(timeout=150)
    finally:
        job.close()
    assert (job.told / "fired").exists(), f"the member has not passed the point\n{job.errors()}"
    lost = {member} | ({2} if case.scenario in ("loss", "hosts") else set())
    late = {member} if case.kind == "notice" else set()
    as_expected = set(told) - late == {0, 1, 2} - lost
    assert as_expected or case.kind == "raise", f"members {sorted(told)} have finished\n{job.errors()}"
    if case.kind == "notice" and case.scenario in ("growth", "end"):
        assert "goes on after commit" not in job.errors(), job.errors()


def _flags(scenario: str, folder: Path) -> list[str]:
    if scenario == "growth":
        told = folder / "told"
        told.mkdir()
        hosts = HostsFile(told)
        hosts.write("localhost:2")
        (told / "next").write_text("localhost:3\n", encoding="ascii")
        return ["-np", "2", "--min-np", "1", *hosts.flags]
    if scenario == "hosts":
        shell = folder / "rsh"
        shell.write_text('#!/bin/sh\nshift\nexec sh -c "$*"\n', encoding="ascii")
        shell.chmod(0o755)
        return ["-np", "3", "--min-np", "1", "--remote-shell", str(shell), "-H", "localhost:1,b:2"]
    return ["-np", "3", "--min-np", "1"]
