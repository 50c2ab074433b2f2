"""Starting ranks that run programs, and finding out which seeds fail."""

from __future__ import annotations

import ast
import dataclasses
import re
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tests import temporary
from tests.fuzzing import Failure, Tell, failures
from tests.torch.distributed.fuzz.faults import FAULT, KINDS, OTHER_CALLS, OUTCOME, TIMED_OUT, TIMEOUT_SECONDS, Fault
from tests.torch.distributed.fuzz.faults import main as faulted
from tests.torch.distributed.fuzz.program import STEPS, draw
from tests.torch.distributed.fuzz.rank import main
from tests.worlds import HANGS_SECONDS, TORCH, Ended, Processes

SECONDS_A_SEED = 5.0
"""For a job on a busy machine."""


def fuzz(seeds: Sequence[int], size: int, calls: Sequence[str] = (), steps: range = range(STEPS),
         tell: Tell = lambda text: None) -> Iterator[Failure]:
    """Run the programs of some seeds, many in one job, and yield those that fail.

    Args:
        calls, steps: see `draw`.
        tell: gets a line a job.
    """
    with tempfile.TemporaryDirectory(prefix=temporary.prefix("fuzz")) as folder:
        yield from failures(seeds, size, main, [folder, list(calls), [steps.start, steps.stop]],
                            lambda seed: "\n".join(map(str, draw(seed, size, calls, steps))), {}, TORCH, SECONDS_A_SEED,
                            tell)


@dataclasses.dataclass
class Trial:
    """How a job with a fault ended.

    Attributes:
        problems: what is wrong; none if all is right.
        seconds: from the fault to the last rank's end.
        errors: the names of the others' errors.
    """

    seed: int
    size: int
    fault: Fault
    problems: list[str]
    seconds: float
    errors: list[str]
    output: str

    def __str__(self) -> str:
        ended = f"seed {self.seed}, {self.size} ranks, {self.fault}: {self.seconds:.1f} s, {', '.join(self.errors)}"
        return "\n".join([ended, self.output, *self.problems]) if self.problems else ended


def fault_trials(programs: Iterable[tuple[int, int]], kinds: tuple[str, ...] = KINDS) -> Iterator[Trial]:
    """Run programs with faults, each given by a seed and a number of ranks, and look at what they leave."""
    with tempfile.TemporaryDirectory(prefix=temporary.prefix("fuzz")) as folder:
        scratch = Path(folder, "tmp")
        scratch.mkdir()
        for seed, size in programs:
            yield _trial(seed, size, kinds, f"file://{folder}/{seed}-{size}", scratch)


def _trial(seed: int, size: int, kinds: tuple[str, ...], where: str, scratch: Path) -> Trial:
    fault = Fault.draw(seed, size, kinds)
    with Processes(size, faulted, seed, where, list(kinds), str(scratch), imported=TORCH) as world:
        sessions = {process.pid for process in world.ranks}
        try:
            ended, problems = world.wait(HANGS_SECONDS), []
        except AssertionError:
            ended = [world.told(rank) for rank in range(size)]
            problems = [f"ranks {[rank.rank for rank in ended if rank.code == 9999]} hang"]
        problems += _orphans(sessions)
    problems += [f"left in the temporary directory: {path.name}" for path in scratch.glob("hvdlite*")]
    found, seconds, errors = judge(fault, ended)
    return Trial(seed, size, fault, problems + found, seconds, errors, "\n".join(
        f"rank {rank.rank} ended with {rank.code}\n{rank.stdout}{rank.stderr[-4000:]}" for rank in ended))


def judge(fault: Fault, ended: Sequence[Ended]) -> tuple[list[str], float, list[str]]:
    """Return what is wrong with the ends of ranks, how long they took, and their errors."""
    problems, errors, last = [], [], 0.0
    # Within a call nobody knows which rank stands still, but rank 0's log names those that do not answer.
    is_logged = fault.kind == "stops for long" and any(
        f"rank {fault.culprit} has not answered" in rank.stderr for rank in ended)
    begun = max((float(line.split()[1]) for rank in ended for line in rank.stdout.splitlines()
                 if line.startswith(f"{FAULT} ")), default=0.0)
    for rank in ended:
        lines = [line for line in rank.stdout.splitlines() if line.startswith(f"{OUTCOME} ")]
        if rank.rank == fault.culprit and fault.is_fatal and fault.kind not in TIMED_OUT:
            continue
        if not lines:
            problems.append(f"rank {rank.rank} ends with {rank.code} and no outcome")
            continue
        when, kinds, text = ast.literal_eval(lines[-1].split(" ", 1)[1])
        last = max(last, when)
        errors.append(kinds[0])
        if not fault.is_fatal:
            if rank.code or kinds[0] != "fine":
                problems.append(f"rank {rank.rank} ends with {rank.code}, {kinds[0]}: {text}")
            continue
        if (rank.rank == fault.culprit and fault.kind in OTHER_CALLS and kinds[0] == "WrongError" and rank.code > 0
                and "the ranks do not call the same" in text):
            continue  # its program takes this for a disagreement that it has made on purpose
        late = "OperationTimeoutError" in kinds and fault.kind not in TIMED_OUT
        # Who has not sent to a receive from any rank, nobody knows.
        is_open = "OperationTimeoutError" in kinds and "from any rank" in text
        has_name = is_open or is_logged or re.search(rf"ranks? (\d+, )*{fault.culprit}\b", text)
        if "RuntimeError" not in kinds or "WrongError" in kinds or rank.code <= 0 or late:
            problems.append(f"rank {rank.rank} ends with {rank.code}, {kinds}: {text}")
        elif rank.rank != fault.culprit and not has_name:
            problems.append(f"rank {rank.rank} does not name rank {fault.culprit}: {text}")
    seconds = last - begun if begun else 0.0
    limit = 2 * TIMEOUT_SECONDS + 20 if fault.kind in TIMED_OUT else 20
    if begun and seconds > limit:
        problems.append(f"the ranks needed {seconds:.1f} s")
    return problems, seconds, errors


def _orphans(sessions: set[int]) -> list[str]:
    """Return processes that are left of some sessions after a moment."""
    until = time.monotonic() + TIMEOUT_SECONDS + 10
    while True:
        found = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                text = path.read_text()
            except OSError:
                continue
            state, _, _, session = text.rpartition(")")[2].split()[:4]
            if int(session) in sessions and state != "Z":
                found.append(f"process {path.parent.name} is left")
        if not found or time.monotonic() > until:
            return found
        time.sleep(0.05)
