"""One rank of a program does something wrong, or something that must not matter.

Every other rank is to raise an error that names that rank, soon; or to end as if nothing had happened.
"""

from __future__ import annotations

import dataclasses
import datetime
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from typing import Final

import torch
import torch.distributed as dist

import hvdlite_torch.distributed
from hvdlite.core.errors import ForkedProcessError
from tests.torch.distributed.fuzz.program import STEPS, Rank, Step, draw

FATAL: Final = ("raises", "is killed", "exits", "exits at once", "is interrupted", "destroys early", "leaves a call out",
                "changes the order", "stops for long")
HARMLESS: Final = ("stops", "forks")
KINDS: Final = (*FATAL, *HARMLESS)
TIMEOUT_SECONDS: Final = 12
"""Of the groups."""
OTHER_CALLS: Final = ("leaves a call out", "changes the order")
"""After these the rank calls something else than the others."""
TIMED_OUT: Final = (*OTHER_CALLS, "stops for long")
"""What the others may find after the timeout only."""
FAULT, OUTCOME = "fault", "outcome"
"""How lines begin that ranks print, with the time."""


class DeliberateError(Exception):
    """Raised by the rank whose fault it is."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """What one rank does.

    Attributes:
        culprit: the rank.
        step: before which step.
        delay: seconds after its beginning, for what comes from outside.
    """

    kind: str
    culprit: int
    step: int
    delay: float

    @classmethod
    def draw(cls, seed: int, size: int, kinds: tuple[str, ...] = KINDS) -> Fault:
        draws = random.Random(f"{seed} {size} fault")
        culprit, step = draws.randrange(size), draws.randrange(FIRST, STEPS)
        return cls(kinds[seed % len(kinds)], culprit, step, draws.choice([0, 0.001, 0.01, 0.05]))

    @property
    def is_fatal(self) -> bool:
        return self.kind in FATAL


FIRST: Final = 4
"""No fault is before this step, and no group is made after it: torch does that with its store."""


class Culprit:
    """Carries a fault out; `Rank` calls it before each step."""

    def __init__(self, fault: Fault) -> None:
        self._fault, self._is_over = fault, False

    def __call__(self, rank: Rank, step: Step) -> None:
        fault = self._fault
        if self._is_over or step.number < fault.step:
            return
        self._is_over = True
        print(FAULT, time.time(), flush=True)
        if fault.kind in ("destroys early", "leaves a call out", "changes the order"):
            self._in_group(rank)
        elif rank.me == fault.culprit:
            getattr(self, f"_{fault.kind.replace(' ', '_')}")()

    def _in_group(self, rank: Rank) -> None:
        """What members of the default group see."""
        one, other = torch.ones(4242), torch.ones(4243)
        if rank.me == self._fault.culprit:
            if self._fault.kind == "destroys early":
                dist.destroy_process_group()
                raise DeliberateError("destroyed early")
            if self._fault.kind == "leaves a call out":
                return
            one, other = other, one
        dist.all_reduce(one)
        dist.all_reduce(other)

    def _raises(self) -> None:
        raise DeliberateError("raised")

    def _exits(self) -> None:
        sys.exit(0)

    def _exits_at_once(self) -> None:
        os._exit(3)

    def _is_killed(self) -> None:
        self._later(lambda: os.kill(os.getpid(), signal.SIGKILL))

    def _is_interrupted(self) -> None:
        def interrupt(*_: object) -> None:
            raise DeliberateError("interrupted")

        signal.signal(signal.SIGUSR1, interrupt)
        self._later(lambda: os.kill(os.getpid(), signal.SIGUSR1))

    def _stops(self, seconds: float = 1.0) -> None:
        continues = f"import os, time; time.sleep({seconds}); os.kill({os.getpid()}, {signal.SIGCONT.value})"
        subprocess.Popen([sys.executable, "-S", "-c", continues], close_fds=True)
        self._later(lambda: os.kill(os.getpid(), signal.SIGSTOP))

    def _stops_for_long(self) -> None:
        self._stops(TIMEOUT_SECONDS + 6.0)

    def _forks(self) -> None:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                dist.all_reduce(torch.ones(2))
            except ForkedProcessError:
                code = 0
            finally:
                os._exit(code)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            raise AssertionError("the child of a fork gets no ForkedProcessError")

    def _later(self, act: object) -> None:
        assert callable(act)
        if not self._fault.delay:
            act()
            return
        timer = threading.Timer(self._fault.delay, act)
        timer.daemon = True
        timer.start()


def main(seed: int, where: str, kinds: tuple[str, ...], scratch: str) -> None:
    """Run the program of a seed with its fault.

    Args:
        where: torch's `init_method`; the ranks of launchers have theirs in the environment.
        scratch: the directory for temporary files.
    """
    tempfile.tempdir = scratch
    torch.set_num_threads(1)
    variables = os.environ
    rank, size = (int(variables[name] if name in variables else variables[ours])
                  for name, ours in (("RANK", "HVDLITE_RANK"), ("WORLD_SIZE", "HVDLITE_SIZE")))
    fault, timeout = Fault.draw(seed, size, tuple(kinds)), datetime.timedelta(seconds=TIMEOUT_SECONDS)
    dist.init_process_group(hvdlite_torch.distributed.NAME, init_method=where, rank=rank, world_size=size,
                            timeout=timeout)
    is_first = variables.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    try:
        program = draw(seed, size, groups_until=FIRST)
        Rank(seed, timeout, Culprit(fault) if is_first else lambda rank, step: None).run(program)
    except BaseException as error:
        kind = [each.__name__ for each in type(error).__mro__]
        print(OUTCOME, repr((time.time(), kind, str(error))), flush=True)
        raise
    threads = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    dist.destroy_process_group()
    print(OUTCOME, repr((time.time(), ["fine"], str(threads))), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], tuple(sys.argv[3].split(",")), tempfile.gettempdir())
