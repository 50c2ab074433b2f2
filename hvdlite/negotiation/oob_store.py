"""Rank 0's store of out-of-band messages, by which planes connect. Pure.

It works as `torch.distributed.Store` does: a rank publishes a value under a key, another fetches it. Connecting N ranks so
costs as many messages as there are pairs that connect, not N x N.
"""

from __future__ import annotations

from collections import defaultdict

from hvdlite.negotiation.messages import DirectMessage, OobKey, OobMessage, SideMessage


class OobStore:
    """Keeps published messages and forwards messages that name their receivers.

    Args:
        epoch: of the world that it serves.
    """

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch
        self._published: dict[OobKey, OobMessage] = {}
        self._requested: defaultdict[OobKey, list[int]] = defaultdict(list)  # ranks that wait for an unpublished key
        self._outgoing: defaultdict[int, list[OobMessage]] = defaultdict(list)  # by receiver

    def receive(self, rank: int, side_message: SideMessage) -> None:
        """Take in the messages that a rank publishes or sends, and the keys that it fetches or withdraws."""
        for message in side_message.oob_messages:
            key, bare = OobKey(message.label, message.sender), OobMessage(message.label, message.sender, message.payload)
            if not message.receivers:
                self._published[key] = bare
            for receiver in message.receivers or self._requested.pop(key, ()):
                self._outgoing[receiver].append(bare)
        for key in side_message.oob_requests:
            if key in self._published:
                self._outgoing[rank].append(self._published[key])
            else:
                self._requested[key].append(rank)
        for label in side_message.oob_withdrawn:
            self._published.pop(OobKey(label, rank), None)

    def take_direct_messages(self) -> tuple[DirectMessage, ...]:
        """Remove and return the messages to send."""
        if not self._outgoing:
            return ()
        outgoing = tuple(DirectMessage(epoch=self._epoch, rank=rank, oob_messages=tuple(messages))
                         for rank, messages in sorted(self._outgoing.items()))
        self._outgoing.clear()
        return outgoing
