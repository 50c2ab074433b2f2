"""What the gradient reducer needs of a framework."""

from __future__ import annotations

import dataclasses
from typing import Any, Generic, Protocol, TypeVar

from hvdlite.core.array import Array

Parameter = TypeVar("Parameter")


@dataclasses.dataclass
class Loan(Generic[Parameter]):
    """Memory in which a parameter's gradient is reduced.

    `array` is C-contiguous; `tensor` is the framework's tensor over it (the gradient itself, or a compressed or
    contiguous copy); `context` is what the compressor needs to undo its work.
    """

    parameter: Parameter
    array: Array
    tensor: Any
    context: Any = None


class Framework(Protocol[Parameter]):
    """Gradients of one framework, as memory."""

    def has_gradient(self, parameter: Parameter) -> bool:
        """Return whether the parameter has a gradient."""

    def lend(self, parameter: Parameter) -> Loan[Parameter]:
        """Return memory that holds the parameter's gradient, ready to be reduced in place."""

    def lend_empty(self, parameter: Parameter) -> Loan[Parameter]:
        """Return memory like `lend`'s for a parameter without a gradient; its values are never read."""

    def give_back(self, loan: Loan[Parameter]) -> None:
        """Make the reduced values the parameter's gradient."""

    def mark(self, parameter: Parameter) -> Any:
        """Return something that identifies the current gradient without keeping it alive."""

    def is_marked(self, parameter: Parameter, mark: Any) -> bool:
        """Return whether the gradient is still the one that `mark` identified (accumulated into, perhaps)."""
