"""The messages between the launcher and worker groups; to other hosts they travel in frames over a remote shell.

    MAGIC | frame | frame | ...        a frame: length (4 bytes) | MessagePack

Login shells may write greetings before `MAGIC`, which the agent writes once. The remote shell (ssh, srun) authenticates both
sides; no message is ever unpickled.
"""

from __future__ import annotations

import signal
from typing import Any, Final

import msgspec

from hvdlite.core.frames import FrameReader, to_frame
from hvdlite.core.launch_contract import FailureRecord
from hvdlite.core.world import World
from hvdlite.diagnostics.progress import Reading
from hvdlite.membership.events import Kill, Look, Note, SeenStopped, SendOrder
from hvdlite.membership.messages import MemberMessage

MAGIC = b"\0hvdlite agent\0"
PING_SECONDS = 1.0
"""Seconds between pings of the launcher while it sends no other message."""
QUIET = 5.0
"""Seconds without a message after which the user is told that a host is silent."""
FRAME_LIMIT = 1 << 30
"""Longest frame, in bytes."""
PIECE_BYTES = 1 << 24
"""Longest piece of a function with its arguments, or of a result; both may be larger than a frame."""


class AgentMessage(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A message between the launcher and a worker group, in one of the two directions. More are in `membership.events`."""


# --- orders: launcher to worker group ----------------------------------------------------------------------------------


class ProcessStart(msgspec.Struct, frozen=True, array_like=True):
    """A process that is to be started."""

    key: int  # a rank, or the id of a member of an elastic job; its events carry it
    world: World  # its first one
    environment: dict[str, bytes]  # its own variables
    core_share: tuple[int, int] | None = None  # (i, n): bind it to the i-th of n parts of the host's cores


class Start(AgentMessage, frozen=True):
    """Start processes."""

    processes: list[ProcessStart]
    command: list[bytes]  # words of any bytes
    environment: dict[str, bytes]  # added to the worker group's environment; may contain the job's key
    is_elastic: bool = False  # they have the members' socket; one that ends takes its descendants with it, and is reaped
    has_input: bool = False  # whether rank 0 is among them and gets the standard input of the worker group's process
    grace: float = 0.0  # seconds that they have to end when the agent gets a signal
    preemption_script: str = ""  # a program that says when the host will be taken away


class TaskPiece(AgentMessage, frozen=True):
    """Append to the file `task` in the job's directory, before any rank is started."""

    content: bytes


FORWARDED: Final = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals that the user sends through hvdrun to the ranks; they do not end the job."""


class Signal(AgentMessage, frozen=True):
    """Send a signal to the ranks that still run; one of `FORWARDED` to those that handle it."""

    signum: int


class Stop(AgentMessage, frozen=True):
    """Kill the remaining processes, clean up, and reply `AgentDone`."""


class Pause(AgentMessage, frozen=True):
    """Stop reading the ranks' output, or go on: the reader of hvdrun's output is slow."""

    paused: bool


class Ping(AgentMessage, frozen=True):
    """The launcher is alive."""


class RouteRequest(AgentMessage, frozen=True):
    """Find the addresses from which this host reaches the given hosts, and listen there for their probes."""

    hosts: list[str]
    interfaces: list[str]  # if not empty, use only addresses of these
    port: int = 0  # 0: any
    listen: bool = True


class ProbeRequest(AgentMessage, frozen=True):
    """Try to reach this port at each of these addresses."""

    addresses: list[str]
    port: int


class HostInfoRequest(AgentMessage, frozen=True):
    """Report the host's software and configuration."""


class SpeedRequest(AgentMessage, frozen=True):
    """Measure latency and bandwidth to a `ProbeServer`."""

    addresses: list[str]
    port: int


class ProgressRequest(AgentMessage, frozen=True):
    """A request for the progress of a host's ranks."""


# --- events: worker group to launcher ----------------------------------------------------------------------------------


class AgentReady(AgentMessage, frozen=True):
    """An agent is ready."""

    python: str
    version: str
    hostname: str
    cores: int
    pid: int

    def describe(self) -> str:
        """Return a line for the user."""
        return f"{self.hostname}: {self.cores} cores, Python {self.python}, agent {self.pid}"


class Pong(AgentMessage, frozen=True):
    """The answer to `Ping`."""


class Started(AgentMessage, frozen=True):
    """A rank's process runs."""

    key: int  # as in `ProcessStart`
    pid: int
    unbound: str = ""  # why it is not bound to its cores, if it was to be


class StartRefused(AgentMessage, frozen=True):
    """A process cannot be started."""

    key: int
    reason: str
    code: int  # as a shell reports it


class Output(AgentMessage, frozen=True):
    """Output of a rank; empty when the stream has ended."""

    key: int
    stream: str
    content: bytes


class Exited(AgentMessage, frozen=True):
    """A rank's process has ended."""

    key: int
    code: int  # negative: by that signal
    by_us: bool  # after it had been ordered to
    record: FailureRecord | None  # `when` is its age in seconds: clocks differ
    progress: Reading  # with its metrics


class FromMember(AgentMessage, frozen=True):
    """A message of a member of an elastic job."""

    member: int
    message: MemberMessage | None  # None when there is a problem
    problem: str = ""  # what is wrong with what it sent: it is disconnected


class HostNoticed(AgentMessage, frozen=True):
    """The host of an elastic job's members is to be left."""

    reason: str
    seconds: float  # until the processes there are killed


class Result(AgentMessage, frozen=True):
    """A piece of the result that a rank wrote to the job's directory, as `result.RANK`."""

    key: int
    content: bytes
    is_last: bool


class AgentDone(AgentMessage, frozen=True):
    """All processes of the job on this host have ended."""

    reason: str = ""  # why the agent has ended them without a `Stop`


class RouteReply(AgentMessage, frozen=True):
    """The answer to `RouteRequest`; the best address first."""

    addresses: list[str]
    port: int
    problem: str = ""
    store_port: int = 0  # kept for the store of torch.distributed


class ProbeReply(AgentMessage, frozen=True):
    """The answer to `ProbeRequest`: the problem of each address, "" for none."""

    problems: dict[str, str]


class HostInfoReply(AgentMessage, frozen=True):
    """The answer to `HostInfoRequest`."""

    facts: dict[str, Any]


class SpeedReply(AgentMessage, frozen=True):
    """The answer to `SpeedRequest`."""

    seconds: float  # of a round trip
    bandwidth: float  # bytes per second
    problem: str = ""


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """The progress of a process that runs."""

    reading: Reading
    memory: int = 0  # bytes
    gpu: str = ""  # the load and memory of its GPU; "" if it has none


class ProgressReply(AgentMessage, frozen=True):
    """The answer to `ProgressRequest`, by rank."""

    ranks: dict[int, Sample]
    waits: str = ""  # which ranks wait for which, from rank 0's host


Order = (Start | TaskPiece | Kill | Look | SendOrder | Signal | Stop | Pause | Ping | RouteRequest
         | ProbeRequest | HostInfoRequest | SpeedRequest | ProgressRequest)
Event = (AgentReady | Pong | Started | StartRefused | Output | Exited | FromMember | SeenStopped | HostNoticed | Note
         | Result | AgentDone | RouteReply | ProbeReply | HostInfoReply | SpeedReply | ProgressReply)
_ORDERS, _EVENTS = msgspec.msgpack.Decoder(Order), msgspec.msgpack.Decoder(Event)


def frame(message: Order | Event) -> bytes:
    """Return a message as a frame.

    Raises:
        ProtocolError: when the frame is too long.
    """
    return to_frame(message, FRAME_LIMIT)


class AgentFrames(FrameReader):
    """Cuts a stream of bytes into messages.

    Args:
        events: True on the launcher's side, which expects `MAGIC` and then events.
    """

    def __init__(self, *, events: bool) -> None:
        super().__init__(_EVENTS if events else _ORDERS, FRAME_LIMIT)
        self._noise: bytes | None = b"" if events else None  # what may be the beginning of `MAGIC`; None after it

    def feed(self, content: bytes) -> list[Any]:
        """Add bytes, and return the messages that they complete.

        Raises:
            ProtocolError: for a frame that is not a message.
        """
        if self._noise is not None:
            noise, found, content = (self._noise + content).partition(MAGIC)
            self._noise = None if found else noise[-len(MAGIC):]
        return super().feed(content)
