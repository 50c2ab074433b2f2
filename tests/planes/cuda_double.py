"""A test double of CuPy's low-level calls: which thread has which current device, and which GPUs have a context.

It is below `CupyDevice`, of which `tests/device_double.py` is a double.
"""

from __future__ import annotations

import itertools
import threading
import types
from typing import Any

import pytest

from hvdlite.planes.nccl import cupy_device, library
from hvdlite.planes.nccl.cupy_device import CupyDevice


class CudaError(RuntimeError):
    """Stands for `CUDARuntimeError`."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


class CudaDouble:
    """Stands for `cupy.cuda.runtime` and for the driver.

    Attributes:
        contexts: the GPUs with a context. To set a device makes one, and so does every call but `getDevice`.
        allocated: addresses.
        malloc_status: what `malloc` answers.
        driver_status, runtime_status: what the driver and the runtime answer about events.
    """

    streamNonBlocking, eventDisableTiming, memcpyDeviceToDevice = 1, 2, 3
    CUDARuntimeError = CudaError

    def __init__(self, count: int = 4) -> None:
        self.contexts: set[int] = set()
        self.allocated: set[int] = set()
        self.malloc_status = self.runtime_status = 0
        self.driver_status: int | None = None
        self._count = count
        self._local = threading.local()
        self._numbers = itertools.count(1)

    def device(self, monkeypatch: pytest.MonkeyPatch, index: int) -> CupyDevice:
        """Return the real object over this double."""
        nccl = types.SimpleNamespace(NcclError=KeyError, get_version=lambda: 22809)
        driver = types.SimpleNamespace(CUDADriverError=CudaError)
        cupy = types.SimpleNamespace(cuda=types.SimpleNamespace(runtime=self, driver=driver))
        monkeypatch.setattr(library, "load", lambda environment: cupy)
        monkeypatch.setattr(cupy_device.importlib, "import_module", lambda name: nccl)
        monkeypatch.setattr(cupy_device, "Driver", lambda: self)
        return CupyDevice(index, 0, {})

    # --- the runtime

    def getDeviceCount(self) -> int:
        return self._count

    def getDevice(self) -> int:
        return getattr(self._local, "device", 0)

    def setDevice(self, index: int) -> None:
        self._local.device = index
        self.contexts.add(index)

    def _used(self) -> int:
        self.contexts.add(self.getDevice())
        return next(self._numbers)

    def streamCreateWithPriority(self, *_: Any) -> int:
        return self._used()

    def eventCreateWithFlags(self, _: int) -> int:
        return self._used()

    def eventRecord(self, *_: int) -> None:
        self._used()

    def streamWaitEvent(self, *_: int) -> None:
        self._used()

    def eventQuery(self, event: int) -> int:
        return self.runtime_status

    def memsetAsync(self, *_: int) -> None:
        self._used()

    def streamSynchronize(self, _: int) -> None:
        self._used()

    def malloc(self, nbytes: int) -> int:
        if self.malloc_status:
            raise CudaError(self.malloc_status)
        self.allocated.add(pointer := self._used() * 4096)
        return pointer

    def free(self, pointer: int) -> None:
        self._used()
        assert self._local.mode == 2, "this would spoil a capture"
        self.allocated.remove(pointer)

    # --- the driver

    def relax_captures(self, mode: int = 2) -> int:
        before = getattr(self._local, "mode", 0)
        self._local.mode = mode
        return before  # type: ignore[no-any-return]

    def event_status(self, event: int) -> int | None:
        return self.driver_status

    def has_context(self, index: int) -> bool:
        return index in self.contexts
