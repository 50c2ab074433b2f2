"""What a group's calls leave in the flight recorder and in the timeline."""

from __future__ import annotations

from hvdlite.core.types import Collective
from hvdlite.diagnostics.flight_recorder import FlightRecorder
from hvdlite.negotiation.messages import Response

RESPONSE = Response(names=("x",), collective=Collective.ALLGATHER, dtype="float32", elements=7)


def test_a_call_is_a_lane_with_its_wait_and_its_transfer() -> None:
    recorder = FlightRecorder("shm", lambda: 9.0)
    recorder.ordered("group: all_gather()", RESPONSE, 1.0, 2.0, 3.0)
    assert recorder.take_trace() == (), "there is no timeline"
    recorder.trace(True)
    recorder.ordered("group: all_gather()", RESPONSE, 1.0, 2.0, 3.0)
    events = recorder.take_trace()
    assert {event.lane for event in events} == {"group: all_gather()"}
    assert [(event.phase, event.when, event.name) for event in events] == [
        ("B", 1e6, "ALLGATHER"), ("B", 1e6, "WAIT"), ("E", 2e6, ""), ("B", 2e6, "SHM_ALLGATHER"), ("E", 3e6, ""),
        ("E", 3e6, "")]


def test_calls_are_remembered_by_their_name() -> None:
    recorder = FlightRecorder("shm", lambda: 9.0)
    for _ in range(3):
        recorder.finished("group: all_gather()", "a group")
    assert recorder.story("group: all_gather()").endswith("3 times, the first 0.000 s ago: done in a group")
