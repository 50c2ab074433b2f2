"""Sends of torch tensors from one rank to another."""

from __future__ import annotations

import torch

from hvdlite import api
from hvdlite.core.types import Collective
from hvdlite_torch.collectives.below_autograd import (
    TorchHandle,
    as_runtime_array,
    contiguous_like,
    copy_back,
    mark_written,
    to_transportable,
)
from hvdlite_torch.uncompiled import leave_module_to_python


def send_async(tensor: torch.Tensor, dst: int, name: str | None = None) -> TorchHandle:
    """Like `send`, but return a handle immediately; `tensor` must not be written until it is done."""
    name = api.runtime().names.of_transfer("torch", name, api.rank(), dst)
    source = to_transportable(tensor, name, Collective.SEND)
    return TorchHandle(api.runtime().send(name, as_runtime_array(source, name), dst), lambda _: None)


def send(tensor: torch.Tensor, dst: int, name: str | None = None) -> None:
    """Send a tensor to rank `dst`, which calls `recv`; return when it has arrived. Like `hvdlite.send`.

    Args:
        tensor: any dtype and shape.
        dst: the rank that receives it.
    """
    send_async(tensor, dst, name).wait()


def recv_async(tensor: torch.Tensor, src: int, name: str | None = None) -> TorchHandle:
    """Like `recv`, but return a handle immediately; `tensor` must not be used until it is done."""
    name = api.runtime().names.of_transfer("torch", name, src, api.rank())
    target = to_transportable(contiguous_like(tensor), name, Collective.SEND)
    mark_written(tensor)
    return TorchHandle(api.runtime().receive(name, as_runtime_array(target, name), src), lambda _: copy_back(tensor, target))


def recv(tensor: torch.Tensor, src: int, name: str | None = None) -> torch.Tensor:
    """Overwrite `tensor` with what rank `src` sends, of the same shape and dtype; return it. Not differentiable.

    Args:
        tensor: written in place.
        src: the rank that sends.
        name: as given to `send`.

    Raises:
        MismatchError: otherwise like `send`.
    """
    return recv_async(tensor, src, name).wait()


leave_module_to_python(vars())
