"""Writing a checkpoint (docs/checkpoints.md, docs/protocol.md#checkpoints).

All ranks compare digests. What is the same on all of them is divided among the ranks that see the same directory: all, where
it is shared; otherwise those of a host, so that each host has all of it. Each rank writes what it has for itself. When all
have written, the first rank of each directory completes the checkpoint.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import uuid
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final

from hvdlite import api
from hvdlite.core.array import Array
from hvdlite.training.checkpoints import directory as disk
from hvdlite.training.checkpoints import kinds
from hvdlite.training.checkpoints.ranks import Ranks
from hvdlite.training.checkpoints.structure import taken_apart
from hvdlite.training.replicas import digest

RANDOM_STATES: Final = "random states"
"""The part with the random generators of each rank; no keyword can have this name."""
_log = logging.getLogger("hvdlite")


class Saving:
    """A checkpoint that is written; `hvd.save` returns one."""

    def __init__(self) -> None:
        self._process = os.getpid()  # a forked child has not the thread
        self._path: Future[Path] = Future()

    def wait(self) -> Path:
        """Wait until the checkpoint is complete, and return where it is.

        Raises:
            CheckpointError: on all ranks, when a rank could not write. Older checkpoints are whole.
            HorovodInternalError: when a rank was lost meanwhile.
        """
        return self._path.result()

    def _run(self, write: Callable[[], Path]) -> None:
        try:
            self._path.set_result(write())
        except BaseException as error:  # it is raised by `wait`
            _log.error("a checkpoint was not written: %s: %s", type(error).__name__, error)
            self._path.set_exception(error)


_last: Saving | None = None
"""The checkpoint that a thread may still write."""


def save(directory: str | os.PathLike[str], /, *, blocking: bool = True, **objects: Any) -> Saving:
    """Write a checkpoint, which is whole or does not count, however the job ends meanwhile; all ranks call this.

    What is the same on all ranks is written once, what differs between them for each rank. Random states belong to it:
    Python's, NumPy's, torch's, those of the current GPU. The newest two checkpoints of the directory are kept. They consist
    of safetensors files and JSON; no pickle.

    Args:
        directory: of the checkpoints of this training: one that all hosts share, or one on each host.
        blocking: False to write in the background, from a copy in host memory. The next call, and `shutdown()`, wait for it.
        objects: by name: what has `state_dict()` and `load_state_dict()` (torch's modules, optimizers, schedulers;
            `hvd.resumable` loaders), Keras' models and optimizers (which are saved apart: `model=model,
            optimizer=model.optimizer`), tensors, arrays, and plain data: numbers, strings, and containers of these.

    Returns:
        A handle; its `wait()` returns the path of the checkpoint.

    Raises:
        CheckpointError: on all ranks, when a rank cannot write it (a full disk, an object that cannot be saved). Older
            checkpoints are whole.
        ImportError: without the package safetensors.
        HorovodInternalError: when a rank is lost meanwhile.
    """
    return save_objects(directory, objects, blocking=blocking)


def save_objects(directory: str | os.PathLike[str], objects: Mapping[str, Any], *, blocking: bool) -> Saving:
    """Like `save`, with objects of any names."""
    refuse_missing_package()
    refused = {RANDOM_STATES, "__metadata__"} & set(objects)  # the latter is one of safetensors
    if refused:
        raise ValueError(f"{refused.pop()!r} is the name of a part of every checkpoint; call the object something else")
    finish()
    ranks, path = Ranks.present("save"), Path(directory).absolute()
    for _, value in sorted(objects.items()):
        kinds.kind_of(value).gather(value)
    parts, arrays = ranks.agreed(lambda: _taken(objects, copies=not blocking), f"no checkpoint was written to {path}")
    saving = Saving()
    if blocking:
        saving._path.set_result(write(ranks, path, parts, arrays))
    else:
        global _last
        _last = saving
        api.finish_before_leaving(finish)
        threading.Thread(target=saving._run, args=(lambda: write(ranks, path, parts, arrays),),
                         name="hvdlite-checkpoint").start()
    return saving


def finish() -> None:
    """Wait for the checkpoint that a thread of this process writes."""
    global _last
    saving, _last = _last, None
    if saving is not None and saving._process == os.getpid():
        saving._path.exception()


def refuse_missing_package() -> None:
    """Raise `ImportError` without safetensors."""
    try:
        import safetensors.numpy  # noqa: F401 - whether it is there
    except ImportError:
        raise ImportError("checkpoints need the package safetensors: pip install 'hvdlite[checkpoints]'") from None


def _taken(values: Mapping[str, Any], *, copies: bool) -> tuple[dict[str, Any], dict[str, Array]]:
    """Return the structures by name, and their tensors."""
    parts: dict[str, Any] = {}
    arrays: dict[str, Array] = {}
    for name, value in {**values, RANDOM_STATES: kinds.all_random_states()}.items():
        parts[name] = taken_apart(name, kinds.kind_of(value).state_of(value), arrays)
        json.dumps(parts[name])  # it refuses integers of thousands of digits
    return parts, {name: array.copy() for name, array in arrays.items()} if copies else arrays


def write(ranks: Ranks, directory: Path, parts: dict[str, Any], arrays: dict[str, Array]) -> Path:
    """Write structures and their tensors, on all ranks; return the checkpoint's path.

    Raises:
        CheckpointError, HorovodInternalError: as `Saving.wait`.
    """
    what = f"no checkpoint was written to {directory}"
    texts = {name: zlib.crc32(json.dumps(part, sort_keys=True).encode()) for name, part in parts.items()}
    digests = {name: digest(array) for name, array in arrays.items()}
    next_number = ranks.agreed(lambda: disk.next_number(directory), what)
    everywhere = ranks.gather((texts, digests, next_number, uuid.uuid4().hex[:8]))
    own_parts = {name: part for name, part in parts.items() if any(each.get(name) != texts[name] for each, *_ in everywhere)}
    own = {name for name, own in digests.items() if any(each.get(name) != own for _, each, *_ in everywhere)}
    number, id = max(each[2] for each in everywhere), everywhere[0][3]  # a host that has come later has lower numbers
    path = disk.temporary(directory, number, id)
    try:
        ranks.agreed(lambda: disk.begin(path, ranks.rank), what)
        here = ranks.agreed(lambda: disk.ranks_here(path), what)
        groups = ranks.gather(here)
        ranks.agreed(lambda: _refuse_other_views(ranks.rank, groups), what)
        files = _own_files(ranks.rank, here, arrays, own)
        written = ranks.agreed(
            lambda: {file: disk.write(path, file, named, digests) for file, named in files.items() if named}, what)
        others = ranks.gather((written, own_parts, bool(own)))
        manifest = disk.Manifest(
            number, id, ranks.size, parts={name: part for name, part in parts.items() if name not in own_parts},
            own_parts={rank: each[1] for rank, each in enumerate(others)},
            owners=tuple(rank for rank, each in enumerate(others) if each[2]),
            files={file: saved for rank in here for file, saved in others[rank][0].items()})
        ranks.agreed(lambda: disk.commit(directory, path, manifest) if ranks.rank == here[0] else None, what)
    except BaseException:
        disk.abandon(path)
        raise
    return disk.path_of(directory, manifest)


def _refuse_other_views(rank: int, groups: Sequence[Sequence[int]]) -> None:
    """Raise `OSError` where ranks do not see the same files: `groups` are the ranks that each sees beside it."""
    if rank not in groups[rank] or any(groups[other] != groups[rank] for other in groups[rank]):
        raise OSError(f"rank {rank} sees the files of ranks {list(groups[rank])}, and these see others: the file system "
                      "shows ranks different files")


def _own_files(rank: int, here: list[int], arrays: Mapping[str, Array], own: set[str]) -> dict[str, dict[str, Array]]:
    """Return what this rank writes, by file: what only it has, and its share of what all have.

    Args:
        here: the ranks that write to the same directory.
        own: the names of what only this rank has.
    """
    shared = sorted((name for name in arrays if name not in own), key=lambda name: (-arrays[name].nbytes, name))
    shares: list[dict[str, Array]] = [{} for _ in here]
    sizes = [0] * len(here)
    for name in shared:
        least = sizes.index(min(sizes))
        shares[least][name] = arrays[name]
        sizes[least] += arrays[name].nbytes
    place = here.index(rank)
    return {disk.own_file(rank): {name: arrays[name] for name in sorted(own)}, disk.shared_file(place): shares[place]}
