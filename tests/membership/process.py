"""A process of the model of an elastic job: it meets others, trains, and stops when told or when its world is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from hvdlite.membership.events import StartMember
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
    MemberHello,
    MemberIdle,
    MemberMessage,
    MemberOrder,
    MemberReady,
    Met,
    PrepareStop,
    SaveState,
    StateReport,
    StopAt,
    StopNow,
    WorldOrder,
)

if TYPE_CHECKING:
    from tests.membership.model import Job

_SYNC = -1  # the step of the collective that carries rank 0's state


class Process:
    """A member's process. Each step of its training is a collective, which completes when all of its world have come to it.

    A subclass replaces `train`, and `forget_world` if it has more to forget.
    """

    def __init__(self, job: Job, start: StartMember) -> None:
        self.job = job
        self.start = start
        self.id, self.host = start.member, start.host
        self.doing = "starting"  # meeting, training, lost, ending, idle, joining, finished, exiting, dead
        self.is_frozen = self.has_frozen = False  # now, and ever
        self.waiting: list[Callable[[], None]] = []  # what it does when it is not frozen any more
        self.epoch = 0 if start.is_joiner else 1
        self.is_ready = False
        self.has_state = not start.is_joiner
        self.commits = 0
        self.body = 0  # boundaries since the commit, in a loop that counts bodies
        self.has_stepped = False  # since the last one
        self.at_rest = self.is_behind = False
        self.has_joined, self.joins = False, 0  # waits in join(); how often all of this world have
        self.order: WorldOrder | None = None
        self.has_address = False  # of rank 0, if it needs one
        self.step = _SYNC
        self.arrived = False  # at the collective of this step
        self.passed = 0  # boundaries of this world
        self.asked: int | None = None  # the change for which it waits at the next boundary
        self.stop_at: int | None = None
        self.waits_at_boundary = False
        self.last_up = self.last_down = 0.0  # when the last message arrives, in both directions

    @property
    def is_alive(self) -> bool:
        return self.doing != "dead"

    def world(self) -> list[Process]:
        """Return the processes of its world, by rank."""
        return [self.job.processes[member] for member in self.job.worlds[self.epoch]]

    def later(self, longest: float, action: Callable[[], None]) -> None:
        """Do something after a while, if it is alive and when it is not frozen."""
        def act() -> None:
            if self.is_frozen:
                self.waiting.append(act)
            elif self.is_alive:
                action()
        self.job.at(self.job.random.uniform(0, longest), act)

    def say(self, message: MemberMessage) -> None:
        self.last_up = max(self.last_up, self.job.now + self.job.random.uniform(0, 0.2))
        self.job.at(self.last_up - self.job.now, lambda: self.job.hear(self, message))

    # --- beginning a world -------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        self.say(MemberHello(self.id, 1000 + self.id))
        if self.start.is_joiner:
            self.say(MemberReady())
            self.is_ready, self.doing = True, "joining"
        elif self.doing == "starting":
            self.enter_meeting()

    def enter_meeting(self) -> None:
        self.doing = "meeting"
        epoch = self.epoch
        world = self.world()
        if self is world[0] and self.order is not None and len(self.order.ranks_by_machine) > 1:
            self.say(Listening(epoch, ("10.0.0.1", "10.1.0.1"), 4000))
        if self.job.is_cut(self, world[0]):
            self.later(5, lambda: self.lose_world(epoch, "no route"))
        self.job.at(15, lambda: self.lose_world(epoch, "nobody came") if self.doing == "meeting" else None)
        self.meet(epoch)

    def meet(self, epoch: int) -> None:
        """Begin its world, if all members have come to the meeting."""
        world = self.world()
        for each in world:
            if each.epoch != epoch or each.doing != "meeting" or self.job.is_cut(each, world[0]):
                return
            needs_address = each is not world[0] and each.order is not None and len(each.order.ranks_by_machine) > 1
            if needs_address and not each.has_address:
                return
        for each in world:
            each.later(0.3, lambda each=each: each.met(epoch))  # type: ignore[misc]

    def met(self, epoch: int) -> None:
        if self.doing == "meeting" and self.epoch == epoch:
            self.doing = "training"
            self.say(Met(epoch))
            if self.is_ready:
                self.train()
            else:
                self.later(3, self.enter_run)

    def enter_run(self) -> None:
        self.is_ready = True
        self.say(MemberReady())
        if self.doing == "training":
            self.train()
        elif self.doing == "lost":
            self.lose_world(self.epoch, "its world had ended")

    # --- training ----------------------------------------------------------------------------------------------------------

    def train(self) -> None:
        """Begin to train in a new world."""
        self._arrive_later()

    def _arrive_later(self) -> None:
        at = self.epoch, self.step

        def arrive() -> None:
            if self.doing == "training" and (self.epoch, self.step) == at and not self.waits_at_boundary:
                self.arrived = True
                self._complete()
        self.later(0.5, arrive)

    def _complete(self) -> None:
        """Complete the collective of a step if all members of the world have come to it."""
        world, step, epoch = self.world(), self.step, self.epoch
        if all(each.epoch == epoch and (each.has_joined or each.step > step or (each.step == step and each.arrived))
               for each in world):
            assert self.job.authority.epoch == epoch, "an old world completes a collective"
            for each in world:
                if each.step == step and each.is_alive and not each.has_joined:
                    each.later(0.1, lambda each=each: each._completed(epoch, step))  # type: ignore[misc]

    def _completed(self, epoch: int, step: int) -> None:
        if self.doing != "training" or (self.epoch, self.step) != (epoch, step) or not self.arrived:
            return
        self.arrived, self.at_rest = False, False
        self.step += 1
        if step == _SYNC:
            self.has_state = True
            self.commits = self.order.commits if self.order else 0
            self.body = self.order.boundaries if self.order and not self.order.restore else 0
            self.has_stepped = False
            self._arrive_later()
            return
        if self.step % self.job.commit_every == 0:
            self.commits, self.body = self.commits + 1, 0
        else:
            self.body += 1
        self.reach_boundary()

    def go_on(self) -> None:
        """Train on after a boundary."""
        if self.job.random.random() < self.job.joins:
            self.join()
        else:
            self._arrive_later()

    def join(self) -> None:
        """Take no further part until all have joined; then they go on alike."""
        world, self.has_joined = self.world(), True
        if all(each.has_joined and each.epoch == self.epoch for each in world):
            for each in world:
                each.has_joined, each.joins = False, each.joins + 1
                each.step = max(other.step for other in world)
                if each.is_alive:
                    each.later(0.1, each.reach_boundary)
        for each in world:
            if each.arrived and each.epoch == self.epoch:
                each._complete()

    def _left_in_join(self, epoch: int) -> None:
        """Others have left the world, perhaps for a change that this process hears of later."""
        if self.doing == "training" and self.has_joined and self.epoch == epoch:
            if self.stop_at is None:
                self.later(1, lambda: self._left_in_join(epoch))
            else:
                self.at_rest = self.is_behind = True
                self.end_world("")

    # --- boundaries --------------------------------------------------------------------------------------------------------

    def reach_boundary(self) -> None:
        if self.asked is not None and self.stop_at is None:
            self.waits_at_boundary = True
        else:
            self.pass_boundary()

    def pass_boundary(self) -> None:
        self.waits_at_boundary = False
        self.passed = max(self.passed, self.joins * JOIN) + 1
        if self.stop_at is not None and self.passed >= self.stop_at:
            self.at_rest = True
            at = {each.step for each in self.world() if each.doing in ("ending", "idle") and each.at_rest
                  and not each.is_behind and each.epoch == self.epoch}
            assert at <= {self.step}, "members stop at different boundaries"
            self.end_world("")
        elif self.step >= self.job.steps:
            if any(each.has_joined for each in self.world()):
                self.join()
                return
            self.doing = "finished"
            self.say(MemberFinished(self.epoch))
        else:
            self.go_on()

    # --- ending a world ----------------------------------------------------------------------------------------------------

    def lose_world(self, epoch: int, reason: str) -> None:
        """A collective or the meeting fails on this process, or it was told to stop."""
        if not self.is_alive or self.epoch != epoch or self.is_frozen:
            return
        if self.doing not in ("starting", "meeting", "training", "finished", "lost"):
            return
        if self.doing == "finished" and reason != "told":
            return  # it only waits for an order
        self.may_have_stepped()
        if not self.is_ready:
            if self.doing == "training" and self.job.random.random() < 0.5:
                self.doing = "lost"  # it sees the loss at the entrance of elastic.run only
                self.later(20, lambda: self.enter_run() if not self.is_ready else None)
            elif self.doing != "lost":
                self.later(1, lambda: self.die(1, "WorldLostError: a peer was lost"))
            return
        if self.doing == "meeting" and reason != "told":
            missing: tuple[int, ...] = ()
            world = self.world()
            if self is world[0]:
                missing = tuple(rank for rank, each in enumerate(world) if each.doing != "meeting"
                                or self.job.is_cut(each, self))
            self.say(MeetingFailed(epoch, reason, missing))
        self.end_world(reason)

    def may_have_stepped(self) -> None:
        """It loses the world, maybe after the step of its body."""
        self.has_stepped |= self.arrived and self.job.other_random.random() < 0.5

    def end_world(self, reason: str) -> None:
        epoch = self.epoch
        if not self.is_alive:  # it died when it told the others
            return
        self.doing = "ending"
        self.later(1, lambda: self.become_idle(epoch, reason))

    def become_idle(self, epoch: int, reason: str) -> None:
        if self.doing == "ending" and self.epoch == epoch:
            self.doing = "idle"
            self.forget_world()
            blamed = tuple(rank for rank, each in enumerate(self.world()) if each.is_frozen and reason != "told")
            self.say(MemberIdle(epoch, self.state_report(), reason, blamed))
            for each in self.world() if self.at_rest else ():
                if each.has_joined:
                    each.later(0.5, lambda each=each: each._left_in_join(epoch))  # type: ignore[misc]

    def state_report(self) -> StateReport:
        counts = self.job.counts and self.has_state
        return StateReport(has_state=self.has_state, commits=self.commits, boundaries=self.body if counts else 0,
                           can_resume=counts and not self.has_stepped and not self.is_behind, at_rest=self.at_rest,
                           is_behind=self.is_behind)

    def forget_world(self) -> None:
        self.arrived = self.waits_at_boundary = self.has_joined = False
        self.asked = self.stop_at = None

    def die(self, code: int, cause: str = "", *, tell: bool = True) -> None:
        """End.

        Args:
            tell: whether the launcher sees it.
        """
        if not self.is_alive:
            return
        self.doing = "dead"
        job, epoch = self.job, self.epoch
        if tell:
            when = max(self.last_up, job.now + job.random.uniform(0, 0.3))
            job.at(when - job.now, lambda: job.tell_gone(self, code, cause))
        for other in list(job.processes.values()):
            if other.is_alive and other.epoch == epoch and job.random.random() < 0.7:
                other.later(0.5, lambda other=other: other.see_death(self, epoch))  # type: ignore[misc]

    def see_death(self, of: Process, epoch: int) -> None:
        """Another process of world `epoch` has died."""
        self.lose_world(epoch, "a peer was lost")

    # --- orders ------------------------------------------------------------------------------------------------------------

    def deliver(self, order: MemberOrder) -> None:
        if self.is_frozen:
            self.waiting.append(lambda: self.deliver(order))
        elif self.is_alive:
            self.obey(order)

    def obey(self, order: MemberOrder) -> None:
        if isinstance(order, StopNow):
            self.lose_world(order.epoch, "told")
        elif isinstance(order, PrepareStop):
            if self.doing in ("training", "finished"):
                self.asked, self.stop_at = order.change, None
                self.say(BoundaryReport(order.change, self.passed))
        elif isinstance(order, AskAlive):
            self.say(Alive(order.epoch, in_user_code=self.job.random.random() < 0.5))
        elif isinstance(order, StopAt):
            if self.asked == order.change:
                self.stop_at = order.boundary
                if self.waits_at_boundary:
                    self.pass_boundary()
        elif isinstance(order, WorldOrder):
            assert self.doing in ("idle", "joining") and self.epoch < order.epoch
            self.epoch, self.order, self.has_address = order.epoch, order, False
            self.step, self.passed, self.asked, self.stop_at = _SYNC, 0, None, None
            self.arrived = self.at_rest = self.is_behind = False
            self.joins = 0
            self.enter_meeting()
        elif isinstance(order, CoordinatorAt):
            if order.epoch == self.epoch:
                self.has_address = True
                self.meet(self.epoch)
        elif isinstance(order, SaveState):
            assert self.doing == "idle"
        elif isinstance(order, (AllFinished, Dismissed)):
            assert self.doing == "finished" if isinstance(order, AllFinished) else self.doing in ("idle", "joining")
            self.doing = "exiting"
            slow = 12 if isinstance(order, Dismissed) and self.job.random.random() < 0.2 else 2
            self.later(slow, lambda: self.die(0))

    def freeze(self, seconds: float) -> None:
        """Do nothing for some time, as after SIGSTOP."""
        self.is_frozen = self.has_frozen = True

        def thaw() -> None:
            self.is_frozen = False
            waiting, self.waiting = self.waiting, []
            for action in waiting:
                action()
        self.job.at(seconds, thaw)
