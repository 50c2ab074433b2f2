"""One rank of one world of the model of elastic training: real controllers, leaders, coordinators and `Decisions`.

Messages to it may be of any world: nothing but the epochs that they carry keeps them apart. A plane's operation has two
barriers, as in `planes/shm.py`: after the first one each rank reduces its share in all ranks' memory.
"""

from __future__ import annotations

import types
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from hvdlite.core.types import Collective
from hvdlite.engine.decisions import Decisions, JobFailed
from hvdlite.handoff.handoff import Handoff
from hvdlite.handoff.job_state import JobState
from hvdlite.negotiation.controller import Controller, Instruction, SplitBucket
from hvdlite.negotiation.coordinator import Coordinator
from hvdlite.negotiation.layouts import BucketSizes
from hvdlite.negotiation.leader import Leader
from hvdlite.negotiation.messages import (
    Bucket,
    BucketReady,
    BucketRelease,
    Decision,
    DirectMessage,
    ErrorKind,
    FailureNotice,
    HostReport,
    Key,
    ReceiveSplits,
    Report,
    Request,
    Response,
)
from hvdlite.negotiation.negotiator import Policy
from tests.negotiation.reducers import Reducer
from tests.negotiation.simulation import concatenated
from tests.negotiation.world import Operation, World

if TYPE_CHECKING:
    from tests.negotiation.trainer import Trainer

Frame = Report | HostReport | Decision | DirectMessage
Script = Generator[Callable[[], object], None, None]
"""A part of a training script: it yields what it waits for."""


class FillingController(Controller):
    """Notes what a rank's memory holds when it reports that this is ready.

    Attributes:
        gradient: what the script would write now.
        slots: what the rank's slots of buckets hold, by bucket and name.
        tensors: what other tensors hold.
    """

    def __init__(self, rank: int, epoch: int) -> None:
        super().__init__(rank, epoch=epoch)
        self.gradient: Any = None
        self.slots: dict[tuple[int, str], Any] = {}
        self.tensors: dict[Key, Any] = {}

    def enqueue(self, request: Request) -> None:
        self.tensors[request.key] = self.gradient
        super().enqueue(request)

    def enqueue_bucket(self, bucket: Bucket, ready: BucketReady) -> SplitBucket | None:
        self.slots.update(((bucket.bucket_id, member.name), self.gradient) for member in bucket.members)
        return super().enqueue_bucket(bucket, ready)


class RankOfWorld:
    """A rank's background thread, and what its script waits for.

    Attributes:
        running: whether the background thread lives.
        reduced: the results of gradients, by round and name.
    """

    def __init__(self, process: Trainer, world: World) -> None:
        self.process, self.world, self.epoch = process, world, process.epoch
        job, self.size = process.job, len(world.members)
        self.rank = world.members.index(process.id)
        leads = {rank: group[0] for group in world.groups for rank in group}
        self.parent = 0 if self.rank in leads.values() else leads.get(self.rank, 0)
        self.children = ([rank for rank in range(1, self.size) if leads.get(rank, rank) == rank] if self.rank == 0
                         else [rank for rank in leads if leads[rank] == self.rank != rank])
        self.route = leads
        mine = [group for group in world.groups if group[0] == self.rank]
        self.leader = Leader(mine[0], self.size, epoch=self.epoch) if mine else None
        policy = Policy(job.random.choice([0, 16, 1 << 20]), BucketSizes(16, 64), 64)
        self.coordinator = None if self.rank else Coordinator(self.size, policy, concatenated, epoch=self.epoch)
        self.controller = FillingController(self.rank, self.epoch)
        here: Any = self  # it stands for the execution, the link to the coordinator, waiting threads and the recorder
        self.state = JobState(self.size)
        no_oob: Any = types.SimpleNamespace(look=lambda: None)
        self.decisions = Decisions(self.controller, here, here, Handoff(here, here, self.state), here, no_oob, lambda: here)
        simulation: Any = types.SimpleNamespace(controllers={self.rank: self.controller})
        self.reducer = Reducer(simulation, self.rank, [], job.random)
        self.running, self.leaving = True, False
        self.reduced: dict[tuple[int, str], Any] = {}
        self._serves = frozenset(range(self.size) if self.rank == 0 else mine[0] if mine else ())
        self._todo: deque[Instruction] = deque()
        self._number = 0  # of operations that this rank has begun
        self._current: tuple[Instruction, Operation] | None = None
        self._splits: defaultdict[tuple[int, str], deque[ReceiveSplits]] = defaultdict(deque)
        self._answers: dict[str, Any] = {}
        self._script: Script | None = None
        self._awaited: Callable[[], object] = lambda: True
        self._pending: set[Callable[[], None]] = set()

    # --- the script ----------------------------------------------------------------------------------------------------

    def run(self, script: Script) -> None:
        """Run a part of the script."""
        self._script, self._awaited = script, lambda: True
        self.resume()

    def resume(self) -> None:
        while self._script is not None and self.running and self._awaited():
            script, self._script = self._script, None  # it may run into this again
            try:
                self._awaited = next(script)
                self._script = script
            except StopIteration:
                pass
            self._soon(self._say)

    def pause(self) -> Script:
        """Compute for a while."""
        over: list[bool] = []

        def end() -> None:
            over.append(True)
            self.resume()
        self.process.later(0.1, end)
        yield lambda: over

    def call(self, request: Request, value: Any) -> Generator[Callable[[], object], None, Any]:
        """Take part in a collective; return what it gives."""
        self.controller.gradient = value
        self.controller.enqueue(request)
        yield lambda: request.name in self._answers
        return self._answers.pop(request.name)

    # --- messages ------------------------------------------------------------------------------------------------------

    def receive(self, sender: int, frame: Frame) -> None:
        """Handle a message of any world."""
        if not self.running:
            return
        now = self.process.job.now
        match frame:
            case Report() if self.leader is not None and sender in self.leader.ranks:
                self.leader.receive(sender, frame)
                self._lead()
            case Report() if self.coordinator is not None:
                self.coordinator.receive(sender, frame, now)
            case HostReport() if self.coordinator is not None:
                groups = [group for group in self.world.groups if group[0] == sender]
                self.coordinator.receive_host(groups[0] if groups else (sender,), frame, now)
            case Decision() if self.rank:
                if self.leader is not None:
                    self.leader.observe(frame)
                    self._lead()
                self._send(self.children, frame)
                self._accept(frame)
            case DirectMessage() if self.rank:
                if frame.rank == self.rank:
                    self._accept_direct(frame)
                elif frame.rank in self.children:
                    self._send([frame.rank], frame)
        if self.coordinator is not None:
            self.coordinator.negotiator.check_invariants()
            self._soon(self._decide)
        self.advance()

    def _send(self, peers: Iterable[int], frame: Frame) -> None:
        for peer in peers:
            self.process.transmit(self.rank, self.world.members[peer], frame)

    def _soon(self, action: Callable[[], None]) -> None:
        """Do something shortly, once."""
        def act() -> None:
            self._pending.discard(action)
            if self.running:
                action()
        if action not in self._pending:
            self._pending.add(action)
            self.process.later(0.03, act)

    def _say(self) -> None:
        report = self.controller.report()
        if report is not None:
            self._send_report(report)

    def _send_report(self, report: Report) -> None:
        if self.coordinator is not None:
            self.coordinator.receive(0, report, self.process.job.now)
            self._soon(self._decide)
        elif self.leader is not None:
            self.leader.receive(self.rank, report)
            self._lead()
            if report.failure is not None:
                self._send(self.children, Decision(epoch=self.epoch, sequence=0, failure=report.failure))
        else:
            self._send([self.parent], report)

    def _lead(self) -> None:
        assert self.leader is not None
        self.leader.check_invariants()
        merged = self.leader.take_report()
        if merged is not None:
            self._send([0], merged)

    def _decide(self) -> None:
        assert self.coordinator is not None
        decision = self.coordinator.decide()
        for message in self.coordinator.take_direct_messages():
            if message.rank:
                self._send([self.route.get(message.rank, message.rank)], message)
            else:
                self._accept_direct(message)
        if decision is not None:
            self._send(self.children, decision)
            self._accept(decision)
            self.advance()

    def _accept(self, decision: Decision) -> None:
        try:
            self.decisions.accept(decision)
        except JobFailed as failed:
            self.running = False
            self.process.world_failed(self, failed.notice)

    def _accept_direct(self, message: DirectMessage) -> None:
        if not self.controller.is_foreign(message):
            for splits in message.receive_splits:
                self._splits[splits.process_set_id, splits.name].append(splits)

    # --- ends ----------------------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Leave the world, as all others do at this boundary."""
        self.leaving = True
        self.controller.leave()
        self._soon(self._say)
        self.advance()

    def announce(self, notice: FailureNotice) -> None:
        """The background thread fails; tell the others."""
        self.running = False
        if self.coordinator is not None:
            self.coordinator.fail(notice)
            decision = self.coordinator.decide()
            if decision is not None:
                self._send(self.children, decision)
            return
        self.controller.fail(notice)
        report = self.controller.report()
        assert report is not None
        self._send_report(report)

    def lose(self, peer: int) -> None:
        """A peer's process has ended."""
        if not self.running or peer in self.state.departed:
            return
        if self.coordinator is not None:
            self.coordinator.lose(peer, "it died")
            self._soon(self._decide)
        elif self.leader is not None and peer in self.leader.ranks:
            self.leader.lose(peer, "it died")
            self._lead()
        else:
            def declare() -> None:
                if self.running and peer not in self.state.departed:
                    notice = FailureNotice(peer, "lost", "it died")
                    self.announce(notice)
                    self.process.world_failed(self, notice)
            self.process.later(0.0 if peer == self.parent else 0.5, declare)

    # --- decisions -----------------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Do what has been decided, as far as it goes without others."""
        while self.running and self._current is None and (self._todo or self.decisions):
            if self._todo:
                self._begin(self._todo.popleft())
            else:
                self.decisions.apply_next()
        if not self.running:
            return
        self.resume()
        if self.controller.has_news:
            self._soon(self._say)
        if self.leaving and self.decisions.has_left and self.state.departed >= self._serves:
            self.running = False
            self.process.world_failed(self, None)

    def carry_out(self, instructions: Sequence[Instruction], departed: object) -> None:
        del departed
        self._todo.extend(instructions)

    def tune(self, settings: object) -> None:
        del settings

    def open_pairs(self, responses: object) -> None:
        del responses

    def cycle(self, sequence: object) -> None:
        del sequence

    # --- the plane -----------------------------------------------------------------------------------------------------

    def _begin(self, instruction: Instruction) -> None:
        controller = self.controller
        match instruction:
            case BucketRelease(bucket_id=bucket):
                names = controller.bucket(bucket).response.names
                self._join_operation(instruction, instruction, {
                    name: controller.slots.pop((bucket, name)) for name in names})
            case Response(error=error, error_text=text) if error is not ErrorKind.NONE:
                raise AssertionError(f"refused: {text}")
            case Response(result=bytes(), names=(name,)):
                self._answers[name] = instruction.result
            case Response(process_set_id=number, round_id=round_id):
                what = instruction.names, round_id, instruction.collective
                self._join_operation(instruction, what, {
                    name: controller.tensors.pop((number, name, round_id)) for name in instruction.names})
            case SplitBucket(bucket_id=bucket):
                for request in instruction.requests:
                    controller.tensors[request.key] = controller.slots.pop((bucket, request.name))
                self.reducer.follow(instruction)
            case _:
                self.reducer.follow(instruction)

    def _join_operation(self, instruction: Instruction, what: object, brought: dict[str, Any]) -> None:
        """Come to the first barrier of the next operation."""
        operations = self.world.operations
        if self._number == len(operations):
            operations.append(Operation(what))
        operation = operations[self._number]
        assert operation.what == what, f"ranks do different things: {operation.what} and {what}"
        self._number += 1
        self._current = instruction, operation
        operation.brought[self.rank] = brought
        if len(operation.brought) == self.size:
            self._for_all(lambda rank: rank._reduce(operation))

    def _for_all(self, action: Callable[[RankOfWorld], None]) -> None:
        """All ranks have come to a barrier: each one goes on after a while, if it still lives."""
        job = self.process.job
        for member in self.world.members:
            process = job.processes[member]
            rank = process.rank
            if rank is not None and rank.world is self.world:
                longest = 0.02 if job.random.random() < 0.95 else 2.0  # then others may commit long before it
                process.later(longest, lambda rank=rank: action(rank) if rank.running else None)  # type: ignore[misc]

    def _reduce(self, operation: Operation) -> None:
        """Reduce this rank's share, and come to the second barrier."""
        assert self.process.job.authority.epoch == self.epoch, "a rank of an old world writes into memory"
        names = list(operation.brought[self.rank])
        for name in names[self.rank::self.size]:
            operation.results[name] = [operation.brought[rank][name] for rank in range(self.size)]
        operation.reduced.add(self.rank)
        if len(operation.reduced) == self.size:
            self._for_all(lambda rank: rank._end_operation(operation))

    def _end_operation(self, operation: Operation) -> None:
        assert self._current is not None and self._current[1] is operation
        instruction, self._current = self._current[0], None
        results = operation.results
        assert isinstance(instruction, (Response, BucketRelease))
        collective = instruction.collective if isinstance(instruction, Response) else Collective.ALLREDUCE
        for name, values in results.items():
            if collective is Collective.BROADCAST:
                self._answers[name] = values[0]
            elif collective is Collective.ALLTOALL:
                self._answers[name] = self._splits[0, name].popleft(), values
            else:
                self.reduced[self.reducer.number, name] = values
        if collective is Collective.ALLREDUCE:
            self.reducer.follow(instruction)
        self.advance()
