"""What the objects of frameworks are in a checkpoint: each frontend adds a `Kind`. NumPy's, and state dicts, are here."""

from __future__ import annotations

import array
import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdlite.core.array import Array


class Kind:
    """Objects of one framework: how their state is taken out, and loaded. This one has what needs no framework."""

    name = "numpy"
    """Of the framework, in manifests."""
    order = 2
    """Kinds are asked in this order: Keras' layers may be torch's modules."""

    def owns(self, value: Any) -> bool:
        """Return whether an object is of this framework."""
        del value
        return True

    def gather(self, value: Any) -> None:
        """Gather what other ranks have of an object's state; all ranks call this, for the same objects."""

    def state_of(self, value: Any) -> Any:
        """Return the state of an object as a structure of tensors and plain data; a value that has none itself."""
        return value.state_dict() if has_state(value) else value

    def array_of(self, leaf: Any) -> Array | None:
        """Return a tensor of the framework as a C-contiguous array, which may share its memory; None for anything else."""
        del leaf
        return None

    def tensor_of(self, array: Array) -> Any:
        """Return an array, which belongs to the caller, as a tensor of the framework."""
        return array

    def check(self, name: str, value: Any, state: Any) -> bool:
        """Find out whether a state can be loaded, before anything changes; return False if only loading it shows that.

        Raises:
            ValueError: when it cannot.
        """
        if isinstance(value, np.ndarray):
            refuse_other(name, [("it", value.shape, value.dtype)], [("it", np.shape(state), np.asarray(state).dtype)])
        return not has_state(value)

    def load(self, value: Any, state: Any) -> bool:
        """Load a state into an object, in place; return False for a value that cannot take any, such as a number."""
        if has_state(value):
            value.load_state_dict(state)
        elif isinstance(value, np.ndarray):
            np.copyto(value, state)
        else:
            return False
        return True

    def random_states(self) -> dict[str, Any]:
        """Return copies of the states of the framework's random generators of this process."""
        return {}

    def set_random_states(self, states: dict[str, Any]) -> None:
        """Go back to states, which stay as they are."""


class _PlainKind(Kind):
    """Python's and NumPy's legacy random numbers, too."""

    def random_states(self) -> dict[str, Any]:
        version, numbers, following = random.getstate()
        words = np.frombuffer(array.array("I", numbers), np.uint32)  # ten times as fast as NumPy's way
        return {"python": (version, words, following), "numpy": np.random.get_state(legacy=False)}

    def set_random_states(self, states: dict[str, Any]) -> None:
        version, numbers, following = states["python"]
        random.setstate((version, tuple(numbers.tolist()), following))
        np.random.set_state(states["numpy"])


_kinds: list[Kind] = [_PlainKind()]  # by their order; the last one takes what no other does


def add(kind: Kind) -> None:
    """Let checkpoints have objects of another framework."""
    _kinds.append(kind)
    _kinds.sort(key=lambda each: each.order)


def kind_of(value: Any) -> Kind:
    """Return the kind of an object."""
    return next(kind for kind in _kinds if kind.owns(value))


def as_array(leaf: Any) -> tuple[str, Array] | None:
    """Return the framework and the array of a tensor; None for anything else."""
    for kind in _kinds:
        array = kind.array_of(leaf)
        if array is not None:
            return kind.name, array
    return None


def as_tensor(name: str, array: Array) -> Any:
    """Return an array as a tensor of a framework; as it is, where that is not in use."""
    return next((kind.tensor_of(array) for kind in _kinds if kind.name == name), array)


def all_random_states() -> dict[str, Any]:
    """Return the states of this process's random generators, by framework."""
    return {kind.name: kind.random_states() for kind in _kinds}


def set_all_random_states(states: dict[str, Any]) -> None:
    """Set those that are in use here, too."""
    for kind in _kinds:
        if kind.name in states:
            kind.set_random_states(states[kind.name])


def refuse_other(name: str, own: Sequence[tuple[str, Any, Any]], saved: Sequence[tuple[str, Any, Any]]) -> None:
    """Compare tensors with saved ones.

    Args:
        name: of the object.
        own: names, shapes and dtypes of its tensors.
        saved: of those in the checkpoint.

    Raises:
        ValueError: when they differ, naming the first one.
    """
    known, there = ({each[0]: f"{each[2]} {list(each[1])}" for each in tensors} for tensors in (own, saved))
    for each in dict.fromkeys((*known, *there)):
        if known.get(each) != there.get(each):
            raise ValueError(f"'{name}' is not what was saved: {each} is {known.get(each, 'missing')} here, and "
                             f"{there.get(each, 'missing')} in the checkpoint")


def has_state(value: Any) -> bool:
    """Return whether an object has `state_dict()` and `load_state_dict()`."""
    has = all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))
    return has and not isinstance(value, type)
