"""Mirroring: every variable of a `MirroredStrategy` has rank 0's value before it is used.

Time of mirroring:
- Variables that are created in the scope: at the end of the scope. If ranks create different ones there (one rank loads a
  model, the others build it), `fit`, `evaluate` and `predict` mirror the model's variables.
- Variables that are created in `strategy.run`, or by a layer of the scope that is built later: immediately. All ranks are in
  step there.
- Variables that are created by `fit`, `evaluate` or `predict`: with all of the model's variables, before the first step.

States of random generators are rank 0's plus the rank, so that every rank draws its own masks.
"""

from __future__ import annotations

import enum
import hashlib
import logging
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, NamedTuple

import keras
import numpy as np

from hvdlite import api
from hvdlite.core.array import Array
from hvdlite.core.errors import MismatchError
from hvdlite.training.objects import allgather_object
from hvdlite_tf.keras.broadcast import array_of, broadcast_variables
from hvdlite_tf.variables import is_random_state, moved_on

_log = logging.getLogger("hvdlite")


class _Mode(enum.Enum):
    AFTER_SCOPE = "until the scope is left"
    DEFERRED = "until the caller mirrors the whole model"
    IMMEDIATELY = "now"


_mode: ContextVar[_Mode] = ContextVar("hvdlite_replicas", default=_Mode.AFTER_SCOPE)


class _CreatedVariable(NamedTuple):
    """A variable that was created.

    Attributes:
        description: name, shape and dtype.
    """

    variable: weakref.ref[Any]
    description: tuple[str, tuple[int, ...], str]


class VariableMirror:
    """The variables of one strategy that do not have rank 0's values yet.

    Args:
        rank, size: this rank, and the number of ranks.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._made: list[_CreatedVariable] = []
        self._unmatched: list[_CreatedVariable] = []  # created in a scope, and different on the ranks
        self._was_unmatched = False  # the same on all ranks
        self._applies_model = False
        self._created_immediately = 0

    @property
    def mirrors_immediately(self) -> bool:
        """Whether a variable gets rank 0's value as soon as it is created."""
        return self._size > 1 and _mode.get() is _Mode.IMMEDIATELY

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Return a context whose new variables are left to `mirror`."""
        before, self._made = self._made, []
        try:
            with _in_mode(_Mode.DEFERRED):
                yield
        finally:
            self._made = before

    def immediately(self) -> AbstractContextManager[None]:
        """Return a context whose new variables get rank 0's values immediately."""
        return _in_mode(_Mode.IMMEDIATELY)

    @contextmanager
    def applying_model(self) -> Iterator[None]:
        """Allow Keras' loops to use a model with rank 0's values, even if some ranks have created other variables."""
        before, self._applies_model = self._applies_model, True
        try:
            yield
        finally:
            self._applies_model = before

    @property
    def is_deferred(self) -> bool:
        """Whether the code inside `deferred` is going to mirror the whole model."""
        return _mode.get() is _Mode.DEFERRED

    def created(self, variable: Any) -> None:
        """Record a new variable; it belongs to a metric if it is summed on read."""
        if self._size == 1:
            return
        if self.mirrors_immediately and getattr(variable, "_value", variable) is not None:
            variable.assign(self.broadcast_value(array_of(variable), is_random_state(variable)))
        else:
            self._made.append(_CreatedVariable(weakref.ref(variable), _described(variable)))

    def broadcast_value(self, array: Array, is_seed: bool) -> Array:
        """Return rank 0's value of a variable that all ranks are creating."""
        array = np.array(array, order="C")
        self._created_immediately += 1
        api.runtime().broadcast(f"scope.variable.{self._created_immediately}", array, 0).wait()
        return moved_on(array, self._rank, 0) if is_seed else array

    def mirror_pending(self, must_match: bool = False) -> None:
        """Copy rank 0's values to the recorded variables; all ranks call this.

        Args:
            must_match: whether different variables on the ranks are an error.

        Raises:
            MismatchError: when they are different and must match.
        """
        if self._size == 1 or self.is_deferred:
            return
        must_match = must_match and not self._applies_model
        if must_match and self._was_unmatched:
            self._mirror([*(each for each in self._unmatched if each.variable() is not None), *self._made])
            self._made, self._unmatched, self._was_unmatched = [], [], False
        elif self._made:
            made, self._made = self._made, []
            try:
                self._mirror(made)
            except MismatchError as error:
                self._unmatched += made
                self._was_unmatched = True
                if must_match:
                    raise
                _log.info("left to the model's first use: %s", error)

    def mirror(self, variables: Sequence[Any]) -> None:
        """Copy rank 0's values to variables; all ranks call this with the same variables, in the same order.

        Raises:
            MismatchError: on all ranks, when the variables differ.
        """
        if self._size == 1:
            return
        self._mirror([_CreatedVariable(weakref.ref(variable), _described(variable)) for variable in variables
                      if getattr(variable, "_value", variable) is not None])
        done = set(map(id, variables))
        self._made, self._unmatched = ([each for each in made if id(each.variable()) not in done]
                                       for made in (self._made, self._unmatched))

    def _mirror(self, made: Sequence[_CreatedVariable]) -> None:
        """Mirror the variables that all ranks still have: the garbage collector decides when a rank drops unused ones."""
        with _eagerly():
            runtime = api.runtime()
            variables = [each.variable() for each in made]
            exist = [variable is not None and getattr(variable, "_value", variable) is not None for variable in variables]
            everywhere = allgather_object(runtime, ([each.description for each in made], exist),
                                          runtime.names.unnamed("keras", "scope_variables"))
            _check_same([descriptions for descriptions, _ in everywhere])
            exist_everywhere = np.all([theirs for _, theirs in everywhere], 0)
            kept = [variable for variable, exists in zip(variables, exist_everywhere, strict=True) if exists]
            broadcast_variables(kept, 0, runtime.names.unnamed("keras", "mirror"))

    def are_equal_everywhere(self, variables: Sequence[Any]) -> bool:
        """Return whether all ranks have the same values, except for random generators; all ranks call this.

        Costs a pass over the values and one small collective.
        """
        if self._size == 1:
            return True
        with _eagerly():
            digest = hashlib.blake2b(digest_size=8)
            for variable in variables:
                if not is_random_state(variable):
                    array = array_of(variable)
                    digest.update(f"{array.dtype}{array.shape}".encode())
                    digest.update(array.reshape(-1).view(np.uint8).data)
            runtime = api.runtime()
            own = np.frombuffer(digest.digest(), np.uint64).reshape(1, 1)
            digests = runtime.allgather(runtime.names.unnamed("keras", "digest"), own).wait()
        return bool((digests == digests[0]).all())


def optimizers_of(model: Any) -> list[Any]:
    """Return a model's optimizers: its own, and those in attributes of it and of the models in it."""
    found: dict[int, Any] = {}

    def visit(value: Any) -> None:
        if isinstance(value, keras.optimizers.Optimizer):
            found.setdefault(id(value), value)
        elif isinstance(value, dict):
            visit(list(value.values()))
        elif isinstance(value, (list, tuple)):
            for each in value:
                visit(each)

    def descend(model: Any, seen: set[int]) -> None:
        if id(model) in seen:
            return
        seen.add(id(model))
        visit(getattr(model, "optimizer", None))
        for name, value in sorted(vars(model).items()):
            if not name.startswith("_"):
                visit(value)
        for layer in getattr(model, "layers", ()):
            if isinstance(layer, keras.Model):
                descend(layer, seen)
    descend(model, set())
    inner = {id(getattr(each, "inner_optimizer", None)) for each in found.values()}
    return [each for identity, each in found.items() if identity not in inner]


@contextmanager
def _in_mode(mode: _Mode) -> Iterator[None]:
    token = _mode.set(mode)
    try:
        yield
    finally:
        _mode.reset(token)


def _check_same(everywhere: Sequence[Sequence[tuple[str, tuple[int, ...], str]]]) -> None:
    first = everywhere[0]
    for rank, theirs in enumerate(everywhere):
        if [each[1:] for each in theirs] == [each[1:] for each in first]:
            continue
        differing: tuple[Any, Any] = next(
            ((one, other) for one, other in zip(first, theirs, strict=False) if one[1:] != other[1:]),
            (f"{len(first)} variables", f"{len(theirs)} variables"))
        raise MismatchError(f"the scope's variables differ: rank 0 made {differing[0]}, rank {rank} {differing[1]}; all "
                            "ranks must make (and build) the same ones in the same order")


def _eagerly() -> AbstractContextManager[Any]:
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf
        return tf.init_scope()
    return nullcontext()


def _described(variable: Any) -> tuple[str, tuple[int, ...], str]:
    return (str(getattr(variable, "path", variable.name)), tuple(variable.shape),
            keras.backend.standardize_dtype(getattr(variable, "_dtype", variable.dtype)))
