"""How jobs end: which signals are sent when, and what hvdrun says and returns. Pure, but for the clock."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Iterator

import pytest

from hvdlite.core.launch_contract import RESULTS_LOST, FailureRecord
from hvdlite.membership.events import EndJob
from hvdlite_runner.job import ending as module
from hvdlite_runner.job.ending import (
    INTERRUPT_GRACE,
    KILL_AFTER,
    TERMINATE_GRACE,
    Ending,
    Exit,
    Verdict,
    verdict,
    verdict_on_signal,
)

INT, TERM, HUP, KILL = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL


class Clock:
    """A clock that is set by hand."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    yield clock


def signals(ending: Ending, clock: Clock) -> list[tuple[float, int]]:
    """Return all signals that are due from now on, with the seconds until each."""
    begun, sent = clock.now, []
    while (wait := ending.wait()) is not None:
        clock.now += wait
        sent += [(clock.now - begun, signum) for signum in ending.due()]
    return sent


@pytest.mark.parametrize(("first", "sent"), [
    (INT, [(0.0, INT), (INTERRUPT_GRACE, KILL)]), (TERM, [(0.0, TERM), (TERMINATE_GRACE, KILL)]),
    (HUP, [(0.0, TERM), (TERMINATE_GRACE, KILL)])])
def test_the_users_signals(clock: Clock, first: int, sent: list[tuple[float, int]]) -> None:
    ending = Ending()
    ending.interrupt(first)
    assert ending.user_signal == first and signals(ending, clock) == sent
    given = Ending(grace=2.0)
    given.interrupt(first)
    assert signals(given, clock) == [sent[0], (2.0, KILL)]


@pytest.mark.parametrize("grace", [0.0, 1.0, 3.0])
def test_the_end_of_the_job(clock: Clock, grace: float) -> None:
    ending = Ending()
    ending.has_ended(grace)
    ending.has_ended(0.0)  # a later one changes nothing
    assert signals(ending, clock) == [(grace, TERM), (grace + KILL_AFTER, KILL)] and not ending.user_signal


@pytest.mark.parametrize("second", [INT, TERM, HUP])
def test_a_second_signal_kills(clock: Clock, second: int) -> None:
    ending = Ending()
    ending.interrupt(INT)
    assert list(ending.due()) == [INT]
    ending.interrupt(second)
    assert signals(ending, clock) == [(0.0, KILL)] and ending.user_signal == INT


def test_the_users_signal_comes_before_the_end_of_the_job(clock: Clock) -> None:
    ending = Ending()
    ending.interrupt(TERM)
    ending.has_ended(0.0)
    assert signals(ending, clock) == [(0.0, TERM), (TERMINATE_GRACE, KILL)] and ending.is_grace_over


def test_a_signal_after_a_failure_postpones_nothing_and_hides_nothing(clock: Clock) -> None:
    ending = Ending()
    ending.has_ended(3.0)
    ending.interrupt(TERM)
    assert signals(ending, clock) == [(0.0, TERM), (3.0 + KILL_AFTER, KILL)]
    assert verdict_on_signal(ending, [Exit(0, 3)]) is None, "the failure is the cause"


def test_a_signal_while_the_job_is_cleaned_up(clock: Clock) -> None:
    ending = Ending()
    ending.is_over = True
    ending.interrupt(HUP)
    ending.interrupt(INT)
    assert (ending.user_signal, ending.later_signal, signals(ending, clock)) == (0, HUP, [])


# --- verdicts ------------------------------------------------------------------------------------------------------------


def record(rank: int, origin: int | None = None, when: float = 1.0) -> dict[int, FailureRecord]:
    named = rank if origin is None else origin
    return {rank: FailureRecord(rank, named, when, "ValueError", "boom", "Traceback:", shown=True)}


def lines(ended: Verdict) -> list[str]:
    return list(ended.lines)


def test_the_end_by_a_signal_of_the_user(clock: Clock) -> None:
    exits = [Exit(1, 3), Exit(0, -9, ended_by_us=True, by_user=True), Exit(3, -9, ended_by_us=True, by_user=True),
             Exit(2, -9), Exit(4, -9, ended_by_us=True)]
    assert verdict_on_signal(Ending(), exits) is None
    ending = Ending()
    ending.interrupt(INT)
    assert verdict_on_signal(ending, exits[:1]) == Verdict(130, ["ended by SIGINT; all ranks ended in time"])
    ending.interrupt(INT)
    signals(ending, clock)
    assert verdict_on_signal(ending, exits) == Verdict(130, ["ended by SIGINT; killed by a second signal: ranks 0,3"])
    ending = Ending(grace=7.5)
    ending.interrupt(TERM)
    signals(ending, clock)
    assert verdict_on_signal(ending, exits) == Verdict(137, ["ended by SIGTERM; killed after 7.5 s (--grace): ranks 0,3"])
    assert verdict_on_signal(ending, exits[:1]) == Verdict(143, ["ended by SIGTERM; all ranks ended in time"])


def test_signals_that_are_passed_on_change_nothing_else(clock: Clock) -> None:
    ending = Ending()
    ending.forward(signal.SIGUSR1)
    assert ending.wait() == 0.0 and list(ending.due()) == [signal.SIGUSR1]
    assert ending.wait() is None and not ending.user_signal
    assert ending.explain(signal.SIGUSR1, {}) == "SIGUSR1 goes to the ranks that handle it"
    ending.is_over = True
    ending.forward(signal.SIGUSR2)
    assert list(ending.due()) == []


def test_a_limit_of_slurms_that_is_shorter_than_the_grace_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.time, "time", lambda: 1000.0)
    ending = Ending()
    environ = {"SLURM_JOB_END_TIME": "1012"}
    assert ending.explain(TERM, environ) == "", "after a failure there is no grace to speak of"
    ending.interrupt(TERM)
    assert ending.explain(TERM, environ) == "Slurm ends this job in 12 s (SLURM_JOB_END_TIME), before --grace 30"
    assert ending.explain(KILL, environ) == ending.explain(TERM, {}) == ""
    assert ending.explain(TERM, {"SLURM_JOB_END_TIME": "1031"}) == ending.explain(TERM, {"SLURM_JOB_END_TIME": "999"}) == ""


def test_all_have_finished() -> None:
    assert verdict(EndJob(0), [Exit(0, 0), Exit(1, 0)], {}) == Verdict(0)
    assert verdict(EndJob(0), [Exit(0, 0)], {}, problem="no room") == Verdict(RESULTS_LOST, ["no room"])
    assert verdict(EndJob(0), [Exit(0, 0), Exit(1, -9, ended_by_us=True)], {}, one_world=False) == Verdict(0)


def test_the_first_failure_is_named_with_its_consequences() -> None:
    ended = verdict(EndJob(1, "rank 0 on a: exit code 1", 0), [Exit(0, 1), Exit(1, 5)], record(0, origin=1))
    assert ended == Verdict(5, ["rank 1 failed first: exit code 5", "rank 0 ended as a consequence"], 1,
                            "rank 1 failed first: exit code 5")
    named = verdict(EndJob(5, "", 1), [Exit(1, 5)], {}, name=lambda key: f"rank {key} on b")
    assert lines(named) == ["rank 1 on b failed first: exit code 5"]
    several = verdict(EndJob(5, "", 1), [Exit(1, 5), Exit(0, 6), Exit(2, -15, ended_by_us=True)], {})
    assert (several.key, several.others) == (1, (0,))


def test_the_origin_is_named_of_an_elastic_job_whichever_end_is_seen_first() -> None:
    """The authority knows no records: it blames whoever ended first, or failed when training had finished."""
    end, records = EndJob(1, "rank 0 on a: exit code 1", 0), record(0, origin=1)
    outside = verdict(end, [Exit(0, 1), Exit(1, 5)], records, one_world=False)
    assert outside.code == 5 and outside.key == 1
    at_end = verdict(end, [Exit(1, -9), Exit(0, 1)], records, one_world=False)
    assert at_end.code == 137 and at_end.key == 1, "rank 0 still needed it"


def test_a_rank_that_crashes_after_it_was_told_to_end_is_the_cause_when_others_name_it() -> None:
    ended = verdict(EndJob(1, "", 0), [Exit(0, 1), Exit(1, -11, ended_by_us=True)], record(0, origin=1))
    assert ended.code == 139 and ended.key == 1


LOST = "host b was lost: ssh ended (with ranks 2-3)"


@pytest.mark.parametrize("exits", [[], [Exit(0, -15, ended_by_us=True)], [Exit(0, 1), Exit(1, 0)]])
def test_a_lost_host_is_the_cause_unless_a_process_failed_by_itself(exits: list[Exit]) -> None:
    records = record(0, origin=2) if exits and not exits[0].ended_by_us else {}
    ended = verdict(EndJob(1, "rank 2 on b: lost"), exits, records, lost=[LOST])
    assert (ended.code, ended.key, ended.reason) == (1, -1, LOST)
    assert lines(ended) == [LOST, *(["ranks 0 ended as a consequence"] if exits else [])]
    by_itself = verdict(EndJob(1, "rank 2 on b: lost"), [Exit(1, 7)], {}, lost=[LOST])
    assert by_itself.code == 7 and lines(by_itself) == ["rank 1 failed first: exit code 7"]


def test_an_elastic_job_that_has_one_world_names_the_failure_or_the_reason() -> None:
    end, exits = EndJob(4, "no rank that has the state is left", 1), [Exit(1, 4), Exit(0, -15, ended_by_us=True)]
    ended = verdict(end, exits, {}, one_world=False)
    assert ended.code == 4 and lines(ended)[0] == "rank 1 failed first: exit code 4"
    healthy = verdict(dataclasses.replace(end, ends_healthy=True), exits, {}, one_world=False)
    assert healthy.code == 4 and lines(healthy)[:2] == [end.reason, "rank 1 failed first: exit code 4"]
    too_few = verdict(EndJob(75, "2 ranks are needed"), [Exit(1, -9), Exit(0, 0)], {}, one_world=False)
    assert too_few.code == 75
    assert lines(too_few) == ["2 ranks are needed", "rank 1 failed first: killed by signal 9 (SIGKILL)"]
    nobody = verdict(EndJob(75, "2 ranks are needed"), [Exit(0, -15, ended_by_us=True)], {}, one_world=False)
    assert nobody == Verdict(75, ["2 ranks are needed"], -1, "2 ranks are needed")


def test_an_elastic_job_that_went_on_blames_nobody_of_an_earlier_world() -> None:
    exits = [Exit(0, -9), Exit(2, 3), Exit(1, 1)]
    ended = verdict(EndJob(3, "no rank that has the state is left", 2), exits, {}, worlds=2, one_world=False)
    assert ended.code == 3
    assert lines(ended) == ["no rank that has the state is left", "rank 2 failed first: exit code 3"], "no consequences"
    followed = verdict(EndJob(3, "lost", 1), exits, record(1, origin=2), worlds=2, one_world=False)
    assert followed.key == 2, "the failure's origin"
