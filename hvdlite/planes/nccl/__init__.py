"""The plane for NVIDIA GPUs: NCCL through CuPy, on plain addresses.

    plane.py         launches plans from a thread of its own; creates and aborts communicators
    collectives.py   each collective as calls of a communicator and kernels
    peer_info.py     host, GPU and NCCL version of a rank, and their checks
    watcher.py       polls launched work and detects its errors; aborts communicators
    device.py        the interface of a GPU, and its implementation by CuPy
    driver.py        calls of CUDA's driver
    kernels.py       CUDA kernels that pack, cast and scale many arrays
    library.py       finds NCCL: a single copy of a supported version
"""

from hvdlite.planes.nccl.plane import NcclPlane

__all__ = ["NcclPlane"]
