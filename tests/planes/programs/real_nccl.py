"""Calls every function of a real NCCL without a GPU: prints what each one answers, one a line."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable
from typing import Any

from hvdlite.planes.nccl.api import IN_PROGRESS, SYMMETRIC, NcclApi, NcclError, UniqueId
from hvdlite.planes.nccl.communicator import NcclOptions

_ZEROS = ctypes.create_string_buffer(1 << 24)


def main(path: str) -> None:
    """Call them with a communicator of zeros: NCCL says that it is none, or that there is no driver."""
    library, none = NcclApi(path), ctypes.addressof(_ZEROS)
    config = NcclOptions(blocking=False, max_ctas=4, cta_policy="efficiency").config("hvdlite.0")
    print(library.version, library.text(4).split(" (")[0], library.text(IN_PROGRESS), sep="; ")
    calls: dict[str, tuple[Any, ...]] = {
        "ncclAllReduce": (256, 512, 10, 7, 0, none, 0), "ncclReduce": (256, 512, 10, 7, 0, 1, none, 0),
        "ncclBroadcast": (256, 512, 10, 1, 0, none, 0), "ncclReduceScatter": (256, 512, 10, 7, 0, none, 0),
        "ncclAllGather": (256, 512, 10, 1, none, 0),
        "ncclSend": (256, 10, 1, 0, none, 0), "ncclRecv": (256, 10, 1, 0, none, 0),
        "ncclGroupStart": (), "ncclGroupEnd": (), "ncclCommGetAsyncError": (none, ctypes.byref(ctypes.c_int())),
        "ncclMemAlloc": (ctypes.byref(ctypes.c_void_p()), 4096), "ncclMemFree": (4096,),
        "ncclCommWindowRegister": (none, 4096, 4096, ctypes.byref(ctypes.c_void_p()), SYMMETRIC),
        "ncclCommInitRankConfig": (ctypes.byref(ctypes.c_void_p()), 2, UniqueId(), 0, ctypes.byref(config)),
        "ncclCommShrink": (none, (ctypes.c_int * 1)(1), 1, ctypes.byref(ctypes.c_void_p()), None, 0),
        "ncclCommRevoke": (0, 0), "ncclCommAbort": (0,)}
    for function, arguments in calls.items():
        if not library.lacks([function]):
            _in_a_thread(lambda: _tell(library, function, arguments))  # noqa: B023 (it ends before the next one)


def _tell(library: NcclApi, function: str, arguments: tuple[Any, ...]) -> None:
    try:
        print(function, library.call(function, *arguments))
    except NcclError as error:
        print(function, error.status)


def _in_a_thread(function: Callable[[], None]) -> None:
    """Some calls that fail leave a group open, which belongs to the thread."""
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


if __name__ == "__main__":
    main(sys.argv[1])
