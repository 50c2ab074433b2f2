"""The information that ranks exchange before they create a communicator, and its checks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from hvdlite.core.errors import HorovodInternalError
from hvdlite.planes.nccl.library import version_text

_SEVERAL_ON_ONE: Final = 23000
"""The version from which NCCL accepts several ranks on one GPU."""


class PeerInfo(msgspec.Struct, frozen=True):
    """One rank's host, GPU, NCCL version and kernels."""

    host: str
    gpu: str  # from `Device.bus_id`
    uuid: str  # from `Device.uuid`
    version: int  # the code of the NCCL version
    has_kernels: bool = True  # from `Device.has_kernels`; ranks use kernels only where all have them
    unique_id: bytes = b""  # the communicator's id; set by the first rank only


def check_peers(ranks: Mapping[int, PeerInfo], *, shared: bool) -> None:
    """Check that these ranks can create a communicator; the result is the same on all of them.

    Args:
        shared: whether several ranks may use one GPU.

    Raises:
        HorovodInternalError: naming the ranks and both values.
    """
    first, *others = sorted(ranks)
    for rank in others:
        if ranks[rank].version != ranks[first].version:
            raise HorovodInternalError(f"rank {first} has NCCL {version_text(ranks[first].version)} and rank {rank} has "
                                       f"{version_text(ranks[rank].version)}: install one version everywhere")
    users: dict[tuple[str, str, str], int] = {}
    owners: dict[tuple[str, str], int] = {}
    for rank in sorted(ranks) if not shared else ():
        mine = ranks[rank]
        other = users.setdefault((mine.host, mine.gpu, mine.uuid), rank)
        if other != rank:
            raise HorovodInternalError(
                f"ranks {other} and {rank} use the same GPU ({mine.gpu}): call "
                "torch.cuda.set_device(hvd.local_rank()) after init(), before anything is put on a GPU; start at most as "
                "many ranks a host as it has GPUs. For tests, HVDLITE_SHARED_GPU=1 allows it (NCCL before 2.30 also needs "
                "another NCCL_HOSTID for each rank)")
        other = owners.setdefault((mine.host, mine.gpu), rank)
        if other != rank and mine.version < _SEVERAL_ON_ONE:
            raise HorovodInternalError(
                f"ranks {other} and {rank} use slices (MIG) of one GPU ({mine.gpu}), which NCCL "
                f"{version_text(mine.version)} refuses: use NCCL 2.30 or newer, or another GPU for each rank")
