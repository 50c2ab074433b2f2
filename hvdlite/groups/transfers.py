"""Sends and receives between two ranks of an ordered group: the calls, their messages' texts, and what carries them out."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Protocol

from hvdlite.core.array import Array
from hvdlite.core.errors import MismatchError, OperationTimeoutError, PeerLeftError
from hvdlite.groups.board import names
from hvdlite.groups.call import Call
from hvdlite.groups.long_waits import LongWaits
from hvdlite.groups.matching import ANY, Arrived


class Transfers(Protocol):
    """One rank's sends and receives. Callable from any thread."""

    def send(self, values: Array, to: int, tag: int, timeout: float) -> Transfer:
        """See `Group.send`.

        Args:
            timeout: seconds after which the call fails.

        Raises:
            ValueError: if `to` is this rank, or none of the group's.
        """

    def receive(self, values: Array, source: int | None, tag: int, timeout: float) -> Transfer:
        """See `Group.receive`. A message of another length is lost: the call fails, and the next one gets the next.

        Args:
            timeout: seconds after which the call fails.

        Raises:
            ValueError: if `source` is this rank, or none of the group's.
        """

    def flush(self, until: float) -> None:
        """Wait until the sends under way are over, at most until a time in `time.monotonic()`."""

    def fail(self, error: Exception) -> None:
        """Let all calls under way and all later ones fail."""

    def close(self) -> None:
        """Leave the group: calls under way fail, on this rank and on those that wait for it. Idempotent.

        In a forked child, do nothing.
        """

    def close_in_child(self) -> None:
        """In a forked child: close the descriptors."""


class Owner(Protocol):
    """What carries transfers out."""

    def described(self, call: Transfer) -> tuple[str, int, Sequence[int]]:
        """Return a description of a call's message, this rank, and the ranks of which one or all take part.

        Both ends of a message between two ranks describe it alike.
        """

    def poll(self, call: Transfer) -> bool:
        """Do what can be done at once; return whether the call is over."""

    def wait(self, call: Transfer, timeout: float | None) -> bool:
        """See `Call.wait`."""


class Transfer(Call):
    """A send or a receive. A thread that waits for it may help to carry it out.

    Attributes:
        values: bytes to be sent, or where those received belong.
        tag: of the message.
        peer: the other rank, or `ANY`.
        begun: whether anything of the message is on its way.
        deadline: in `time.monotonic()`; after it the call fails.
        long_waits: hears of threads that wait long for it.
    """

    peer: int

    def __init__(self, owner: Owner, values: Array, tag: int, timeout: float) -> None:
        super().__init__((), timeout=timeout)
        self.values, self.tag, self.begun = values, tag, False
        self.deadline = time.monotonic() + timeout
        self.long_waits: LongWaits | None = None
        self._owner = owner

    @property
    def is_over(self) -> bool:
        """Like `is_done`, without doing anything for it."""
        return self._is_over

    @property
    def is_done(self) -> bool:
        return self._is_over or self._owner.poll(self)

    def described(self) -> tuple[str, int, Sequence[int]]:
        """See `Owner.described`."""
        return self._owner.described(self)

    def _wait(self, timeout: float | None) -> bool:
        told = self.long_waits
        if told is None or (timeout is not None and timeout <= told.patience):
            return self._owner.wait(self, timeout)
        if self._owner.wait(self, told.patience):
            return True
        told.begin(self)
        try:
            return self._owner.wait(self, None if timeout is None else timeout - told.patience)
        finally:
            told.end(self)

    def wait_idly(self, timeout: float | None) -> bool:
        """Wait while another thread carries it out."""
        return super()._wait(timeout)


class Send(Transfer):
    """A message to the rank `to`; its first `sent` bytes are on their way."""

    def __init__(self, owner: Owner, values: Array, to: int, tag: int, timeout: float) -> None:
        super().__init__(owner, values, tag, timeout)
        self.to = self.peer = to
        self.sent = 0


class Receive(Transfer):
    """A message from the rank `wanted`, or from `ANY`."""

    def __init__(self, owner: Owner, values: Array, wanted: int, tag: int, timeout: float) -> None:
        super().__init__(owner, values, tag, timeout)
        self.wanted = self.peer = wanted


class Announced(Arrived, Protocol):
    """A message that a receive may get."""

    @property
    def total(self) -> int:
        """Its length in bytes."""


class Texts:
    """What errors say of the transfers of one rank.

    Args:
        group: its name.
        members: the name of each rank.
    """

    def __init__(self, group: str, rank: int, size: int, members: Sequence[str] = ()) -> None:
        self.group = group
        self._rank, self._size, self._members = rank, size, tuple(members) or tuple(map(str, range(size)))

    def check_peer(self, verb: str, rank: int) -> None:
        """Raise ValueError unless `rank` is another rank of the group."""
        if rank == self._rank or not 0 <= rank < self._size:
            raise ValueError(f"rank {self._rank} of {self.group} cannot {verb} rank {rank}: the group has ranks 0 to "
                             f"{self._size - 1}, and a rank exchanges messages with other ranks only")

    def shown(self, call: Transfer) -> str:
        """Return a description of a call."""
        here, tag = self._named([self._rank]), f"tag {call.tag}, {call.values.size} bytes"
        if isinstance(call, Send):
            return f"send from {here} to {self._named([call.to])} ({tag})"
        return f"receive on {here} from {'any rank' if call.peer == ANY else self._named([call.peer])} ({tag})"

    def message(self, call: Transfer, peers: Sequence[int]) -> str:
        """Return a description of what a call sends or receives, to or from one of some ranks."""
        if len(peers) > 1:
            return self.shown(call)
        here, there = self._named([self._rank]), self._named(peers)
        sender, receiver = (here, there) if isinstance(call, Send) else (there, here)
        return f"message from {sender} to {receiver} (tag {call.tag}, {call.values.size} bytes)"

    def other_size(self, call: Receive, message: Announced) -> MismatchError:
        """Return the error of a receive that gets a message of another length."""
        return MismatchError(f"{self.group}: the {self.shown(call)} gets a message of {message.total} bytes from "
                             f"{self._named([message.source])}: the tensors sent and received must have the same number of "
                             "bytes")

    def departed(self, call: Transfer, peers: Iterable[int]) -> PeerLeftError:
        """Return the error of a call that needs ranks that have left."""
        return PeerLeftError(f"{self.group}: the {self.shown(call)} needs {self._named(peers)}, which left the group (its "
                             "process ended, or destroyed the group)", min(peers))

    def overdue(self, call: Transfer, kept: Iterable[Announced]) -> OperationTimeoutError:
        """Return the error of a call that takes too long.

        Args:
            kept: messages that no receive has got.
        """
        if isinstance(call, Send):
            why = f"{self._named([call.to])} does not receive it"
        else:
            others = "; ".join(f"{message.total} bytes from {self._named([message.source])} with tag {message.tag}"
                               for message in kept)
            why = "no such message has come" + (f", but others that nobody receives: {others}" if others else "")
        return OperationTimeoutError(f"{self.group}: the {self.shown(call)} has not ended within the timeout of "
                                     f"{call.timeout or 0.0:g} s: {why}", () if call.peer == ANY else (call.peer,))

    def _named(self, ranks: Iterable[int]) -> str:
        return names(sorted(ranks), self._members)
