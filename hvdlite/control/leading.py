"""The end of the star of a host's leader: it speaks with rank 0 for the ranks of its host.

Reports of the host's ranks, its own included, are merged by `negotiation.leader` and go up as one; decisions go down as they
come. Both happen while this rank's runtime thread waits, in the middle of a plan too, and are no events to it.

How a failure travels (docs/protocol.md#leaders, #first-failure)
- The end of a rank of this host goes up, and comes back as rank 0's decision, like what rank 0 saw itself.
- When this rank is the first to know of a failure, because rank 0 itself is lost for instance, it tells its host: nobody
  else can.
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
        self._pass_up()

    def send_report(self, report: Report) -> None:
        self._leader.receive(self._rank, report)
        self._pass_up()
        if report.failure is not None:
            self._pass_down(Decision(epoch=report.epoch, sequence=0, failure=report.failure))

    def _handle(self, ready: Iterable[tuple[int, int]]) -> None:
        super()._handle(ready)
        self._pass_up()

    def _heard_from(self, peer: int, message: Message) -> list[Event]:
        match message:
            case Report() if peer in self.children:
                self._leader.receive(peer, message)
                return []
            case Decision() if peer == self.parent:
                self._leader.watch(message)
                self._pass_down(message)
            case DirectMessages(messages) if peer == self.parent:
                self.send_direct_messages([message for message in messages if message.rank in self.children])
        return super()._heard_from(peer, message)

    def _suspect(self, peer: int, reason: str) -> None:
        if peer in self.children:
            self._leader.lose(peer, reason)
        super()._suspect(peer, reason)

    def _pass_up(self) -> None:
        report = self._leader.report()
        if report is not None:
            self._send(self.parent, report)

    def _pass_down(self, decision: Decision) -> None:
        encoded = encode(decision)
        for peer in self.children:
            self._send(peer, encoded)
