"""Random failures in many elastic jobs: no hang, nothing left, exit code 0, healthy members go on, replicas agree.

A third of the jobs are on two hosts in network namespaces; without root these are left out.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.elastic.injuries import Injuries
from tests.elastic.jobs import Job
from tests.elastic.points import cases, run_case
from tests.runner.elastic_jobs import HostsFile
from tests.runner.networks import Hosts, unavailable


@contextmanager
def two_hosts() -> Iterator[Hosts | None]:
    """Provide hosts for jobs of several hosts; None where there can be none."""
    if unavailable():
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="hvdlite-hosts-") as name, Hosts("ab", Path(name)) as hosts:
        yield hosts


def on_hosts(seed: int) -> bool:
    """Return whether the job of a seed is on two hosts."""
    return seed % 3 == 1


def one(seed: int, hosts: Hosts | None = None) -> tuple[int, str]:
    """Run the job of a seed; return how many members and hosts it lost, and "" or what was wrong."""
    with tempfile.TemporaryDirectory(prefix="hvdlite-elastic-") as name:
        chance = random.Random(seed)
        job, founders = _on_two_hosts(chance, Path(name), hosts) if hosts else _on_this_host(chance, Path(name))
        injuries = Injuries(job, chance)
        try:
            job.wait_for_all(founders)  # a death outside elastic.run ends the job
            job.wait_for_step(chance.randrange(job.steps // 2))
            most = 6 if "--blacklist-cooldown-range" in job.flags else 2  # else few slots are left
            injuries.hurt(chance.randint(1, most), seconds=chance.choice([0.1, 1.0, 4.0]))
            job.succeed(lost=injuries.lost, lost_hosts=injuries.lost_hosts)
        except Exception as error:  # of any kind: the other jobs are tried, too
            problem = f"{injuries.done}: {type(error).__name__}: {error}"
            return injuries.kills, f"seed {seed}: {job.flags}: {job.environment}: {problem}"
        finally:
            injuries.recover()
            job.close()
            if hosts is not None:
                hosts.wait_until_empty(20)
    return injuries.kills, ""


def campaign(kills: int, first: int, tell: Callable[[str], object]) -> list[str]:
    """Run jobs from a seed on until so many members and hosts were lost; return what was wrong."""
    wrong: list[str] = []
    total = {False: 0, True: 0}
    seed = first
    with two_hosts() as hosts:
        if hosts is None:
            tell(f"no jobs on several hosts: {unavailable()}")
        while sum(total.values()) < kills:
            if hosts is not None or not on_hosts(seed):
                count, problem = one(seed, hosts if on_hosts(seed) else None)
                total[on_hosts(seed)] += count
                tell(f"seed {seed}: {count} lost; on one host {total[False]}, on two hosts {total[True]}, of {kills}"
                     f"{': WRONG' if problem else ''}")
                if problem:
                    wrong.append(problem)
                    tell(problem)
            seed += 1
    return wrong


def points(only: str, first: int, tell: Callable[[str], object]) -> list[str]:
    """Run the failpoints whose descriptions contain a text, in their order; return what was wrong.

    Args:
        first: the number of the case with which to begin; the first one is 1.
    """
    wrong: list[str] = []
    chosen = [case for case in cases() if only in str(case)]
    for number, case in enumerate(chosen[first - 1:], first):
        problem = ""
        with tempfile.TemporaryDirectory(prefix="hvdlite-elastic-") as name:
            try:
                run_case(case, Path(name))
            except Exception as error:  # of any kind: the other cases are tried, too
                problem = f"{case}: {type(error).__name__}: {error}"
                wrong.append(problem)
        tell(f"{number} of {len(chosen)}: {case}{': WRONG' if problem else ''}")
        if problem:
            tell(problem)
    return wrong


def _on_this_host(chance: random.Random, folder: Path) -> tuple[Job, int]:
    """Start a job; return it and the number of its founders."""
    size = chance.choice([2, 3, 4])
    kind = chance.choice(["fixed", "cooldown", "discovery"])
    flags = ["-np", str(size), "--min-np", "1" if kind == "fixed" else chance.choice("12")]
    if kind == "cooldown":
        flags += ["--blacklist-cooldown-range", "1", "2"]
    if kind == "discovery":
        flags += ["--max-np", "4", *_discovered(folder, "localhost:2", "127.0.0.1:2")]
    return Job(flags, folder, 400, _loop(chance)), size


def _on_two_hosts(chance: random.Random, folder: Path, hosts: Hosts) -> tuple[Job, int]:
    """Start a job of two ranks on each host, which takes a lost one back or not; return it and its founders."""
    slots = [f"{hosts.address(name)}:2" for name in hosts.names]
    if chance.random() < 0.5:
        chance.shuffle(slots)  # rank 0 on the other host
    flags = ["-np", "4", "--min-np", "1"]
    kind = chance.choice(["fixed", "cooldown", "discovery", "discovery and cooldown"])
    flags += _discovered(folder, *slots) if "discovery" in kind else ["-H", ",".join(slots)]
    if "cooldown" in kind:
        flags += ["--blacklist-cooldown-range", "1", "2"]
    return Job(flags, folder, chance.choice([300, 1000]), _loop(chance), hosts=hosts), 4


def _loop(chance: random.Random) -> dict[str, str]:
    """Return the environment of a training that counts bodies, or not."""
    return {"BODIES": chance.choice("01")}


def _discovered(folder: Path, *lines: str) -> tuple[str, ...]:
    """Return the flags with which these hosts are discovered."""
    hosts = HostsFile(folder)
    hosts.write(*lines)
    return hosts.flags
