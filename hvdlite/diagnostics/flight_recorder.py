"""The flight recorder: the last events of this rank's tensors, and the trace for the timeline while one is written.

The names of the timeline's spans are Horovod's: NEGOTIATE_<OPERATION> from the call to the decision, then <OPERATION> with
QUEUE (other work comes first) and <PLANE>_<OPERATION> (bytes move) inside.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from hvdlite.core.device import CPU
from hvdlite.core.types import Collective, ReduceOp
from hvdlite.negotiation.messages import BucketReady, ReportItem, Request, Response, TraceEvent

GPU_PLANE: Final = "NCCL"
REMEMBERED: Final = 2048
"""Number of events that a rank keeps."""

_What = tuple[float, Sequence[str], str, object]


class FlightRecorder:
    """Keeps the last `REMEMBERED` events of one rank.

    Args:
        plane: the data plane's name.
        clock: seconds; the same for all ranks of a host.

    Attributes:
        mark_cycles: whether the timeline shows decisions.
    """

    def __init__(self, plane: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._plane = plane.upper()
        self._clock = clock
        self._events: deque[_What] = deque(maxlen=REMEMBERED)
        self.mark_cycles = False
        self._trace: list[TraceEvent] = []
        self._open: Counter[str] | None = None  # spans under way by lane, while there is a timeline

    @property
    def tracing(self) -> bool:
        """Whether there is a timeline."""
        return self._open is not None

    def trace(self, on: bool) -> None:
        """Begin or end a timeline; spans under way end with it."""
        if on and self._open is None:
            self._open = Counter()
        elif not on and self._open is not None:
            when = self._clock()
            for lane, depth in self._open.items():
                for _ in range(depth):
                    self._trace.append(TraceEvent("E", when * 1e6, lane, ""))
            self._trace.append(TraceEvent("end", when * 1e6, "", ""))
            self._open = None

    @property
    def unreported(self) -> int:
        """Number of events that `take_trace` would return."""
        return len(self._trace)

    def take_trace(self) -> tuple[TraceEvent, ...]:
        """Return the timeline's events since the last call."""
        taken, self._trace = tuple(self._trace), []
        return taken

    def enqueued(self, request: Request) -> None:
        """A tensor was enqueued here."""
        self._events.append((self._clock(), (request.name,), "enqueued", (  # all but the payload
            request.collective, request.dtype, request.shape, request.op, request.root_rank, request.process_set_id)))
        if self._open is not None:
            self._begin((lane_of(request.process_set_id, request.name),), f"NEGOTIATE_{request.collective.name}",
                        f"{request.dtype}{list(request.shape)}")

    def bucket_enqueued(self, lane: str, names: Sequence[str], response: Response) -> None:
        """All members of a learned bucket were enqueued here."""
        self._events.append((self._clock(), names, "enqueued as part of a learned bucket", lane))
        if self._open is not None:
            self._begin((lane,), f"NEGOTIATE_{response.collective.name}", f"{len(names)} tensors, {response.dtype}")

    def ready_elsewhere(self, ranks: Sequence[int], what: Sequence[ReportItem]) -> None:
        """On rank 0: other ranks reported tensors and buckets."""
        for item in what if self._open is not None else ():
            if isinstance(item, (Request, BucketReady)):
                lane = (bucket_lane(item.bucket_id) if isinstance(item, BucketReady)
                        else lane_of(item.process_set_id, item.name))
                self._trace.extend(TraceEvent("i", self._clock() * 1e6, lane, str(rank)) for rank in ranks)

    def decided(self, lanes: Sequence[str], response: Response) -> None:
        """A decision says what to do with some tensors; they queue until their turn comes."""
        if self._open is not None:
            self._end(lanes)
            self._begin(lanes, response.collective.name)
            self._begin(lanes, "QUEUE")

    def cycle(self, number: int) -> None:
        """A decision is applied: what comes nearest to Horovod's cycle."""
        if self.mark_cycles and self._open is not None:
            self._trace.append(TraceEvent("i", self._clock() * 1e6, "decisions", "CYCLE_START", str(number)))

    def moving(self, lanes: Sequence[str], response: Response) -> None:
        """The plane gets some tensors."""
        plane = self._plane if response.device == CPU else GPU_PLANE
        self._events.append((self._clock(), response.names, "begun", plane.lower()))
        if self._open is not None:
            self._end(lanes)
            self._begin(lanes, f"{plane}_{response.collective.name}")

    def done(self, lanes: Sequence[str], response: Response) -> None:
        """Some tensors have their result, or their error."""
        self._events.append((self._clock(), response.names, "failed" if response.error else "done", None))
        if self._open is not None:
            self._end(lanes)
            self._end(lanes, f"{response.dtype}, {response.elements} elements")

    def finished(self, name: str, where: str) -> None:
        """A tensor was exchanged in "a mailbox", or a call of "a group" is done; callable from any thread."""
        self._events.append((self._clock(), (name,), f"done in {where}", None))

    def ordered(self, name: str, response: Response, begun: float, met: float, done: float) -> None:
        """A call of a group is done, for the timeline.

        Args:
            begun: on this rank, on this object's clock; all ranks had `met` later, and then it was `done`.
        """
        if self._open is not None:
            operation = response.collective.name
            for phase, when, what, detail in (
                    ("B", begun, operation, f"{response.dtype}, {response.elements} elements"), ("B", begun, "WAIT", ""),
                    ("E", met, "", ""), ("B", met, f"{self._plane}_{operation}", ""), ("E", done, "", ""),
                    ("E", done, "", "")):
                self._trace.append(TraceEvent(phase, when * 1e6, name, what, detail))

    def split(self, lane: str, names: Sequence[str]) -> None:
        """A bucket's members are negotiated one by one after all."""
        self._events.append((self._clock(), names, "to be negotiated one by one: its bucket was given up", lane))
        if self._open is not None:
            self._end((lane,))

    def story(self, name: str) -> str:
        """Return what happened to a tensor here, oldest first; "" when nothing is remembered.

        One line an event; events that follow each other and are alike, such as calls in a mailbox, have one line.

        Args:
            name: as negotiated, or what follows the first dot of it ("x" for "allreduce.x").
        """
        now = self._clock()
        events = list(self._events)
        known = {each for _, names, _, _ in events for each in names}
        if name not in known:
            name = next((each for each in known if each.partition(".")[2] == name), name)
        lines = []
        for _, alike in itertools.groupby((event for event in events if name in event[1]), lambda event: event[2:]):
            first, *others = alike
            when, _, what, detail = others[-1] if others else first
            times = f"{len(others) + 1} times, the first {now - first[0]:.3f} s ago: " if others else ""
            lines.append(f"{now - when:9.3f} s ago: {times}{what}{_detail(detail)}")
        return "\n".join(lines)

    def _begin(self, lanes: Sequence[str], name: str, detail: str = "") -> None:
        assert self._open is not None
        when = self._clock() * 1e6
        for lane in lanes:
            self._open[lane] += 1
            self._trace.append(TraceEvent("B", when, lane, name, detail))

    def _end(self, lanes: Sequence[str], detail: str = "") -> None:
        assert self._open is not None
        when = self._clock() * 1e6
        for lane in lanes:
            if self._open[lane] > 0:  # else the span began before the timeline did
                self._open[lane] -= 1
                self._trace.append(TraceEvent("E", when, lane, "", detail))


def lane_of(process_set: int, name: str) -> str:
    """Return where a tensor's events are drawn."""
    return name if process_set == 0 else f"{name} (process set {process_set})"


def bucket_lane(number: int) -> str:
    """Return where a bucket's events are drawn."""
    return f"bucket.{number}"


def _detail(detail: Any) -> str:
    match detail:
        case (Collective() as collective, dtype, shape, ReduceOp() as op, root_rank, process_set):
            words = [collective.name.lower(), f"{dtype}{list(shape)}"]
            words += [f"op {op.name.capitalize()}"] if "REDUCE" in collective.name else []
            words += [f"root rank {root_rank}"] if root_rank >= 0 else []
            words += [f"process set {process_set}"] if process_set else []
            return f" ({', '.join(words)})"
        case str():
            return f" ({detail})"
        case _:
            return ""
