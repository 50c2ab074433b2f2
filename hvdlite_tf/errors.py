"""The errors of collectives as TensorFlow's: instances of hvdlite's class and of the one in `tf.errors` that Horovod raises.

    error                                                     in `tf.errors`
    a bad argument, a name in use, an unknown process set     InvalidArgumentError
    ranks disagree, or the runtime is not initialized         FailedPreconditionError
    a rank is lost, has failed or left, or waits too long     UnknownError

Inside `tf.function`, TensorFlow keeps the text of a Python exception only, and its code is Unknown for most classes. So the
failures of this process are remembered for a while. When a call of a `tf.function` raises an error with the text of one of
them, that one is raised instead: importing this module changes the classes of functions. What leaves a graph in other ways
(`tf.compat.v1.Session`, an iterator over `dataset.map`) stays TensorFlow's own error.

`graph_name` names collectives inside `tf.function` by the lines of the script that call them. A name must be equal on all
ranks (docs/protocol.md#names). Ranks trace a function at different times and unequally often (another batch size, a summary
or a checkpoint on one rank only), so a name contains nothing that counts traces, graphs or tensors of the process. Lines of
the script are equal on all ranks. If a trace passes a line several times, the name has a number, counted within the graph of
that trace; a loop or a branch of TensorFlow is a graph of its own. The iterations of a loop share a name: TensorFlow runs
them one after the other, as it does all collectives of a function.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ParamSpec, TypeVar

import keras
import tensorflow as tf

from hvdlite import api
from hvdlite.core.errors import HorovodInternalError, HvdliteError, PeerLostError
from hvdlite.core.texts import encodable

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


_PACKAGES = tuple(os.path.dirname(os.path.abspath(path)) + os.sep for path in (
    __file__, api.__file__, keras.__file__, tf.__file__))
"""Frames of these packages are not the script's."""
_TRACING = os.sep + "polymorphic_function" + os.sep
"""Part of the path of TensorFlow's files that begin a trace; outer frames differ from trace to trace."""
_DEPTH = 3
"""The number of calls of the script that a name contains."""

_passed: weakref.WeakKeyDictionary[Any, Counter[tuple[str, int]]] = weakref.WeakKeyDictionary()
"""The number of times that each graph has passed a name, by process set."""


def graph_name(kind: str, process_set: int) -> str:
    """Return the name of the collective that is being traced: the lines of the script that call it, innermost first."""
    frames = [(frame[0], frame[1], frame[2]) for frame in reversed(tf.no_op().traceback)]
    name = f"{kind}.{'.from.'.join(itertools.islice(_places(frames), _DEPTH)) or 'graph'}"
    passed = _passed.setdefault(tf.compat.v1.get_default_graph(), Counter())
    count = passed[name, process_set]
    passed[name, process_set] += 1
    return encodable(f"{name}#{count}" if count else name)  # a file's name is any bytes


def _places(frames: Iterable[tuple[str, int, str]]) -> Iterator[str]:
    """Yield the script's lines within the trace, one for each function, of a traceback whose innermost frame comes first."""
    frames = list(frames)
    is_traced = any(_TRACING in file for file, _, _ in frames)
    last = None
    for file, line, function in frames:
        if _TRACING in file:
            return
        if file.startswith(_PACKAGES) or (file, function) == last:  # the latter: a loop or a branch in that function
            continue
        last = file, function
        yield f"{os.path.basename(file)}:{line}.{function}"
        if not is_traced:
            return  # a graph of the script's own: its callers may differ between ranks
