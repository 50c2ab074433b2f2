"""The worker groups of all hosts of a job, and the loop that waits for them; it does not poll.

One loop waits for the pipes and pidfds of this host's processes and for the links to other hosts. `termination.py` schedules
the signals that end processes after a failure or the user's signal.
"""

from __future__ import annotations

import selectors
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager

from hvdlite.core.addresses import routes_to
from hvdlite_runner import commands, monitor
from hvdlite_runner.agents import Agents, rendezvous_address
from hvdlite_runner.messages import Event, Pause, ProgressReply, ProgressRequest, Signal, Stop, TaskPiece
from hvdlite_runner.placement import LOCAL, Host
from hvdlite_runner.remote_agent import AGENT_TIMEOUT, RemoteAgent
from hvdlite_runner.task_files import TaskFiles
from hvdlite_runner.termination import GRACE, Termination
from hvdlite_runner.worker_group import KILL_SECONDS, POLL_WITHOUT_PIDFD, WorkerGroup

_CHECK_SECONDS = 1.0  # seconds between checks for silent hosts, and between samples of the processes' progress


class JobWorkers:
    """The worker groups of a job: this host's, and one behind each agent.

    Args:
        inherited: the environment of this host's processes, to which a job adds.
        take: called with the name of a machine and its event.
        lost: called with an agent whose link has ended.
        note: called with lines for the user.
        observer: called with the progress of each machine's processes every second, if any.
        unreached: called with an agent whose link has ended before its host was reached.
    """

    def __init__(self, inherited: Mapping[str, str], take: Callable[[str, Event], None], lost: Callable[[RemoteAgent], None],
                 note: Callable[[str], None], observer: Callable[[str, ProgressReply], None] | None,
                 unreached: Callable[[RemoteAgent], None] = lambda remote: None) -> None:
        self.selector = selectors.DefaultSelector()
        self.termination = Termination()
        self.local = WorkerGroup(self.selector, lambda event: take(LOCAL, event), inherited)
        self.agents = Agents(self.selector, lambda remote, event: take(remote.host.name, event), self._on_lost,
                             self.user_has_ended_job, unreached)
        self._lost, self._note, self._observer = lost, note, observer
        self._last_check = 0.0
        self._paused = False
        self._with_task: set[RemoteAgent | None] = set()  # None: this host

    def handles_signals(self) -> AbstractContextManager[None]:
        """Return a context in which the user's signals end the job."""
        return self.termination.handlers(self.selector)

    def user_has_ended_job(self) -> bool:
        """Whether the user has sent a signal."""
        return bool(self.termination.user_signal)

    def remote(self, machine: str) -> RemoteAgent | None:
        """Return the agent of a machine; None for this one."""
        return next((remote for remote in self.agents.remotes if remote.host.name == machine), None)

    def cores(self, machine: str) -> int:
        """Return the number of cores of a machine."""
        remote = self.remote(machine)
        return commands.cores() if remote is None or remote.ready is None else remote.ready.cores

    def rendezvous_address(self, hosts: Sequence[Host], interfaces: Sequence[str], port: int) -> str:
        """Return a host:port where rank 0 can listen, on the first host, and that all others can reach.

        Raises:
            LaunchError: with the names of hosts that cannot reach each other.
        """
        first = self.remote(hosts[0].name)
        others: dict[RemoteAgent | None, str] = {self.remote(host.name): host.address for host in hosts[1:]}
        if None in others and first is not None:
            others[None] = self.address_for(first)
        return rendezvous_address(self.agents, first, others, interfaces, port)

    @staticmethod
    def address_for(remote: RemoteAgent) -> str:
        """Return the address of this host towards another one; "" when only the remote shell knows its name."""
        return next(iter(routes_to([remote.host.address])), "")

    def give_task(self, machine: str, task: TaskFiles) -> None:
        """Send the function that the ranks are to call, if there is one and the machine does not have it yet."""
        remote = self.remote(machine)
        if remote in self._with_task:
            return
        self._with_task.add(remote)
        for content in task.pieces():
            if remote is None:
                self.local.add_task(TaskPiece(content))
            else:
                remote.send(TaskPiece(content))

    def turn(self, waits: Iterable[float | None]) -> None:
        """Wait for events at most for the shortest of these times, and handle them; send signals that are due."""
        chosen = [*self.termination.waits(), *(wait for wait in waits if wait is not None)]
        if self.local.needs_polling():
            chosen.append(POLL_WITHOUT_PIDFD)
        if self.agents.remotes or self._observer is not None:
            chosen.append(_CHECK_SECONDS)
        self.agents.turn(min(chosen, default=None))
        self.local.notice()
        for signum in self.termination.due():
            self.local.signal(signum)
            for remote in self.agents.remotes:
                remote.send(Signal(signum))
        self._check()

    def pause(self, paused: bool) -> None:
        """Stop reading the processes' output on all hosts, or go on."""
        self._paused = paused
        self.local.pause(paused)
        for remote in self.agents.remotes:
            remote.send(Pause(paused))

    def end(self) -> None:
        """End all processes of the job on all hosts."""
        self.termination.is_over = True
        for remote in self.agents.remotes:
            remote.send(Stop())
        self.local.end()
        self.agents.end(KILL_SECONDS + GRACE)

    def close(self) -> None:
        """Close the selector, after the last output has been shown."""
        self.selector.close()

    @staticmethod
    def ignore_stop_signal() -> None:
        """Ignore Ctrl-Z: a stopped launcher could not be told from a cut link."""
        signal.signal(signal.SIGTSTP, signal.SIG_IGN)

    def _check(self) -> None:
        """Count silent hosts as lost, and request the processes' progress."""
        now = time.monotonic()
        if now - self._last_check < _CHECK_SECONDS:
            return
        self._last_check = now
        for remote in list(self.agents.remotes):
            if remote.timed_out(now):
                silent = now - remote.last_heard
                remote.mark_lost(f"was lost: nothing has been heard of it for {silent:.0f} s ({AGENT_TIMEOUT})")
                self._on_lost(remote)
                continue
            if line := remote.silence_note(now):
                self._note(line)
            if self._paused:
                remote.send(Pause(True))  # it may be new
            if self._observer is not None:
                remote.send(ProgressRequest())
        if self._observer is not None:
            self._observer(LOCAL, ProgressReply(*monitor.sample(self.local)))

    def _on_lost(self, remote: RemoteAgent) -> None:
        if not self.termination.is_over:
            self._lost(remote)
