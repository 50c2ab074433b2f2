"""The scopes of strategies: while a thread is inside a scope, the scope is called for each new object of some classes.

Rules
- A scope belongs to the thread that entered it. Instances that other threads make are not affected.
- The same scope may be entered again inside itself; another one may not, nor may two threads be in the same one.
- A class is patched from the first scope that any thread enters until the last one is left, also by an exception. A patch
  that other code has put on top meanwhile stays; the scope's own patch beneath it then does nothing.

`LaunchableStrategy` is the common part of all frontends' strategies: starting ranks from inside a script, and the names of
reductions.
"""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from hvdlite import api
from hvdlite.core.errors import UnsupportedError
from hvdlite.core.types import ReduceOp
from hvdlite.launch.run_function import run

Scope = TypeVar("Scope")
Kind = TypeVar("Kind")


class Scopes(Generic[Scope]):
    """The scopes of one framework.

    Args:
        made: for each class to watch, a function of the scope and an instance. It is called when the class's `__init__` has
            run in a thread inside a scope; the `__init__` of a subclass may not have finished.
        name: the word for a scope in messages.
    """

    def __init__(self, made: Mapping[type, Callable[[Scope, Any], None]], name: str) -> None:
        self._made = made
        self._name = name
        self._local = threading.local()
        self._lock = threading.Lock()
        self._threads: dict[int, str] = {}  # by a scope's identity: the name of the thread that is inside
        self._patches: list[_Patch[Scope]] = []

    def current(self) -> Scope | None:
        """Return the scope that this thread is in."""
        stack = self._stack()
        return stack[-1] if stack else None

    @contextmanager
    def entered(self, scope: Scope) -> Iterator[None]:
        """Return the context of a scope.

        Raises:
            RuntimeError: inside another one, or when another thread is inside this one.
        """
        stack = self._stack()
        if not stack:
            self._enter(scope)
        elif stack[-1] is not scope:
            raise RuntimeError(f"this is inside the scope of another {self._name}; make one for all, or leave its scope "
                               "first")
        stack.append(scope)
        try:
            yield
        finally:
            stack.pop()
            if not stack:
                self._leave(scope)

    def _stack(self) -> list[Scope]:
        stack: list[Scope] = self._local.__dict__.setdefault("stack", [])
        return stack

    def _enter(self, scope: Scope) -> None:
        with self._lock:
            if id(scope) in self._threads:
                raise RuntimeError(f"thread '{self._threads[id(scope)]}' is inside this {self._name}'s scope; give each "
                                   "thread its own")
            if not self._threads:
                self._patches = [_Patch(self, owner, made) for owner, made in self._made.items()]
            self._threads[id(scope)] = threading.current_thread().name

    def _leave(self, scope: Scope) -> None:
        with self._lock:
            del self._threads[id(scope)]
            if not self._threads:
                for patch in self._patches:
                    patch.undo()
                self._patches = []


class _Patch(Generic[Scope]):
    """One class's `__init__`, replaced."""

    def __init__(self, scopes: Scopes[Scope], owner: type, made: Callable[[Scope, Any], None]) -> None:
        self._owner = owner
        self._own = vars(owner).get("__init__")  # None: inherited
        self._in_force = True
        original: Any = owner.__init__  # type: ignore[misc]

        @functools.wraps(original)
        def __init__(instance: Any, *arguments: Any, **named: Any) -> None:
            original(instance, *arguments, **named)
            scope = scopes.current() if self._in_force else None
            if scope is not None:
                made(scope, instance)

        __init__.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]  # Keras reads it
        self._replacement = __init__
        owner.__init__ = __init__  # type: ignore[misc]

    def undo(self) -> None:
        self._in_force = False
        if vars(self._owner).get("__init__") is not self._replacement:
            return
        if self._own is None:
            del self._owner.__init__  # type: ignore[misc]
        else:
            self._owner.__init__ = self._own  # type: ignore[misc]


class LivingObjects(Generic[Kind]):
    """Objects with names, in order of construction, as long as they live.

    Attributes:
        count: of all that were ever added.
    """

    def __init__(self) -> None:
        self.count = 0
        self._objects: weakref.WeakValueDictionary[tuple[int, str], Kind] = weakref.WeakValueDictionary()

    def __iter__(self) -> Iterator[tuple[str, Kind]]:
        for (_, name), value in list(self._objects.items()):
            yield name, value

    def add(self, name: str, value: Kind) -> None:
        """Remember an object until it is gone."""
        self._objects[self.count, name] = value
        self.count += 1


_OPS = {"SUM": ReduceOp.SUM, "MEAN": ReduceOp.AVERAGE}


class LaunchableStrategy:
    """Base of strategies.

    Args:
        devices: the number of ranks for `launch` without a launcher; a list of devices stands for its length.

    Attributes:
        devices: that number, or None.

    Raises:
        ValueError: for anything else.
        UnsupportedError: in an elastic job.
    """

    def __init__(self, devices: int | Sequence[Any] | None) -> None:
        if api.is_elastic():
            raise UnsupportedError(f"{type(self).__name__} has one replica for each rank that there is when it is made, and "
                                   "the ranks of an elastic job change: use hvd.DistributedOptimizer and hvd.elastic.run, "
                                   "or start the job without --min-np and --host-discovery-script")
        count = len(devices) if isinstance(devices, (list, tuple)) else devices
        if count is not None and (not isinstance(count, int) or count < 1):
            raise ValueError(f"devices must be a number of ranks from 1, or a list of devices, not {devices!r}")
        self.devices = count

    def launch(self, main: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Call `main` on `devices` new ranks and return the result of rank 0, like `hvdlite.run`.

        Calls `main` in this process if a launcher has started it, or if there is no number of devices.

        Args:
            main: a function of the training.
            args: its arguments.
            kwargs: likewise.
        """
        if self.devices in (None, 1) or api.runtime().world.size > 1:
            return main(*args, **(kwargs or {}))
        return run(main, args, kwargs, np=self.devices)[0]


def parse_reduce_op(op: Any) -> ReduceOp:
    """Return the reduction that a strategy's `reduce` is asked for: "SUM" or "MEAN" in any case, or a `ReduceOp`.

    Raises:
        ValueError: for anything else.
    """
    name = getattr(op, "value", op)  # TensorFlow's are enums of these words
    if isinstance(name, str):
        if name.upper() not in _OPS:
            raise ValueError(f"reduce takes 'SUM' or 'MEAN', or a ReduceOp, not {op!r}")
        return _OPS[name.upper()]
    return ReduceOp(op)
