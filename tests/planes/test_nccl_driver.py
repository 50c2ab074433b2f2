"""CUDA's driver through ctypes: what is asked, without the GIL, and what is done without it."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import threading
import time
from pathlib import Path

import pytest

from hvdlite.planes.nccl.driver import Driver
from tests.gpu_double.cuda import CudaError
from tests.gpu_double.gpu import GpuDouble

COMPILER = shutil.which("gcc") or shutil.which("cc")
_STUB = """
#include <unistd.h>
static int mode;
int cuThreadExchangeStreamCaptureMode(int* wanted) { int before = mode; mode = *wanted; *wanted = before; return 0; }
int cuEventQuery(volatile int* event) {
    event[1] = 1;
    while (!event[0]) usleep(100);
    return event[0] == 1 ? 0 : event[0];
}
int cuDeviceGet(int* device, int index) { *device = index + 40; return index == 7; }
int cuDeviceGetUuid_v2(unsigned char* uuid, int device) {
    for (int i = 0; i < 16; i++) uuid[i] = i == 1 ? 0 : device;
    return 0;
}
int cuDevicePrimaryCtxGetState(int index, unsigned* flags, int* active) { *flags = 0; *active = index == 2; return 0; }
"""


@pytest.fixture
def stub(tmp_path: Path) -> str:
    """Return the path of a library that stands for the driver. An event is a status, of which 0
    blocks until it changes, and whether it was asked for."""
    if COMPILER is None:
        pytest.skip("needs a C compiler")
    source, library = tmp_path / "driver.c", tmp_path / "libdriver.so"
    source.write_text(_STUB, encoding="utf-8")
    subprocess.run([COMPILER, "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    return str(library)


def test_a_query_that_blocks_does_not_block_python(stub: str) -> None:
    """A driver's lock can be held by another thread of the process for long."""
    driver, event = Driver(stub), (ctypes.c_int * 2)()

    def finish() -> None:
        while not event[1]:
            time.sleep(0.001)
        event[0] = 1
    thread = threading.Thread(target=finish)
    thread.start()
    assert driver.event_status(ctypes.addressof(event)) == 0
    thread.join()
    event[0] = 600
    assert driver.event_status(ctypes.addressof(event)) == 600


def test_what_else_the_driver_is_asked(stub: str) -> None:
    driver = Driver(stub)
    assert [driver.has_context(index) for index in range(4)] == [False, False, True, False]
    assert driver.uuid(2) == "2a00" + "2a" * 14 and driver.uuid(7) == ""
    assert driver.relax_captures() == 0
    assert driver.relax_captures(0) == 2
    assert driver.relax_captures() == 0


def test_without_a_driver() -> None:
    driver = Driver("libnothing-of-this-name.so.1")
    driver.relax_captures()
    assert driver.event_status(1) is None and driver.has_context(0) and driver.uuid(0) == ""


@pytest.mark.parametrize(("driver", "runtime", "expected"), [
    (0, -1, True), (600, -1, False), (None, 0, True), (None, 600, False), (700, 700, None)])
def test_an_event_is_done_when_the_driver_or_cupy_says_so(driver: int | None, runtime: int, expected: bool | None,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = GpuDouble()
    monkeypatch.setattr(gpu, "event_status", lambda event: driver)
    monkeypatch.setattr(gpu, "eventQuery", lambda event: runtime)
    if expected is None:
        with pytest.raises(CudaError, match="status 700"):
            gpu.device.is_event_done(1)
    else:
        assert gpu.device.is_event_done(1) is expected
    gpu.end()
