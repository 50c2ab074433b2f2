"""A send or a receive of one rank of a group, and its description in errors."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from hvdlite.core.array import Array
from hvdlite.core.errors import MismatchError, OperationTimeoutError, PeerLeftError
from hvdlite.groups.call import Call
from hvdlite.groups.matching import ANY, P2PMessage
from hvdlite.groups.members import GroupMembers
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
        self.values, self.peer, self.tag, self.is_send = values, peer, tag, is_send
        self.deadline = time.monotonic() + timeout
        self.begun = False
        self.sent = self.number = 0
        self.message: P2PMessage | None = None
        self._messages = messages

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
        what, rank, peers = self._messages.texts.described(self)
        state.wait_long(self, LongWait(f"{self._messages.texts.group}: {what}", 0, (rank, *peers), tuple(peers),
                                       time.monotonic() - patience))
        try:
            return wait(self, None if timeout is None else timeout - patience)
        finally:
            state.end_wait(self)

    def wait_idly(self, timeout: float | None) -> bool:
        """Wait while another thread ends it."""
        return super()._wait(timeout)


class Texts:
    """Describes the transfers of one rank in errors and reports."""

    def __init__(self, members: GroupMembers) -> None:
        self.group, self.others = members.name, members.others
        self._rank, self._size, self._members = members.rank, members.size, members

    def described(self, call: Transfer) -> tuple[str, int, Sequence[int]]:
        """Return a description of the message, this rank, and the ranks of which one or all take part.

        Both ends of a message between two ranks describe it alike.
        """
        peers = self.peers(call)
        if len(peers) > 1:
            return self.shown(call), self._rank, peers
        here, there = self._named([self._rank]), self._named(peers)
        sender, receiver = (here, there) if call.is_send else (there, here)
        return f"message from {sender} to {receiver} (tag {call.tag}, {call.values.size} bytes)", self._rank, peers

    def peers(self, call: Transfer) -> Sequence[int]:
        """Return the ranks of which one is the other end."""
        return self.others if call.peer == ANY else [call.peer]

    def check_peer(self, verb: str, rank: int) -> None:
        """Raise ValueError unless `rank` is another rank of the group."""
        if rank == self._rank or not 0 <= rank < self._size:
            raise ValueError(f"rank {self._rank} of {self.group} cannot {verb} rank {rank}: the group has ranks 0 to "
                             f"{self._size - 1}, and a rank exchanges messages with other ranks only")

    def shown(self, call: Transfer) -> str:
        """Return a description of a call."""
        here, tag = self._named([self._rank]), f"tag {call.tag}, {call.values.size} bytes"
        if call.is_send:
            return f"send from {here} to {self._named([call.peer])} ({tag})"
        return f"receive on {here} from {'any rank' if call.peer == ANY else self._named([call.peer])} ({tag})"

    def other_size(self, call: Transfer, message: P2PMessage) -> MismatchError:
        """Return the error of a receive that gets a message of another length."""
        return MismatchError(f"{self.group}: the {self.shown(call)} gets a message of {message.total} bytes from "
                             f"{self._named([message.source])}: the tensors sent and received must have the same number of "
                             "bytes")

    def departed(self, call: Transfer, peers: Iterable[int]) -> PeerLeftError:
        """Return the error of a call that needs ranks that have left."""
        return PeerLeftError(f"{self.group}: the {self.shown(call)} needs {self._named(peers)}, which left the group (its "
                             "process ended, or destroyed the group)", min(peers))

    def overdue(self, call: Transfer, kept: Iterable[P2PMessage]) -> OperationTimeoutError:
        """Return the error of a call that takes too long.

        Args:
            kept: messages that no receive has got.
        """
        if call.is_send:
            why = f"{self._named([call.peer])} does not receive it"
        else:
            others = "; ".join(f"{message.total} bytes from {self._named([message.source])} with tag {message.tag}"
                               for message in kept)
            why = "no such message has come" + (f", but others that nobody receives: {others}" if others else "")
        return OperationTimeoutError(f"{self.group}: the {self.shown(call)} has not ended within the timeout of "
                                     f"{call.timeout or 0.0:g} s: {why}", () if call.peer == ANY else (call.peer,))

    def _named(self, ranks: Iterable[int]) -> str:
        return self._members.named(sorted(ranks))
