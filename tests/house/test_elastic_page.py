"""Each row of docs/elastic.md's table of what happens has tests that read what hvdrun prints about it."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
_EVENTS, _ELASTIC = "tests/runner/test_elastic_events.py", "tests/runner/test_elastic.py"
_HOSTS, _KILLS = "tests/runner/test_elastic_hosts.py", "tests/elastic/test_kills.py"
_NOTICES, _NOTICED = "tests/runner/test_notices.py", "tests/elastic/test_notices.py"
_DURABLE = "tests/elastic/test_durable.py"
_WAITED_FOR = f"{_EVENTS}::test_ranks_for_which_others_wait_in_a_collective_and_at_the_end"

ROWS = {
    "a rank is killed, raises, or calls `os._exit`": [f"{_EVENTS}::test_ranks_that_are_killed_exit_or_raise"],
    "a host is lost, its link is cut, or hvdrun's agent there is stopped": [
        f"{_HOSTS}::test_a_host_joins_and_is_lost",
        "tests/runner/test_hosts.py::test_an_elastic_job_goes_on_without_a_host_that_is_cut_off_and_takes_it_back"],
    "rank 0 is lost": [f"{_EVENTS}::test_ranks_that_are_killed_exit_or_raise"],
    "another rank is lost during recovery": [f"{_EVENTS}::test_ranks_that_are_lost_before_elastic_run_and_during_recovery"],
    "discovery prints another host, or more slots": [f"{_ELASTIC}::test_a_host_comes_and_goes"],
    "discovery no longer prints a host": [f"{_ELASTIC}::test_a_host_comes_and_goes"],
    "a rank gets SIGTERM in `run`, and the script does not handle it or call `stop_requested()`": [
        f"{_NOTICED}::test_a_rank_that_gets_sigterm_leaves_and_no_step_is_done_again"],
    "hvdrun's agent on a host gets SIGTERM, or `hvdrun --leave HOST` is called": [
        f"{_NOTICES}::test_a_signal_to_an_agent_is_a_notice_of_its_host", f"{_NOTICES}::test_a_host_is_left_on_demand"],
    "`--preemption-script` prints a number on a host": [
        f"{_NOTICES}::test_a_program_says_when_a_host_is_taken_away",
        f"{_NOTICES}::test_all_ranks_are_to_leave_with_the_host_of_hvdrun"],
    "a rank that was told to leave has not left in time": [
        f"{_NOTICES}::test_a_rank_that_has_not_left_in_time_is_killed"],
    "all ranks were told to leave": [f"{_NOTICED}::test_all_ranks_get_sigterm"],
    "hvdrun is killed (SIGKILL), or gets SIGTERM": [
        f"{_DURABLE}::test_hvdrun_ends_and_ranks_leave_a_checkpoint",
        f"{_DURABLE}::test_hvdrun_is_killed_and_ranks_of_another_host_leave_a_checkpoint_too"],
    "discovery prints no host at all": [f"{_ELASTIC}::test_a_host_comes_and_goes"],
    "the discovery program fails, hangs or returns invalid output": [
        f"{_EVENTS}::test_a_discovery_program_that_fails_at_the_start", f"{_ELASTIC}::test_a_host_comes_and_goes"],
    "fewer than `--min-np` ranks are left": [f"{_EVENTS}::test_too_few_ranks"],
    "a rank does not stop when the others do": [f"{_EVENTS}::test_ranks_that_do_not_stop_when_others_do"],
    "a rank does not reach the boundary at which all stop": [f"{_EVENTS}::test_ranks_that_do_not_stop_when_others_do"],
    "a script catches the error of a collective (`except Exception: continue`) when its world has ended": [
        f"{_KILLS}::test_a_script_that_catches_every_exception_comes_into_the_next_world"],
    "a timeline, or the file with a rank's progress, cannot be written in a later world": [
        f"{_KILLS}::test_a_script_that_catches_every_exception_comes_into_the_next_world"],
    "a rank is killed, or its host is lost, after `run` has returned on all ranks": [
        f"{_EVENTS}::test_a_rank_is_killed_and_another_one_stopped_when_training_has_finished",
        f"{_EVENTS}::test_rank_0_is_lost_when_training_has_finished"],
    "a rank hangs, and nobody else fails": [_WAITED_FOR],
    "a rank's process is stopped (SIGSTOP) while others wait for it": [_WAITED_FOR],
    "a rank's process is stopped after the last `run` has returned": [
        f"{_EVENTS}::test_a_rank_is_killed_and_another_one_stopped_when_training_has_finished"],
    "a rank ends without having called `run`": [
        f"{_EVENTS}::test_ranks_that_are_lost_before_elastic_run_and_during_recovery"],
    "three failures in a row (`--failures-without-progress`) without progress, which is a commit or a later boundary than "
    "before: on more than one slot, or with fewer than `--min-np` ranks left": [
        f"{_EVENTS}::test_three_failures_in_a_row_without_progress"],
    "one slot fails again and again": [f"{_EVENTS}::test_one_slot_fails_again_and_again"],
    "a rank ends between two calls of `run`": [f"{_EVENTS}::test_a_rank_that_does_not_call_run_again"],
    "the training function returns on some ranks": [f"{_EVENTS}::test_ranks_that_are_killed_exit_or_raise"],
}


def _events() -> list[str]:
    """Return the first column of the table."""
    page = (ROOT / "docs/elastic.md").read_text(encoding="utf-8")
    lines = page.partition("\n| event | what the job does |\n")[2].splitlines()
    return [line.split(" | ")[0].removeprefix("| ") for line in lines[1:lines.index("")]]


def test_every_event_has_a_test_of_what_hvdrun_prints() -> None:
    assert _events() == list(ROWS)
    for tests in ROWS.values():
        assert tests
        for path, name in (test.split("::") for test in tests):
            assert re.search(rf"^def {name}\(", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE), f"{path}::{name}"
