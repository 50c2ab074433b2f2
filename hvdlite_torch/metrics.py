"""torchmetrics over all ranks, as under torch.distributed."""

from __future__ import annotations

from typing import Any

import torch

from hvdlite import api
from hvdlite.core.process_set import ProcessSet, global_process_set
from hvdlite_torch.collectives.broadcasts import gather_tensors
from hvdlite_torch.uncompiled import leave_module_to_python


def synchronize_metrics(module: torch.nn.Module) -> None:
    """Make the torchmetrics metrics of a module, or a metric itself, gather their states from all of hvdlite's ranks.

    Metrics with their own `dist_sync_fn` are unchanged. From then on, all ranks call `compute()` together. A metric's
    `process_group` may be a `ProcessSet`.

    Args:
        module: a metric, or a module that has some.
    """
    metric: Any
    for metric in module.modules():
        if hasattr(metric, "dist_sync_fn") and hasattr(metric, "distributed_available_fn") and metric.dist_sync_fn is None:
            metric.dist_sync_fn = gather_all_tensors
            metric.distributed_available_fn = _is_distributed


def gather_all_tensors(result: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
    """Return all ranks' tensors, in rank order, also of different shapes; like torchmetrics' function of this name.

    `Metric(dist_sync_fn=hvd.gather_all_tensors, distributed_available_fn=hvd.is_initialized)` is one metric's way to
    `synchronize_metrics`.

    Args:
        result: of any shape and dtype.
        group: a `ProcessSet`; all ranks by default.
    """
    process_set = group if isinstance(group, ProcessSet) else global_process_set
    runtime, process_set_id = api.runtime(), api.set_id(process_set)
    name = runtime.names.unnamed("torch", "gather_all_tensors", process_set_id)
    gathered = gather_tensors(runtime, result, name, process_set_id)
    gathered[runtime.members(process_set_id).index(runtime.world.rank)] = result  # with its graph
    return gathered


def _is_distributed() -> bool:
    return api.is_initialized() and api.runtime().world.size > 1


leave_module_to_python(vars())
