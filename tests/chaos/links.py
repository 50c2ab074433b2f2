"""Links between two hosts that are slow, lose packets or are cut: the job does its work, or ends with a reason.

Slow links have a token bucket at both ends (tc-tbf(8)); packets are lost by random numbers of nftables, at both ends too.
"""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

from tests.chaos.rows import Row, Trouble, reason_in
from tests.elastic.campaign import two_hosts
from tests.runner.networks import Hosts, unavailable
from tests.worlds import HANGS_SECONDS, PYTHON_PATH, ROOT

Hurt = Callable[[random.Random, Hosts], contextlib.AbstractContextManager[str | None]]
"""Does something to the link of host b until the context ends; returns a text that no reason of a job's end may have."""


@contextlib.contextmanager
def _slow(chance: random.Random, hosts: Hosts) -> Iterator[str | None]:
    rate = chance.choice([4, 20, 100])
    with contextlib.ExitStack() as stack:
        stack.callback(hosts.limit("b", f"{rate}mbit"))
        yield "hvdrun: "


@contextlib.contextmanager
def _lossy(chance: random.Random, hosts: Hosts) -> Iterator[str | None]:
    share = chance.choice([1, 3, 10])
    with contextlib.ExitStack() as stack:
        for name in hosts.names:
            stack.callback(hosts.filter(name, f"meta iif != lo numgen random mod 100 < {share} drop"))
        yield None


@contextlib.contextmanager
def _cut(chance: random.Random, hosts: Hosts) -> Iterator[str | None]:
    """Cut the link for good, or for less than `HVDLITE_AGENT_TIMEOUT`."""
    hosts.cut("b")
    mends = chance.random() < 0.5
    try:
        if mends:
            time.sleep(chance.choice([chance.uniform(0.1, 3.0), chance.uniform(3.0, 20.0)]))
            hosts.mend("b")
        yield "nothing has been heard" if mends else None
    finally:
        hosts.mend("b")


def _job(chance: random.Random, row: Row, hurt: Hurt) -> None:
    """Run a job of one rank on each host, hurt its link at some moment, and see how it ends."""
    with two_hosts() as hosts:
        assert hosts is not None
        command = hosts.hvdrun("-H", f"{hosts.address('a')}:1,{hosts.address('b')}:1", sys.executable,
                               "-m", "tests.chaos.programs.reducing", str(chance.choice([10, 30_000])), "50")
        environment = {**hosts.environment(), "PYTHONPATH": PYTHON_PATH}
        with subprocess.Popen(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as job:
            time.sleep(chance.uniform(0.0, 4.0))
            with hurt(chance, hosts) as refused:
                try:
                    text = job.communicate(timeout=2 * HANGS_SECONDS)[0].decode(errors="replace")
                    hosts.wait_until_empty(HANGS_SECONDS, "b")  # its agent has to notice by itself
                finally:
                    job.kill()
            hosts.wait_until_empty(HANGS_SECONDS)
    row.tried += 1
    if job.returncode == 0:
        assert text.count("reduced") == 2, text
        row.survived += 1
        return
    reason_in(text)
    reasons = [line for line in text.splitlines() if line.startswith("hvdrun: ") and hosts.address("b") in line]
    assert reasons and not any(refused in each for each in reasons if refused), f"exit code {job.returncode}: {text[-2000:]}"
    row.refused += 1
    row.remark = reasons[0][:100]


LINKS = (
    Trouble("jobs over slow links (4 to 100 Mbit/s)", lambda chance, row: _job(chance, row, _slow), 1, unavailable),
    Trouble("jobs over links that lose packets", lambda chance, row: _job(chance, row, _lossy), 1, unavailable),
    Trouble("jobs over links that are cut", lambda chance, row: _job(chance, row, _cut), 1, unavailable),
)
