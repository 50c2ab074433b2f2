"""The judge of random jobs finds each member that was ended though nobody had hurt it, and no other."""

from __future__ import annotations

import pytest

from tests.elastic.judge import spared

KILLED = "hvdrun: rank 1 on localhost: killed by signal 9 (SIGKILL)\n"
HELD_UP = "rank 1 (process 3) on fd77::2: it held up the others: PeerLostError: rank 1 lost (killed by signal 9 (SIGKILL))"


def test_members_that_were_hurt_are_no_finding() -> None:
    output = f"{KILLED}hvdrun: world 2, 2 ranks, goes on after commit 3; left: rank 1 on localhost (x); it took 0.2 s\n"
    assert not spared(output, {0, 1, 2}, {0, 2}, {1})


@pytest.mark.parametrize(("line", "member"), [
    (HELD_UP, 3),
    ("rank 2 on a: its process was stopped while others waited for it (killed by signal 9 (SIGKILL))", 2),
    ("new process 4 on a: LaunchError: no world (exit code 1)", 4),
    ("rank 0 on a left: its world was lost before it entered elastic.run", 0),
    ("rank 3 on b: PeerLostError: x (exit code 1); training had finished", 3),
])
def test_a_healthy_member_that_was_ended_is_found_with_the_reason(line: str, member: int) -> None:
    told = {0, 2, 3} - {member}
    assert spared(f"{KILLED}hvdrun: {line}\n", {0, 1, 2, 3}, told | {3} - {member}, {1}) == {member: line}


def test_a_member_that_vanishes_without_a_line_is_found() -> None:
    found = spared(KILLED, {0, 1, 2}, {0}, {1})
    assert list(found) == [2] and "no line about it" in found[2]


def test_what_members_write_and_other_lines_of_hvdrun_are_no_finding() -> None:
    output = (f"[0]<stderr>:hvdrun: {HELD_UP}\nhvdrun: rank 2 on a has not stopped; the others wait for it\n"
              "hvdrun: failed: rank 1 on localhost: killed by signal 9 (SIGKILL) (world 1)\n"
              "hvdrun: host b was lost: rank 2 on a: x\n")
    assert not spared(KILLED + output, {0, 1}, {0}, {1})


def test_members_that_are_lost_with_a_host_that_was_hurt_are_no_finding() -> None:
    output = "hvdrun: rank 2 (process 5) on b: no message for 30 s (lost with its host)\n"
    assert not spared(output, {0, 5}, {0}, {1}, {"b"})
    assert list(spared(output, {0, 5}, {0}, {1}, {"c"})) == [5]
    assert list(spared(output.replace("(lost with its host)", "(exit code 1)"), {0, 5}, {0}, {1}, {"b"})) == [5]
