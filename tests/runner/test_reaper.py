"""Which processes belong to a job."""

from __future__ import annotations

from hvdlite_runner.reaper import Process, members


def table(*rows: tuple[int, int, int, str]) -> dict[int, Process]:
    """Build a process table of (pid, parent, session, state); the group is the session."""
    return {pid: Process(parent, session, session, state) for pid, parent, session, state in rows}


def test_a_job_is_its_ranks_their_sessions_and_their_descendants() -> None:
    processes = table((1, 0, 1, "S"), (10, 1, 10, "S"), (11, 10, 11, "S"),  # init, the launcher, the reaper
                      (20, 10, 20, "Z"), (21, 1, 20, "S"),  # a rank that has ended, and an orphan of its session
                      (30, 10, 30, "S"), (31, 30, 31, "S"), (32, 31, 31, "R"),  # a rank, a child with a session, its child
                      (40, 1, 40, "S"), (41, 10, 10, "S"))  # strangers
    assert members(processes, ranks={20, 30}) == {21, 30, 31, 32}


def test_orphans_that_the_launcher_adopted_belong_to_the_job_but_not_its_own_children() -> None:
    processes = table((10, 1, 10, "S"), (11, 10, 11, "S"), (12, 10, 10, "S"), (13, 12, 10, "S"),
                      (50, 10, 50, "S"), (51, 50, 51, "S"), (52, 10, 52, "Z"))
    assert members(processes, ranks=set(), subreaper=10, excluded={11, 12}) == {50, 51}
