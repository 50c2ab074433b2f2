"""Makes the backend "hvdlite" known to `torch.distributed`. Importing this module imports nothing of the runtime."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any, Final

from torch.distributed import Backend, is_available

NAME: Final = "hvdlite"


def register() -> None:
    """Register the backend; torch's entry point for backends calls this at the end of `import torch`."""
    if is_available() and NAME.upper() not in Backend._plugins:
        Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])


def _create(options: Any, backend_options: Any = None) -> Any:
    """Make the backend of one process group on this rank; c10d calls this on all its ranks."""
    ranks = list(options.global_ranks_in_group) or None
    return _join(options.store, options.group_id, options.group_rank, options.group_size, ranks, options.timeout)


def _join(store: Any, name: str, rank: int, size: int, members: Sequence[int] | None, timeout: datetime.timedelta) -> Any:
    from torch._C import _distributed_c10d as c10d

    from hvdlite import api

    ordered = api.join_group(store, name, rank, size, timeout.total_seconds(), members)

    def join_part(store: Any, name: str, rank: int, ranks: Sequence[int], timeout: datetime.timedelta) -> Any:
        of_world = [members[each] for each in ranks] if members else list(ranks)
        return _join(store, name, rank, len(ranks), of_world, timeout)

    if "__init__" in vars(c10d.Backend):  # Python can derive from it: since torch 2.14
        from hvdlite_torch.distributed.backend import HvdliteBackend

        return HvdliteBackend(ordered, timeout, join_part)
    from hvdlite_torch.distributed.process_group import HvdliteProcessGroup

    return HvdliteProcessGroup(ordered, store, timeout, join_part)
