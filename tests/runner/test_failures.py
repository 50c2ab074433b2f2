"""Which failure is the cause of the others."""

from __future__ import annotations

import sys

import pytest

from hvdlite.core.launch_contract import FailureRecord
from hvdlite.membership.history import shell_code
from hvdlite_runner.job.ending import Cause, Exit, dated, root_cause


def record(rank: int, origin: int, when: float) -> FailureRecord:
    return FailureRecord(rank, origin, when, "ValueError", "boom", "Traceback:\n  here")


def test_a_killed_rank_is_the_cause_although_another_exited_first() -> None:
    cause = root_cause([Exit(0, 1), Exit(2, -9)], {0: record(0, 2, 5.0)})
    assert cause is not None and cause.exit.key == 2 and shell_code(cause.exit.code) == 137
    assert cause.describe() == ["rank 2 failed first: killed by signal 9 (SIGKILL)", "rank 0 ended as a consequence"]


def test_a_rank_that_raised_is_the_cause_with_its_traceback() -> None:
    cause = root_cause([Exit(0, 1), Exit(2, 1), Exit(1, 3)],
                       {0: record(0, 1, 2.0), 1: record(1, 1, 1.0), 2: record(2, 1, 2.0)})
    assert cause is not None and cause.exit.key == 1 and shell_code(cause.exit.code) == 3
    assert cause.describe() == ["rank 1 failed first: ValueError: boom (exit code 3)", "Traceback:", "  here",
                                "ranks 0, 2 ended as a consequence"]


def test_blame_is_followed_to_its_end() -> None:
    """Rank 0 only saw rank 1 go, which went because of rank 2."""
    cause = root_cause([Exit(0, 1), Exit(1, 1), Exit(2, -9)], {0: record(0, 1, 2.0), 1: record(1, 2, 1.0)})
    assert cause is not None and cause.exit.key == 2 and cause.consequences == (0, 1)


def test_ranks_that_blame_each_other_do_not_hang_the_report() -> None:
    cause = root_cause([Exit(1, 1), Exit(0, 1)], {0: record(0, 1, 2.0), 1: record(1, 0, 2.0)})
    assert cause is not None and cause.exit.key == 1
    cause = root_cause([Exit(1, 1), Exit(0, 1), Exit(2, 4)],
                       {0: record(0, 1, 2.0), 1: record(1, 0, 2.0), 2: record(2, 2, 3.0)})
    assert cause is not None and cause.exit.key == 2


def test_of_two_own_failures_the_earlier_wins() -> None:
    cause = root_cause([Exit(0, 1), Exit(1, 1)], {0: record(0, 0, 2.0), 1: record(1, 1, 1.0)})
    assert cause is not None and cause.exit.key == 1


def test_without_records_the_first_exit_wins_but_not_one_we_ended() -> None:
    cause = root_cause([Exit(1, -15, ended_by_us=True), Exit(0, 7)], {})
    assert cause is not None and cause.exit.key == 0


def test_a_stalled_rank_that_the_launcher_ends_is_not_the_cause() -> None:
    cause = root_cause([Exit(0, 1), Exit(1, -15, ended_by_us=True)], {0: record(0, 1, 5.0)})
    assert cause is not None and cause.exit.key == 0
    cause = root_cause([Exit(0, 1), Exit(1, -11, ended_by_us=True)], {0: record(0, 1, 5.0)})  # it crashed meanwhile
    assert cause is not None and cause.exit.key == 1


def test_nobody_failed() -> None:
    assert root_cause([Exit(0, 0), Exit(1, 0)], {}) is None


def test_failures_of_hosts_whose_clocks_differ_are_in_the_order_of_their_ages() -> None:
    """Host b's clock is an hour ahead: what failed there first has the later time."""
    records = {0: dated(record(0, 0, 1.0), 1000.0), 1: dated(record(1, 1, 3.0), 1000.5)}
    cause = root_cause([Exit(0, 1), Exit(1, 1)], records)
    assert cause is not None and cause.exit.key == 1


def test_ranks_that_failed_alike_before_init_are_named_together_with_the_exception() -> None:
    same = "Traceback (most recent call last):\n  File \"a.py\", line 1\nhvd.core.NotInitializedError: no\n  more"
    other = "Traceback (most recent call last):\n  File \"a.py\", line 2\nKeyError: 'x'"
    exits = [Exit(0, 1), Exit(2, 1), Exit(1, 1), Exit(3, -15, ended_by_us=True), Exit(4, 1, ended_by_us=True)]
    cause = root_cause(exits, {})
    assert cause is not None
    told = cause.with_tracebacks(exits, {}, {0: same, 1: other, 2: same, 3: same, 4: same})
    assert told.describe() == ["ranks 0,2,4 failed alike: NotInitializedError: no (exit code 1)",
                               "rank 1 failed too: KeyError: 'x'", "rank 3 ended as a consequence"]
    assert told.others == {"KeyError: 'x'": [1]}
    alone = cause.with_tracebacks(exits, {}, {1: other})
    assert alone.describe()[0] == "ranks 0,2 failed alike: exit code 1", "they have printed none"


@pytest.mark.parametrize(("text", "code", "reason"), [
    ('  File "/a/train.py", line 1\n    def f(:\nSyntaxError: no', 1, "SyntaxError: no (exit code 1)"),
    ("usage: train.py [-h]\ntrain.py: error: unrecognized arguments: -np 2", 2, "exit code 2"),
    ("/a/bin/python3.11: No module named train", 1, "exit code 1"),
])
def test_ranks_that_fail_alike_before_there_is_a_traceback_are_named_together(text: str, code: int, reason: str) -> None:
    exits = [Exit(rank, code) for rank in range(3)]
    cause = root_cause(exits, {})
    assert cause is not None
    told = cause.with_tracebacks(exits, {}, dict.fromkeys(range(3), text)).describe()
    assert told == [f"ranks 0-2 failed alike: {reason}"]


def test_ranks_that_exit_by_themselves_are_no_consequence() -> None:
    exits = [Exit(0, 3), Exit(1, 3), Exit(2, 5), Exit(3, 5), Exit(4, 3, ended_by_us=True), Exit(5, 1), Exit(6, 0)]
    cause = root_cause(exits, {})
    assert cause is not None
    assert cause.with_tracebacks(exits, {5: record(5, 0, 1.0)}, {}).describe() == [
        "ranks 0-1 failed alike: exit code 3", "ranks 2-3 failed too: exit code 5", "ranks 4, 5 ended as a consequence"]


def test_an_exception_after_which_a_rank_has_written_more_is_not_the_cause() -> None:
    handled = ("Traceback (most recent call last):\n  File \"a.py\", line 1\nModuleNotFoundError: No module named 'torch'\n"
               "falling back\nno training data")
    exits = [Exit(0, 1), Exit(1, 1)]
    cause = root_cause(exits, {})
    assert cause is not None
    assert cause.with_tracebacks(exits, {}, {0: handled}).describe() == ["rank 0 failed first: exit code 1",
                                                                         "rank 1 failed too: exit code 1"]
    assert cause.with_tracebacks(exits, {}, {1: handled}).others == {"exit code 1": [1]}


def test_a_message_of_several_lines_is_repeated_where_its_traceback_is_not() -> None:
    message = "\n".join(["in a circle:", *(f"  rank {rank} waits" for rank in range(25))])
    shown = FailureRecord(0, 0, 1.0, "DeadlockError", message, "Traceback:\n  here", shown=True)
    lines = Cause(Exit(0, 1), shown, ()).describe()
    assert lines[:2] == ["rank 0 failed first: DeadlockError: in a circle: (exit code 1)", "  rank 0 waits"]
    assert lines[20:] == ["  rank 19 waits", "(5 more lines in its traceback above)"]
    assert Cause(Exit(0, 1), shown, ()).describe(repeats=True)[1:] == ["Traceback:", "  here"]


@pytest.mark.parametrize(("message", "hint"), [
    ("No module named 'horovod'", "--horovod-compat"),
    ("No module named 'hvdlite_torch'", f"-np 2 {sys.executable} train.py"),
    ("No module named 'torch'", "pip install torch"),
    ("No module named 'hvdlite_keras'", "hvdlite_tf.keras (Keras 3)"),
    ("No module named 'hvdlite.callbacks'", "hvdlite_tf.keras (Keras 3)"),
    ("No module named 'horovod.mxnet'", "hvdlite has of Horovod"),
    ("No module named 'mine'", None),
])
def test_what_to_do_follows_the_exception(message: str, hint: str | None) -> None:
    failed = FailureRecord(0, 0, 1.0, "ModuleNotFoundError", message, "", shown=True)
    lines = Cause(Exit(0, 1), failed, ()).describe()
    assert lines[0] == f"rank 0 failed first: ModuleNotFoundError: {message} (exit code 1)"
    assert hint in lines[1] if hint else len(lines) == 1
    assert len(lines) < 3
