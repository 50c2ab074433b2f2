"""A member's link with the authority of an elastic job, which orders worlds (docs/protocol.md#members).

A thread reads the orders. It ends the world, or the rendezvous, that is to stop, whatever the user's threads do; all other
orders wait until the user's thread asks for them. Nothing is sent while nothing changes.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import stat
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from hvdlite.core.errors import HostsUpdatedInterrupt, LaunchError, PeerLostError, ProtocolError, WorldEnded
from hvdlite.core.launch_contract import MEMBER_SOCKET
from hvdlite.core.sockets import connect_unix, routes_to
from hvdlite.core.system_limits import explained
from hvdlite.membership.messages import (
    JOIN,
    Alive,
    AllFinished,
    AskAlive,
    BoundaryReport,
    CoordinatorAt,
    Dismissed,
    Listening,
    MeetingFailed,
    MemberFinished,
    MemberFrames,
    MemberHello,
    MemberIdle,
    MemberNoticed,
    MemberReady,
    MembershipMessage,
    Met,
    PrepareStop,
    SaveState,
    StateReport,
    StopAt,
    StopNow,
    WorldOrder,
    frame,
)

_log = logging.getLogger("hvdlite")
_RECEIVE_BYTES: Final = 1 << 16


class MemberClient:
    """This process as a member of an elastic job. Callable from any thread, but for `boundary`: the training thread's.

    Args:
        directory: the job directory of this host.
        number: the member's id.

    Attributes:
        number: the member's id.
        is_at_rest: whether this member has stopped at a boundary in its present world.
        is_behind: whether it waited in `join()` then, or has trained on.
        is_last: whether the job ends at this boundary, because all members were told to leave; the world still works.
        saves_at_end: whether the world goes on to the next boundary when the job ends, or its launcher is lost: the state is
            saved there.
        is_ending: whether that has happened.

    Raises:
        LaunchError: when nobody serves members there.
    """

    def __init__(self, directory: str, number: int) -> None:
        self.number = number
        self.is_at_rest = self.is_behind = self.is_last = self.saves_at_end = self.is_ending = False
        self._pid = os.getpid()
        self._held: list[int] = []  # ends for reading of the pipes to which this process writes
        self._changed = threading.Condition()  # guards what follows
        self._lost = ""  # why there is no authority any more
        self._orders: deque[WorldOrder | SaveState | AllFinished | Dismissed] = deque()
        self._coordinator: CoordinatorAt | None = None
        self._epoch = 1  # the last world that was ordered
        self._host_names: tuple[str, ...] = ()  # of its ranks
        self._stopped = StopNow(0, "")  # the last world that was stopped
        self._attached: tuple[int, Callable[[str], None]] | None = None  # what to stop, and the world to which it belongs
        self._has_ended: Callable[[], bool] = lambda: False  # the background thread of that world
        self._boundaries = 0  # that this member has reached in this world, and `JOIN` for each `join()` of all
        self._change: PrepareStop | None = None  # a stop that is being agreed on
        self._stop_at: StopAt | None = None
        self._socket = _connected(directory)
        self._send_lock = threading.RLock()  # a signal handler may send while this thread does; messages are short
        self._send(MemberHello(number, self._pid))
        with explained("the thread that listens to hvdrun"):
            threading.Thread(target=self._listen, name="hvdlite-member", daemon=True).start()

    @property
    def in_child(self) -> bool:
        """Whether this process is a forked child, which is no member."""
        return self._pid != os.getpid()

    @property
    def is_to_stop(self) -> bool:
        """Whether the present world ends soon, or has ended: at a boundary that is agreed on, by a loss, or with the job."""
        return self._change is not None or self._stopped.epoch >= self._epoch or bool(self._lost)

    # --- what the member reports -------------------------------------------------------------------------------------

    def ready(self) -> None:
        """This member is at the entrance of `elastic.run`; boundaries that it has passed outside do not count."""
        with self._changed:
            self._boundaries = 0
        self._send(MemberReady())

    def outlive_output(self) -> None:
        """Read from this process's pipes, too: when the launcher is killed, a `print` does not fail."""
        with contextlib.suppress(OSError):  # not on Linux
            self._held = self._held or [os.open(f"/proc/self/fd/{each}", os.O_RDONLY | os.O_NONBLOCK)
                                        for each in _output_pipes()]

    def noticed(self) -> None:
        """This process was told to leave: it goes on until it is let go. A signal handler may call this."""
        with contextlib.suppress(LaunchError):  # the job ends
            self._send(MemberNoticed())

    def idle(self, epoch: int, state_report: StateReport, reason: str, blamed: tuple[int, ...] = ()) -> None:
        """World `epoch` has ended here: its background thread has ended, and its planes are closed."""
        self._send(MemberIdle(epoch, state_report, reason, blamed))

    def meeting_failed(self, epoch: int, reason: str, missing: tuple[int, ...]) -> None:
        """This member could not meet the others of world `epoch`; this is no news if the authority has given that world up.

        Args:
            missing: on rank 0, the ranks that have not reached it.
        """
        if self._stopped.epoch < epoch:
            self._send(MeetingFailed(epoch, reason, missing))

    def met(self, epoch: int) -> None:
        """This member has met all others of world `epoch`, and its background thread runs."""
        self._send(Met(epoch))

    def announce_coordinator(self, epoch: int, port: int) -> None:
        """On rank 0 of world `epoch`: announce its port, and the addresses by which other hosts reach this one."""
        self._send(Listening(epoch, tuple(routes_to(self._host_names)), port))

    # --- what the member waits for -----------------------------------------------------------------------------------

    def attach(self, epoch: int, stop: Callable[[str], None], has_ended: Callable[[], bool] = lambda: False) -> None:
        """Call `stop(reason)` when world `epoch` has to end at once: now, if it has been ordered already.

        It replaces what was attached before. It may be called by another thread, under a lock: it must not block.

        Args:
            has_ended: whether the background thread of the world has ended, so that a member that has not stopped computes.
        """
        with self._changed:
            self._attached = epoch, stop
            self._has_ended = has_ended
            self._stop_attached()

    def detach(self) -> None:
        """Forget what was attached: it has ended."""
        with self._changed:
            self._attached = None
            self._has_ended = lambda: False

    def coordinator(self, epoch: int, timeout: float) -> tuple[str, int]:
        """Block until it is known where rank 0 of world `epoch` listens; return host and port.

        Raises:
            LaunchError: when the world is given up before, or it is not known within `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        with self._changed:
            while self._coordinator is None or self._coordinator.epoch != epoch:
                self._check_link()
                if self._stopped.epoch >= epoch:
                    raise LaunchError(f"the ranks stopped meeting: {self._stopped.reason}")
                if time.monotonic() >= deadline:
                    raise LaunchError(f"rank 0 has not said within {timeout:.0f} s where it listens (HVDLITE_START_TIMEOUT)")
                self._changed.wait(None if deadline == math.inf else max(0.0, deadline - time.monotonic()))
            return self._coordinator.host, self._coordinator.port

    def next_order(self) -> WorldOrder | SaveState:
        """Block until this member, which is idle, is to be in a world, or to save its state; return the newest order.

        Raises:
            LaunchError: when the authority is gone.
            SystemExit: with code 0, when this member is not needed any more.
        """
        with self._changed:
            while True:
                order = self._take_order()
                if isinstance(order, (WorldOrder, SaveState)) and not any(
                        isinstance(later, (WorldOrder, SaveState)) for later in self._orders):
                    return order
                if order is None:
                    self._check_link()
                    self._changed.wait()

    def finish(self, epoch: int) -> bool:
        """Report that the training function has returned in world `epoch`, and block until it has on all members.

        Returns:
            False when the world ends before that: the function has to be called again.

        Raises:
            LaunchError, SystemExit: like `next_order`.
        """
        self._send(MemberFinished(epoch))
        with self._changed:
            while True:
                if isinstance(self._take_order(), AllFinished):
                    return True
                if self._stopped.epoch >= epoch:
                    return False
                self._check_link()
                self._changed.wait()

    def boundary(self, joins: int) -> None:
        """Pass a boundary of the training loop, at which all members may be stopped.

        Args:
            joins: how often all have called `join()` in this world.

        Raises:
            HostsUpdatedInterrupt: on all members of the world at the same boundary, when members come or go.
            PeerLostError: when the world is stopped while it is agreed on such a boundary.
            WorldEnded: when the script has caught the first of these, and trained on.
        """
        if self.in_child:
            return
        with self._changed:
            if self.is_at_rest:
                self.is_behind = True
                raise WorldEnded("the script has caught HostsUpdatedInterrupt, for which hvd.elastic.run waits, and trained "
                                 "on: let it pass, so that ranks can come and go without a loss of steps")
            self._boundaries = max(self._boundaries, joins * JOIN) + 1
            stop_at = self._agreed_stop()
            if stop_at is not None and self._boundaries >= stop_at.boundary:
                self._rest(is_behind=False)

    def left_in_join(self) -> None:
        """Others have left the world while this member waits in `join()`. If they stop at a boundary, this is one, too.

        Raises:
            HostsUpdatedInterrupt: if they do.
            PeerLostError: Like `boundary`.
        """
        with self._changed:
            if not self.in_child and self._agreed_stop() is not None:
                self._rest(is_behind=True)

    def _agreed_stop(self) -> StopAt | None:
        """Return the boundary at which all members stop; None if they do not. Block while it is agreed on."""
        while self._change is not None and self._stop_at is None:
            if self._stopped.epoch >= self._epoch:
                raise PeerLostError(self._stopped.reason)
            self._check_link()
            self._changed.wait()
        return self._stop_at

    def _rest(self, *, is_behind: bool) -> None:
        self.is_last = self._stop_at is not None and self._stop_at.is_last
        self._change = self._stop_at = None
        self.is_at_rest, self.is_behind = True, is_behind
        raise HostsUpdatedInterrupt

    def close_in_child(self) -> None:
        """In a forked child: close the copy of the descriptor."""
        self._socket.close()

    def _take_order(self) -> WorldOrder | SaveState | AllFinished | None:
        if not self._orders:
            return None
        order = self._orders.popleft()
        if isinstance(order, Dismissed):
            raise SystemExit(0)
        return order

    def _check_link(self) -> None:
        if self._lost:
            raise LaunchError(self._lost)

    def _stop_attached(self) -> None:
        if self._attached is None:
            return
        epoch, stop = self._attached
        if self._lost or self._stopped.epoch >= epoch:
            self._attached = None
            stop(self._lost or self._stopped.reason)

    def _send(self, message: MembershipMessage) -> None:
        try:
            with self._send_lock:
                self._socket.sendall(frame(message))
        except OSError as error:
            self._lose(str(error))
            self._check_link()

    # --- the thread of the link --------------------------------------------------------------------------------------

    def _listen(self) -> None:
        frames = MemberFrames(orders=True)
        try:
            while content := self._socket.recv(_RECEIVE_BYTES):
                for order in frames.feed(content):
                    self._receive(order)
            self._lose("it has ended")
        except (OSError, ProtocolError) as error:
            self._lose(str(error))
        except Exception as error:  # of any kind: others would wait for a member that receives no orders
            _log.exception("member %d cannot take an order of its launcher", self.number)
            self._lose(f"{type(error).__name__}: {error}")

    def _lose(self, reason: str) -> None:
        with self._changed:
            self._lost = self._lost or ("the launcher of this elastic job, which orders its worlds, cannot be reached any "
                                        f"more ({reason}); the job ends")
            self._changed.notify_all()
            if self.saves_at_end:
                self.is_ending = True
                nowhere = os.open(os.devnull, os.O_WRONLY)  # nobody reads what this process writes, so pipes would fill
                for descriptor in _output_pipes():
                    os.dup2(nowhere, descriptor)
                os.close(nowhere)
            else:
                self._stop_attached()

    def _receive(self, order: Any) -> None:
        answer: BoundaryReport | Alive | None = None
        with self._changed:
            match order:
                case StopNow():
                    self._stopped = order
                    self._stop_attached()
                case AskAlive(epoch):
                    answer = Alive(epoch, in_user_code=self._has_ended())
                case PrepareStop():
                    self._change, self._stop_at = order, None
                    answer = BoundaryReport(order.change, self._boundaries)
                case StopAt(change) if self._change is not None and change == self._change.change:
                    self._stop_at = order
                case WorldOrder():
                    self._epoch, self._host_names, self._boundaries = order.epoch, order.host_names, 0
                    self._change = self._stop_at = None
                    self.is_at_rest = self.is_behind = self.is_last = False
                    self._orders.append(order)
                case CoordinatorAt():
                    self._coordinator = order
                case AllFinished():
                    self._change = self._stop_at = None  # it comes too late
                    self._orders.append(order)
                case Dismissed() | SaveState():
                    self._orders.append(order)
            self._changed.notify_all()
        if answer is not None:
            self._send(answer)


def _output_pipes() -> list[int]:
    return [descriptor for descriptor in (1, 2) if stat.S_ISFIFO(os.fstat(descriptor).st_mode)]


def _connected(directory: str) -> socket.socket:
    path = str(Path(directory) / MEMBER_SOCKET)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connect_unix(sock, path)
    except (OSError, ProtocolError) as error:
        sock.close()
        raise LaunchError(f"this process is a member of an elastic job, and its launcher does not answer at {path}: "
                          f"{error}") from error
    return sock
