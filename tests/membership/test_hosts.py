"""Slots and hosts: what is free after failures, cooldowns and what discovery finds."""

from __future__ import annotations

import math

from hvdlite.membership.events import Limits
from hvdlite.membership.hosts import HostSlots


def seen(limits: Limits | None = None, **slots: int) -> HostSlots:
    hosts = HostSlots(limits or Limits(1))
    hosts.see(slots)
    return hosts


def test_free_slots_come_in_the_order_of_discovery() -> None:
    hosts = seen(b=2, a=1)
    assert hosts.free([("b", 0)], 0) == [("b", 1), ("a", 0)]


def test_a_failure_costs_the_slot_until_discovery_has_lost_it() -> None:
    hosts = seen(a=2, b=1)
    assert not hosts.fail("a", 0, 1.0)
    assert hosts.free([], 1e9) == [("a", 1), ("b", 0)] and hosts.next_end(1.0) == math.inf
    hosts.see({"b": 1})
    hosts.see({"a": 2, "b": 1})
    assert ("a", 0) in hosts.free([], 1e9)


def test_a_slot_that_is_taken_from_a_host_and_given_back_is_new() -> None:
    hosts = seen(a=2)
    hosts.fail("a", 1, 0.0)
    hosts.see({"a": 1})
    assert not hosts.has("a", 1)
    hosts.see({"a": 2})
    assert hosts.free([], 1.0) == [("a", 0), ("a", 1)]


def test_three_failures_within_ten_minutes_bar_a_host_for_good() -> None:
    hosts = seen(a=9)
    assert [hosts.fail("a", slot, 290.0 * slot) for slot in range(3)] == [False, False, True]
    hosts.see({})
    hosts.see({"a": 9})
    assert hosts.free([], 1e9) == []


def test_failures_that_are_far_apart_bar_nothing() -> None:
    hosts = seen(a=9)
    assert not any(hosts.fail("a", slot, 301.0 * slot) for slot in range(9))


def test_a_cooldown_doubles_each_time_up_to_its_limit() -> None:
    hosts = seen(Limits(1, cooldown=(10.0, 35.0)), a=1)
    now, delays = 0.0, []
    for _ in range(4):
        now += 1000.0
        hosts.fail("a", 0, now)
        delays.append(hosts.next_end(now) - now)
        assert hosts.free([], hosts.next_end(now) - 0.001) == [] and hosts.free([], hosts.next_end(now)) == [("a", 0)]
    assert delays == [10.0, 20.0, 35.0, 35.0]


def test_a_slot_that_is_retired_for_good_stays_out_when_its_process_fails_later() -> None:
    hosts = seen(Limits(1, cooldown=(10.0, 35.0)), a=1)
    assert not hosts.miss("a", 0, "a", 0.0)
    hosts.fail("a", 0, 5.0)
    assert hosts.free([], 1e9) == []
    hosts.see({})
    hosts.see({"a": 1})
    assert hosts.free([], 6.0) == [("a", 0)]


def test_a_barred_host_is_used_again_after_the_cooldown() -> None:
    hosts = seen(Limits(1, cooldown=(10.0, 35.0), whole_host=True), a=2)
    assert hosts.fail("a", 0, 0.0) and hosts.free([], 9.0) == [] and len(hosts.free([], 10.0)) == 2
    assert hosts.fail("a", 0, 10.0) and hosts.free([], 29.0) == [] and len(hosts.free([], 30.0)) == 2


def test_a_lost_host_is_one_failure_and_none_of_its_slots_is_used() -> None:
    hosts = seen(a=3, b=1)
    assert not hosts.lose("a", 0.0)
    hosts.see({"a": 4, "b": 1})
    assert hosts.free([], 1e9) == [("b", 0)]
    hosts.see({"b": 1})
    hosts.see({"a": 3})
    assert len(hosts.free([], 1.0)) == 3
