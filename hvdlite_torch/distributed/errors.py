"""Errors of process groups: both the types that `torch.distributed` documents and hvdlite's own."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from torch.distributed import DistBackendError

from hvdlite.core.errors import HorovodInternalError, HvdliteError, OperationTimeoutError, UnsupportedError

if TYPE_CHECKING:
    from hvdlite.groups.group import Group

    _BackendError = RuntimeError
else:
    _BackendError = DistBackendError  # torch's, a `RuntimeError`


class WaitTimeoutError(HorovodInternalError, _BackendError):
    """Raised by `Work.wait(timeout)` when the operation is still under way after that time; it stays under way."""


class ArgumentError(ValueError, RuntimeError):
    """Raised at the call for arguments that do not fit; a `RuntimeError` too, as Gloo's errors are."""


class UnsupportedArgumentError(UnsupportedError, TypeError, RuntimeError):
    """Raised at the call for a dtype, layout or device that hvdlite cannot serve; a `ValueError` and a `TypeError`, too."""


def as_backend_error(error: Exception) -> Exception:
    """Return an error of the runtime as one that is a `torch.distributed.DistBackendError` too; others as they are.

    The result is a new object: an exception collects the traceback of each place that raises it.
    """
    kind: Any = type(error)
    if not isinstance(error, HvdliteError):
        return error
    copied: Exception = _combined(kind)(*error.args)
    copied.__dict__.update(error.__dict__)
    copied.__cause__ = error.__cause__
    return copied


def missed(error: OperationTimeoutError, group: Group, seconds: float, *, all_ranks: bool) -> Exception:
    """Return the error of a monitored barrier, in the words of torch's.

    Args:
        seconds: its timeout.
        all_ranks: whether to name all ranks that have not come, or the first one.
    """
    absent, limit = error.ranks if all_ranks else error.ranks[:1], round(seconds * 1000)
    own, first = group.members[group.rank], group.members[0]
    text = (f"Rank{'s' if len(absent) > 1 else ''} {', '.join(group.members[rank] for rank in absent)} failed to pass "
            f"monitoredBarrier in {limit} ms")
    if group.rank:
        text = (f"Rank {own} successfully reached monitoredBarrier, but received errors while waiting for send/recv from "
                f"rank {first}: {text}")
    else:
        text += f"; Rank {own} timed out in monitoredBarrier after {limit} ms"
    return as_backend_error(OperationTimeoutError(text, error.ranks))


@functools.cache
def _combined(kind: Any) -> Any:
    """Return a class that derives from an hvdlite error and from torch's; `ValueError`s stay as they are."""
    if issubclass(kind, (_BackendError, ValueError)):
        return kind
    def reduce(error: Any) -> tuple[Any, ...]:
        return _rebuilt, (kind, error.args, error.__dict__)

    return type(kind.__name__, (kind, _BackendError), {"__doc__": kind.__doc__, "__module__": kind.__module__,
                                                       "__reduce__": reduce})


def _rebuilt(kind: Any, arguments: tuple[Any, ...], attributes: dict[str, Any]) -> Exception:
    """Return an error of a combined class, as it was pickled."""
    error: Exception = _combined(kind)(*arguments)
    error.__dict__.update(attributes)
    return error
