"""The rounds of one set, one after the other: the one under way, and whether another one is due."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Generic

from hvdlite.core.errors import HvdliteError, MismatchError, UnsupportedError
from hvdlite.handoff.handle import WaitDeferred, WaitLeftToCaller
from hvdlite.training.framework import Parameter
from hvdlite.training.gradient_set import GradientSet
from hvdlite.training.later_call import LaterCall
from hvdlite.training.order_errors import GradientOrderError, computed_late, reduction_told
from hvdlite.training.passes import PassCounter
from hvdlite.training.round import Round, Rounds
from hvdlite.training.waiting import WaitIn, WaitPolicy

JOB_CONTINUES = (GradientOrderError, MismatchError, UnsupportedError)
"""Errors of a round, perhaps on one rank only, after which ranks make further rounds."""


class RoundSequence(Generic[Parameter]):
    """Begins, closes and ends rounds; from any thread.

    Args:
        passes: backward passes whose gradients are accumulated before each round.

    Attributes:
        current: the round that is under way; None between rounds.
        rounds: makes rounds.
        passes: counts the backward passes that no round has reduced.
        waiting: where this rank waits.
        closed: how many rounds were closed in this generation.
        is_touched: whether some member was accumulated into since the last round.
        behind: ranks that took part in this generation's rounds from within their step.
        later_call: of a step's closure, while there is one.
        on_reduced: called at the end of each round with the parameters whose gradients were reduced in it.
        lock: held while a round is closed or waited for: gradients may be read from several threads.
    """

    def __init__(self, gradient_set: GradientSet[Parameter], rounds: Rounds[Parameter], passes: int,
                 wait_in: WaitIn) -> None:
        self._set, self.rounds = gradient_set, rounds
        self.current: Round[Parameter] | None = None
        self.passes = PassCounter(passes)
        self.waiting = WaitPolicy(wait_in)
        self.closed = 0
        self.is_touched = False
        self.behind: set[int] = set()
        self.later_call: LaterCall[Parameter] | None = None
        self.on_reduced: Callable[[Sequence[Parameter]], None] | None = None
        self.lock = threading.RLock()
        self._begin_lock = threading.Lock()  # hooks may come from several autograd threads; the first one begins the round

    def admit(self) -> None:
        """Take in the parameters that are trainable now, unless a round is under way."""
        with self._begin_lock:
            if self.current is None:
                self._admit()

    def begin(self) -> Round[Parameter]:
        """Return the round under way; begin one if there is none."""
        with self._begin_lock:
            if self.current is None:
                self._admit()
                self.current = self.rounds.begin(self._set)
            return self.current

    def close(self) -> None:
        """Give whatever has not been given, or report it as missing; nothing when the round is closed."""
        with self.lock:
            current = self.begin()
            if current.is_closed:
                return
            if self.later_call is not None:
                self.later_call.close(self._set, current)
            for member in self._set.members:
                if member.given != current.round_id:
                    current.give(member, self._set.gradients.is_present(member))
            current.close()
            self.closed += 1
            self.passes.reduce(of_failed_pass=current.is_of_failed_pass)
            self.is_touched = False

    def wait(self, *, deferrable: bool = False) -> bool:
        """Wait until every gradient of the closed round is final; return False when the wait was deferred.

        May be called again after an interrupt. Raises like `finish`.

        Args:
            deferrable: whether the wait may end early: the coordinator ends it if ranks wait for each other in a circle, and
                a thread that cannot be interrupted leaves a long one to another thread. The round then stays under way.
        """
        errors: list[HvdliteError] = []
        with self.lock:
            current = self.current
            if current is None:
                return True
            current.set_late_aside(errors)
            try:
                current.collect(errors, deferrable)
            except WaitLeftToCaller:
                return False
            except WaitDeferred:
                self.waiting.defer(self._set.label, self._set.rank)
                return False
            except BaseException:
                if current.is_over:
                    self._end(current)
                raise
            errors += [computed_late(member.name, self._set.rank, reduction_told(self._set.op))
                       for member in self._set.gradients.drop_inexact()]
            self._end(current)
            if self.later_call is not None:
                self.later_call.incomplete = self.later_call.incomplete or current.incomplete
            elif current.incomplete is not None:
                errors.append(current.incomplete)
            if self.on_reduced is not None and not errors:
                self.on_reduced(current.reduced)
        if errors:
            raise errors[0]
        return True

    def finish(self) -> None:
        """End the round: report what is missing, and wait until every gradient is final; then make the rounds that are due.

        Raises:
            HorovodInternalError: when a reduction failed; all others are completed first, and the rounds that are due are
                made, as on other ranks, where perhaps nothing has failed.
        """
        with self.lock:
            self.close()
            self.wait_and_make_due(deferrable=False)

    def wait_and_make_due(self, *, deferrable: bool) -> None:
        """Like `finish`, when the round is closed; unless its wait is deferred, see `wait`."""
        errors: list[HvdliteError] = []
        with self.lock:
            while True:
                try:
                    if not self.wait(deferrable=deferrable):
                        return
                except JOB_CONTINUES as error:
                    errors.append(error)
                if not self.passes.are_due:
                    break
                self.close()
                deferrable = False
        if errors:
            raise errors[0]

    def finish_current(self, only: Round[Parameter] | None = None) -> None:
        """Like `finish`, when a round is under way.

        Args:
            only: the round that is to be finished; nothing is done when it is over.
        """
        with self.lock:
            if self.current is not None and only in (None, self.current):
                self.finish()

    def abandon(self) -> None:
        """The runtime has ended: the round under way is over without results, and learned buckets are let go of."""
        self.current = self.later_call = None
        self.rounds.forget()

    def notice_late(self, current: Round[Parameter]) -> None:
        """Like the round's, if it is still under way."""
        with self.lock:
            if self.current is current:
                current.notice_late()

    def begin_generation(self) -> None:
        """The gradients were used or cleared."""
        self.closed = 0
        self.passes.clear()
        self._set.gradients.end_generation()

    def _admit(self) -> None:
        if self._set.members.admit(self._set.framework.is_trainable):
            self.rounds.forget()  # a layout learned before does not describe the set any more

    def _end(self, current: Round[Parameter]) -> None:
        if not self._set.in_step:  # else nothing can be changed before this rank steps either
            self.behind.update(current.behind)
        self.current = None
        self._set.gradients.end_period()
        if self._set.gradients.put_back():
            self.is_touched = True
