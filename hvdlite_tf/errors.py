"""The errors of collectives as TensorFlow's: instances of hvdlite's class and of the one in `tf.errors` that Horovod raises.

    error                                                     in `tf.errors`
    a bad argument, a name in use, an unknown process set     InvalidArgumentError
    ranks disagree, or the runtime is not initialized         FailedPreconditionError
    a rank is lost, has failed or left, or waits too long     UnknownError

Inside `tf.function`, TensorFlow keeps the text of a Python exception only, and its code is Unknown for most classes. So the
failures of this process are remembered for a while. When a call of a `tf.function` raises an error with the text of one of
them, that one is raised instead: importing this module changes the classes of functions. What leaves a graph in other ways
(`tf.compat.v1.Session`, an iterator over `dataset.map`) stays TensorFlow's own error.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import tensorflow as tf

from hvdlite.core.errors import HorovodInternalError, HvdliteError, PeerLostError

P = ParamSpec("P")
R = TypeVar("R")

_REMEMBERED = 64
"""Failures; several operations of a graph can fail at once, and TensorFlow raises one of them."""


@dataclasses.dataclass(frozen=True)
class _Failure:
    """An exception, without its traceback: the frames hold tensors.

    Attributes:
        kind: its class.
        attributes: of the exception, such as the rank that was lost.
    """

    kind: Any
    message: str
    attributes: dict[str, Any]

    @property
    def text(self) -> str:
        """What TensorFlow's error contains if a function that a graph calls raises this."""
        return f"{self.kind.__name__}: {self.message}"

    def exception(self) -> Exception:
        """Return a new exception of both classes."""
        error: Exception = _both(self.kind, _counterpart(self.kind))(None, None, self.message)
        error.__dict__.update(self.attributes)
        return error


_failures: collections.deque[_Failure] = collections.deque(maxlen=_REMEMBERED)


def as_tensorflow(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function whose errors are to be TensorFlow's, too."""
    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            failure = _remembered(error)
            if failure is None:
                raise
            both = [failure.exception().with_traceback(error.__traceback__ and error.__traceback__.tb_next)]
            both[0].__cause__, both[0].__suppress_context__ = error.__cause__, error.__suppress_context__
        raise both.pop()  # here, so that its context is the script's; no variable keeps it, because it has this frame
    return wrapper


def remembering(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function that a graph calls, so that its errors leave a `tf.function` as what they are."""
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            _remembered(error)
            raise
    return wrapper


def _install() -> None:
    """Let calls of a `tf.function` raise the errors of its collectives as what they are."""
    kinds: list[Any] = [type(tf.function(lambda: None))]
    with contextlib.suppress(ImportError):  # without it, errors of such functions stay TensorFlow's
        from tensorflow.python.eager.polymorphic_function import concrete_function  # has no public name
        kinds.append(concrete_function.ConcreteFunction)
    for kind in kinds:
        if not hasattr(kind.__call__, "_raises_failures_of_hvdlite"):
            kind.__call__ = _raising_failures(kind.__call__)


def _raising_failures(call: Callable[P, R]) -> Callable[P, R]:
    @functools.wraps(call)  # with the module, by which autograph knows that this is not to be converted
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return call(*args, **kwargs)
        except tf.errors.OpError as error:
            failure = None if isinstance(error, _Both) else _failure_in(error.message)
            if failure is None:
                raise
        raise failure.exception()
    wrapper._raises_failures_of_hvdlite = True  # type: ignore[attr-defined]
    return wrapper


def _remembered(error: Exception) -> _Failure | None:
    """Remember an exception; return None for one that has no counterpart in `tf.errors`."""
    kind = type(error)
    if isinstance(error, _Both) or _counterpart(kind) is None:
        return None
    failure = _Failure(kind, str(error), _attributes(error))
    _failures.append(failure)
    return failure


def _attributes(error: Exception) -> dict[str, Any]:
    """Return the attributes of an exception, without those of TensorFlow and autograph."""
    return {name: value for name, value in vars(error).items() if not name.startswith(("_", "ag_"))}


def _failure_in(message: str) -> _Failure | None:
    """Return the latest failure whose text is in the message of an error, and forget it."""
    for failure in reversed(tuple(_failures)):
        if failure.text in message:
            try:
                _failures.remove(failure)
            except ValueError:  # another thread has found it
                pass
            return failure
    return None


def _counterpart(kind: type[Exception]) -> Any:
    if issubclass(kind, PeerLostError):
        return tf.errors.UnknownError
    if issubclass(kind, HorovodInternalError):
        return tf.errors.FailedPreconditionError
    if kind is ValueError or (issubclass(kind, HvdliteError) and issubclass(kind, ValueError)):
        return tf.errors.InvalidArgumentError
    return None


class _Both:
    """Base of the classes that are both hvdlite's and TensorFlow's."""


@functools.cache
def _both(own: Any, theirs: Any) -> Any:
    """Return a subclass of both classes, with the name of the first one.

    Its constructor takes what those of `tf.errors` take, because autograph and Keras make a new error from one that passes
    through them.
    """
    def __init__(self: Any, node_def: Any, op: Any, message: str, *details: Any) -> None:
        own.__init__(self, message)
        theirs.__init__(self, node_def, op, message, *details)
        self.args = (message,)

    def __reduce__(self: Any) -> Any:
        return own, (self.message,), _attributes(self)
    return type(own.__name__, (_Both, own, theirs), {"__init__": __init__, "__reduce__": __reduce__, "__doc__": own.__doc__,
                                                     "__module__": own.__module__, "__qualname__": own.__qualname__})


_install()
