"""The interface between the gradient reducer and a framework."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

from hvdlite.core.array import Array
from hvdlite.core.device import AnyArray, Completion, Event

Parameter = TypeVar("Parameter")


@dataclasses.dataclass
class StagedGradient(Generic[Parameter]):
    """Memory in which a parameter's gradient is reduced by itself.

    `array` is C-contiguous; `tensor` is the framework's tensor over it (the gradient itself, or a compressed or
    contiguous copy); `context` is what the compressor needs to undo its work.
    """

    parameter: Parameter
    array: AnyArray
    tensor: Any
    context: Any = None


@dataclasses.dataclass(frozen=True)
class Shape:
    """How a parameter's gradient travels."""

    dtype: str  # on the wire, as the runtime names it
    shape: tuple[int, ...]
    strides: tuple[int, ...] = ()  # in elements; () is row-major


class Framework(Protocol[Parameter]):
    """Gradients of one framework, as memory.

    A *view* is the framework's tensor over a place in a learned bucket, made by `bucket_view` and kept by the reducer.

    Attributes:
        needs_notes: whether `note` is to be called for each gradient that is made.
    """

    needs_notes: bool

    def note(self, parameter: Parameter) -> None:
        """The parameter's gradient was made on the stream that is current on this thread."""

    def has_gradient(self, parameter: Parameter) -> bool:
        """Return whether the parameter has a gradient."""

    def shape(self, parameter: Parameter) -> Shape:
        """Return how the parameter's gradient travels now."""

    def stage(self, parameter: Parameter) -> StagedGradient[Parameter]:
        """Return memory that holds the parameter's gradient, ready to be reduced in place."""

    def stage_empty(self, parameter: Parameter) -> StagedGradient[Parameter]:
        """Return memory like `stage`'s for a parameter without a gradient; its values are never read."""

    def unstage(self, staged: StagedGradient[Parameter]) -> Any:
        """Make the reduced values the parameter's gradient; return a mark that identifies it without keeping it alive."""

    def is_sparse(self, parameter: Parameter) -> bool:
        """Return whether the parameter has a gradient that is to stay sparse."""

    def rows(self, parameter: Parameter) -> Array:
        """Return a sparse gradient as bytes, (n, bytes of a row): each row's indices and values."""

    def give_rows(self, parameter: Parameter, rows: Array, factor: float) -> Any:
        """Make the sum of all ranks' rows, times a factor, the parameter's gradient; return a mark, like `unstage`."""

    def bucket_view(self, parameter: Parameter, place: AnyArray) -> Any:
        """Return a view over `place`, which has the shape, dtype and strides of `shape(parameter)`."""

    def is_trainable(self, parameter: Parameter) -> bool:
        """Return whether the parameter can have a gradient now."""

    def fill(self, parameter: Parameter, view: Any) -> bool:
        """Copy the gradient into its view, unless it lies there already.

        Return False when it does not fit any more, or when somebody still uses an earlier gradient that lies there.

        Afterwards the framework does not write to the view through the parameter until `install_view`.
        """

    def batch(self, pairs: Sequence[tuple[Parameter, Any]]) -> Sequence[tuple[Parameter, Any]]:
        """Return members of one bucket in the form that `fill_all` and `install_views` handle fastest; with new views."""

    def fill_all(self, pairs: Sequence[tuple[Parameter, Any]]) -> bool:
        """Like `fill`, of many gradients of one bucket at once. Return False when one does not fit; then none is copied."""

    def fill_with(self, parameter: Parameter, view: Any, value: Any) -> bool:
        """Give a bucket view's elements one value, for a parameter without a gradient.

        Return False, like `fill`, when the parameter's gradients do not fit any more, or when somebody still uses an earlier
        gradient that lies there.
        """

    def filled(self, memory: AnyArray) -> Event | None:
        """Return after what the bucket views in `memory` hold what was put there; None on the host."""

    def follow(self, completion: Completion) -> None:
        """Let what the framework does from now on come after work on a GPU."""

    def copy_from_row_major(self, view: Any, values: AnyArray) -> None:
        """Put row-major values into a view of other strides."""

    def detach_view(self, parameter: Parameter, view: Any) -> Any:
        """When the parameter's gradient, the reduced one, lies in its view, move it out; return its new mark, else None."""

    def install_view(self, parameter: Parameter, view: Any) -> Any:
        """Make what lies in the view the parameter's gradient; return a mark, like `unstage`."""

    def install_views(self, pairs: Sequence[tuple[Parameter, Any]]) -> Sequence[Any]:
        """Like `install_view`, of many gradients of one bucket at once."""

    def is_marked(self, parameter: Parameter, mark: Any) -> bool:
        """Return whether the gradient is still the one that `mark` identified (accumulated into, perhaps)."""

    def is_changed(self, parameter: Parameter, mark: Any) -> bool:
        """Return whether the gradient that `mark` identified has been replaced or written to since."""

    def is_zeroed(self, parameter: Parameter, mark: Any) -> bool:
        """Return whether the gradient that `mark` identified has been written to since and is all zeros.

        Return False where only waiting for a GPU could tell.
        """

    def renew(self, parameter: Parameter, mark: Any) -> None:
        """Let what was written so far to the gradient that `mark` identifies not count as a change."""

    def take(self, parameter: Parameter) -> Any:
        """Return the parameter's gradient, which it does not have any more; None when there is none."""

    def is_staged(self, staged: StagedGradient[Parameter]) -> bool:
        """Return whether the parameter's gradient lies in the memory that it is reduced in."""

    def accumulate(self, parameter: Parameter, gradient: Any) -> None:
        """Add to the parameter's gradient what `take` returned."""
