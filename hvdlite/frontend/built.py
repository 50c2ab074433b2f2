"""Horovod's `*_built()` and `*_enabled()` functions, which report what is installed.

hvdlite has nothing to build: an engine is available when its Python package is installed. Scripts call these functions to
choose learning rates (`nccl_built() and ...`) or to skip tests.
"""

from __future__ import annotations

import importlib
import importlib.util

from hvdlite.api import runtime


def check_extension(*names: str) -> None:
    """Do nothing: hvdlite has no extensions that could be missing.

    Args:
        names: ignored.
    """


def mpi_built(verbose: bool = False) -> bool:
    """Return whether mpi4py is installed.

    Args:
        verbose: accepted for Horovod's sake.
    """
    return _installed("mpi4py")


def gloo_built(verbose: bool = False) -> bool:
    """Return whether torch, which brings Gloo, is installed.

    Args:
        verbose: accepted for Horovod's sake.
    """
    return _installed("torch")


def nccl_built(verbose: bool = False) -> int:
    """Return NCCL's version code (22803 for 2.28.3) as CuPy sees it, or 0 when it cannot be used.

    Args:
        verbose: accepted for Horovod's sake.
    """
    try:
        nccl = importlib.import_module("cupy.cuda.nccl")  # not at the top: nothing needs a GPU to be imported
        return int(nccl.get_version()) if nccl.available else 0
    except (ImportError, RuntimeError):
        return 0


def cuda_built(verbose: bool = False) -> bool:
    """Return whether CuPy, through which GPUs are used, is installed.

    Args:
        verbose: accepted for Horovod's sake.
    """
    return _installed("cupy")


def ccl_built(verbose: bool = False) -> bool:
    """Return False: AMD's and Intel's GPUs have no plane, and neither IBM's DDL nor oneCCL is used.

    Args:
        verbose: accepted for Horovod's sake.
    """
    return False


rocm_built = sycl_built = ddl_built = ccl_built


def mpi_enabled() -> bool:
    """Return whether tensors of this job travel over MPI."""
    return "mpi" in runtime().plane.name


def gloo_enabled() -> bool:
    """Return whether this job works without MPI: always, as long as MPI carries no tensors."""
    return not mpi_enabled()


def mpi_threads_supported() -> bool:
    """Return whether MPI may be called from several threads, the script's own beside this job's.

    Raises:
        ValueError: when this job does not use MPI, as in Horovod.
    """
    if not mpi_enabled():
        raise ValueError("this job does not use MPI, so its thread support does not matter")
    mpi = importlib.import_module("mpi4py.MPI")
    return bool(mpi.Query_thread() == mpi.THREAD_MULTIPLE)


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
