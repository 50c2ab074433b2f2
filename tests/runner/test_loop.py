"""The loop of jobs, with doubles for its parts. What real jobs do: test_hvdrun.py, test_agents.py, test_elastic.py."""

from __future__ import annotations

import math
import os
import selectors
from collections.abc import Iterator
from unittest.mock import Mock

import pytest

from hvdlite.core.world import World
from hvdlite.diagnostics.progress import Reading
from hvdlite.membership.events import GRACE_AFTER_LOSS, EndJob, HostLost, HostsSeen, Limits, StartMember
from hvdlite_runner.host.worker_group import WorkerGroup
from hvdlite_runner.job import loop
from hvdlite_runner.job.ending import WorkerProcess
from hvdlite_runner.job.loop import Job
from hvdlite_runner.job.settings import JobSettings
from hvdlite_runner.messages import Event, Exited, ProcessStart, ProgressReply, Sample, Start
from hvdlite_runner.output.job_output import ProgressObserver
from hvdlite_runner.placement import LOCAL
from hvdlite_runner.reports.monitor import Monitor


@pytest.fixture
def job() -> Iterator[Job]:
    """A job of two ranks, on this host and on host b, neither of which does anything."""
    limits = Limits(2, 2, 2, elastic_timeout=math.inf, hosts_are_fixed=True, one_world=True)
    job = Job(JobSettings(["true"], limits, {LOCAL: 1, "b": 1}, share_cores=False), {}, ProgressObserver())
    job._hosts.end(0.0)
    job._hosts, job._local = Mock(), Mock()
    job._hosts.machine_of.side_effect = str
    yield job
    job.selector.close()


def orders(*machines: str) -> dict[str, Start]:
    return {machine: Start([ProcessStart(rank, World(rank, 2, 0, 1, 0, 2), {})], [b"true"], {})
            for rank, machine in enumerate(machines)}


def test_a_host_that_is_lost_while_routes_are_sought_is_not_waited_for(
        job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def seek(starting: list[StartMember]) -> dict[str, Start]:
        job._on_lost("b", "host b was lost: the cable was cut")
        job._hosts.remote.return_value = None
        return orders(LOCAL, "b")

    monkeypatch.setattr(job, "_starts", Mock(orders=seek))
    job._events.append(HostsSeen({LOCAL: 1, "b": 1}))
    job._decide(0.0)
    assert job._processes.running == {0} and job._end is not None
    assert (job._end.code, job._end.reason.partition(":")[0]) == (1, "rank 1 on b")
    wait = job.ending.wait()
    assert wait is not None and 0.0 < GRACE_AFTER_LOSS - wait < 0.5, "seconds until the other rank is told to end"
    said: list[str] = []
    monkeypatch.setattr(job._output, "note", lambda text, is_failure=False: said.append(text))
    job._take(LOCAL, Exited(0, -15, True, None, Reading()))
    assert job.report() == 1, "the rank that was ended has not failed"
    assert said == ["host b was lost: the cable was cut (with ranks 1)", "ranks 0 ended as a consequence"]


def test_a_rank_of_a_host_whose_loss_is_told_next_is_not_waited_for(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "_starts", Mock(orders=lambda starting: orders(LOCAL, "b")))
    job._hosts.remote.return_value = None
    job._start([StartMember(rank, host, 0, rank, 2, False) for rank, host in enumerate([LOCAL, "b"])])
    assert job._processes.running == {0}


def test_the_authority_hears_of_a_lost_host_without_what_it_says_itself(job: Job) -> None:
    job._authority = Mock(epoch=1)
    job._on_lost("b", "host b was lost: the cable was cut")
    job._on_lost("c", "host c sent no message")
    assert list(job._events) == [HostLost("b", "the cable was cut"), HostLost("c", "host c sent no message")]


def test_the_loss_of_a_host_before_the_ranks_are_started_is_no_event(job: Job) -> None:
    job._on_lost("b", "host b was lost")
    assert not job._events
    job._authority = Mock(epoch=1)
    job._on_lost("b", "host b was lost")
    assert list(job._events) == [HostLost("b", "host b was lost")]


def test_ranks_that_are_not_started_after_the_users_signal_are_not_waited_for(
        job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def seek(starting: list[StartMember]) -> dict[str, Start]:
        job.ending.interrupt(loop.signal.SIGINT)
        return orders(LOCAL, "b")

    job._local.running = {}
    monkeypatch.setattr(job, "_starts", Mock(orders=seek))
    job._events.append(HostsSeen({LOCAL: 1, "b": 1}))
    job._decide(0.0)
    assert job._processes.running == {1}, "host b has its order; it hears the signal next"


def test_a_command_that_cannot_be_started_ends_the_job_with_the_first_reason(job: Job) -> None:
    job._take("b", loop.StartRefused(1, "no such command", 127))
    job._take(LOCAL, loop.StartRefused(0, "not executable", 126))
    assert job._refused is not None and (str(job._refused), job._refused.code) == ("host b: no such command", 127)
    with pytest.raises(loop.commands.CommandError):
        job._loop()
    assert not isinstance(job._end, EndJob)


def test_the_first_table_of_a_world_waits_for_the_progress_of_other_hosts(job: Job) -> None:
    now, shown = [100.0], list[str]()
    job._observer = monitor = Monitor(shown.append, False, lambda: now[0])
    job._last_sample = now[0] = 109.0
    job._processes |= {0: WorkerProcess(LOCAL, LOCAL), 1: WorkerProcess("b", "b")}
    job._begin_world([0, 1])
    assert job._last_sample == 0.0, "they are asked at once"
    monitor.take(LOCAL, ProgressReply({0: Sample(Reading())}))
    assert not shown
    now[0] += 1.0
    monitor.take("b", ProgressReply({1: Sample(Reading())}))
    monitor.take(LOCAL, ProgressReply({0: Sample(Reading())}))
    assert len(shown) == 1 and len(shown[0].splitlines()) == 3


def test_no_more_processes_are_started_after_the_users_signal() -> None:
    told: list[Event] = []
    with selectors.DefaultSelector() as selector:
        group = WorkerGroup(selector, told.append, dict(os.environ), lambda: bool(told))
        group.prepare()
        try:
            group.obey(Start([ProcessStart(rank, World(rank, 3, rank, 3, 0, 1), {}) for rank in range(3)], [b"true"], {}))
            assert list(group.running) == [0]
        finally:
            group.end()
