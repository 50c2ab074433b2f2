"""The interface between the gradient reducer and a framework: single gradients, and the memory of buckets."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Protocol, TypeAlias, TypeVar

from hvdlite.core.array import Array
from hvdlite.core.device import AnyArray, Completion, Event
from hvdlite.handoff.buckets import LearnedBucket

Parameter = TypeVar("Parameter")
ParameterIn = TypeVar("ParameterIn", contravariant=True)
SMALL: Final = 16 << 10
"""Bytes up to which a gradient waits for its bucket's other small ones."""
Gradient: TypeAlias = Any
"""What the framework has as a parameter's gradient."""


Alone: TypeAlias = tuple[AnyArray, Callable[[], Gradient]]
"""Memory in which one gradient is reduced by itself, and a function that returns what was reduced, as a gradient."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """How a parameter's gradient travels."""

    dtype: str  # on the wire, as the runtime names it
    shape: tuple[int, ...]
    strides: tuple[int, ...] = ()  # in elements; () is row-major


class Places(Protocol):
    """The memory of one learned bucket, as gradients; lasts as long as the layout.

    What is copied in here is the reducer's. What goes out is the parameters', and the script can do anything to it. Where a
    gradient that comes in has another user (a list or a flat buffer of the script's, a graph), or cannot be a view of its
    place, it is the *target*: it is kept, and the result is copied back into it. Any other result is a view of the place.
    """

    small: Sequence[int]  # the places that are filled together, because a call costs more than a copy

    def fill(self, places: Sequence[int], gradients: Sequence[Gradient], is_own: bool) -> bool:
        """Copy gradients into their places, unless they lie there already.

        Return False, and copy none, when one does not fit any more, or when somebody still uses an earlier gradient that
        lies in its place.

        Args:
            places: several that `small` has; or one.
            gradients: only this sequence refers to them, so that their other users can be counted.
            is_own: whether the script has made one of them, instead of a backward pass.
        """

    def vacate(self, place: int, held: list[Gradient]) -> None:
        """Replace a gradient that does not count by a copy, if it lies in the place and only this list has it."""

    def blank(self, place: int, value: Any, old: Gradient | None) -> bool:
        """Give a place's elements one value, because this rank has no gradient that counts; return whether it fits.

        Args:
            old: as `vacate` left it; where a target is due, it is this.
        """

    def filled(self) -> Event | None:
        """Return after what the places hold what was put there; None on the host."""

    def take_back(self, places: Sequence[int]) -> Sequence[Gradient]:
        """Return what was put into these places, as gradients: it is not reduced there after all."""

    def results(self, places: Sequence[int] | None) -> Sequence[Gradient]:
        """Return what lies in these places, or in all, as gradients; once for what is filled."""

    def from_row_major(self, place: int, values: AnyArray) -> None:
        """Put row-major values into a place of other strides."""


class Framework(Protocol[ParameterIn]):
    """Gradients of one framework. None of these calls waits for another rank."""

    def is_trainable(self, parameter: ParameterIn, /) -> bool:
        """Return whether the parameter can have a gradient now."""

    def shape(self, parameter: ParameterIn, /) -> Shape:
        """Return how the parameter's gradient travels now."""

    def get(self, parameter: ParameterIn, /) -> Gradient | None:
        """Return the parameter's gradient."""

    def set(self, parameter: ParameterIn, gradient: Gradient | None, /) -> None:
        """Make this the parameter's gradient."""

    def add(self, gradient: Gradient, more: Gradient, /) -> Gradient:
        """Return the sum of two gradients, in the first one's memory where that is possible."""

    def scaled(self, gradients: Sequence[Gradient], factor: float, /) -> Sequence[Gradient]:
        """Return gradients times a factor, in their memory where that is possible."""

    def version(self, gradient: Gradient, /) -> int:
        """Return how often a gradient has been written to; always the same where nobody can."""

    def reference(self, gradient: Gradient, /) -> Callable[[], Gradient | None]:
        """Return what gives the gradient, as long as it lives, and does not keep it alive."""

    def is_zero(self, gradient: Gradient, /) -> bool:
        """Return whether all values are zero; False where only waiting for a GPU would show it."""

    def rows(self, parameter: ParameterIn, gradient: Gradient, /) -> Array | None:
        """Return a sparse gradient as bytes, (n, bytes of a row): each row's indices and values. None for any other."""

    def from_rows(self, parameter: ParameterIn, rows: Array, factor: float, /) -> Gradient:
        """Return the sum of all ranks' rows, times a factor, as a gradient."""

    def places(self, bucket: LearnedBucket, parameters: Sequence[ParameterIn], /) -> Places:
        """Return the places of a bucket, in which gradients fit that travel as the parameters' do now."""

    def alone(self, parameter: ParameterIn, gradient: Gradient | None, counts: bool, /) -> Alone:
        """Return C-contiguous memory to reduce one gradient in, its own where that is possible, and what gives the result.

        That is the gradient that came in, where there was one.

        Args:
            counts: whether the gradient's values count; otherwise those in memory are never read.
        """

    def follow(self, completion: Completion, /) -> None:
        """Let what the framework does from now on come after work on a GPU."""


def set_gradients(framework: Framework[Parameter], parameters: Iterable[Parameter], gradients: Iterable[Gradient]) -> None:
    """Set the gradients of many parameters, without a statement of Python for each."""
    deque(map(framework.set, parameters, gradients), maxlen=0)
