"""Reading a checkpoint: the newest one that is whole, on all ranks the same (docs/checkpoints.md)."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvdlite.core.array import Array
from hvdlite.core.errors import CheckpointError
from hvdlite.training.checkpoints import directory as disk
from hvdlite.training.checkpoints import kinds
from hvdlite.training.checkpoints.ranks import Ranks
from hvdlite.training.checkpoints.saving import RANDOM_STATES, finish, refuse_missing_package
from hvdlite.training.checkpoints.structure import put_together

_log = logging.getLogger("hvdlite")


def load(directory: str | os.PathLike[str], /, **objects: Any) -> dict[str, Any] | None:
    """Load the newest whole checkpoint of `save`, the same on all ranks, which all call this; also without a job.

    A damaged checkpoint, or a foreign one, is named in a warning and passed over. The number of ranks may be another one:
    rank r takes what rank r % n of n ranks had for itself. Random states are set if objects are given, and as many ranks
    have saved them.

    Args:
        directory: as in `save`. Where a host does not have the checkpoint, ranks of other hosts send it.
        objects: to load, by the names under which they were saved. Keras' models and optimizers must be built.

    Returns:
        What was saved under other names: state dicts, tensors in host memory, plain data; of Keras' models the lists of
        their variables. None when there is no checkpoint.

    Raises:
        CheckpointError: on all ranks, when there are checkpoints, but none is whole; for a name that was not saved.
        ValueError: when an object has other tensors than the saved one; nothing is loaded then.
        ImportError: without the package safetensors.
    """
    return load_objects(directory, objects)


def load_objects(directory: str | os.PathLike[str], objects: Mapping[str, Any]) -> dict[str, Any] | None:
    """Like `load`, with objects of any names."""
    refuse_missing_package()
    finish()
    ranks = Ranks.present("load")
    saved = read(ranks, Path(directory))
    return None if saved is None else _take(ranks, objects, *saved)


def read(ranks: Ranks, path: Path) -> tuple[dict[str, Any], dict[str, Array], int] | None:
    """Return the structures and the tensors of the newest whole checkpoint, and how many ranks have written it.

    Raises:
        CheckpointError: on all ranks, when there is none, but others.
    """
    found, damaged = disk.checkpoints(path)
    everywhere = ranks.gather(([(each.number, each.id) for each in found], damaged))
    passed_over = list(dict.fromkeys(text for _, texts in everywhere for text in texts))
    for number, id in sorted({each for known, _ in everywhere for each in known}, reverse=True):
        holders = [rank for rank, (known, _) in enumerate(everywhere) if (number, id) in known]
        manifest = next((each for each in found if (each.number, each.id) == (number, id)), None)
        try:
            saved = _Reading(ranks, path, holders, manifest).parts()
        except disk.DamagedError as error:
            passed_over.append(f"{path / f'checkpoint-{number:06d}'}: {error}")
            continue
        for text in passed_over if ranks.rank == 0 else ():
            _log.warning("a damaged or foreign checkpoint is passed over: %s", text)
        return saved
    if passed_over:
        raise CheckpointError(f"there is no whole checkpoint in {path}: {'; '.join(passed_over)}. Move them away to begin "
                              "anew")
    return None


def _take(ranks: Ranks, values: Mapping[str, Any], parts: dict[str, Any], arrays: Mapping[str, Array],
          size: int) -> dict[str, Any]:
    """Load parts into the objects of their names; return the others."""
    missing = sorted(set(values) - set(parts))
    if missing:
        known = ", ".join(sorted(set(parts) - {RANDOM_STATES}))
        raise CheckpointError(f"'{missing[0]}' is not in the checkpoint, which has {known}")
    states = {name: put_together(part, arrays) for name, part in parts.items()}
    random_states = states.pop(RANDOM_STATES)
    for name, value in values.items():
        kinds.kind_of(value).check(name, value, states[name])
    for name, value in values.items():
        if kinds.kind_of(value).load(value, states[name]):
            del states[name]
    if values and size == ranks.size:
        kinds.set_all_random_states(random_states)
    return states


class _Reading:
    """One checkpoint, which all ranks read.

    Args:
        holders: the ranks in whose directory it is.
        manifest: this rank's; None where it is not.
    """

    def __init__(self, ranks: Ranks, directory: Path, holders: list[int], manifest: disk.Manifest | None) -> None:
        self._ranks, self._holders, self._own = ranks, holders, manifest
        self._manifest: disk.Manifest = manifest if len(holders) == ranks.size and manifest is not None else \
            ranks.broadcast(manifest, holders[0])
        self._path = disk.path_of(directory, self._manifest)

    def parts(self) -> tuple[dict[str, Any], dict[str, Array], int]:
        """Return the structures, the tensors, and how many ranks have written them.

        Raises:
            DamagedError: on all ranks, when some rank cannot read what it needs.
        """
        size = self._manifest.ranks
        mine = self._ranks.rank % size  # what another rank of a larger job had
        shared = [file for file in ({} if self._own is None else self._own.files) if file.startswith("shared-")]
        arrays: dict[str, Array] = {}
        error = ""
        try:
            for file in shared:
                arrays.update(self._read(file))
            if self._has(mine):
                arrays.update(self._read(disk.own_file(mine)))
        except disk.DamagedError as raised:
            error = str(raised)
        facts = self._ranks.gather((error, self._own is not None, [rank for rank in range(size) if self._has(rank)]))
        for rank, (text, _, _) in enumerate(facts):
            if text:
                raise disk.DamagedError(text if self._ranks.size == 1 else f"{text} (rank {rank})")
        arrays.update(self._received(facts, mine, arrays))
        own = self._manifest.own_parts.get(mine, {})
        return {**self._manifest.parts, **own}, arrays, size

    def _has(self, rank: int) -> bool:
        """Return whether this rank sees what a rank of the job that has written had for itself."""
        return self._own is not None and (
            disk.own_file(rank) in self._own.files or not self._manifest.own_tensors.get(rank))

    def _read(self, file: str) -> dict[str, Array]:
        assert self._own is not None
        return disk.read(self._path, file, self._own.files[file]) if file in self._own.files else {}

    def _received(self, facts: list[tuple[str, bool, list[int]]], mine: int, read: Mapping[str, Array]) -> dict[str, Array]:
        """Return what this rank does not see, from ranks that do; the others send it."""
        received: dict[str, Array] = {}
        if not all(has_manifest for _, has_manifest, _ in facts):
            holder = self._holders[0]
            own = self._manifest.own_tensors.get(mine, ())
            sent = {name: array for name, array in read.items() if name not in own} if self._ranks.rank == holder else None
            everything = self._ranks.broadcast(sent, holder)
            received.update({} if self._own is not None else everything)
        for saved in dict.fromkeys(rank % self._manifest.ranks for rank, (_, _, seen) in enumerate(facts)
                                   if rank % self._manifest.ranks not in seen):
            holder = next((rank for rank, (_, _, seen) in enumerate(facts) if saved in seen), -1)
            if holder < 0:
                raise disk.DamagedError(f"no rank sees {disk.own_file(saved)}")
            sent, error = None, ""
            if self._ranks.rank == holder:
                try:
                    sent = self._read(disk.own_file(saved))
                except disk.DamagedError as raised:
                    error = str(raised)
            sent, error = self._ranks.broadcast((sent, error), holder)
            if error:
                raise disk.DamagedError(f"{error} (rank {holder})")
            if saved == mine and not self._has(mine):
                received.update(sent)
        return received
