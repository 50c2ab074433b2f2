"""A device whose backward passes torch carries out on a thread of its own, as on a GPU; its memory is the host's.

torch starts a thread for each device of a backend, also of one that is written in Python. It stays in the process, so tests
use it in a process of their own. There is one such device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils import backend_registration
from torch.utils._pytree import tree_map

from hvdlite_torch.arrays import cuda
from tests.gpu_double.gpu import GpuDouble, plane
from tests.gpu_double.torch_cuda import install
from tests.gpu_double.worlds import Gpus

NAME = "gpudouble"
_IN_PLACE = {torch.ops.aten.add_.Tensor, torch.ops.aten.copy_.default, torch.ops.aten.div_.Tensor,
             torch.ops.aten.fill_.Scalar, torch.ops.aten.mul_.Scalar, torch.ops.aten.mul_.Tensor,
             torch.ops.aten.zero_.default}


class OnDevice(torch.Tensor):
    """A tensor on the device.

    Attributes:
        host: the tensor in the host's memory that has its values.
    """

    host: torch.Tensor
    device = property(lambda self: torch.device("cuda", 1))  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, host: torch.Tensor) -> OnDevice:
        made: Any = torch.Tensor._make_wrapper_subclass(cls, host.shape, host.stride(), dtype=host.dtype,
                                                        device=f"{NAME}:0", requires_grad=host.requires_grad)
        made.host = host.detach()
        return made  # type: ignore[no-any-return]

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def unwrapped(value: Any) -> Any:
            return value.host if isinstance(value, OnDevice) else torch.device("cpu") if isinstance(value, torch.device) \
                else value
        result = function(*tree_map(unwrapped, args), **tree_map(unwrapped, kwargs or {}))
        if function in _IN_PLACE:
            return args[0]
        return tree_map(lambda value: OnDevice(value) if isinstance(value, torch.Tensor) else value, result)


class _Module(backend_registration._DummyBackendModule):
    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16]


def on_device(model: Any) -> Any:
    """Move a model's parameters to the device."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, torch.nn.Parameter(OnDevice(parameter.detach())))
    return model


def install_device(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    """Make the device; it is rank 0's GPU. Tensors in the host's memory pass for those of the other ranks' GPUs."""
    backend_registration._setup_privateuseone_for_python_backend(NAME, _Module())
    gpus = install(monkeypatch)
    bytes_tensor: Callable[[Any], torch.Tensor] = cuda.bytes_tensor

    def made(rank: int, oob: Any, wake: Any) -> Any:
        gpus.made.append(GpuDouble(int(rank == 0), gpus.meetings))
        return plane(rank, oob, wake, gpus.made[-1])
    monkeypatch.setattr(gpus, "plane", made)
    monkeypatch.setattr(cuda, "cuda_index", lambda tensor: int(isinstance(tensor, OnDevice)))
    monkeypatch.setattr(cuda, "bytes_tensor", lambda array: OnDevice(bytes_tensor(array)) if array.device
                        else bytes_tensor(array))
    monkeypatch.setattr(cuda, "memory_device", lambda index: torch.device(NAME if index else "cpu"))
    return gpus
