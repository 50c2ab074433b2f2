"""The plane for NVIDIA GPUs: NCCL through CuPy, on plain addresses.

    plane.py         launches plans from a thread of its own; creates and aborts communicators
    collectives.py   each collective as calls of a communicator and kernels
    communicators.py made by the ranks of a process set together, after a check of their hosts, GPUs and versions
    watcher.py       polls launched work and detects its errors; aborts communicators
    cupy_device.py   a GPU through CuPy, and its pool of events
    driver.py        calls of CUDA's driver
    kernels.py       CUDA kernels that pack, cast and scale many arrays
    library.py       finds NCCL: a single copy of a supported version
"""

from hvdlite.planes.nccl.plane import NcclPlane

__all__ = ["NcclPlane"]
