"""The plane for NVIDIA GPUs: NCCL through CuPy, on plain addresses.

    plane.py         plans become launches, on a thread of their own; completions; the end
    collectives.py   each collective as calls of a communicator and of kernels
    peer_info.py     who is in a communicator, on which GPU, with which NCCL
    watcher.py       looks at launched work from time to time; aborts communicators
    device.py        what all of that needs of a GPU: the interface, and CuPy behind it
    kernels.py       one CUDA kernel for packing, casting and scaling many arrays
    library.py       finding NCCL: one copy, new enough
"""

from hvdlite.planes.nccl.plane import NcclPlane

__all__ = ["NcclPlane"]
