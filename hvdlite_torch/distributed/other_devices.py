"""Backends of other devices in a process group of ours: "cpu:hvdlite,cuda:nccl", before torch 2.14.

There torch makes no other backend for a group that Python implements, so they are made here when they are first needed.
"""

from __future__ import annotations

import datetime
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d
from torch.distributed import distributed_c10d

from hvdlite_torch.distributed.errors import UnsupportedArgumentError

_TYPES = c10d.ProcessGroup.BackendType


def named(group: Any, own: str) -> dict[str, str]:
    """Return the backends that the script has named for a group, by type of device, except `own`."""
    config = distributed_c10d._world.pg_backend_config.get(group, "")
    pairs = [each.split(":") for each in config.split(",") if ":" in each]
    return {device: backend for device, backend in pairs if backend != own}


def make(name: str, device: str, group: Any, timeout: datetime.timedelta) -> tuple[Any, Any]:
    """Make a backend as torch does; return it and its type.

    Raises:
        UnsupportedArgumentError: for a backend that cannot be made here.
    """
    prefix = distributed_c10d._world.pg_map[group][1]
    store, rank, size = c10d.PrefixStore(f"{device}/", prefix), group.rank(), group.size()
    ranks = list(distributed_c10d._world.pg_group_ranks.get(group, range(size)))
    if name in ("nccl", "xccl"):
        kind: Any = getattr(c10d, f"ProcessGroup{name.upper()}", None)
        if kind is None:
            raise UnsupportedArgumentError(f'backend "{name}" for {device}: this torch ({torch.__version__}) was built '
                                           "without it; install one for this device, or name another backend")
        options = kind.Options()
        options._timeout, options.global_ranks_in_group, options.group_name = timeout, ranks, group.group_name
        return kind(store, rank, size, options), getattr(_TYPES, name.upper())
    if name == "gloo":
        return c10d.ProcessGroupGloo(store, rank, size, timeout=timeout), _TYPES.GLOO
    plugin = torch.distributed.Backend._plugins.get(name.upper())
    if plugin is None:
        raise UnsupportedArgumentError(f'backend "{name}" for {device} cannot be used beside hvdlite on torch '
                                       f"{torch.__version__}: only nccl, xccl, gloo and backends that are registered")
    if not plugin.extended_api:
        return plugin.creator_fn(store, rank, size, timeout), _TYPES.CUSTOM
    options = c10d._DistributedBackendOptions()
    options.store, options.group_rank, options.group_size, options.timeout = store, rank, size, timeout
    options.group_id, options.global_ranks_in_group = group.group_name, ranks
    return plugin.creator_fn(options, None), _TYPES.CUSTOM
