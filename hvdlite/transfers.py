"""Sends of NumPy and CuPy arrays from one rank to another."""

from __future__ import annotations

from numpy.typing import ArrayLike

from hvdlite.api import rank, runtime
from hvdlite.core.array import Array
from hvdlite.core.types import Collective
from hvdlite.handoff.handle import Handle
from hvdlite.ops import handle_of, readable, result_of, writable


def send_async(array: ArrayLike, dst: int, name: str | None = None) -> Handle:
    """Like `send`, but return a handle immediately; `array` must not be written until it is done."""
    source = readable(array, name, Collective.SEND)
    return handle_of(runtime().send(runtime().names.of_transfer("numpy", name, rank(), dst), source, dst), source)


def send(array: ArrayLike, dst: int, name: str | None = None) -> None:
    """Send an array to rank `dst`, which calls `recv`; return when it has arrived there.

    Two ranks that send to each other before they receive wait for each other: let one receive first, or use `send_async`.

    Args:
        array: any dtype and shape.
        dst: the rank that receives it.
        name: as given to `recv`; unnamed sends from one rank to another are matched by their order.

    Raises:
        MismatchError: on both ranks, when shape or dtype differ; or when one of them has joined.
        PeerLostError: when a rank of the job died.
        UnsupportedError: for a rank that does not exist, or this one.
    """
    send_async(array, dst, name).wait()


def recv_async(array: Array, src: int, name: str | None = None) -> Handle:
    """Like `recv`, but return a handle immediately; `array` must not be used until it is done."""
    target = writable(array, name, Collective.SEND)
    return handle_of(runtime().receive(runtime().names.of_transfer("numpy", name, src, rank()), target, src), target)


def recv(array: Array, src: int, name: str | None = None) -> Array:
    """Overwrite a C-contiguous array with what rank `src` sends, of the same shape and dtype; return it. See `send`.

    Args:
        array: C-contiguous; written in place.
        src: the rank that sends.
        name: as given to `send`.

    Raises:
        MismatchError: otherwise like `send`.
    """
    return result_of(recv_async(array, src, name))
