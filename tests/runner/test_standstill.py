"""What a process that stood still itself concludes from the silence of others: nothing, before it has listened again."""

from __future__ import annotations

import math
import os
import selectors
import types
from unittest.mock import Mock

import pytest

from hvdlite.core.standstill import standstill
from hvdlite.engine.engine import Engine
from hvdlite.membership.events import Limits
from hvdlite_runner.agents import agent as agent_module
from hvdlite_runner.agents.agent import Agent
from hvdlite_runner.job import hosts as hosts_module
from hvdlite_runner.job.hosts import HostPool
from hvdlite_runner.job.settings import JobSettings
from hvdlite_runner.placement import Host


def test_a_loop_that_is_a_little_late_has_not_stood_still() -> None:
    assert standstill(10.0, 11.5, 1.0) == 0 and standstill(10.0, 21.0, 1.0) == 10
    assert standstill(-math.inf, 5.0, 1.0) == 0, "the first turn"


def test_hvdrun_that_stood_still_waits_for_hosts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, notes, lost = types.SimpleNamespace(monotonic=lambda: 140.5), [], []  # type: ignore[var-annotated]
    monkeypatch.setattr(hosts_module, "time", clock)
    remote = Mock(host=Host("b"), ready=object(), over=False, last_received=100.0)
    remote.timed_out = lambda now: now - remote.last_received > 30
    remote.silence_note.return_value = ""
    with selectors.DefaultSelector() as selector:
        pool = HostPool(selector, JobSettings(["x"], Limits(1), {}), {}, note=notes.append,
                        lost=lambda name, reason: lost.append(name))
        pool._hosts["b"] = hosts_module._Known(is_local=False, remote=remote)
        pool._last_check = 100.5
        pool.take_events(0)
        assert notes == ["this process itself was busy or stood still for 39 s"] and not remote.mark_lost.called
        for now in range(141, 172):
            clock.monotonic = lambda now=now: float(now)
            pool.take_events(0)
        assert lost == ["b"] and len(notes) == 1, "it had 30 s to answer"
        pool.stop()


def test_an_agent_that_stood_still_waits_for_hvdrun_again(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = types.SimpleNamespace(now=100.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(agent_module, "time", clock)
    monkeypatch.setattr(Agent, "_wake_for_signals", lambda self: None)
    monkeypatch.setattr(Agent, "_wait_for_launcher", lambda self, allowed: None)
    monkeypatch.setattr(Agent, "_send", lambda self, event: None)
    reader, writer = os.pipe()
    agent = Agent(reader, writer, {}, 5.0)
    gaps = iter([40.0, *[1.0] * 9])

    def select(timeout: float) -> list[object]:
        clock.now += next(gaps)
        return []

    agent._workers = Mock()
    agent._workers.wait.return_value = math.inf
    agent._selector = Mock(select=select)
    agent.run()
    assert "nothing of hvdrun for 5 s" in agent._reason and clock.now == 145.0
    os.close(reader)
    os.close(writer)


def test_a_rank_that_stood_still_listens_before_it_judges() -> None:
    watchdog = Mock(look=Mock(return_value=None), gave_up=Mock(return_value=""))
    engine = Mock(spec=Engine, _execution=Mock(waits=True), _coordinator=Mock(urgent=False), _watchdog=watchdog,
                  _look_seconds=0.5, _next_look=100.5, _control=Mock(parent=0), _controller=Mock(),
                  _mailboxes=Mock(act_again=Mock(return_value=False)))
    engine._coordinator.check_stalls.return_value = False
    engine._clock = lambda: 170.0
    assert Engine._look(engine) == 0.5 and not watchdog.gave_up.called
    assert Engine._look(engine) == 0.5 and watchdog.gave_up.called

