"""Random losses in elastic jobs with `outer=`: what is learned is counted, and what each world begins with computed anew."""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hvdlite.membership.messages import WorldOrder
from tests.elastic_jobs import ElasticJob
from tests.worlds import TORCH

LAST_STEPS = 60
"""In these nobody is killed: a loss after the end of the training is a failure."""
Records = dict[int, list[dict[str, Any]]]


class Drawn:
    """A job of a seed."""

    def __init__(self, seed: int) -> None:
        self.chance = chance = random.Random(seed)
        self.slots = chance.choice([{"a": 1, "b": 1}, {"a": 2, "b": 1, "c": 1}, {"a": 2, "b": 2},
                                    {"a": 1, "b": 1, "c": 1, "e": 1}])
        self.commit_every, self.pause = chance.choice([0, 0, 3]), chance.choice([0.0, 0.002, 0.006])
        self.size = chance.choice([10_000, 1_000_000])
        self.steps = 240 if self.size < 1_000_000 else 150
        every = chance.randint(1, 6)
        self.arguments: dict[str, Any] = {"every": every, "workers": chance.choice(["host", "rank"])}
        if chance.random() < 0.5:
            self.arguments |= {"delay": chance.randrange(every), "fragments": chance.randint(1, 2), "momentum": 0.5,
                               "lr": 0.5, "wire": chance.choice(["int8", None]), "merge": chance.choice(["carry", 0.5])}
        self.lost: set[int] = set()
        self.done: list[str] = []

    def hurt(self, job: ElasticJob, folder: Path) -> None:
        """Kill members and whole hosts at random moments, some soon after each other; let hosts come."""
        for _ in range(self.chance.randint(1, 6)):
            until = time.monotonic() + self.chance.choice([0.02, 0.3, 1.5]) * self.chance.random()
            job.until(lambda until=until: time.monotonic() >= until or job.code is not None)
            last = f"step {self.steps - LAST_STEPS}"
            if job.code is not None or any(last in job.output(member) for member in job.processes):
                return
            if self.chance.random() < 0.2:
                self.slots = {**self.slots, "d": 1}
                job.see(self.slots)
            living, host = sorted(set(job.processes) - self.lost), self.chance.choice(list(self.slots))
            victims = {self.chance.choice(living)} if self.chance.random() < 0.7 else {
                member for member in living if job.host_of(member) == host}
            logs = [folder / f"{member}.log" for member in living if member not in victims]
            if any(log.exists() and "began" in log.read_text(encoding="utf-8") for log in logs):
                self.done.append(f"world {max(job.orders, default=1)}: {victims}")
                self.lost |= victims
                for member in victims:
                    job.kill(member)


def one(seed: int) -> tuple[int, int, str]:
    """Run the job of a seed; return how many members it lost, how many beginnings were checked, and what was wrong."""
    drawn = Drawn(seed)
    what = f"seed {seed}: {drawn.slots} {drawn.arguments} of {drawn.size} commits {drawn.commit_every}"
    with tempfile.TemporaryDirectory(prefix="hvdlite-outer-") as name, ElasticJob(
            "tests.torch.programs.outer_elastic:train", name, drawn.steps, drawn.size, drawn.arguments, drawn.commit_every,
            drawn.pause, slots=dict(drawn.slots), cooldown=(0.2, 0.5), failures_per_host=1000,
            failures_without_progress=1000, imported=TORCH) as job:
        try:
            for member in range(sum(drawn.slots.values())):
                job.until_printed(member, "step")
            drawn.hurt(job, Path(name))
            results = job.finish(100)
            return len(drawn.lost), judge(read(Path(name)), job.orders, drawn.arguments, results), ""
        except Exception as error:  # of any kind: the other jobs are tried, too
            return len(drawn.lost), 0, f"{what}: {drawn.done}: {type(error).__name__}: {error}\n{job}"


def campaign(kills: int, first: int, tell: Callable[[str], object]) -> list[str]:
    """Run jobs from a seed on until so many members were lost; return what was wrong."""
    wrong: list[str] = []
    total, seed = 0, first
    while total < kills:
        count, checked, problem = one(seed)
        total += count
        tell(f"seed {seed}: {count} lost, {checked} beginnings checked; {total} of {kills}{': WRONG' if problem else ''}")
        if problem:
            wrong.append(problem)
            tell(problem)
        seed += 1
    return wrong


def read(folder: Path) -> Records:
    """Return what each member has written, without a line in which it was killed."""
    return {int(path.stem): [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines(keepends=True)
                             if line.endswith("\n")] for path in folder.glob("*.log")}


def judge(records: Records, orders: dict[int, WorldOrder], arguments: dict[str, Any], results: dict[int, Any]) -> int:
    """Check what each world began with, what its steps did, and the end; return how many beginnings could be checked."""
    assert len({str(each) for each in results.values()}) == 1, f"the ends differ: {results}"
    assert results and min(min(each["weights"]) for each in results.values()) > 0, results
    begun: dict[int, list[dict[str, Any]]] = {}
    for each in (each for own in records.values() for each in own if each["kind"] == "began"):
        begun.setdefault(each["epoch"], []).append(each)
    checked = 0
    for epoch, beginnings in begun.items():
        assert len({str((each["local"], each["workers"])) for each in beginnings}) == 1, f"world {epoch}: {beginnings}"
        if epoch in orders:
            wanted = _beginning(records, orders[epoch], beginnings[0]["workers"], arguments.get("merge", "carry"))
            if wanted is not None:
                checked += 1
                assert _are_close(beginnings[0]["local"], wanted), f"world {epoch}: {beginnings[0]['local']}, not {wanted}"
        if arguments.keys() == {"every", "workers"} and beginnings[0]["workers"]:
            _check_steps(records, orders[epoch].members if epoch in orders else range(beginnings[0]["size"]), beginnings[0],
                         arguments["every"])
    return checked


def _beginning(records: Records, order: WorldOrder, workers: Sequence[Sequence[int]], merge: object) -> list[float] | None:
    """Return the weights with which a world has to begin; None where some member's state is not known."""
    states = []
    for member in order.members:
        own = [each for each in records.get(member, ()) if each["epoch"] < order.epoch and each["kind"] != "step"]
        if own and (own[-1]["kind"] != "ended" or own[-1]["epoch"] < order.epoch - 1):
            return None
        if order.restore:
            own = [each for each in own if each["kind"] != "ended"]
        states.append(own[-1] if own else {"step": -1, "local": None})
    if all(each["step"] < 0 for each in states):
        return states[0]["local"]  # type: ignore[no-any-return]
    return [_of_parameter(states, workers or [range(len(states))], merge, index) for index in (0, 1)]


def _of_parameter(states: Sequence[dict[str, Any]], workers: Sequence[Sequence[int]], merge: object, index: int) -> float:
    newest = max((each for each in states if each["step"] >= 0), key=lambda each: each["merges"][index])
    whole, changes = newest["global"][index], []
    for worker in workers:
        own = states[max(worker, key=lambda rank: (states[rank]["step"], -rank))]
        if own["step"] < 0:
            continue
        local, start = own["local"][index], own["start"][index]
        missed = newest["merges"][index] - own["merges"][index]
        if not missed:
            changes.append(local - own["global"][index])
        elif missed > 1 or start is None or own["waits"][index]:
            changes.append(0.0)
        else:
            changes.append(local - start if merge == "carry" else float(merge) * (local - whole))  # type: ignore[arg-type]
    return float(whole + sum(changes) / len(changes))


def _check_steps(records: Records, members: Sequence[int], beginning: dict[str, Any], every: int) -> None:
    """Check all steps of a world that each member has noted down."""
    epoch, workers = beginning["epoch"], beginning["workers"]
    steps: dict[int, dict[int, dict[str, Any]]] = {}
    for rank, member in enumerate(members):
        last = beginning["local"]
        for each in records.get(member, ()):
            if (each["kind"], each["epoch"]) == ("step", epoch):
                assert each["before"] == last, f"world {epoch}: {each} begins with other weights than {last}"
                last = each["after"]
                steps.setdefault(each["step"], {})[rank] = each
    for step, found in steps.items():
        if len(found) < len(members):
            continue
        for index in (0, 1):
            trained = [found[worker[0]]["before"][index] + sum(found[rank]["added"][index] for rank in worker) / len(worker)
                       for worker in workers]
            for place, worker in enumerate(workers):
                wanted = sum(trained) / len(trained) if step % every == 0 else trained[place]
                assert all(_are_close([found[rank]["after"][index]], [wanted]) for rank in worker), (epoch, step, found)


def _are_close(some: Sequence[float], others: Sequence[float]) -> bool:
    return all(abs(one - other) <= 1e-9 * max(1.0, abs(other)) for one, other in zip(some, others, strict=True))
