"""The control plane of a host's leader, which relays between rank 0 and the ranks of its host.

It merges the reports of the host's ranks, its own included (`negotiation.leader`), and forwards decisions unchanged. Both
happen while the background thread waits, also in the middle of a collective, and are no events to this rank.

How a failure travels (docs/protocol.md#leaders, #first-failure)
- The leader reports the end of a rank of its host to rank 0, and forwards the decision that follows, like any other.
- When the leader is the first to know of a failure, for instance because rank 0 is lost, it announces it to the ranks of
  its host itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hvdlite.control.base import Event
from hvdlite.control.codec import encode
from hvdlite.control.doorbell import Doorbell
from hvdlite.control.star import StarControl
from hvdlite.control.wire import Connection
from hvdlite.negotiation.leader import Leader
from hvdlite.negotiation.messages import Decision, DirectMessages, Message, Report


class LeaderControl(StarControl):
    """Like `StarControl`.

    Args:
        connections: to rank 0 and to each other rank of the host.
    """

    def __init__(self, leader: Leader, connections: Mapping[int, Connection], doorbells: Mapping[int, Doorbell],
                 pids: Mapping[int, int], *, heartbeat_timeout: float) -> None:
        rank, *others = leader.ranks
        self._leader = leader
        self.children = frozenset(others)
        super().__init__(rank, connections, doorbells, pids, heartbeat_timeout=heartbeat_timeout)
        self._send_up()

    def send_report(self, report: Report) -> None:
        self._leader.receive(self._rank, report)
        self._send_up()
        if report.failure is not None:
            self._send_down(Decision(epoch=report.epoch, sequence=0, failure=report.failure))

    def _handle(self, ready: Iterable[tuple[int, int]]) -> None:
        super()._handle(ready)
        self._send_up()

    def _events_of(self, peer: int, message: Message) -> list[Event]:
        match message:
            case Report() if peer in self.children:
                self._leader.receive(peer, message)
                return []
            case Decision() if peer == self.parent:
                self._leader.observe(message)
                self._send_down(message)
            case DirectMessages(messages) if peer == self.parent:
                self.send_direct_messages([message for message in messages if message.rank in self.children])
        return super()._events_of(peer, message)

    def _suspect(self, peer: int, reason: str) -> None:
        if peer in self.children:
            self._leader.lose(peer, reason)
        super()._suspect(peer, reason)

    def _send_up(self) -> None:
        report = self._leader.take_report()
        if report is not None:
            self._send(self.parent, report)

    def _send_down(self, decision: Decision) -> None:
        encoded = encode(decision)
        for peer in self.children:
            self._send(peer, encoded)
