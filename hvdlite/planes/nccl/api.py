"""NCCL's functions that CuPy does not have, through ctypes, from the copy of NCCL that CuPy has loaded.

Signatures, values and the layout of `ncclConfig_t` are those of nccl.h. Which functions there are depends on the version.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Final

from hvdlite.planes.nccl.library import version_text

SUCCESS: Final = 0
"""ncclSuccess."""
IN_PROGRESS: Final = 7
"""ncclInProgress: of a nonblocking communicator, which goes on with a call in the background."""
SYMMETRIC: Final = 1
"""NCCL_WIN_COLL_SYMMETRIC: collectives are called with the same offset in the window on all ranks."""
WINDOW_ALIGNMENT: Final = 4096
"""NCCL_WIN_REQUIRED_ALIGNMENT, in bytes."""
CTA_POLICIES: Final = {"default": 0, "efficiency": 1}
"""NCCL_CTA_POLICY_..."""
_UNDEFINED: Final = -2**31
"""NCCL_CONFIG_UNDEF_INT: NCCL chooses."""
_MAGIC: Final = 0xCAFEBEEF
_OF_LAYOUT: Final = 22700
"""The version whose `ncclConfig_t` is `Config`. Later ones append to it, and go by `version` and `size`."""

_comm, _pointer, _int, _size = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t


class UniqueId(ctypes.Structure):
    """`ncclUniqueId`, which is passed by value."""

    _fields_ = (("internal", ctypes.c_char * 128),)


class Config(ctypes.Structure):
    """`ncclConfig_t` of NCCL 2.27, without choices."""

    _fields_ = (("size", _size), ("magic", ctypes.c_uint), ("version", ctypes.c_uint), ("blocking", _int),
                ("cgaClusterSize", _int), ("minCTAs", _int), ("maxCTAs", _int), ("netName", ctypes.c_char_p),
                ("splitShare", _int), ("trafficClass", _int), ("commName", ctypes.c_char_p), ("collnetEnable", _int),
                ("CTAPolicy", _int), ("shrinkShare", _int), ("nvlsCTAs", _int))

    def __init__(self) -> None:
        super().__init__()
        for name, kind in self._fields_:
            if kind is _int:
                setattr(self, name, _UNDEFINED)
        self.size, self.magic, self.version = ctypes.sizeof(self), _MAGIC, _OF_LAYOUT


_FUNCTIONS: Final[dict[str, tuple[int, tuple[Any, ...]]]] = {
    "ncclMemAlloc": (21903, (ctypes.POINTER(_pointer), _size)),
    "ncclMemFree": (21903, (_pointer,)),
    "ncclCommWindowRegister": (22703, (_comm, _pointer, _size, ctypes.POINTER(_pointer), _int)),
    "ncclCommInitRankConfig": (_OF_LAYOUT, (ctypes.POINTER(_comm), _int, UniqueId, _int, ctypes.POINTER(Config))),
    "ncclCommGetAsyncError": (20400, (_comm, ctypes.POINTER(_int))),
    "ncclCommAbort": (20400, (_comm,)),
    "ncclCommRevoke": (22807, (_comm, _int)),
    "ncclCommShrink": (22703, (_comm, ctypes.POINTER(_int), _int, ctypes.POINTER(_comm), ctypes.POINTER(Config), _int)),
    "ncclGroupStart": (20000, ()),
    "ncclGroupEnd": (20000, ()),
    "ncclAllReduce": (20000, (_pointer, _pointer, _size, _int, _int, _comm, _pointer)),
    "ncclReduce": (20000, (_pointer, _pointer, _size, _int, _int, _int, _comm, _pointer)),
    "ncclBroadcast": (20202, (_pointer, _pointer, _size, _int, _int, _comm, _pointer)),
    "ncclReduceScatter": (20000, (_pointer, _pointer, _size, _int, _int, _comm, _pointer)),
    "ncclAllGather": (20000, (_pointer, _pointer, _size, _int, _comm, _pointer)),
    "ncclSend": (20703, (_pointer, _size, _int, _int, _comm, _pointer)),
    "ncclRecv": (20703, (_pointer, _size, _int, _int, _comm, _pointer)),
}
"""For each function: the version that has it first, as far as it is known, and the types of its arguments."""
WINDOWS: Final = ("ncclMemAlloc", "ncclMemFree", "ncclCommWindowRegister")
CONFIG: Final = ("ncclCommInitRankConfig",)
SHRINK: Final = ("ncclCommRevoke", "ncclCommShrink")


class NcclError(RuntimeError):
    """A call of NCCL has failed.

    Attributes:
        status: a `ncclResult_t`.
    """

    def __init__(self, function: str, status: int, text: str) -> None:
        super().__init__(f"{function}: {text} (ncclResult_t {status})")
        self.status = status


class NcclApi:
    """NCCL through ctypes, which releases the GIL. Communicators, windows and streams are addresses.

    Args:
        name: of the library. The loader goes by it: it returns the copy that is in the process already.

    Attributes:
        version: the code of its version; 0 without a library.
    """

    def __init__(self, name: str = "libnccl.so.2") -> None:
        self.version = 0
        self._functions: dict[str, Any] = {}
        self._why = ""
        try:
            library: Any = ctypes.CDLL(name)
            self._error_string = library.ncclGetErrorString
            code = _int()
            library.ncclGetVersion(ctypes.byref(code))
        except (OSError, AttributeError) as error:
            self._why = f"NCCL cannot be called through ctypes: {error}"
            return
        self._error_string.restype, self._error_string.argtypes = ctypes.c_char_p, [_int]
        self.version = code.value
        for function, (since, arguments) in _FUNCTIONS.items():
            if self.version >= since and hasattr(library, function):
                self._functions[function] = getattr(library, function)
                self._functions[function].argtypes = arguments

    def lacks(self, functions: Sequence[str]) -> str:
        """Return why some of these functions cannot be called; "" if all can."""
        missing = [function for function in functions if function not in self._functions]
        if not missing or self._why:
            return self._why if missing else ""
        since = max(_FUNCTIONS[function][0] for function in missing)
        return f"NCCL {version_text(self.version)} has no {missing[0]}; {version_text(since)} has it"

    def call(self, function: str, *arguments: Any) -> int:
        """Call a function; return `SUCCESS` or `IN_PROGRESS`.

        Raises:
            NcclError: when it fails, or when there is no such function.
        """
        called = self._functions.get(function)
        if called is None:
            raise NcclError(function, -1, self.lacks([function]))
        status = int(called(*arguments))
        if status not in (SUCCESS, IN_PROGRESS):
            raise NcclError(function, status, self.text(status))
        return status

    def text(self, status: int) -> str:
        """Return NCCL's text for a status."""
        return str(self._error_string(status).decode(errors="replace"))

    # --- memory and windows ------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> int:
        """Return memory of the current device that can be a window."""
        pointer = _pointer()
        self.call("ncclMemAlloc", ctypes.byref(pointer), nbytes)
        return pointer.value or 0

    def free(self, pointer: int) -> None:
        """Free memory of `allocate`, which nothing uses any more."""
        self.call("ncclMemFree", pointer)

    def register_window(self, communicator: int, pointer: int, nbytes: int) -> ctypes.c_void_p:
        """Register memory as a symmetric window. All ranks of the communicator must call this; it blocks until they have.

        Return where its handle is when the communicator is ready: null if NCCL has no use for it. A handle does not mean
        that there is a window: where it can make none, NCCL 2.28 returns that of an ordinary registration.

        The window lasts as long as the communicator. To deregister one is not offered: NCCL places the next window at an
        offset that each rank computes from its own history of registrations, and calls need equal offsets on all ranks.
        """
        window = _pointer()
        self.call("ncclCommWindowRegister", communicator, pointer, nbytes, ctypes.byref(window), SYMMETRIC)
        return window

    # --- communicators -----------------------------------------------------------------------------------------------

    def init(self, size: int, unique_id: bytes, rank: int, config: Config) -> int:
        """Return a new communicator; all its ranks call this. `config` must last as long as it."""
        made = _comm()
        self.call("ncclCommInitRankConfig", ctypes.byref(made), size, UniqueId.from_buffer_copy(unique_id), rank,
                  ctypes.byref(config))
        return made.value or 0

    def shrink(self, communicator: int, excluded: Sequence[int], made: ctypes.c_void_p) -> None:
        """Make a communicator, configured like this one, of the ranks that are not excluded, in their order; all those call
        this.

        Args:
            made: where its address is when this one is ready again. It must last until this one has been aborted: NCCL
                stores into it when it comes to an end, also after a failure.
        """
        ranks = (_int * len(excluded))(*excluded)
        self.call("ncclCommShrink", communicator, ranks, len(excluded), ctypes.byref(made), None, 0)

    def revoke(self, communicator: int) -> None:
        """Stop what is under way, and permit nothing but `shrink` and `abort`; each rank calls this for itself."""
        self.call("ncclCommRevoke", communicator, 0)

    def state(self, communicator: int) -> int:
        """Return `SUCCESS` or `IN_PROGRESS`.

        Raises:
            NcclError: when the communicator has failed.
        """
        status = _int()
        self.call("ncclCommGetAsyncError", communicator, ctypes.byref(status))
        if status.value not in (SUCCESS, IN_PROGRESS):
            raise NcclError("work under way", status.value, self.text(status.value))
        return status.value
