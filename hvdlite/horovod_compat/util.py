"""`horovod.common.util`: the helpers that scripts and tests import."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from hvdlite.frontend.built import ccl_built, check_extension, ddl_built, gloo_built, mpi_built, nccl_built

__all__ = [
    "ccl_built", "check_extension", "check_installed_version", "ddl_built", "env", "extension_available",
    "gloo_built", "gpu_available", "is_iterable", "is_version_greater_equal_than", "mpi_built", "nccl_built",
    "num_rank_is_power_2", "split_list",
]

T = TypeVar("T")


def extension_available(name: str, verbose: bool = False) -> bool:
    """Return whether the frontend of a framework ("torch", "tensorflow") can be used."""
    return importlib.util.find_spec(name) is not None


def gpu_available(name: str, verbose: bool = False) -> bool:
    """Return whether there is NCCL to use GPUs with."""
    return extension_available(name) and nccl_built() > 0


def check_installed_version(name: str, version: str, exception: Exception | None = None) -> None:
    """Do nothing: hvdlite is not built against a framework."""


@contextlib.contextmanager
def env(**variables: str | None) -> Iterator[None]:
    """Set environment variables for a while; None removes one."""
    before = {name: os.environ.get(name) for name in variables}
    try:
        _set(variables)
        yield
    finally:
        _set(before)


def _set(variables: dict[str, Any]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def split_list(items: Sequence[T], parts: int) -> list[Sequence[T]]:
    """Cut a sequence into so many parts of nearly equal length, the first ones longer."""
    share, more = divmod(len(items), parts)
    return [items[part * share + min(part, more):(part + 1) * share + min(part + 1, more)] for part in range(parts)]


def num_rank_is_power_2(num_rank: int) -> bool:
    """Return whether a number is a power of two."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def is_iterable(value: object) -> bool:
    """Return whether a value can be iterated over."""
    try:
        iter(value)  # type: ignore[call-overload]
    except TypeError:
        return False
    return True


def is_version_greater_equal_than(version: str, target: str) -> bool:
    """Compare versions, of which the target must be "x.y.z".

    Raises:
        ValueError: for another form.
    """
    if target.count(".") != 2:
        raise ValueError(f"the version to compare with must be x.y.z, not {target!r}")
    return _numbers(version) >= _numbers(target)


def _numbers(version: str) -> list[int]:
    parts = version.split("+")[0].split(".")[:3]
    numbers = [int("".join(digit for digit in part if digit.isdigit()) or 0) for part in parts]
    return numbers + [0] * (3 - len(numbers))
