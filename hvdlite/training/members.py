"""The members of a gradient set: parameters of one wrapped optimizer, under names that are equal on all ranks."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic

from hvdlite.training.framework import Parameter


@dataclasses.dataclass(slots=True, eq=False)
class Member(Generic[Parameter]):
    """One parameter of the set.

    Its state is tagged with counters, so that a new round forgets it without visiting every member.
    """

    parameter: Parameter
    name: str
    group_id: int  # members with the same one, from 1, share a bucket
    period: int = 0  # the last period in which it was accumulated into
    passes: int = 0  # how often in that period
    given: int = 0  # the last round to which it was given, with or without a gradient
    again: int = 0  # the last round to which it was given with a gradient that was reduced in this generation already
    missing: int = 0  # the last round in which this rank reported it as missing
    sparse: bool = False  # some rank had a sparse gradient for it once: it always goes by itself
    mark: Any = None  # identifies the reduced gradient
    marked: int = -1  # the generation in which `mark` counts


def set_on_all(field: str) -> Callable[[Iterable[Member[Any]], Iterable[Any]], None]:
    """Return a function that sets a field of many members, without a statement of Python for each."""
    set_on = vars(Member)[field].__set__

    def set_all(members: Iterable[Member[Any]], values: Iterable[Any]) -> None:
        deque(map(set_on, members, values), maxlen=0)
    return set_all


class Members(Generic[Parameter]):
    """The members of one set, and the parameters that are not trainable yet.

    Args:
        prefix: begins the members' names.

    Attributes:
        by_key: the members by the parameters' identity, because framework tensors compare elementwise.
    """

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.by_key: dict[int, Member[Parameter]] = {}
        self._waiting: dict[int, Member[Parameter]] = {}  # frozen, or added in the middle of a round

    def __iter__(self) -> Iterator[Member[Parameter]]:
        return iter(self.by_key.values())

    def __len__(self) -> int:
        return len(self.by_key)

    def add(self, parameter: Parameter, name: str, group_id: int) -> None:
        """Let a parameter become a member as soon as it is trainable."""
        self._waiting[id(parameter)] = Member(parameter, self.prefix + name, group_id)

    def admit(self, is_trainable: Callable[[Parameter], bool]) -> bool:
        """Make members of the waiting parameters that are trainable now; return whether there were any."""
        admitted = [key for key, member in self._waiting.items() if is_trainable(member.parameter)]
        for key in admitted:
            self.by_key[key] = self._waiting.pop(key)
        return bool(admitted)

    def parameters(self) -> Iterator[Parameter]:
        """Return the parameters of all members and of those that wait."""
        return (member.parameter for member in (*self.by_key.values(), *self._waiting.values()))
