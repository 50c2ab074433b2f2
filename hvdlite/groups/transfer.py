"""A send or a receive of one rank of a group, and its description in errors."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from hvdlite.core.array import Array
from hvdlite.core.errors import MismatchError, OperationTimeoutError, PeerLeftError
from hvdlite.groups.call import Call
from hvdlite.groups.matching import ANY, P2PMessage
from hvdlite.handoff.group_state import LongWait

if TYPE_CHECKING:
    from hvdlite.groups.messages import Messages


class Transfer(Call):
    """A send or a receive. A thread that waits for it carries out what is under way.

    Attributes:
        values: bytes to be sent, or where those received belong.
        peer: the other rank; of a receive, maybe `ANY`.
        tag: of the message.
        deadline: in `time.monotonic()`; after it the call fails.
        begun: whether it cannot be given up alone any more.
        sent: how many bytes of a send are on their way.
        number: of a send, if its carrier counts messages.
        message: what a receive gets, once it is known.
    """

    def __init__(self, messages: Messages, values: Array, peer: int, tag: int, timeout: float, *, is_send: bool) -> None:
        super().__init__((), messages.progress, timeout=timeout)
        self.values = values
        self.peer = peer
        self.tag = tag
        self.is_send = is_send
        self.deadline = time.monotonic() + timeout
        self.begun = False
        self.sent = self.number = 0
        self.message: P2PMessage | None = None
        self._messages = messages
        self._members = messages.members

    @property
    def is_done(self) -> bool:
        if not self._is_over:
            self._messages.advance()
        return self._is_over

    def _wait(self, timeout: float | None) -> bool:
        state, wait, patience = self._messages.state, self._messages.wait, self._messages.patience
        if timeout is not None and timeout <= patience:
            return wait(self, timeout)
        if wait(self, patience):
            return True
        what, rank, peers = self.described()
        state.wait_long(self, LongWait(f"{self._members.name}: {what}", 0, (rank, *peers), tuple(peers),
                                       time.monotonic() - patience))
        try:
            return wait(self, None if timeout is None else timeout - patience)
        finally:
            state.end_wait(self)

    def wait_idly(self, timeout: float | None) -> bool:
        """Wait while another thread ends it."""
        return super()._wait(timeout)

    def described(self) -> tuple[str, int, Sequence[int]]:
        """Return a description of the message, this rank, and the ranks of which one or all take part.

        Both ends of a message between two ranks describe it alike.
        """
        members, peers = self._members, self.peers()
        if len(peers) > 1:
            return self.shown(), members.rank, peers
        here, there = members.named([members.rank]), members.named(peers)
        sender, receiver = (here, there) if self.is_send else (there, here)
        return f"message from {sender} to {receiver} (tag {self.tag}, {self.values.size} bytes)", members.rank, peers

    def peers(self) -> Sequence[int]:
        """Return the ranks of which one is the other end."""
        return self._members.others if self.peer == ANY else [self.peer]

    def shown(self) -> str:
        """Return a description of this call."""
        members, tag = self._members, f"tag {self.tag}, {self.values.size} bytes"
        here, there = members.named([members.rank]), "any rank" if self.peer == ANY else members.named([self.peer])
        return f"send from {here} to {there} ({tag})" if self.is_send else f"receive on {here} from {there} ({tag})"

    def other_size_error(self, message: P2PMessage) -> MismatchError:
        """Return the error of a receive that gets a message of another length."""
        members = self._members
        return MismatchError(f"{members.name}: the {self.shown()} gets a message of {message.total} bytes from "
                             f"{members.named([message.source])}: the tensors sent and received must have the same number "
                             "of bytes")

    def departed_error(self, peers: Iterable[int]) -> PeerLeftError:
        """Return the error of a call that needs ranks that have left."""
        members = self._members
        return PeerLeftError(f"{members.name}: the {self.shown()} needs {members.named(sorted(peers))}, which left the "
                             "group (its process ended, or destroyed the group)", min(peers))

    def overdue_error(self, kept: Iterable[P2PMessage]) -> OperationTimeoutError:
        """Return the error of a call that takes too long.

        Args:
            kept: messages that no receive has got.
        """
        members = self._members
        if self.is_send:
            why = f"{members.named([self.peer])} does not receive it"
        else:
            others = "; ".join(f"{message.total} bytes from {members.named([message.source])} with tag {message.tag}"
                               for message in kept)
            why = "no such message has come" + (f", but others that nobody receives: {others}" if others else "")
        return OperationTimeoutError(f"{members.name}: the {self.shown()} has not ended within the timeout of "
                                     f"{self.timeout or 0.0:g} s: {why}", () if self.peer == ANY else (self.peer,))
