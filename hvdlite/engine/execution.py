"""Execution of decisions on a rank: run plans, complete entries, learn layouts, change process sets."""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final

from hvdlite.core.device import CPU, AnyArray, Completion
from hvdlite.core.errors import HorovodInternalError, MismatchError, PeerLeftError
from hvdlite.core.process_set import GLOBAL_PROCESS_SET_ID
from hvdlite.core.types import Collective
from hvdlite.diagnostics.flight_recorder import FlightRecorder, bucket_lane, lane_of
from hvdlite.engine.connections import Connections
from hvdlite.engine.mailboxes import Mailboxes
from hvdlite.handoff.buckets import BucketEntry, LearnedLayout, buffer_bytes
from hvdlite.handoff.entry import Entry
from hvdlite.handoff.handoff import Handoff
from hvdlite.negotiation.controller import (
    CloseMailbox,
    Controller,
    EvictLayout,
    FreezeMailbox,
    Instruction,
    ParticipateWithoutData,
    SplitBucket,
    SuspendLayout,
)
from hvdlite.negotiation.messages import BucketRelease, ErrorKind, Layout, Mailbox, ReceiveSplits, Response
from hvdlite.planes.base import AlltoallSplits, BufferSlice, FusionBuffer, Plan, WaitUntil

_log = logging.getLogger("hvdlite")

NOT_MOVING: Final = float("inf")


class Execution:
    """One rank's pending tensors, and the work on them. Only the background thread calls it.

    Attributes:
        partners: the ranks of the collective under way.
        moving_since: when it began, on the caller's clock; infinite when there is none.

    Args:
        connections: of which the planes and the clock are used.
        handoff: its state gets the process sets, layouts and joins that result; its inbox has the names in use.
        controller: gives up layouts for which there is no memory.
        mailboxes: this rank's.
        wait_until: lets the planes wait.
    """

    def __init__(self, connections: Connections, handoff: Handoff, controller: Controller, recorder: FlightRecorder,
                 mailboxes: Mailboxes, wait_until: WaitUntil) -> None:
        self.partners: tuple[int, ...] = ()
        self.moving_since = NOT_MOVING
        self._rank, self._controller = controller.rank, controller
        self._plane, self._devices, self._clock = connections.plane, connections.devices, connections.clock
        self._inbox, self._state = handoff.inbox, handoff.state
        self._process_sets, self._layouts = self._state.process_sets, self._state.layouts
        if self._devices is not None:
            self._devices.add_process_set(GLOBAL_PROCESS_SET_ID, self._process_sets[GLOBAL_PROCESS_SET_ID])
        self._recorder, self._mailboxes, self._wait_until = recorder, mailboxes, wait_until
        self._entries: dict[tuple[int, str], Entry] = {}  # enqueued and not completed; likewise below
        self._buckets: dict[int, BucketEntry] = {}
        self._plans: defaultdict[int, int] = defaultdict(int)  # by process set
        self._pairs: set[int] = set()  # process sets of two ranks that are open in the plane
        self._left: Collection[int] = ()  # the ranks that have left
        # Of alltoalls to be carried out; a name may have several when this rank has joined and is behind.
        self._receive_splits: defaultdict[tuple[int, str], deque[ReceiveSplits]] = defaultdict(deque)

    @property
    def waits(self) -> bool:
        """Whether anything is under way."""
        return bool(self._entries or self._buckets or self._mailboxes.waiting)

    def pending(self) -> Iterator[Entry | BucketEntry]:
        """Yield what is under way."""
        yield from list(self._entries.values())
        yield from list(self._buckets.values())

    def add(self, entry: Entry) -> None:
        """An entry's request is enqueued."""
        self._entries[entry.key] = entry
        self._recorder.enqueued(entry.request)

    def add_bucket(self, entry: BucketEntry) -> None:
        """A bucket is reported."""
        definition = entry.bucket.definition
        self._buckets[entry.ready.bucket_id] = entry
        self._recorder.bucket_enqueued(bucket_lane(definition.bucket_id), definition.response.names, definition.response)

    def split(self, split: SplitBucket) -> None:
        """A bucket's members are answered one by one."""
        entry = self._buckets.pop(split.bucket_id)
        self._recorder.split(bucket_lane(split.bucket_id), entry.bucket.definition.response.names)
        for each in entry.split(split, self._devices):
            self.add(each)

    def add_receive_splits(self, splits: Iterable[ReceiveSplits]) -> None:
        """Learn what this rank gets in alltoalls of coming decisions."""
        for received in splits:
            self._receive_splits[received.process_set_id, received.name].append(received)

    def tune(self, settings: Mapping[str, int]) -> None:
        """Knobs have new values."""
        self._plane.tune(settings)

    def open_pairs(self, responses: Iterable[Response]) -> None:
        """Let the plane open the process sets of two ranks when they first need it; all ranks do so at the same decision."""
        for response in responses:
            number = response.process_set_id
            if number < 0 and number not in self._pairs and response.error is ErrorKind.NONE and response.result is None:
                self._pairs.add(number)
                self._open_set(number, self._process_sets[number])

    def carry_out(self, instructions: Sequence[Instruction], left: Collection[int]) -> None:
        """Follow a decision's instructions, in order.

        Args:
            left: the ranks that have left by then.
        """
        self._left = left
        if self._recorder.tracing:
            for instruction in instructions:
                self._trace(instruction)
        for instruction in instructions:
            self._follow(instruction)

    def fail(self, error: HorovodInternalError) -> None:
        """Fail what is under way."""
        for entry in list(self._entries.values()):
            self._release(entry).abandon(error)
        for bucket in self._buckets.values():
            bucket.abandon(error)
        self._mailboxes.end(error)

    def _open_set(self, number: int, ranks: tuple[int, ...]) -> None:
        self._plane.add_process_set(number, ranks)
        if self._devices is not None:
            self._devices.add_process_set(number, ranks)

    def _trace(self, instruction: Instruction) -> None:
        if isinstance(instruction, Response):
            self._recorder.decided(_lanes(instruction), instruction)
        elif isinstance(instruction, BucketRelease):
            response = self._buckets[instruction.bucket_id].bucket.definition.response
            self._recorder.decided((bucket_lane(instruction.bucket_id),), response)

    def _follow(self, instruction: Instruction) -> None:
        match instruction:
            case Response():
                self._perform(instruction)
            case ParticipateWithoutData(response):
                self._participate_without_data(response)
            case BucketRelease():
                self._reduce_bucket(instruction)
            case Layout():
                self._learn(instruction)
            case SplitBucket():
                self.split(instruction)
            case SuspendLayout(layout):
                learned = self._layouts.get(layout.label)
                if learned is not None and learned.layout.layout_id == layout.layout_id:
                    learned.is_suspended = True
            case EvictLayout(layout):
                learned = self._layouts.get(layout.label)
                if learned is not None and learned.layout.layout_id == layout.layout_id:
                    del self._layouts[layout.label]
            case Mailbox():
                self._mailboxes.open(instruction)
            case FreezeMailbox(mailbox_id):
                self._mailboxes.freeze(mailbox_id)
            case CloseMailbox(mailbox_id):
                self._mailboxes.close(mailbox_id)

    def _learn(self, layout: Layout) -> None:
        ranks = layout.buckets[0].response.contributors
        buffers: dict[str, FusionBuffer] = {}
        failure = None
        for device, nbytes in buffer_bytes(layout).items():
            try:
                buffer = self._buffer(device, nbytes, ranks)
            except MemoryError as error:  # goes on: all ranks make the same calls (see `Plane.fusion_buffer`)
                failure = error
            else:
                if buffer is not None:
                    buffers[device] = buffer
        if failure is not None:
            _log.warning("rank %d: '%s' goes on without learned buckets: %s", self._rank, layout.label, failure)
            self._controller.mark_stale(layout.layout_id)
        elif len(buffers) == len(buffer_bytes(layout)):
            self._layouts[layout.label] = LearnedLayout(layout, buffers)

    def _buffer(self, device: str, nbytes: int, ranks: tuple[int, ...]) -> FusionBuffer | None:
        if device == CPU:
            return self._plane.fusion_buffer(nbytes, ranks)
        assert self._devices is not None
        return self._devices.fusion_buffer(nbytes, ranks, self._wait_until)

    def _reduce_bucket(self, release: BucketRelease) -> None:
        entry = self._buckets[release.bucket_id]
        response, lanes = entry.bucket.definition.response, (bucket_lane(release.bucket_id),)
        memory = [entry.memory]
        self._recorder.moving(lanes, response)
        completion = self._move(response, memory, memory, entry.bucket.buffer_slice)
        del self._buckets[release.bucket_id]
        self._recorder.done(lanes, response)
        entry.complete(release, completion)

    def _perform(self, response: Response) -> None:
        entries = [self._entries[response.process_set_id, name] for name in response.names]
        if response.error is not ErrorKind.NONE:
            self._recorder.done(_lanes(response), response)
            for entry in entries:
                self._release(entry).fail(self._refusal(response))
            return
        splits = self._splits_of(response, entries[0].request.splits)
        if response.device != CPU and self._devices is not None:
            self._devices.enter_thread()  # before results are allocated
        for entry in entries:
            entry.prepare(response, self._rank, self._process_sets[response.process_set_id], splits)
        completion = None
        if response.result is not None:
            entries[0].deliver(response.result)
        elif response.collective in (Collective.ADD_PROCESS_SET, Collective.REMOVE_PROCESS_SET):
            self._change_sets(response)
        elif response.collective is Collective.JOIN:
            for learned in self._layouts.values():
                learned.is_suspended = False
            self._state.joins += 1
        elif response.collective is not Collective.BARRIER:  # that all ranks reported it is the barrier
            self._recorder.moving(_lanes(response), response)
            completion = self._move(response, [source for entry in entries for source in entry.sources],
                                    [output for entry in entries for output in entry.outputs], splits=splits)
        self._recorder.done(_lanes(response), response)
        for entry in entries:
            self._release(entry).complete(response, completion)

    def _participate_without_data(self, response: Response) -> None:
        """Having joined, do this rank's share of the others' work."""
        if response.collective in (Collective.ADD_PROCESS_SET, Collective.REMOVE_PROCESS_SET):
            self._change_sets(response)
        elif (self._rank in self._process_sets[response.process_set_id] and response.result is None
              and response.collective is not Collective.BARRIER):
            self._move(response, (), (), splits=self._splits_of(response, ()))

    def _splits_of(self, response: Response, sent: tuple[int, ...]) -> AlltoallSplits | None:
        """Return who sends what in an alltoall; `sent` is this rank's part, nothing when it has joined."""
        if response.collective is not Collective.ALLTOALL:
            return None
        key = response.process_set_id, response.names[0]
        received = self._receive_splits[key].popleft()
        if not self._receive_splits[key]:
            del self._receive_splits[key]
        return AlltoallSplits(sent or (0,) * len(received.rows), received.rows, received.offsets)

    def _change_sets(self, response: Response) -> None:
        if response.collective is Collective.ADD_PROCESS_SET:
            self._open_set(self._process_sets.add(response.members), response.members)
        else:
            self._process_sets.remove(response.rows[0])
            self._plane.remove_process_set(response.rows[0], self._wait_until)
            if self._devices is not None:
                self._devices.remove_process_set(response.rows[0], self._wait_until)

    def _move(self, response: Response, sources: Sequence[AnyArray | None], outputs: Sequence[AnyArray | None],
              buffer_slice: BufferSlice | None = None, splits: AlltoallSplits | None = None) -> Completion | None:
        number = response.process_set_id
        self._plans[number] += 1
        self.partners, self.moving_since = self._process_sets[number], self._clock()
        plan = Plan(self._plans[number], self.partners, response, sources, outputs, buffer_slice, splits)
        completion = None
        if response.device == CPU:
            self._plane.execute(plan, self._wait_until)
        else:
            assert self._devices is not None, "a tensor on a GPU came from nowhere"
            completion = self._devices.execute(plan, self._wait_until)
        self.moving_since = NOT_MOVING
        return completion

    def _refusal(self, response: Response) -> HorovodInternalError:
        name = response.names[0]
        story = self._recorder.story(name)
        text = response.error_text + (f"\nWhat happened to '{name}' on rank {self._rank}:\n{story}" if story else "")
        if response.error is ErrorKind.LEFT:
            return PeerLeftError(text, min(self._left, default=-1))
        return MismatchError(text)

    def _release(self, entry: Entry) -> Entry:
        """Free the entry's name before its handle is completed, so that the waiter can use it again at once."""
        del self._entries[entry.key]
        self._inbox.release(entry.key)
        return entry


def _lanes(response: Response) -> Sequence[str]:
    if response.process_set_id == 0:
        return response.names
    return [lane_of(response.process_set_id, name) for name in response.names]
