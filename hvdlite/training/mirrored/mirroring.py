"""Mirroring: the points at which replicas take replica 0's state, and the tensors that they take.

Rules
- Every reason to communicate is the same on all ranks: an optimizer was made, and a batch or a step is the first one after
  that. A checkpoint may be loaded on one rank only, so ranks ask each other first: in every step, where the question travels
  with the gradients, in `run`, and at the beginning of a distributed epoch.
- Tensors are matched by name: by the class of their module and the order of construction. A tensor that replica 0 does not
  have keeps its value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from hvdlite.core.errors import MismatchError
from hvdlite.training.mirrored.replica_group import ReplicaGroup

Tensor = TypeVar("Tensor")


class MirrorSchedule:
    """Decides when everything takes replica 0's values.

    Args:
        has_new_tensors: returns whether tensors of this rank have got their shapes since the last time.

    Attributes:
        due: whether it happens before the next batch or step; the same on all ranks.
        has_loaded: whether this rank has loaded a checkpoint since the last time.
    """

    def __init__(self, replicas: ReplicaGroup, has_new_tensors: Callable[[], bool]) -> None:
        self.due = self.has_loaded = False
        self._replicas, self._has_new_tensors = replicas, has_new_tensors
        self._answers: dict[int, Callable[[], bool]] = {}  # to the questions of steps to come, by optimizer id

    @property
    def is_wanted(self) -> bool:
        """Whether this rank has a reason of its own."""
        return self.has_loaded or self._has_new_tensors()

    def agree(self) -> None:
        """Find out whether some rank has a reason; all ranks call this together."""
        if not self.due:
            self.due = self._replicas.ask("loaded", self.is_wanted)()

    def ask_in_step(self, optimizer_id: int) -> None:
        """Begin to find out whether some rank has a reason, once for every step of an optimizer."""
        if optimizer_id not in self._answers:
            self._answers[optimizer_id] = self._replicas.ask(f"loaded.{optimizer_id}", self.is_wanted)

    def agree_in_step(self, optimizer_id: int) -> None:
        """Like `agree`, in every step of an optimizer: reasons count that ranks had when they asked."""
        self.ask_in_step(optimizer_id)
        self.due = self._answers.pop(optimizer_id)() or self.due

    def done(self) -> None:
        """Everything has replica 0's values now."""
        self.due = self.has_loaded = False


class TensorKind(NamedTuple):
    """A tensor's shape (None for a lazy tensor), dtype, whether it is trained, and the type of its device."""

    shape: tuple[int, ...] | None
    dtype: str
    is_trained: bool
    device: str

    def __str__(self) -> str:
        shape = "without a shape yet" if self.shape is None else str(list(self.shape))
        return f"{self.dtype} {shape}{'' if self.is_trained else ' (frozen)'}"


def agreed_names(replicas: ReplicaGroup, parameters: Sequence[tuple[str, TensorKind]]) -> list[str]:
    """Return replica 0's names for the parameters of an optimizer that all ranks make now.

    Raises:
        MismatchError: on all ranks, when the parameters differ in number, shape, dtype or whether they are trained.
    """
    everywhere = replicas.allgather_object(list(parameters), "optimizer")
    for replica_id, theirs in enumerate(everywhere):
        for index in range(max(len(everywhere[0]), len(theirs))):
            pair = [each[index] if index < len(each) else None for each in (everywhere[0], theirs)]
            if len({entry and entry[1][:3] for entry in pair}) > 1:
                first, other = ("no more" if entry is None else f"'{entry[0]}', {entry[1]}" for entry in pair)
                raise MismatchError(f"the optimizers that ranks make in the scope differ at parameter {index}: replica 0 "
                                    f"has {first}, replica {replica_id} {other}; all ranks must make the same ones, in the "
                                    "same order")
    return [name for name, _ in everywhere[0]]


def matching_tensors(replicas: ReplicaGroup, named: Mapping[str, Tensor], kind_of: Callable[[Tensor], TensorKind],
                     make: Callable[[TensorKind], Tensor]) -> list[Tensor]:
    """Return the tensors that a broadcast from replica 0 fills, in the same order on all ranks, which call this together.

    Args:
        named: this rank's tensors; a tensor may have several names, and is found under any name that it has on replica 0.
        make: makes memory for a tensor of replica 0 that this rank does not have.

    Raises:
        MismatchError: on all ranks, when a tensor's shape or dtype differs.
    """
    names: dict[int, list[str]] = {}
    for name, tensor in named.items():
        names.setdefault(id(tensor), []).append(name)
    own = [(aliases, kind_of(named[aliases[0]])) for aliases in names.values()]
    found: list[Tensor] = []
    taken: set[int] = set()
    problem = ""
    for aliases, kind in replicas.broadcast_object([entry for entry in own if entry[1].shape is not None], "mirror"):
        here = next((named[name] for name in aliases if name in named and id(named[name]) not in taken), None)
        if here is None:
            found.append(make(kind))
            continue
        taken.add(id(here))
        found.append(here)
        mine = kind_of(here)
        if mine[:2] != kind[:2]:
            problem = problem or f"'{aliases[0]}' is {kind} on replica 0 and {mine} on replica {replicas.replica_id}"
    problems = [text for text in replicas.allgather_object(problem, "problems") if text]
    if problems:
        raise MismatchError(f"{problems[0]}; all ranks must make the same modules in the scope, in the same order")
    return found
