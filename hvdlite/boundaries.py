"""Points of a training loop at which the ranks of a job come, go or stop together."""

from __future__ import annotations

from hvdlite import api
from hvdlite.core.errors import ForkedProcessError, PeerLeftError
from hvdlite.runtime.runtime import Runtime


def boundary() -> None:
    """Pass a boundary of the training function: a point at which members of an elastic job may come and go.

    Raises:
        HostsUpdatedInterrupt: on all ranks at the same boundary, when they do.
    """
    worlds = api.worlds()
    if worlds.member is not None and worlds.runs_elastically:
        worlds.member.boundary(0 if worlds.runtime is None else worlds.runtime.joins)


def join(runtime: Runtime) -> int:
    """Take no further part until all ranks have called this; return the rank that came last. See `hvd.join`.

    In an elastic job, a rank that waits in this is at a boundary: members may come and go.

    Raises:
        HostsUpdatedInterrupt: when they do.
        PeerLeftError: when a rank leaves without joining.
    """
    try:
        last: int = runtime.join().wait()
    except PeerLeftError:
        worlds = api.worlds()
        if worlds.member is not None and worlds.runs_elastically:
            worlds.member.left_in_join()
        raise
    return last


def stop_requested() -> bool:
    """Return whether to stop: False, and then True in the same call on all ranks, when one of them has been asked to.

    Call it once a step on all ranks, save, and leave the loop when it is True; ranks that call it at other times stop at
    other steps. What asks is a signal to any rank: SIGTERM (from hvdrun, which gets it from a scheduler that takes the
    machine away), SIGUSR1 or SIGUSR2. From the first call on, in the main thread, until `shutdown()`, they no longer end
    the process; handlers of the script are still called. Nothing is sent until a signal comes.

    Raises:
        ForkedProcessError: in a process that was forked from a rank.
        HorovodInternalError: when the job ends while the ranks agree.
    """
    runtime, notice = api.runtime(), api.worlds().stop_notice
    if runtime.in_child:
        raise ForkedProcessError("stop_requested() was called in a process that was forked from a rank: only the rank knows")
    notice.watch({runtime.config.report_signal, runtime.config.traceback_signal})
    request = runtime.stop_request
    return request.count > 0 or request.is_due(notice.is_given, runtime.joins)
