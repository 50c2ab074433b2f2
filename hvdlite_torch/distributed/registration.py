"""Makes the backend "hvdlite" known to `torch.distributed`. Importing this module imports nothing of the runtime.

torch imports it at the end of `import torch`, wherever hvdlite is installed, and fails with what it raises. So it raises
nothing, and needs nothing that a build of torch may lack.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

NAME: Final = "hvdlite"
OLDEST_TORCH: Final = (2, 13)
"""The oldest version of torch with which the tests of this backend pass; the rest of hvdlite_torch runs with older ones."""
TRACE: Final = "TORCH_FR_DUMP_TEMP_FILE"
"""The variable that names where torch's Flight Recorder writes: the path but for the rank."""


def register() -> None:
    """Register the backend, once; torch's entry point for backends calls this at the end of `import torch`.

    Where torch cannot take it, a warning gives the reason as soon as a script asks for it.
    """
    try:
        if torch.distributed.is_available() and NAME not in torch.distributed.Backend.backend_list:
            torch.distributed.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])
    except Exception as error:
        with contextlib.suppress(Exception):
            setattr(torch.distributed.Backend, NAME.upper(), _Unavailable(f"{type(error).__name__}: {error}"))


class _Unavailable:
    """Stands for the backend's name in `Backend`, where torch looks it up, and warns at the first look."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def __get__(self, instance: object, owner: type) -> str:
        if self._reason:
            warnings.warn(f'torch {torch.__version__} does not accept the backend "{NAME}" ({self._reason}): install '
                          "another version of torch or of hvdlite", stacklevel=2)
            self._reason = ""
        return NAME


def _create(options: Any, backend_options: Any = None) -> Any:
    """Make one process group on this rank; c10d calls this on all its ranks."""
    check_torch(torch.__version__)
    ranks = list(options.global_ranks_in_group) or None
    group = _join(options.store, options.group_id, options.group_rank, options.group_size, ranks, options.timeout)
    replaced = getattr(options, "process_group", None)  # since torch 2.14
    if replaced is not None and replaced.bound_device_id is not None:
        group.bound_device_id = replaced.bound_device_id
    return group


def check_torch(version: str) -> None:
    """Raise an error if this version of torch is too old for the backend.

    Raises:
        ImportError: with both versions.
    """
    if tuple(map(int, version.split(".")[:2])) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        raise ImportError(f'the backend "{NAME}" of torch.distributed needs torch {oldest} or newer, and {version} is '
                          "installed: pip install -U torch")


def _join(store: Any, name: str, rank: int, size: int, members: Sequence[int] | None, timeout: datetime.timedelta) -> Any:
    from hvdlite import api
    from hvdlite.core.errors import HvdliteError
    from hvdlite_torch.distributed.errors import as_backend_error
    from hvdlite_torch.distributed.process_group import HvdliteProcessGroup
    from hvdlite_torch.distributed.store import TorchStore
    from hvdlite_torch.step_parts import count_steps

    def join_part(store: Any, name: str, rank: int, ranks: Sequence[int], timeout: datetime.timedelta) -> Any:
        of_world = [members[each] for each in ranks] if members else list(ranks)
        return _join(store, name, rank, len(ranks), of_world, timeout)

    description = "default process group" if members is None else f"process group {name}"
    try:
        group = api.join_group(TorchStore(store), description, rank, size, timeout.total_seconds(), members)
    except HvdliteError as error:
        raise as_backend_error(error) from error.__cause__
    trace = os.environ.get(TRACE, "")
    if trace:
        group.watch(_writer(f"{trace}{members[rank] if members else rank}"))
    if members is None:
        count_steps()
    return HvdliteProcessGroup(group, store, name, timeout, join_part)


@functools.cache
def _writer(path: str) -> Callable[[], None]:
    """Return what writes the trace of this rank's groups to a file: one function for all groups, which is called once."""
    from hvdlite_torch.distributed import fr_trace
    from hvdlite_torch.distributed.process_group import records

    return lambda: fr_trace.write(path, records)
