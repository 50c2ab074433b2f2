"""The members of a gradient set and what is known of their gradients: the table of states, and the one of origins.

A member's *state* is what has happened to its gradient since the last step. It changes by these events only; where a row
has "I", reducing a reduced gradient again has to be exact (`is_idempotent`), as it is for averages: the average of
(reduced + local) is reduced + the average of the local parts.

| state | event | new state | what else |
|---|---|---|---|
| IDLE; REDUCED, but it is another tensor | accumulated | LOCAL | then as LOCAL; see below |
| REDUCED | accumulated | AGAIN if I, else an error | then as AGAIN |
| LOCAL, AGAIN | accumulated | the same; READY when that was the last pass of a round | it leaves the parameter |
| READY, TRAILING | accumulated | TRAILING if I, else an error | the backward pass counts as a trailing one |
| UNUSED | accumulated | TRAILING | not I, and another rank had one: an error at the round's end |
| IDLE, LOCAL, AGAIN, REDUCED | the round is closed | READY or UNUSED | by its origin; it leaves the parameter |
| TRAILING | the wait begins | READY or UNUSED again | what came since goes from the parameter to `trailing` |
| READY, UNUSED | a result, to which some rank contributed | REDUCED | it is the parameter's gradient |
| READY, UNUSED | a result, to which none did; an error | `before` | what was held is the parameter's gradient again |
| REDUCED, IDLE | then, with something trailing | AGAIN, LOCAL | that is added; a round is due |
| any | step, zero_grad, load_state_dict | IDLE | the round under way is finished before |
| REDUCED, AGAIN | another optimizer has used the gradient | IDLE, LOCAL | a round is due |
| any | the world ends | - | the reducer is thrown away; memory lives as long as gradients that lie in it |

A backward pass that finds, with its first gradient, that none of the reduced ones is left: the script has cleared them, and
all members are IDLE first.

The *origin* of a gradient is computed when somebody asks:

| origin | when | when a round is closed | before the step |
|---|---|---|---|
| NONE | there is none, or another optimizer reduces it | UNUSED | all reduced members are NONE: cleared, a round is due |
| NEW, AGAIN | state LOCAL, AGAIN | READY | a round is due |
| REDUCED | the tensor that was reduced; state REDUCED | READY if I, else UNUSED | all zeros: a round is due |
| REPLACED | another tensor; state REDUCED | READY | a round is due if I, else an error |
| OLD | the tensor that was reduced, not written to since, or zeros that add nothing; state IDLE | UNUSED | - |
| REWRITTEN | it has been written to; state IDLE | READY if I and zeros, or I and `written_too` | a round is due if I |
| OWN | another tensor; state IDLE | READY | a round is due |
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic

from hvdlite.training.gradients.framework import Framework, Gradient, Parameter, set_gradients


class GradientState(enum.Enum):
    """What has happened to a member's gradient; see the table."""

    IDLE = enum.auto()
    LOCAL = enum.auto()
    AGAIN = enum.auto()
    REDUCED = enum.auto()
    READY = enum.auto()
    UNUSED = enum.auto()
    TRAILING = enum.auto()


IDLE, LOCAL, AGAIN, REDUCED, READY, UNUSED, TRAILING = GradientState


class Origin(enum.Enum):
    """Where a gradient comes from; see the table."""

    NONE = enum.auto()
    NEW = enum.auto()
    AGAIN = enum.auto()
    REDUCED = enum.auto()
    REPLACED = enum.auto()
    OLD = enum.auto()
    REWRITTEN = enum.auto()
    OWN = enum.auto()


@dataclasses.dataclass(slots=True, eq=False)
class Member(Generic[Parameter]):
    """One parameter of the set."""

    parameter: Parameter
    name: str  # equal on all ranks
    group_id: int  # members with the same one, from 1, share a bucket
    state: GradientState = IDLE
    before: GradientState = IDLE  # while READY or UNUSED: REDUCED when its gradient, or a part of it, was reduced before
    passes: int = 0  # how often accumulated since it was IDLE or REDUCED; those in no_sync do not count
    bucket: int = -1  # the index of its bucket in the layout; -1: it goes by itself
    place: int = -1  # its index in the bucket
    is_small: bool = False  # it is copied together with others of its bucket
    is_sparse: bool = False  # some rank had a sparse gradient for it once: it always goes by itself
    held: Gradient | None = None  # what left the parameter, while that is READY or UNUSED, and not copied
    trailing: Gradient | None = None  # what was accumulated after that
    reduced: Callable[[], Gradient | None] = lambda: None  # gives the gradient that the last round left
    version: int = -1  # how often that had been written to
    zeroed: bool = False  # whether the optimizer has set it to zero since


def set_on_all(field: str) -> Callable[[Iterable[Member[Any]], Iterable[Any]], None]:
    """Return a function that sets a field of many members, without a statement of Python for each."""
    set_on = vars(Member)[field].__set__

    def set_all(members: Iterable[Member[Any]], values: Iterable[Any]) -> None:
        deque(map(set_on, members, values), maxlen=0)
    return set_all


_parameter_of, _state_of, _reduced_of = map(operator.attrgetter, ("parameter", "state", "reduced"))
set_state, set_before, set_held = set_on_all("state"), set_on_all("before"), set_on_all("held")
set_reduced, set_version, set_zeroed = set_on_all("reduced"), set_on_all("version"), set_on_all("zeroed")


def set_ready(members: Sequence[Member[Any]]) -> None:
    """The members' gradients, of which no part was reduced before, have left the parameters and are reduced."""
    set_before(members, itertools.repeat(IDLE))
    set_state(members, itertools.repeat(READY))


class Members(Generic[Parameter]):
    """The members of one set, and the parameters that are not trainable yet.

    Args:
        prefix: begins the members' names.
        is_idempotent: whether reducing a reduced gradient again leaves it as it is.
    """

    def __init__(self, framework: Framework[Parameter], prefix: str, is_idempotent: bool) -> None:
        self.framework = framework
        self.prefix = prefix
        self.is_idempotent = is_idempotent
        self.by_key: dict[int, Member[Parameter]] = {}  # by the parameters' identity: tensors compare elementwise
        self.waiting: dict[int, Member[Parameter]] = {}  # frozen, or added in the middle of a round
        # By identity: parameters whose gradients another optimizer reduces, as long as what this gives lives.
        self.elsewhere: Mapping[int, Callable[[], object]] = {}

    def __iter__(self) -> Iterator[Member[Parameter]]:
        return iter(self.by_key.values())

    def __len__(self) -> int:
        return len(self.by_key)

    def admit(self) -> bool:
        """Make members of the waiting parameters that are trainable now; return whether there were any."""
        admitted = [key for key, member in self.waiting.items() if self.framework.is_trainable(member.parameter)]
        for key in admitted:
            self.by_key[key] = self.waiting.pop(key)
        return bool(admitted)

    def parameters(self) -> Iterator[Parameter]:
        """Return the trainable parameters of all members, and of those that become members after the round."""
        members = (*self.by_key.values(), *self.waiting.values())
        return filter(self.framework.is_trainable, map(_parameter_of, members))

    def is_elsewhere(self, parameter: Parameter) -> bool:
        """Return whether another optimizer reduces the parameter's gradients."""
        owner = self.elsewhere.get(id(parameter))
        return owner is not None and owner() is not None

    def gradient(self, member: Member[Parameter]) -> Gradient | None:
        """Return the member's gradient; None for one that another optimizer reduces."""
        if self.elsewhere and self.is_elsewhere(member.parameter):
            return None
        return self.framework.get(member.parameter)

    # --- the table of states ---------------------------------------------------------------------------------------------

    def accumulated(self, member: Member[Parameter]) -> GradientState:
        """A backward pass has accumulated into a member that is not given; return its state.

        Nothing is changed where that is an error: then it is REDUCED.
        """
        before = member.state
        is_again = (before is REDUCED or before is AGAIN) and member.reduced() is self.framework.get(member.parameter)
        if is_again and not self.is_idempotent:
            return REDUCED
        member.state = AGAIN if is_again else LOCAL
        if before is IDLE or before is REDUCED:
            member.passes = 0
        return member.state

    def hand_over(self, member: Member[Parameter], *, is_again: bool) -> None:
        """What a member holds is reduced in the round under way.

        Args:
            is_again: whether a part of it is reduced already.
        """
        member.before = REDUCED if is_again else IDLE
        member.state = READY
        self.framework.set(member.parameter, None)

    def leave_out(self, member: Member[Parameter]) -> None:
        """What a member holds, if anything, does not count in the round under way."""
        member.before = REDUCED if member.state is REDUCED or member.state is AGAIN else IDLE
        member.state = UNUSED
        if member.held is not None:
            self.framework.set(member.parameter, None)

    def take_back(self, member: Member[Parameter]) -> None:
        """There is no result for a member."""
        if member.held is not None:
            self.framework.set(member.parameter, member.held)
        member.held, member.state = None, member.before

    def hold_trailing(self, trailing: Mapping[Member[Parameter], GradientState]) -> None:
        """Before results become gradients: keep what was accumulated since their members were given.

        Args:
            trailing: such members, and their states before that.
        """
        for member, state in trailing.items():
            if member.state is TRAILING:
                member.state = state
                gradient = self.gradient(member)
                if gradient is not None:
                    self.framework.set(member.parameter, None)
                    member.trailing = gradient if member.trailing is None else self.framework.add(member.trailing, gradient)

    def note_trailing(self, member: Member[Parameter], trailing: dict[Member[Parameter], GradientState]) -> bool:
        """A backward pass has accumulated into a member that is given. Where that is an error, return False, change nothing.

        Args:
            trailing: gets the member and its state before that.
        """
        if member.state is READY and not self.is_idempotent:
            return False
        if member.state is not TRAILING:
            trailing[member] = member.state
            member.state = TRAILING
        return True

    def finish(self, members: Sequence[Member[Parameter]], gradients: Sequence[Gradient], factor: float) -> None:
        """These results, to which some rank contributed, are the members' gradients, times a factor."""
        if factor != 1.0:
            gradients = self.framework.scaled(gradients, factor)
        set_gradients(self.framework, map(_parameter_of, members), gradients)
        set_reduced(members, map(self.framework.reference, gradients))
        set_version(members, map(self.framework.version, gradients))
        set_zeroed(members, itertools.repeat(False))
        set_state(members, itertools.repeat(REDUCED))

    def add_trailing(self, trailing: Iterable[Member[Parameter]]) -> tuple[list[Member[Parameter]], list[Member[Parameter]]]:
        """After results became gradients: add what came after their members were given.

        Return the members that have got something, and those for which it is dropped: other ranks have had a gradient
        of theirs, and reducing again is not exact.
        """
        added, dropped = [], []
        for member in trailing:
            more, member.trailing = member.trailing, None
            if more is None:
                continue
            if member.state is REDUCED and not self.is_idempotent:
                dropped.append(member)
                continue
            own = self.framework.get(member.parameter)
            total = more if own is None else self.framework.add(own, more)
            self.framework.set(member.parameter, total)
            if member.state is REDUCED:
                self.note_last(member, total)  # a part of it is what was reduced
            member.state, member.passes = (AGAIN if member.state is REDUCED else LOCAL), 0
            added.append(member)
        return added, dropped

    def forget(self) -> None:
        """The gradients were used or cleared."""
        set_state(self, itertools.repeat(IDLE))

    def forget_reduced(self, members: Iterable[Member[Parameter]]) -> None:
        """Another optimizer has used what was reduced of these members, or it counts as used."""
        for member in members:
            if member.state is REDUCED or member.state is AGAIN:
                member.state = IDLE if member.state is REDUCED else LOCAL

    def check(self, *, is_under_way: bool, is_closed: bool, has_local: bool, has_reduced: bool) -> None:
        """Check what always holds between two calls; for tests."""
        for member in (*self, *self.waiting.values()):
            is_in_round = member.state in (READY, UNUSED, TRAILING)
            assert is_in_round <= is_under_way, member
            assert is_in_round or not is_closed or id(member.parameter) in self.waiting, member
            assert is_in_round or (member.held is None and member.trailing is None), member
            assert has_reduced or member.state not in (REDUCED, AGAIN), member
            assert has_local or member.state not in (LOCAL, AGAIN), member
            if member.state in (READY, UNUSED):  # else somebody could write to what others read
                assert self.gradient(member) is None, member

    # --- origins ---------------------------------------------------------------------------------------------------------

    def origin(self, member: Member[Parameter], gradient: Gradient | None) -> Origin:
        """Return where a gradient comes from that is the member's."""
        if gradient is None:
            return Origin.NONE
        is_same = member.reduced() is gradient
        if member.state is LOCAL or (member.state is AGAIN and not is_same):
            return Origin.NEW
        if member.state is AGAIN:
            return Origin.AGAIN
        if member.state is REDUCED:
            return Origin.REDUCED if is_same else Origin.REPLACED
        if not is_same:
            return Origin.OWN
        if self.framework.version(gradient) == member.version:
            return Origin.OLD
        # Zeros of a frozen parameter, and zeros that were zeros before (they are multiplied to clip).
        adds_nothing = member.zeroed or not self.framework.is_trainable(member.parameter)
        return Origin.OLD if adds_nothing and self.framework.is_zero(gradient) else Origin.REWRITTEN

    def counts(self, gradient: Gradient | None, origin: Origin, written_too: bool) -> bool:
        """Return whether a gradient of this origin counts in a round that is closed.

        Args:
            written_too: whether what was written since an older reduction counts, and not only zeros.
        """
        if gradient is None or origin is Origin.OLD:
            return False
        if origin is Origin.REWRITTEN:
            return self.is_idempotent and (written_too or self.framework.is_zero(gradient))
        return self.is_idempotent or origin is not Origin.REDUCED

    def needs_round(self, origin: Origin) -> bool:
        """Return whether a gradient of this origin, which no backward pass has given, is to be reduced in the step."""
        return origin is Origin.OWN or (origin is Origin.REWRITTEN and self.is_idempotent)

    def reduced(self) -> Iterator[Member[Parameter]]:
        """Return the members that were reduced since the last step."""
        return (member for member in self if member.state is REDUCED or member.state is AGAIN)

    def unlike_reduced(self) -> Iterator[Member[Parameter]]:
        """Return the members but for those whose gradients are what the last round left, without a statement for each."""
        members = self.by_key.values()
        gradients = map(self.framework.get, map(_parameter_of, members))
        are_same = map(operator.is_, gradients, map(operator.call, map(_reduced_of, members)))
        are_reduced = map(operator.is_, map(_state_of, members), itertools.repeat(REDUCED))
        return itertools.compress(members, map(operator.not_, map(operator.and_, are_same, are_reduced)))

    def has_reduced(self, parameter: Parameter) -> bool:
        """Return whether a parameter's gradient is one that was reduced since the last step."""
        return id(parameter) in self.by_key and self.is_reduced(self.by_key[id(parameter)])

    def is_reduced(self, member: Member[Parameter]) -> bool:
        """Return whether the gradient is one that was reduced since the last step (and written to since, perhaps)."""
        return (member.state is REDUCED or member.state is AGAIN) and self._last(member) is not None

    def is_written(self, member: Member[Parameter]) -> bool:
        """Return whether the gradient that was reduced last has been written to since, or is not there."""
        gradient = self._last(member)
        return gradient is None or self.framework.version(gradient) != member.version

    def is_zeroed(self, member: Member[Parameter]) -> bool:
        """Return whether the gradient that was reduced last has been written to since and is all zeros."""
        gradient = self._last(member)
        return gradient is not None and self.is_written(member) and self.framework.is_zero(gradient)

    def were_cleared(self, accumulated: Member[Parameter] | None = None) -> bool:
        """Return whether there were reduced gradients since the last step, of which the script has left none.

        Args:
            accumulated: into which a backward pass has just accumulated: it is another tensor if it was cleared.
        """
        found = None
        for found in self.reduced():
            if self._last(found) is not None if found is accumulated else self.gradient(found) is not None:
                return False
        return found is not None

    def were_zeroed(self) -> bool:
        """Return whether there are reduced gradients since the last step, all of which the script has set to zero."""
        found = False
        for member in self.reduced():
            if self.gradient(member) is not None:
                if not self.is_zeroed(member):
                    return False  # nearly always the first one
                found = True
        return found

    def renew(self) -> None:
        """The optimizer has set the reduced gradients to zero; that does not make them new ones."""
        for member in self:
            if (gradient := member.reduced()) is not None:
                member.version, member.zeroed = self.framework.version(gradient), True

    def note_last(self, member: Member[Parameter], gradient: Gradient, *, is_written: bool = False) -> None:
        """This is the gradient that was reduced last.

        Args:
            is_written: whether it has been written to since.
        """
        member.reduced, member.version = self.framework.reference(gradient), self.framework.version(gradient) - is_written
        member.zeroed = member.zeroed and not is_written

    def _last(self, member: Member[Parameter]) -> Gradient | None:
        """Return the gradient that was reduced last; None when the parameter has another one, or none."""
        gradient = self.framework.get(member.parameter)
        return gradient if member.reduced() is gradient else None
