"""Finds NCCL: one copy in the process, of a supported version; with installation advice."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.metadata
import importlib.util
import logging
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from hvdlite.core.errors import HorovodInternalError

_log = logging.getLogger("hvdlite")

OLDEST = 21801
"""NCCL 2.18.1, the oldest version that CuPy's wheels support."""
OLDEST_CUPY = 14
"""Before it, CuPy keeps the GIL while it records an event, which blocks when the GPU's queue is full."""
HANGS_IN_ABORT = range(22500, 22602)
"""`ncclCommAbort` of NCCL 2.25.1 hangs (pytorch issue 149153); fixed in 2.26.2."""


def unavailable_reason() -> str:
    """Return why GPUs cannot be used here and what to do; "" if they probably can. Does not import CuPy."""
    if importlib.util.find_spec("cupy") is None:
        return f"CuPy is not installed: pip install 'hvdlite[{suggested_extra()}]'"
    return ""


def suggested_extra() -> str:
    """Return the package extra for the CUDA version of the installed torch; CUDA 12 if it is unknown."""
    return f"nccl-cuda{cuda_of_torch() or 12}"


def cuda_of_torch() -> int | None:
    """Return the major CUDA version that torch was built for; None without torch and for CPU builds."""
    loaded = sys.modules.get("torch")
    version = getattr(getattr(loaded, "version", None), "cuda", None)
    if version:
        return int(version.split(".")[0])
    try:
        needs = importlib.metadata.requires("torch") or []
        local = importlib.metadata.version("torch").partition("+")[2]
    except importlib.metadata.PackageNotFoundError:
        return None
    if found := re.match(r"cu(\d\d)", local):
        return int(found.group(1))
    if local:
        return None
    majors = {int(found.group(1)) for need in needs if (found := re.match(r"nvidia-nccl-cu(\d\d)", need))}
    return max(majors, default=None)


def cuda_of_cupy() -> set[int]:
    """Return the major CUDA versions of CuPy's installed wheels; none without a wheel. Does not import CuPy."""
    found = set()
    for major in (12, 13):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            importlib.metadata.version(f"cupy-cuda{major}x")
            found.add(major)
    return found


def mixed_cuda(cupy: Iterable[int], torch: int | None) -> str:
    """Return what is wrong with the CUDA versions of CuPy and torch, and what to do; "" if nothing, or nothing is known."""
    others = sorted(set(cupy) - {torch})
    if torch is None or not others:
        return ""
    return (f"CuPy is for CUDA {' and '.join(map(str, others))}, torch for CUDA {torch}: they need different compilers and "
            f"libraries. pip uninstall {' '.join(f'cupy-cuda{major}x' for major in others)}, then "
            f"pip install --force-reinstall 'hvdlite[nccl-cuda{torch}]'")


def installation_problem() -> str:
    """Return why GPUs cannot be used here, or what is wrong with the installed packages; "" if nothing is known."""
    return unavailable_reason() or mixed_cuda(cuda_of_cupy(), cuda_of_torch())


def load(environment: Mapping[str, str]) -> Any:
    """Import CuPy and its NCCL, and return `cupy`.

    Raises:
        HorovodInternalError: if there is no usable NCCL, or more than one copy, or CuPy is for another CUDA version than
            torch.
    """
    if environment.get("NCCL_COMM_BLOCKING") == "0":
        raise HorovodInternalError("NCCL_COMM_BLOCKING=0 makes NCCL answer calls with 'in progress', which CuPy does not "
                                   "know: unset it")
    if environment.get("CUDA_LAUNCH_BLOCKING") == "1":
        _log.warning("CUDA_LAUNCH_BLOCKING=1 takes away all overlap, and can deadlock NCCL between hosts (nccl issue 750)")
    if environment.get("NCCL_LAUNCH_ORDER_IMPLICIT") == "1":
        _log.warning("NCCL_LAUNCH_ORDER_IMPLICIT=1 makes NCCL fail (ncclInvalidUsage) when two threads launch at once, "
                     "hvdlite's and one of the script's: unset it")
    try:
        cupy = importlib.import_module("cupy")
        nccl = importlib.import_module("cupy.cuda.nccl")  # loads libnccl; the module below it does not
    except ImportError as error:
        raise HorovodInternalError(f"CuPy cannot be imported: {error}. {_advice()}") from None
    if not nccl.available:
        raise HorovodInternalError("CuPy finds no libnccl.so.2 (CUPY_DEBUG_LIBRARY_LOAD=1 shows where it looks). "
                                   f"{_advice()}")
    if int(cupy.__version__.split(".")[0]) < OLDEST_CUPY:
        raise HorovodInternalError(f"CuPy {cupy.__version__} is too old; {OLDEST_CUPY} is the oldest that works. "
                                   f"{_advice()}")
    if "torch" in sys.modules and (
            problem := mixed_cuda([cupy.cuda.runtime.runtimeGetVersion() // 1000], cuda_of_torch())):
        raise HorovodInternalError(problem)
    check(nccl.get_version(), copies())
    return cupy


def check(version: int, paths: Iterable[str]) -> None:
    """Check and log the NCCL version.

    Raises:
        HorovodInternalError: if it is too old, or there are several copies.
    """
    paths = sorted(paths)
    if len(paths) > 1:
        raise HorovodInternalError(f"there are {len(paths)} copies of NCCL in this process: {', '.join(paths)}. Import the "
                                   "framework before hvdlite uses a GPU, and install CuPy and NCCL for its CUDA version: "
                                   f"pip install 'hvdlite[{suggested_extra()}]'")
    if version < OLDEST:
        raise HorovodInternalError(f"NCCL {version_text(version)} is too old; {version_text(OLDEST)} is the oldest that "
                                   f"works. {_advice()}")
    if version in HANGS_IN_ABORT:
        _log.warning("NCCL %s can hang when a job fails (pytorch issue 149153); 2.26.2 does not", version_text(version))
    _log.info("NCCL %s from %s", version_text(version), ", ".join(paths) or "an unknown place")


def copies(maps: str = "/proc/self/maps") -> set[str]:
    """Return the paths of the NCCL libraries mapped into this process; none where this is unknown."""
    try:
        with open(maps, encoding="utf-8", errors="replace") as file:
            return {line.split(maxsplit=5)[5].strip() for line in file if "libnccl.so" in line}
    except OSError:
        return set()


def version_text(code: int) -> str:
    """Return the text of an NCCL version code."""
    return f"{code // 10000}.{code // 100 % 100}.{code % 100}"


def last_error(communicator: int) -> str:
    """Return NCCL's message for its last error; "" if there is none.

    Args:
        communicator: the address of the `ncclComm_t`; 0 for any.
    """
    try:
        function = ctypes.CDLL("libnccl.so.2").ncclGetLastError  # the copy that is loaded: the loader goes by its name
    except (OSError, AttributeError):
        return ""
    function.restype, function.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
    text = function(communicator)
    return text.decode(errors="replace").strip() if text else ""


def _advice() -> str:
    return f"Install it with: pip install 'hvdlite[{suggested_extra()}]'"
