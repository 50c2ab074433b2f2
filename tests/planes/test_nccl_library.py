"""What NCCL and CuPy can do, finding them, and settings that cannot work."""

from __future__ import annotations

import importlib.util
import re
import types
from typing import Any

import pytest

from hvdlite.core.array import SUPPORTED_DTYPES
from hvdlite.core.errors import HorovodInternalError, UnsupportedError
from hvdlite.core.types import Collective, ReduceOp
from hvdlite.planes import selection
from hvdlite.planes.nccl import kernels, library
from hvdlite.planes.nccl.plane import NcclPlane
from tests.gpu_double.gpu import GpuDouble, plane

SUM, AVERAGE = ReduceOp.SUM, ReduceOp.AVERAGE


def test_what_it_carries() -> None:
    gpu = GpuDouble()
    access = plane(0, None, lambda: None, gpu)
    for dtype in SUPPORTED_DTYPES:
        for collective in (Collective.BROADCAST, Collective.ALLGATHER, Collective.ALLTOALL, Collective.SEND):
            assert access.supports(collective, None, dtype)
    reduces = {dtype for dtype in SUPPORTED_DTYPES if access.supports(Collective.ALLREDUCE, SUM, dtype)}
    assert reduces == set(SUPPORTED_DTYPES) - {"bool", "int16", "uint16"}
    means = {dtype for dtype in SUPPORTED_DTYPES if access.supports(Collective.REDUCESCATTER, ReduceOp.AVERAGE, dtype)}
    assert means == {"float16", "bfloat16", "float32", "float64", "complex64", "complex128"}, "sums of integers wrap"
    assert access.supports(Collective.ALLREDUCE, ReduceOp.MAX, "bool")
    assert not access.supports(Collective.ALLREDUCE, ReduceOp.PRODUCT, "complex64")
    assert not access.supports(Collective.ALLREDUCE, ReduceOp.ADASUM, "float32")
    gpu.end()


def test_without_cupy_the_reason_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(library, "cuda_of_torch", lambda: 13)
    assert library.unavailable_reason() == "CuPy is not installed: pip install 'hvdlite[nccl-cuda13]'"
    without = NcclPlane(0, "host", None, lambda: None, lambda index: GpuDouble().device)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="nccl-cuda13"):
        without.record_event(0)


@pytest.mark.parametrize(("version", "requires", "expected"), [
    ("2.11.0+cu130", [], 13), ("2.6.0+cu124", [], 12), ("2.13.0+cpu", [], None),
    ("2.11.0", ["numpy", "nvidia-nccl-cu13==2.28.9; platform_system == 'Linux'"], 13), ("2.11.0", ["numpy"], None)])
def test_cuda_of_torch(version: str, requires: list[str], expected: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(library.sys.modules, "torch", None)
    monkeypatch.setattr(library.importlib.metadata, "version", lambda name: version)
    monkeypatch.setattr(library.importlib.metadata, "requires", lambda name: requires)
    assert library.cuda_of_torch() == expected


@pytest.mark.parametrize(("cupy", "torch", "told"), [
    ({12}, 12, None), ({12}, None, None), (set(), 13, None), ({12}, 13, "CuPy is for CUDA 12, torch for CUDA 13"),
    ({12, 13}, 13, "pip uninstall cupy-cuda12x, then pip install --force-reinstall 'hvdlite.nccl-cuda13.'")])
def test_cuda_versions_that_do_not_fit_are_told(cupy: set[int], torch: int | None, told: str | None,
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name not in {f"cupy-cuda{major}x" for major in cupy}:
            raise library.importlib.metadata.PackageNotFoundError(name)
        return "14.2.0"
    monkeypatch.setattr(library.importlib.metadata, "version", version)
    monkeypatch.setattr(library.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(library, "cuda_of_torch", lambda: torch)
    (nccl,) = [plane for plane in selection.PLANES if plane.name == "nccl"]
    problem = nccl.unavailable_reason()  # as --check-build and --doctor show it
    assert re.search(told, problem) if told else problem == "", problem


@pytest.mark.parametrize("torch", [12, 13, None])
def test_cupy_for_another_cuda_than_torch_is_refused_at_the_first_tensor(torch: int | None,
                                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = types.SimpleNamespace(runtimeGetVersion=lambda: 12090)
    modules = {"cupy": types.SimpleNamespace(__version__="14.2.0", cuda=types.SimpleNamespace(runtime=runtime)),
               "cupy.cuda.nccl": types.SimpleNamespace(available=True, get_version=lambda: 22809)}
    monkeypatch.setattr(library.importlib, "import_module", modules.__getitem__)
    monkeypatch.setattr(library, "cuda_of_torch", lambda: torch)
    monkeypatch.setattr(library, "copies", set)
    monkeypatch.setitem(library.sys.modules, "torch", types.SimpleNamespace())
    if torch == 13:
        with pytest.raises(HorovodInternalError, match="CuPy is for CUDA 12, torch for CUDA 13"):
            library.load({})
    else:
        assert library.load({}) is modules["cupy"]


def test_one_copy_of_nccl_new_enough(tmp_path: Any) -> None:
    library.check(22809, {"/a/libnccl.so.2"})
    with pytest.raises(HorovodInternalError, match=r"2 copies.*/a/libnccl.so.2, /b/libnccl.so.2"):
        library.check(22809, {"/b/libnccl.so.2", "/a/libnccl.so.2"})
    with pytest.raises(HorovodInternalError, match=r"NCCL 2.16.2 is too old; 2.18.1"):
        library.check(21602, set())
    maps = tmp_path / "maps"
    maps.write_text("7f00-7f01 r-xp 00000000 08:01 12 /x/libnccl.so.2\n7f02-7f03 r--p 00000000 08:01 12 /x/libnccl.so.2\n"
                    "7f04-7f05 r--p 00000000 08:01 13 /y/libc.so.6\n", encoding="utf-8")
    assert library.copies(str(maps)) == {"/x/libnccl.so.2"}
    assert library.copies("/nowhere") == set()


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(HorovodInternalError, match="NCCL_COMM_BLOCKING"):
        library.load({"NCCL_COMM_BLOCKING": "0"})


@pytest.mark.parametrize(("environment", "warned"), [
    ({"NCCL_LAUNCH_ORDER_IMPLICIT": "1"}, "ncclInvalidUsage.*unset it"), ({"NCCL_LAUNCH_ORDER_IMPLICIT": "0"}, None),
    ({"CUDA_LAUNCH_BLOCKING": "1"}, "takes away all overlap"), ({}, None)])
def test_settings_that_harm_are_told(environment: dict[str, str], warned: str | None, monkeypatch: pytest.MonkeyPatch,
                                     caplog: pytest.LogCaptureFixture) -> None:
    modules = {"cupy": types.SimpleNamespace(__version__="14.2.0"),
               "cupy.cuda.nccl": types.SimpleNamespace(available=True, get_version=lambda: 22809)}
    monkeypatch.setattr(library.importlib, "import_module", modules.__getitem__)
    monkeypatch.setattr(library, "copies", set)
    monkeypatch.delitem(library.sys.modules, "torch", raising=False)
    library.load(environment)
    messages = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(messages) == (warned is not None) and all(re.search(warned or "", message) for message in messages)


def test_cupy_that_blocks_python_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = {"cupy": types.SimpleNamespace(__version__="13.6.0"), "cupy.cuda.nccl": types.SimpleNamespace(available=True)}
    monkeypatch.setattr(library.importlib, "import_module", modules.__getitem__)
    with pytest.raises(HorovodInternalError, match=r"CuPy 13.6.0 is too old; 14 is the oldest.*pip install 'hvdlite\[nccl"):
        library.load({})


def test_the_real_library_without_a_gpu() -> None:
    """CuPy and NCCL load, ids are made, and errors come with NCCL's text, on any machine that has them installed."""
    pytest.importorskip("cupy", reason="needs CuPy")
    from hvdlite.planes.nccl.cupy_device import CupyDevice
    from hvdlite.planes.nccl.driver import Driver
    cupy = library.load({})
    if not cupy.cuda.nccl.available:
        pytest.skip("needs NCCL")
    assert len(library.copies()) == 1
    assert cupy.cuda.nccl.get_version() >= library.OLDEST
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError:
        count = 0
    if count:
        pytest.skip("there is a GPU: tests/gpu")
    device = object.__new__(CupyDevice)
    device._cupy, device._nccl, device._runtime, device._driver = cupy, cupy.cuda.nccl, cupy.cuda.runtime, Driver()
    first, second = device.unique_id(), device.unique_id()
    assert len(first) == 128 and first != second
    with device.group():
        pass
    with pytest.raises(cupy.cuda.nccl.NcclError) as caught:
        device.communicator(1, first, 0)
    assert "NCCL_ERROR_UNHANDLED_CUDA_ERROR" in device.explain(None, caught.value)
    # A communicator that was never made says so: the arguments themselves are as CuPy wants them.
    none, runtime = cupy.cuda.nccl.NcclCommunicator.__new__(cupy.cuda.nccl.NcclCommunicator), cupy.cuda.runtime
    for call in (lambda: none.allReduce(256, 512, 10, 7, 0, 0), lambda: none.reduce(256, 512, 10, 7, 0, 1, 0),
                 lambda: none.broadcast(256, 512, 10, 1, 0, 0), lambda: none.reduceScatter(256, 512, 10, 7, 0, 0),
                 lambda: none.allGather(256, 512, 10, 1, 0), lambda: none.send(256, 10, 1, 0, 0),
                 lambda: none.recv(256, 10, 1, 0, 0), none.check_async_error):
        with pytest.raises(cupy.cuda.nccl.NcclError, match="invalid argument"):
            call()
    for call in (lambda: device.make_event(), lambda: device._runtime.eventRecord(1, 0), lambda: device.is_event_done(1),
                 lambda: runtime.streamWaitEvent(0, 1), lambda: device.is_capturing(0), lambda: device.copy(1, 2, 3, 0),
                 lambda: runtime.memsetAsync(1, 0, 1, 0), lambda: runtime.deviceGetPCIBusId(0),
                 lambda: runtime.eventCreateWithFlags(runtime.eventDisableTiming), lambda: runtime.malloc(256),
                 lambda: runtime.streamCreateWithPriority(runtime.streamNonBlocking, -5)):
        device.index = 0
        with pytest.raises(cupy.cuda.runtime.CUDARuntimeError):
            call()
    assert issubclass(cupy.cuda.driver.CUDADriverError, RuntimeError)
    function, (table,) = cupy.cuda.Function.__new__(cupy.cuda.Function), kernels.tables([(256, 512, 10)], 1024)
    with pytest.raises(cupy.cuda.runtime.CUDARuntimeError):  # and not a TypeError: a table is an argument by value
        device._start(types.SimpleNamespace(kernel=function), 1, table, 0)
    with pytest.raises(cupy.cuda.runtime.CUDARuntimeError):
        CupyDevice(0, 0, {})
