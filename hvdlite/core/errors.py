"""Every error hvdlite raises.

There are three families.

- A *call* error (bad argument, duplicate name) is raised by the call, before anything is enqueued.
- An *agreement* error (`MismatchError`) is raised on every rank when ranks disagree about one tensor; the job goes on.
- A *job* error (`PeerLostError` and its subclasses) ends the runtime: every pending and later call raises it. But
  the job goes on after `PeerLeftError`, raised only by work that needs the rank that left, and `StepFailedError`.

`HorovodInternalError` is the base of agreement and job errors, and of those call errors that depend on the state of the job
(`NotInitializedError`, `ForkedProcessError`). It has Horovod's name because elastic training scripts catch it by that name.

`HostsUpdatedInterrupt` is no error: elastic training ends a world with it at a boundary on which all ranks agree.
`WorldEnded` is a job error that a script's `except Exception` does not catch.
"""

from __future__ import annotations


class HvdliteError(Exception):
    """Base of every error defined by hvdlite."""


class HorovodInternalError(HvdliteError, RuntimeError):
    """Raised when a collective cannot complete; the base of agreement and job errors, and of some call errors."""


class NotInitializedError(HorovodInternalError, ValueError):
    """Raised when the runtime is used before `init()` or after `shutdown()`.

    A `ValueError` too, because that is what Horovod's `rank()` raises.
    """


class MismatchError(HorovodInternalError):
    """Raised on all ranks when ranks disagree about one tensor; other tensors are unaffected."""


class ReplicaMismatchError(HorovodInternalError):
    """Raised on all ranks when a tensor that should be the same on all of them is not, naming it and the ranks."""


class PeerLostError(HorovodInternalError):
    """Raised on the surviving ranks when a rank died or stopped answering."""

    def __init__(self, message: str, rank: int = -1, blamed: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.rank = rank  # the origin of the failure, never a rank that merely passed it on
        self.blamed = blamed  # the ranks that hold up the others though their processes live, as far as is known


class PeerFailedError(PeerLostError):
    """Raised on the other ranks when a rank raised an exception; carries that rank's traceback as text."""


class StepFailedError(PeerFailedError):
    """Raised by `step()` of a sharded optimizer when it has raised on the owner of some parameters; the job goes on."""


class PeerLeftError(PeerLostError):
    """Raised when work needs a rank that has already left the job normally."""


class StallError(PeerLostError):
    """Raised when a tensor has waited for some ranks too long (HVDLITE_STALL_SHUTDOWN_TIME_SECONDS); carries the report."""


class DeadlockError(PeerLostError):
    """Raised on all ranks when ranks wait for each other in a circle; names which rank waits for what."""


class OperationTimeoutError(HorovodInternalError, TimeoutError):
    """Raised when a call of a group has taken longer than allowed.

    Attributes:
        ranks: the ranks of the group that are known not to have made the call.
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class ForkedProcessError(HorovodInternalError):
    """Raised when a forked child (for example a DataLoader worker) uses its parent's runtime."""


class DuplicateNameError(HvdliteError, ValueError):
    """Raised at the call when a tensor of that name is still being processed on this rank."""


class UnsupportedError(HvdliteError, ValueError):
    """Raised at the call for a dtype, shape or operation that cannot be served."""


class ConfigError(HvdliteError, ValueError):
    """Raised for a knob with an unknown name or an invalid value."""


class CheckpointError(HvdliteError, RuntimeError):
    """Raised by `hvd.save` and `hvd.load` on all ranks when a checkpoint cannot be written, or none can be read."""


class LaunchError(HvdliteError, RuntimeError):
    """Raised by `init()` when the launch environment is incomplete or the ranks cannot meet."""


class ProtocolError(HvdliteError, RuntimeError):
    """Raised inside the control plane for a frame that is too long, out of order, or not authentic."""


class HostsUpdatedInterrupt(RuntimeError):
    """Raised by `state.commit()` and `state.check_host_updates()` on all ranks at the same boundary: members come or go.

    Attributes:
        skip_sync: accepted for Horovod's sake; whose state counts is decided for each new world.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("members of the job come or go; hvd.elastic.run goes on in the next world")
        self.skip_sync = skip_sync


class WorldEnded(BaseException):
    """Raised in elastic jobs when a script catches what ended its world (an error, or a change of members) and trains on."""
