"""Checkpoints in a directory: each is a directory of its own, with safetensors files and a manifest.

A checkpoint is written under a temporary name, and gets its own by one rename when all of it is on the disk: whatever is
interrupted, a checkpoint is whole, or has a name that does not count. A manifest has a digest of itself and of each tensor.

`Every` knows when the next checkpoint is due: after some time, at the same step on all ranks
(docs/protocol.md#agreed-calls).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import time
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from hvdlite import api
from hvdlite.core.array import SUPPORTED_DTYPES, Array
from hvdlite.core.errors import UnsupportedError
from hvdlite.runtime.agreed_call import AgreedCall
from hvdlite.runtime.runtime import Runtime
from hvdlite.training.replicas import digest

FORMAT: Final = "hvdlite checkpoint 2"
KEPT: Final = 2
"""The newest checkpoints, which are kept."""
_NAME: Final = re.compile(r"checkpoint-(\d{6,})")
_TEMPORARY: Final = re.compile(r"\.checkpoint-\d{6,}\..*")
_MANIFEST: Final = "manifest.json"
_AS_BYTES: Final = frozenset({"complex128"})
"""Dtypes that safetensors lacks; their bytes are saved."""


class DamagedError(Exception):
    """A checkpoint is not what was written, or not one of ours."""


class SavedTensor(msgspec.Struct, frozen=True):
    """A tensor of a file.

    Attributes:
        digest: CRC-32 of dtype, shape and bytes.
    """

    dtype: str
    shape: tuple[int, ...]
    digest: int


class Manifest(msgspec.Struct, frozen=True):
    """What a checkpoint consists of.

    Attributes:
        number: checkpoints of a directory are numbered from 1.
        id: the same in all directories to which the ranks have written it.
        ranks: how many have written it.
        parts: the structures that are the same on all ranks, by name; tensors are left out (`structure.py`).
        own_parts: the others, by rank and name.
        owners: the ranks that have tensors for themselves.
        files: the tensors of each file of this directory. A rank's own are in a file of its own, `own_file`.
        format: `FORMAT`.
    """

    number: int
    id: str
    ranks: int
    parts: dict[str, Any]
    own_parts: dict[int, dict[str, Any]]
    owners: tuple[int, ...]
    files: dict[str, dict[str, SavedTensor]]
    format: str = FORMAT


def own_file(rank: int) -> str:
    """Return the name of the file with what a rank has for itself."""
    return f"rank-{rank:05d}.safetensors"


def shared_file(index: int) -> str:
    """Return the name of a file with tensors that all ranks have."""
    return f"shared-{index:05d}.safetensors"


def is_shared(file: str) -> bool:
    """Return whether a file has tensors that all ranks have."""
    return file.startswith("shared-")


def checkpoints(directory: Path) -> tuple[list[Manifest], list[str]]:
    """Return the checkpoints of a directory, newest first, and for people what is wrong with others.

    Tensors are not read: `read` finds what is wrong with them.
    """
    found, damaged = [], []
    for number, path in sorted(_numbered(directory), reverse=True):
        try:
            manifest = _manifest(path)
            if manifest.number != number:
                raise DamagedError(f"its manifest is that of checkpoint {manifest.number}")
            missing = [name for name in manifest.files if not (path / name).is_file()]
            if missing:
                raise DamagedError(f"{missing[0]} is missing")
            found.append(manifest)
        except DamagedError as error:
            damaged.append(f"{path}: {error}")
    return found, damaged


def path_of(directory: Path, manifest: Manifest) -> Path:
    """Return where a checkpoint is."""
    return directory / f"checkpoint-{manifest.number:06d}"


def temporary(directory: Path, number: int, id: str) -> Path:
    """Return where a checkpoint is until it is complete."""
    return directory / f".checkpoint-{number:06d}.{id}"


def begin(path: Path, rank: int) -> None:
    """Make the temporary directory of a checkpoint, unless another rank has.

    A file in it tells that this rank sees it; see `ranks_here`.

    Raises:
        OSError: when that cannot be done.
    """
    path.mkdir(parents=True, exist_ok=True)
    (path / f"writes-{rank}").touch()


def ranks_here(path: Path) -> list[int]:
    """Return the ranks that see a temporary directory, after all have called `begin`."""
    return sorted(int(each.name.partition("-")[2]) for each in path.glob("writes-*"))


def next_number(directory: Path) -> int:
    """Return the number of the next checkpoint."""
    return 1 + max((number for number, _ in _numbered(directory)), default=0)


def write(path: Path, file: str, arrays: Mapping[str, Array], digests: Mapping[str, int]) -> dict[str, SavedTensor]:
    """Write arrays to a file of a checkpoint, durably; return what the manifest says of them.

    Args:
        digests: of the arrays, by name.

    Raises:
        Exception: of any kind, when that cannot be done: safetensors has its own.
        UnsupportedError: for a dtype that no plane has either.
    """
    from safetensors.numpy import save_file

    saved = {}
    for name, array in arrays.items():
        dtype = next((known for known, each in SUPPORTED_DTYPES.items() if each == array.dtype), None)
        if dtype is None:
            raise UnsupportedError(f"'{name}' cannot be saved: its dtype is {array.dtype}, which is none of "
                                   f"{', '.join(SUPPORTED_DTYPES)}")
        saved[name] = SavedTensor(dtype, array.shape, digests[name])
    save_file({name: array.reshape(-1).view(np.uint8) if saved[name].dtype in _AS_BYTES else array
               for name, array in arrays.items()}, path / file)
    _sync(path / file)
    return saved


def read(path: Path, file: str, tensors: Mapping[str, SavedTensor]) -> dict[str, Array]:
    """Return the tensors of a file, which are what was written.

    Raises:
        DamagedError: when they are not.
    """
    from safetensors import SafetensorError, safe_open

    arrays = {}
    try:
        with safe_open(path / file, framework="np") as opened:
            for name, saved in tensors.items():
                array = opened.get_tensor(name)
                arrays[name] = array.view(SUPPORTED_DTYPES[saved.dtype]).reshape(saved.shape)
                if digest(arrays[name]) != saved.digest:
                    raise DamagedError(f"{file}: '{name}' is not what was written")
    except (SafetensorError, OSError, KeyError, ValueError, TypeError) as error:
        raise DamagedError(f"{file}: {error}") from None
    return arrays


def commit(directory: Path, path: Path, manifest: Manifest) -> Path:
    """Complete a checkpoint whose files have been written: it gets its name; older ones are removed.

    Raises:
        OSError: when that cannot be done; then `abandon` it.
    """
    content = msgspec.to_builtins(manifest, str_keys=True)
    with open(path / _MANIFEST, "w", encoding="utf-8") as file:
        json.dump({"digest": _digest(content), "manifest": content}, file)
    for marker in path.glob("writes-*"):
        marker.unlink()
    _sync(path / _MANIFEST)
    _sync(path)
    final = path_of(directory, manifest)
    path.rename(final)
    _sync(directory)
    _clean(directory)
    return final


def abandon(path: Path) -> None:
    """Remove a temporary directory."""
    shutil.rmtree(path, ignore_errors=True)


def _clean(directory: Path) -> None:
    """Remove what is older than the newest whole checkpoints, and what interrupted ones have left."""
    whole = {manifest.number for manifest in checkpoints(directory)[0][:KEPT]}
    old = [path for number, path in _numbered(directory) if number < min(whole, default=0)] if len(whole) == KEPT else []
    for path in old:
        with contextlib.suppress(OSError):  # a name that does not count, before parts of it are missing
            path.rename(directory / f".{path.name}.old")
    for each in directory.iterdir():
        if _TEMPORARY.fullmatch(each.name):
            abandon(each)


def _numbered(directory: Path) -> Iterable[tuple[int, Path]]:
    if not directory.exists():
        return []  # anything else than a directory is an error of `iterdir`
    matches = ((_NAME.fullmatch(each.name), each) for each in directory.iterdir())
    return [(int(match[1]), each) for match, each in matches if match is not None]


def _manifest(path: Path) -> Manifest:
    try:
        read = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DamagedError(f"it has no {_MANIFEST}, so hvd.save has not written it") from None
    except (OSError, ValueError) as error:
        raise DamagedError(f"{_MANIFEST}: {error}") from None
    content = read.get("manifest") if isinstance(read, dict) else None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise DamagedError(f"{_MANIFEST} is not one of '{FORMAT}'")
    if read.get("digest") != _digest(content):
        raise DamagedError(f"{_MANIFEST} is not what was written")
    try:
        return msgspec.convert(content, Manifest, strict=False)
    except msgspec.ValidationError as error:
        raise DamagedError(f"{_MANIFEST}: {error}") from None


def _digest(content: Any) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def _sync(path: Path) -> None:
    """Let a file or a directory reach the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_UNITS: Final = {"s": 1.0, "min": 60.0, "h": 3600.0}


class Every:
    """Says at which step the next checkpoint is due; rank 0's clock counts.

    Args:
        interval: such as "90 s", "10 min" or "2 h"; or a number of seconds.

    Raises:
        ValueError: for anything else.
    """

    def __init__(self, interval: str | float) -> None:
        self.seconds = _seconds(interval)
        self._last = time.monotonic()
        self._world: Runtime | None = None
        self._call: AgreedCall | None = None  # of this world

    def is_due(self, is_wanted: bool = False) -> bool:
        """Return whether to save now: the same on all ranks, which call this once a step.

        Args:
            is_wanted: whether this rank wants it soon, whatever the time.
        """
        runtime = api.runtime()
        if self._call is None or self._world is not runtime:
            self._world, self._call = runtime, runtime.agreed_call(runtime.names.unnamed("checkpoint", "every"))
        is_late = runtime.world.rank == 0 and time.monotonic() - self._last >= self.seconds
        is_due = self._call.is_due(is_late or is_wanted, runtime.joins)
        if is_due:
            self._last = time.monotonic()
        return is_due


def _seconds(interval: str | float) -> float:
    match = re.fullmatch(r"\s*([0-9.]+)\s*([a-z]*)\s*", str(interval))
    try:
        assert match is not None
        seconds = float(match[1]) * _UNITS[match[2] or "s"]
    except (AssertionError, KeyError, ValueError):
        raise ValueError(f"every={interval!r} is no interval; use seconds, or such as '90 s', '10 min', '2 h'") from None
    return seconds
