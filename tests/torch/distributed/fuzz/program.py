"""The steps of a program, drawn from a seed, and one rank that carries them out."""

from __future__ import annotations

import dataclasses
import datetime
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch.distributed as dist

from tests.fuzzing import WrongError
from tests.torch.distributed.fuzz.calls import CALLS
from tests.torch.distributed.fuzz.turn import Turn
from tests.torch.distributed.fuzz.values import digest

STEPS: Final = 24
GROUPS: Final = 4
"""How many groups there are at most beside the default one."""


@dataclasses.dataclass(frozen=True)
class Step:
    """What happens next.

    Attributes:
        kind: of "call", "threads", "new", "destroy".
        groups: which groups: of calls, and of "destroy".
        ranks: the members of a new group, or of each of `groups`.
        calls: the names of calls, for each group.
        made: how a new group is made.
    """

    number: int
    kind: str
    groups: tuple[int, ...] = ()
    ranks: tuple[tuple[int, ...], ...] = ()
    calls: tuple[tuple[str, ...], ...] = ()
    made: str = ""

    def __str__(self) -> str:
        if self.kind == "new":
            return f"step {self.number}: group {self.groups[0]} of {self.ranks[0]} by {self.made}"
        parts = [f"group {group} {ranks}: {', '.join(calls)}" for group, ranks, calls
                 in zip(self.groups, self.ranks, self.calls, strict=True)]
        return f"step {self.number}: {self.kind} {'; '.join(parts)}"


def draw(seed: int, size: int, calls: Sequence[str] = (), only: range = range(STEPS),
         groups_until: int = STEPS) -> list[Step]:
    """Return the steps of a program.

    Args:
        calls: the names of the calls that are carried out; all without any.
        only: the steps that are carried out; groups are made in any case.
        groups_until: no group is made from this step on.
    """
    draws = random.Random(f"{seed} {size}")
    groups, named, registered = {0: tuple(range(size))}, {0}, Counter(range(size))
    names: dict[int, tuple[object, ...]] = {}
    steps: list[Step] = []
    for number in range(STEPS):
        kind = "new" if number in (0, 1) else draws.choices(["call", "threads", "new", "destroy"], [20, 3, 2, 1])[0]
        if kind == "new" and number < groups_until and len(groups) <= GROUPS:
            ranks = tuple(sorted(draws.sample(range(size), draws.randint(1, size))))
            made = draws.choice(["new_group", "alone", "split_group"])
            if made == "alone":  # torch names it by its ranks and the number of each member's groups
                counts = {registered[rank] for rank in ranks}
                name = (ranks, *counts)
                if len(counts) > 1 or name in names.values():
                    made = "new_group"
                else:
                    names[number + 1] = name
            if made != "split_group":
                registered.update(ranks)
                named.add(number + 1)
            groups[number + 1] = ranks
            steps.append(Step(number, kind, (number + 1,), (ranks,), made=made))
            continue
        if kind == "destroy" and len(groups) > 1:
            group = draws.choice([each for each in groups if each])
            registered.subtract(groups[group] if group in named else ())
            names.pop(group, None)
            steps.append(Step(number, kind, (group,), (groups.pop(group),), ((),)))
            continue
        several = draws.sample(list(groups), min(len(groups), draws.randint(2, 3))) if kind == "threads" else [
            draws.choice([0, *groups])]
        drawn = tuple(tuple(name for name in draws.choices(list(CALLS), k=3 if kind == "threads" else 1)
                            if not calls or name in calls) for _ in several)
        if number in only and any(drawn):
            steps.append(Step(number, "threads" if len(several) > 1 else "call", tuple(several),
                              tuple(groups[each] for each in several), drawn))
    return steps


@dataclasses.dataclass
class Pending:
    """A call that has begun."""

    group: int
    what: str
    turn: Turn
    work: Any
    check: Callable[[], None]
    policy: str

    def finish(self) -> None:
        """Wait, as it was drawn, and check the result."""
        if self.work is not None:
            if self.policy == "future" and hasattr(self.work, "get_future"):
                self.work.get_future().wait()
            elif self.policy == "poll" and hasattr(self.work, "is_completed"):
                while not self.work.is_completed():
                    time.sleep(0.001)
                if not self.work.is_success():
                    raise self.work.exception()
            else:
                self.work.wait()
        self.check()
        self.turn.check(self.what)


class Rank:
    """Carries a program out on one rank.

    Args:
        timeout: of groups.
        before: called before each step with its number; faults happen there.
    """

    def __init__(self, seed: int, timeout: datetime.timedelta,
                 before: Callable[[Rank, Step], None] = lambda rank, step: None) -> None:
        self.seed, self.me = seed, dist.get_rank()
        self.groups: dict[int, Any] = {0: dist.group.WORLD}
        self._before, self._timeout = before, timeout
        self._pending: list[Pending] = []
        self._lock = threading.Lock()
        self._digests: dict[str, str] = {}
        self._draws = random.Random(f"{seed} {self.me} waits")

    def run(self, steps: Sequence[Step]) -> None:
        """Carry out all steps; destroy the groups."""
        for step in steps:
            self._before(self, step)
            if step.kind == "new":
                self._make(step)
            elif step.kind == "destroy":
                self._destroy(step.groups[0])
            else:
                self._call(step)
            self._settle(lambda pending: self._draws.random() < 0.3)
        dist.barrier()
        self._settle(lambda pending: True)
        everybodys: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everybodys, self._digests)
        for rank, digests in enumerate(everybodys):
            for what, found in self._digests.items():
                if digests.get(what, found) != found:
                    raise WrongError(f"{what}: the result differs from that on rank {rank}")
        for group in [each for each in self.groups if each]:
            self._destroy(group)

    def _make(self, step: Step) -> None:
        (number,), (ranks,) = step.groups, step.ranks
        group: Any = None
        if step.made == "new_group":
            group = dist.new_group(list(ranks), group_desc=f"number {number}", timeout=self._timeout)
        elif self.me in ranks:
            if step.made == "alone":
                group = dist.new_group(list(ranks), use_local_synchronization=True, timeout=self._timeout)
            else:
                world: Any = dist.group.WORLD
                group = world.split_group(list(ranks), group_name=f"split {self.seed} {number} {ranks}")
        if self.me in ranks:
            self.groups[number] = group

    def _destroy(self, number: int) -> None:
        group = self.groups.pop(number, None)
        if group is None:
            return
        self._settle(lambda pending: pending.group == number)
        if group in dist.distributed_c10d._world.pg_map:
            dist.destroy_process_group(group)
        else:
            group.shutdown()

    def _call(self, step: Step) -> None:
        errors: list[BaseException] = []

        def thread(part: int) -> None:
            try:
                self._call_group(step, part)
            except BaseException as error:
                errors.append(error)

        mine = [part for part, ranks in enumerate(step.ranks) if self.me in ranks]
        if step.kind == "call":
            for part in mine:
                self._call_group(step, part)
            return
        threads = [threading.Thread(target=thread, args=(part,)) for part in mine]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        if errors:
            raise errors[0]

    def _call_group(self, step: Step, part: int) -> None:
        number, ranks = step.groups[part], step.ranks[part]
        group = self.groups[number]
        is_registered = group in dist.distributed_c10d._world.pg_map
        for index, name in enumerate(step.calls[part]):
            turn = Turn(self.seed, step.number, 10 * part + index, ranks, self.me, group)
            what = f"step {step.number}, group {number} {ranks}, {name}"
            if not is_registered:
                name, what = "all_reduce_coalesced", f"{what} (all_reduce_coalesced)"
            try:
                work, check = CALLS[name](turn)
            except Exception as error:
                error.add_note(f"{what}: {turn.told}")
                raise
            policy = self._draws.choice(["now", "later", "later", "future", "poll"])
            pending = Pending(number, f"{what} {turn.told}", turn, work, check, policy)
            if policy == "now" or name == "nested":  # torch takes its calls for those of a coalescing manager
                self._finish(pending)
            else:
                with self._lock:
                    self._pending.append(pending)

    def _finish(self, pending: Pending) -> None:
        try:
            pending.finish()
        except Exception as error:
            error.add_note(pending.what)
            raise
        if pending.turn.shared:
            self._digests[f"{pending.group} {pending.turn.key}"] = digest(pending.turn.shared)

    def _settle(self, chosen: Callable[[Pending], bool]) -> None:
        """Finish some of the calls under way, in any order."""
        finished = [pending for pending in self._pending if chosen(pending)]
        self._pending = [pending for pending in self._pending if not any(pending is each for each in finished)]
        self._draws.shuffle(finished)
        for pending in finished:
            self._finish(pending)

