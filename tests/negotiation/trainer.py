"""A model of elastic training: processes whose parameters are the list of the steps that they have made.

Each entry names a step and whose gradients were averaged in it. So it is seen when a step is lost after a commit, repeated,
or made from gradients of other ranks, steps or worlds than those of the world. The processes come, die and go as in
`tests.membership.model`; they negotiate by `rank_of_world.py`. A process may die whenever it sends a message.
"""

from __future__ import annotations

from hvdlite.core.types import Collective
from hvdlite.membership.events import Command, Kill, StartMember, WorldBegun
from hvdlite.membership.messages import MemberOrder, WorldOrder
from hvdlite.negotiation.messages import FailureNotice, Request
from tests.membership.model import Job
from tests.membership.process import Process
from tests.negotiation.rank_of_world import Frame, RankOfWorld, Script
from tests.negotiation.reducers import Round
from tests.negotiation.world import World

Token = tuple[int, int, int]
"""A gradient: whose, of which step, in which world."""
Model = tuple[tuple[int, tuple[Token, ...]], ...]
"""The steps that parameters have made, and whose gradients were averaged in each."""

MEMBERS = {"a": 8, "b": 30, "c": 40, "d": 9, "e": 12}
"""The gradients of a step, and their lengths."""


class Trainer(Process):
    """A process that trains.

    Attributes:
        model: its parameters.
        saved: those of its last commit, or of the last synchronisation.
        saved_body: the number of its boundary.
        place: the step that it makes next, or is in: of the small things that a state copies at boundaries.
        committed: how many steps its last commit has.
        rank: its background thread in the current world, if it has one.
    """

    job: TrainingJob

    def __init__(self, job: TrainingJob, start: StartMember) -> None:
        super().__init__(job, start)
        self.model: Model = ()
        self.saved: Model = ()
        self.saved_body = self.committed = self.place = 0
        self.rank: RankOfWorld | None = None
        self.unread: list[tuple[int, Frame]] = []

    # --- connections ---------------------------------------------------------------------------------------------------

    def transmit(self, rank: int, member: int, frame: Frame) -> None:
        """Send something to another process; this is where processes die.

        Some messages come once more, in a later world, as no connection lets them.
        """
        job = self.job
        if job.deaths and job.random.random() < job.deadliness:
            job.deaths -= 1
            self.die(-9)
        if not self.is_alive:
            return
        receiver = job.processes[member]
        link = self.epoch, self.id, member
        slow = 3.0 if job.random.random() < 0.03 else 0.05
        job.links[link] = when = max(job.links.get(link, 0.0), job.now + job.random.uniform(0, slow))
        job.at(when - job.now, lambda: receiver.arrived_at(rank, frame))
        if job.random.random() < 0.1:
            epoch = self.epoch
            job.at(when - job.now + job.random.uniform(0, 10),
                   lambda: receiver.arrived_at(rank, frame) if receiver.epoch > epoch else None)

    def arrived_at(self, sender: int, frame: Frame) -> None:
        """Take in what has arrived, of whichever world it is."""
        self.unread.append((sender, frame))
        self.read()

    def read(self) -> None:
        while self.unread and self.rank is not None and self.is_alive:
            if self.is_frozen:
                if self.read not in self.waiting:
                    self.waiting.append(self.read)
                return
            self.job.stale += self.unread[0][1].epoch != self.epoch
            self.rank.receive(*self.unread.pop(0))

    # --- worlds --------------------------------------------------------------------------------------------------------

    def met(self, epoch: int) -> None:
        if self.doing == "meeting" and self.epoch == epoch:
            self.rank = RankOfWorld(self, self.job.world_of(self))
        super().met(epoch)
        self.read()

    def obey(self, order: MemberOrder) -> None:
        if isinstance(order, WorldOrder):
            self.forget_world()
        super().obey(order)

    def train(self) -> None:
        if self.order is not None and self.order.restore and self.has_state:
            self.model, self.body, self.has_stepped = self.saved, self.saved_body, True
            self.place = len(self.model)
        if self.rank is not None:
            self.rank.run(self._synchronise(self.rank))

    def go_on(self) -> None:
        rank = self.rank
        self.later(0.2, lambda: rank.run(self._step(rank)) if rank is not None and rank is self.rank else None)

    def lose_world(self, epoch: int, reason: str) -> None:
        rank = self.rank
        if rank is not None and rank.leaving and rank.running and self.epoch == epoch and not self.is_frozen:
            rank.announce(FailureNotice(-1, "stopped", reason))
            super().end_world("")
            return
        if rank is not None and rank.running and not self.is_ready and self.epoch == epoch and not self.is_frozen:
            rank.announce(FailureNotice(-1, "stopped", reason))
        super().lose_world(epoch, reason)

    def may_have_stepped(self) -> None:
        """It knows."""

    def end_world(self, reason: str) -> None:
        if self.rank is not None and self.rank.running:
            if not reason:
                self.doing = "ending"
                self.rank.leave()
                return
            self.rank.announce(FailureNotice(-1, "stopped", reason))
        super().end_world(reason)

    def world_failed(self, rank: RankOfWorld, notice: FailureNotice | None) -> None:
        """The background thread has ended: the world has failed, or this rank has left it."""
        if rank is not self.rank or not self.is_alive:
            return
        if rank.leaving:
            super().end_world("")
        else:
            assert notice is not None
            self.lose_world(rank.epoch, notice.message)

    def see_death(self, of: Process, epoch: int) -> None:
        if self.rank is None or not self.rank.running:
            super().see_death(of, epoch)
        elif self.epoch == epoch and of.id in self.rank.world.members:
            self.rank.lose(self.rank.world.members.index(of.id))

    def die(self, code: int, cause: str = "", *, tell: bool = True) -> None:
        if self.rank is not None:
            self.rank.running = False
        super().die(code, cause, tell=tell)

    def forget_world(self) -> None:
        super().forget_world()
        self.rank = None

    # --- the script ----------------------------------------------------------------------------------------------------

    def _synchronise(self, rank: RankOfWorld) -> Script:
        """Take rank 0's state, and make the first step."""
        request = Request("state", Collective.BROADCAST, "uint8", (0,), root_rank=0)
        had, own = self.has_state, self.model
        if self.job.counts:  # the others have trained on, or have stepped
            had = had and not self.has_stepped and (self.order is None or (self.order.commits, self.order.boundaries) == (
                self.commits, self.body))
        state = yield from rank.call(request, (self.commits, self.body, self.committed, self.model, self.place))
        self.commits, self.body, self.committed, self.model, self.place = state
        self.saved, self.saved_body, self.has_state, self.at_rest = self.model, self.body, True, False
        self.has_stepped = False
        self.step = self.place
        assert [step for step, _ in self.model] == list(range(self.place)), "a step is missing, or there twice"
        assert self.job.begun_with.setdefault(self.epoch, self.model) == self.model, "replicas differ"
        assert self.step >= self.job.required[self.epoch], "a step is lost that was committed"
        assert self.order is None or self.order.restore or not had or own == self.model, "members at rest differ"
        yield from self._step(rank)

    def _step(self, rank: RankOfWorld) -> Script:
        job, reducer, step = self.job, rank.reducer, self.place
        token = self.id, step, self.epoch
        tokens = tuple((member, step, self.epoch) for member in rank.world.members)
        reducer.epochs = [[Round(MEMBERS)]]
        reducer.act()
        rank.controller.gradient = token
        while reducer.to_give:
            reducer.act()
            if job.random.random() < 0.2:
                yield from rank.pause()
                rank.controller.gradient = token
        reducer.act()
        yield lambda: not reducer.waiting
        averages = {tuple(rank.reduced.pop((reducer.number, name))) for name in MEMBERS}
        while reducer.to_give is not None:
            reducer.act()
        assert averages == {tokens}, f"step {step} of world {self.epoch} averages {averages}"
        if job.random.random() < 0.3 or step % 3 == 0:
            yield from rank.pause()
        if job.counts and step % 4 == 0:
            self.model, self.has_stepped = (*self.model, (step, tokens)), True
        if step % 2 == 0:
            yield from self._metric(rank, tokens)
        if step % 3 == 0:
            yield from self._exchange(rank, step)
        if rank.coordinator is not None and job.random.random() < 0.05:
            rank.coordinator.tune({"bucket_size": job.random.randint(20, 80)}, job.now)
        if not self.has_stepped:
            self.model = (*self.model, (step, tokens))
        self.has_stepped = False
        assert job.made.setdefault((self.epoch, step), tokens) == tokens
        job.steps_made += 1
        self.step = self.place = step + 1
        self.at_rest = False
        if self.step % job.commit_every == 0:
            self.saved, self.committed, self.commits = self.model, self.step, self.commits + 1
            self.body = self.saved_body = 0
        else:
            self.body += 1
        self.reach_boundary()

    def _metric(self, rank: RankOfWorld, tokens: tuple[Token, ...]) -> Script:
        """Reduce something that travels in messages."""
        payload = repr(tokens[rank.rank]).encode()
        result = yield from rank.call(Request("metric", Collective.ALLREDUCE, "uint8", (8,), payload=payload), payload)
        assert result == b"+".join(repr(token).encode() for token in tokens), "an eager result is of other ranks"

    def _exchange(self, rank: RankOfWorld, step: int) -> Script:
        """Exchange something of which each rank gets another size, which a direct message tells."""
        def rows(sender: int, receiver: int) -> int:
            return 1 + (step + 3 * sender + 5 * receiver + 7 * self.epoch) % 11
        splits = tuple(rows(rank.rank, receiver) for receiver in range(rank.size))
        request = Request("exchange", Collective.ALLTOALL, "uint8", (sum(splits), 1), splits=splits)
        received, _ = yield from rank.call(request, splits)
        assert received.rows == tuple(rows(sender, rank.rank) for sender in range(rank.size)), "splits of another world"


class TrainingJob(Job):
    """A job of processes that train.

    Attributes:
        deaths: how many processes still die when they send something.
        deadliness: how probable that is for each message.
        links: when the last message of each connection arrives, by epoch, sender and receiver.
        required: for each world, the steps that are committed on a member that is left.
        begun_with: the parameters with which a world begins.
        made: whose gradients were averaged in a step of a world.
        stale: messages that were delivered to a later world than theirs.
    """

    processes: dict[int, Trainer]  # type: ignore[assignment]

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.deaths = self.random.choice([0, 3, 10, 30])
        self.deadliness = self.random.choice([0.001, 0.005, 0.02])
        self.use_leaders = self.random.random() < 0.6
        self.links: dict[tuple[int, int, int], float] = {}
        self.required: dict[int, int] = {1: 0}
        self.begun_with: dict[int, Model] = {}
        self.made: dict[tuple[int, int], tuple[Token, ...]] = {}
        self.stale = self.steps_made = 0
        self._worlds: dict[int, World] = {}

    def calm(self) -> None:
        super().calm()
        self.deaths = 0

    def make_process(self, start: StartMember) -> Process:
        return Trainer(self, start)

    def begun(self, command: WorldBegun) -> None:
        super().begun(command)
        if command.epoch > 1:
            having = [process for member in self.worlds[command.epoch - 1]
                      if (process := self.processes[member]).doing == "idle" and process.has_state]
            self.required[command.epoch] = max((process.committed for process in having), default=0)
            reports = {process.id: process.state_report() for process in having}
            last = self.last_position(reports.values())
            resuming = [process for process in having if self.resumes(reports[process.id], last)]
            if resuming:  # no step that is finished is lost
                self.required[command.epoch] = max(len(process.model) for process in resuming)

    def carry_out(self, command: Command) -> None:
        if isinstance(command, Kill) and "did not stop" in command.reason:
            process = self.processes[command.member]
            assert process.has_frozen or not process.is_ready or not process.is_alive, f"{process.doing} for ever"
        super().carry_out(command)

    def world_of(self, process: Trainer) -> World:
        """Return what the ranks of a process' world share."""
        if process.epoch not in self._worlds:
            members = self.worlds[process.epoch]
            hosts: dict[str, list[int]] = {}
            for rank, member in enumerate(members):
                hosts.setdefault(self.processes[member].host, []).append(rank)
            led = [tuple(ranks) for ranks in hosts.values() if len(ranks) > 1 and ranks[0] != 0 and self.use_leaders]
            self._worlds[process.epoch] = World(members, led)
        return self._worlds[process.epoch]

