"""Errors, deaths and Ctrl-C inside `fit` and `tf.function`: told, and over soon."""

from __future__ import annotations

import signal
import time

import pytest

from tests.tf.support import ENVIRONMENT, PROGRAMS, imported
from tests.worlds import HANGS_SECONDS, Processes


@pytest.mark.parametrize(("fault", "kind", "told"), [
    ("raise", "PeerFailedError", "rank 1 failed with RuntimeError: out of paper"),
    ("kill", "PeerLostError", "rank 1 was lost")])
def test_the_others_end_soon_and_say_why(fault: str, kind: str, told: str) -> None:
    with Processes(2, f"{PROGRAMS}.faults:fit_with_a_fault", fault, environment=ENVIRONMENT,
                   imported=imported("tensorflow")) as world:
        world.wait_for(1, "there")
        begun = time.monotonic()
        assert world.ranks[0].wait(HANGS_SECONDS) != 0
        assert time.monotonic() - begun < 20
        assert told in world.told(0).stderr and f"caught {kind}\n" in world.told(0).stdout


def test_ctrl_c_ends_fit() -> None:
    """The signal as hvdrun sends it on; what hvdrun returns then: `test_the_users_signals_end_every_rank`."""
    with Processes(2, f"{PROGRAMS}.faults:fit_until_interrupted", environment=ENVIRONMENT,
                   imported=imported("tensorflow")) as world:
        world.wait_for_all("there")
        world.kill(1, signal.SIGINT)
        ended = world.wait()
    assert all(rank.code != 0 for rank in ended) and "KeyboardInterrupt" in ended[1].stderr, ended
