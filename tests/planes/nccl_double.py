"""The plane for GPUs, over a double, as a plane for NumPy arrays: so the contract suite runs on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np
import pytest

from hvdlite.core.device import DeviceArray
from hvdlite.core.types import Collective, ReduceOp
from hvdlite.negotiation.messages import Response
from hvdlite.planes.base import FusionBuffer, Plan, Plane, WaitUntil
from hvdlite.planes.nccl.plane import NcclPlane
from tests.gpu_double.cuda import view
from tests.gpu_double.gpu import GpuDouble, plane
from tests.gpu_double.nccl import Meetings
from tests.planes.makers import Board, BoardOob

_REDUCTIONS = (Collective.ALLREDUCE, Collective.REDUCE, Collective.REDUCESCATTER)


class OnDouble:
    """A `Plane` whose arrays pass for a GPU's memory."""

    name = "nccl"

    def __init__(self, real: NcclPlane, gpu: GpuDouble) -> None:
        self.real, self.gpu = real, gpu

    def execute(self, plan: Plan, wait_until: WaitUntil) -> None:
        response = msgspec.structs.replace(plan.response, device="cuda")
        if not self.supports(response):
            pytest.skip(f"NCCL has no {response.collective.name} {response.op.name} of {response.dtype}")
        moved = [wrapped(array) for array in plan.sources], [wrapped(array) for array in plan.outputs]
        self.real.execute(Plan(plan.sequence, plan.ranks, response, *moved, plan.buffer_slice, plan.splits),
                          wait_until).wait()
        assert self.gpu.error is None, self.gpu.error

    def supports(self, response: Response) -> bool:
        op = ReduceOp(response.op) if response.collective in _REDUCTIONS else None
        return self.real.supports(response.collective, op, response.dtype)

    def add_process_set(self, process_set_id: int, ranks: tuple[int, ...]) -> None:
        self.real.add_process_set(process_set_id, ranks)

    def remove_process_set(self, process_set_id: int, wait_until: WaitUntil) -> None:
        self.real.remove_process_set(process_set_id, wait_until)

    def fusion_buffer(self, nbytes: int, ranks: tuple[int, ...]) -> FusionBuffer | None:
        own = self.gpu.device.allocate(nbytes)
        memory = view(own.pointer, nbytes, np.dtype(np.uint8))
        self.memory = own  # keep it
        return FusionBuffer(memory)

    def tune(self, settings: Mapping[str, int]) -> None:
        pass

    def close(self) -> None:
        self.real.close(None)
        self.gpu.end()
        assert self.gpu.contexts <= {self.gpu.device.index}


def wrapped(array: Any) -> DeviceArray | None:
    """Describe a NumPy array as a GPU's memory."""
    if array is None:
        return None
    return DeviceArray(array.ctypes.data, array.shape, array.dtype, 0, array)


def nccl(size: int, wake_rank: Callable[[int], None]) -> list[Plane]:
    board, meetings = Board(lambda: [wake_rank(rank) for rank in range(size)]), Meetings()
    planes: list[Plane] = []
    for rank in range(size):
        gpu = GpuDouble(rank, meetings)
        planes.append(OnDouble(plane(rank, BoardOob(board, rank), lambda rank=rank: wake_rank(rank), gpu), gpu))
    return planes
