"""Random programs and faults of process groups, a few of them; `make fuzz` runs more. What they are: the package `fuzz`."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from tests.torch.distributed.fuzz.calls import CALLS
from tests.torch.distributed.fuzz.faults import KINDS, Fault
from tests.torch.distributed.fuzz.jobs import fault_trials, fuzz, judge
from tests.torch.distributed.fuzz.program import draw
from tests.worlds import Ended

PROGRAMS = range(5)
KILLED, INTERRUPTED, LEFT_OUT, FORKS = map(KINDS.index, ("is killed", "is interrupted", "leaves a call out", "forks"))


def test_programs() -> None:
    failures = list(fuzz(PROGRAMS, 3))
    assert not failures, "\n\n".join(map(str, failures))


def test_the_programs_have_every_call() -> None:
    drawn = {name for seed in PROGRAMS for step in draw(seed, 3) for names in step.calls for name in names}
    assert drawn == set(CALLS)


@pytest.mark.slow
def test_faults() -> None:
    for trial in fault_trials([(KILLED, 3), (INTERRUPTED, 2), (LEFT_OUT, 3), (FORKS, 2)]):
        assert not trial.problems, str(trial)


def test_what_is_wrong_is_found() -> None:
    fault = Fault("is killed", 1, 5, 0.0)

    def wrong(outcome: str, code: int = 1) -> list[str]:
        return judge(fault, [Ended(0, code, f"fault 5.0\noutcome (6.0, {outcome})", ""), Ended(1, -9, "", "")])[0]

    assert not wrong("['PeerLostError', 'RuntimeError'], 'rank 1 was lost'")
    assert wrong("['PeerLostError', 'RuntimeError'], 'rank 2 was lost'") and wrong("['fine'], ''", 0)
    assert wrong("['WrongError'], 'rank 1'") and wrong("['KeyError'], 'rank 1'")
    assert wrong("['PeerLeftError', 'RuntimeError'], 'the receive from any rank needs rank 2, which left'")
    assert judge(fault, [Ended(0, 9999, "fault 5.0", ""), Ended(1, -9, "", "")])[0]


@pytest.mark.parametrize(("kind", "error", "is_wrong"), [
    ("changes the order", "WrongError", False), ("stops for long", "WrongError", True),
    ("changes the order", "KeyError", True)])
def test_what_the_rank_itself_may_end_with(kind: str, error: str, is_wrong: bool) -> None:
    ended = Ended(1, 1, f"fault 5.0\noutcome (6.0, ['{error}'], 'told as: the ranks do not call the same')", "")
    assert bool(judge(Fault(kind, 1, 5, 0.0), [ended])[0]) is is_wrong
