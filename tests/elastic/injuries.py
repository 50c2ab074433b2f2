"""What random jobs suffer: members that are killed or stopped, agents that are killed, cables that are cut.

Nothing is done that ends a job by its rules: a member that trains is always left, on a host that can be reached.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from pathlib import Path

from tests.elastic.jobs import Job
from tests.elastic.programs.counting import COMMIT_EVERY

SECONDS = 90.0


class Injuries:
    """Hurts one job.

    Args:
        chance: what is drawn, and when.

    Attributes:
        done: what was done, for people.
        lost: the members that were killed, whose host was lost, or that are stopped and do not go on.
        lost_hosts: the hosts whose agent was killed, or whose cable was cut.
        kills: how many members and hosts were taken away.
    """

    def __init__(self, job: Job, chance: random.Random) -> None:
        self._job, self._chance = job, chance
        self.done: list[str] = []
        self.lost: set[int] = set()
        self.lost_hosts: set[str] = set()
        self.kills = 0
        self._stopped: dict[int, int] = {}  # process ids by member
        self._remote = job.hosts.names[1] if job.hosts is not None else ""
        self._is_cut = False

    def hurt(self, count: int, seconds: float) -> None:
        """Do random things at random moments, so many at most, within some seconds of training."""
        kinds = [self.kill, self.kill, self.stop_and_kill, self.notice]
        if self._remote:
            kinds = [self.kill, self.kill, self.stop_and_kill, self.notice, self.kill_agent, self.cut, self.cut_and_kill]
        for number in range(count):
            if number and number % 2 == 0:
                self._wait_for_commits()  # three failures without a commit between them end a job
            time.sleep(self._chance.uniform(0, seconds / count))
            if self._job.process.poll() is None:
                self._chance.choice(kinds)()

    def recover(self) -> None:
        """Put the cable back, and let stopped members go on."""
        self._mend()
        for pid in self._stopped.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    # --- what is done --------------------------------------------------------------------------------------------------

    def notice(self) -> None:
        """Tell a member to leave."""
        self.kill(signal.SIGTERM)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal to a member."""
        members = self._job.running()
        candidates = [member for member in members if self._spares_one({member})]
        if not candidates:
            return
        member = self._chance.choice(sorted(candidates))
        step = self._job.step_of(member)
        with contextlib.suppress(ProcessLookupError):
            os.kill(members[member], number)
            self._record(f"member {member} at step {step} ({signal.Signals(number).name})", {member})

    def stop_and_kill(self) -> None:
        """Stop a member, kill another one, and let the stopped one go on some time later, or not."""
        members = self._job.running()
        pairs = [(one, other) for one in sorted(members) for other in sorted(members)
                 if one != other and self._spares_one({one, other})]
        if not pairs:
            return self.kill()
        stopped, killed = self._chance.choice(pairs)
        pause, rest = self._chance.uniform(0, 0.5), self._chance.choice([0.0, 0.3, 4.0, None])
        was_lost = stopped in self.lost
        with contextlib.suppress(ProcessLookupError):
            os.kill(members[stopped], signal.SIGSTOP)
            self._stopped[stopped] = members[stopped]
            self._record(f"member {stopped} stopped", {stopped})
            time.sleep(pause)
            os.kill(members[killed], signal.SIGKILL)
            self._record(f"member {killed} {pause:.2f} s later", {killed})
        if rest is not None:
            time.sleep(rest)
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._stopped.pop(stopped), signal.SIGCONT)
                self.done.append(f"member {stopped} goes on")
                if not was_lost:  # nobody is ended for so short a stop
                    self.lost.discard(stopped)

    def kill_agent(self) -> None:
        """Kill the agent of the second host."""
        agents = self._agents()
        lost = self._on_remote()
        if agents and self._spares_one(lost):
            os.kill(agents[0], signal.SIGKILL)
            self._record_host(f"agent of {self._remote}", lost)

    def cut(self) -> None:
        """Cut the cable of the second host; for a moment, until its loss is noticed, or until the end."""
        lost = self._on_remote()
        if self._is_cut or not lost or not self._spares_one(lost):
            return
        assert self._job.hosts is not None
        self._job.hosts.cut(self._remote)
        self._is_cut = True
        how = self._chance.choice(["moment", "noticed", "end"])
        self._record_host(f"cable of {self._remote}, mended: {how}", lost)
        before = self._losses()
        if how == "moment":
            time.sleep(self._chance.uniform(0.1, 2.0))
        elif how == "noticed":
            self._job.wait_for("the loss of the host",  # unless it was lost already, and the job ends meanwhile
                               lambda: self._losses() > before or self._job.process.poll() is not None)
            time.sleep(self._chance.choice([0.0, 0.5, 6.0]))
        if how != "end":
            self._mend()

    def cut_and_kill(self) -> None:
        """Kill a member of the first host, and cut the cable of the second one."""
        lost = self._on_remote()
        members = self._job.running()
        candidates = sorted(member for member in members.keys() - lost if self._spares_one(lost | {member}))
        if not candidates or not lost or self._is_cut:
            return self.kill()
        member = self._chance.choice(candidates)
        with contextlib.suppress(ProcessLookupError):
            os.kill(members[member], signal.SIGKILL)
            self._record(f"member {member}", {member})
        time.sleep(self._chance.choice([0.0, 0.02, 0.3]))
        self.cut()

    # --------------------------------------------------------------------------------------------------------------------

    def _record(self, what: str, lost: set[int]) -> None:
        self.done.append(what)
        self.lost |= lost
        self.kills += 1

    def _record_host(self, what: str, lost: set[int]) -> None:
        assert self._job.hosts is not None
        self.lost_hosts.add(self._job.hosts.address(self._remote))
        self._record(what, lost)

    def _spares_one(self, lost: set[int]) -> bool:
        """Return whether a member that trains is left without these, on a host that can be reached."""
        out = self.lost | lost | (self._on_remote() if self._is_cut else set())
        return any(self._job.step_of(member) >= 0 for member in self._job.running() if member not in out)

    def _wait_for_commits(self) -> None:
        """Block until members that are left have done more steps than any other, or the job ends."""
        def reached() -> int:
            return max((self._job.step_of(member) for member in self._job.running().keys() - self.lost), default=-1)

        target = max(map(self._job.step_of, self._job.members())) + 2 * COMMIT_EVERY
        deadline = time.monotonic() + SECONDS
        while self._job.process.poll() is None and reached() < min(target, self._job.steps - 1):
            assert time.monotonic() < deadline, f"training does not go on within {SECONDS} s\n{self._job.errors()}"
            time.sleep(0.01)

    def _on_remote(self) -> set[int]:
        hosts = self._job.hosts
        return set() if hosts is None else set(self._job.running_on(hosts.address(self._remote)))

    def _agents(self) -> list[int]:
        """Return the agent's process on the second host."""
        hosts, found = self._job.hosts, []
        for pid in [] if hosts is None else hosts.processes(self._remote):
            with contextlib.suppress(OSError):
                line = Path(f"/proc/{pid}/cmdline").read_bytes()
                if b"stdin.buffer.raw" in line and Path(f"/proc/{pid}/comm").read_text().startswith("python"):
                    found.append(pid)
        return found

    def _losses(self) -> int:
        return self._job.errors().count(" was lost: ")

    def _mend(self) -> None:
        if self._is_cut:
            assert self._job.hosts is not None
            self._job.hosts.mend(self._remote)
            self._is_cut = False
