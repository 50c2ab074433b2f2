"""The comparison of replicas: tensors of all ranks are compared bit by bit, through short digests."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from hvdlite.core.array import Array
from hvdlite.core.errors import ReplicaMismatchError
from hvdlite.core.process_set import GLOBAL_PROCESS_SET_ID
from hvdlite.runtime.runtime import Runtime

_BITS = 64


def check_replicas(runtime: Runtime, named: Sequence[tuple[str, Array]], name: str,
                   process_set: int = GLOBAL_PROCESS_SET_ID) -> None:
    """Compare tensors over the ranks of a process set; all of them call this.

    Costs a pass over the tensors (BLAKE2b, about a gigabyte a second) and two small collectives.

    Args:
        named: C-contiguous, the same names in the same order on all ranks.
        name: of the collectives.

    Raises:
        ReplicaMismatchError: on all ranks, naming the first tensor that differs, how many do, and who has what.
    """
    ranks = runtime.members(process_set)
    names = "\n".join(each for each, _ in named)
    own = np.array([[len(named), _digest(names.encode())]], np.uint64)
    digests = np.array([[_digest(f"{array.dtype}{array.shape}".encode(), array) for _, array in named]], np.uint64)
    sets = runtime.allgather(f"{name}.names", own, process_set=process_set).wait()
    if (sets != sets[0]).any():
        counts = _groups(ranks, [f"{int(count)} tensors" for count in sets[:, 0]])
        raise ReplicaMismatchError(f"ranks check different tensors: {counts}; give the same names in the same order "
                                   "everywhere")
    found = runtime.allgather(f"{name}.digests", digests, process_set=process_set).wait()
    wrong = np.flatnonzero((found != found[0]).any(axis=0))
    if wrong.size:
        first = int(wrong[0])
        others = f" and {wrong.size - 1} of the other {len(named) - 1} tensors" if wrong.size > 1 else ""
        who = _groups(ranks, [f"digest {int(digest):016x}" for digest in found[:, first]])
        raise ReplicaMismatchError(
            f"replicas differ in '{named[first][0]}'{others}: {who}. Something changed it on some ranks only: a gradient "
            "that is not reduced, a random number without a common seed, or a broadcast that was left out")


def _digest(head: bytes, array: Array | None = None) -> int:
    digest = hashlib.blake2b(head, digest_size=_BITS // 8)
    if array is not None:
        digest.update(array.reshape(-1).view(np.uint8).data)
    return int.from_bytes(digest.digest(), "little")


def _groups(ranks: Sequence[int], values: Sequence[str]) -> str:
    """Return a text with the ranks of each value."""
    who: dict[str, list[int]] = {}
    for rank, value in zip(ranks, values, strict=True):
        who.setdefault(value, []).append(rank)
    return "; ".join(f"rank{'s' * (len(own) > 1)} {', '.join(map(str, own))}: {value}" for value, own in who.items())
