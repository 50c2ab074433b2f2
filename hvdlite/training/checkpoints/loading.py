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
        CheckpointError: on all ranks, when there are checkpoints, but none is whole; for a name that was not saved; and when
            an object has other tensors than the saved one, on any rank: nothing is loaded then.
        ImportError: without the package safetensors.
    """
    refuse_missing_package()
    finish()
    ranks = Ranks.present("load")
    saved = read(ranks, Path(directory).absolute())
    return None if saved is None else _take(ranks, objects, *saved)


def read(ranks: Ranks, path: Path) -> tuple[dict[str, Any], dict[str, Array], int] | None:
    """Return the structures and the tensors of the newest whole checkpoint, and how many ranks have written it.

    Raises:
        CheckpointError: on all ranks, when there is none, but others.
    """
    found, damaged = ranks.agreed(lambda: disk.checkpoints(path), f"no checkpoint was loaded from {path}")
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
    states = {name: put_together(part, arrays) for name, part in parts.items()}
    random_states = states.pop(RANDOM_STATES)

    def check() -> set[str]:
        for name in values:
            if name not in states:
                raise CheckpointError(f"'{name}' is not in the checkpoint, which has {', '.join(sorted(states))}")
        return {name for name, value in values.items() if kinds.kind_of(value).check(name, value, states[name])}

    def load(known: bool) -> None:
        for name, value in values.items():
            if (name in checked) == known and kinds.kind_of(value).load(value, states[name]):
                del states[name]

    checked = ranks.agreed(check, "nothing was loaded")
    ranks.agreed(lambda: load(False), "nothing that was checked before was loaded")  # they may refuse a state themselves
    ranks.agreed(lambda: load(True), "a checkpoint was loaded in part")
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
        self._ranks = ranks
        self._here = {} if manifest is None else manifest.files
        self._manifest: disk.Manifest = manifest if len(holders) == ranks.size and manifest is not None else \
            ranks.broadcast(manifest, holders[0])
        self._path = disk.path_of(directory, self._manifest)

    def parts(self) -> tuple[dict[str, Any], dict[str, Array], int]:
        """Return the structures, the tensors, and how many ranks have written them; 0 if some of theirs are missing.

        Raises:
            DamagedError: on all ranks, when some rank cannot read what it needs.
        """
        size, owners = self._manifest.ranks, self._manifest.owners
        seen = self._ranks.gather(list(self._here))
        there = [rank for rank in range(size)
                 if rank not in owners or any(disk.own_file(rank) in files for files in seen)]
        if not there:
            raise disk.DamagedError("no rank sees what ranks have written for themselves")
        taken = [self._substitute(rank % size, there) for rank in range(self._ranks.size)]  # what each rank takes
        mine = taken[self._ranks.rank]
        lacking: dict[str, list[int]] = {}  # files, and the ranks that need them and do not see them
        for rank, files in enumerate(seen):
            shared = [file for file in self._manifest.files if disk.is_shared(file)] if not files else []
            own_files = [disk.own_file(taken[rank])] if taken[rank] in owners else []
            for file in [file for file in (*shared, *own_files) if file not in files]:
                lacking.setdefault(file, []).append(rank)
        senders = {file: next(rank for rank, files in enumerate(seen) if file in files) for file in lacking}
        wanted = [file for file in self._here if disk.is_shared(file) or file == disk.own_file(mine)]
        arrays, sent = self._read(wanted, [file for file, sender in senders.items() if sender == self._ranks.rank])
        for file, sender in senders.items():
            received = self._ranks.broadcast(sent.get(file), sender)
            arrays.update(received if self._ranks.rank in lacking[file] else {})
        own_parts = self._manifest.own_parts.get(mine, {})
        return {**self._manifest.parts, **own_parts}, arrays, size if len(there) == size else 0

    def _substitute(self, rank: int, there: list[int]) -> int:
        """Return a rank of those that are there, if a rank's own tensors are on a host that is lost."""
        if rank in there:
            return rank
        other = there[rank % len(there)]
        if self._ranks.rank == 0:
            _log.warning("what rank %d had for itself (statistics, random states) is not there, and no rank sees it: what "
                         "rank %d had is taken instead", rank, other)
        return other

    def _read(self, wanted: list[str], sent: list[str]) -> tuple[dict[str, Array], dict[str, dict[str, Array]]]:
        """Return the tensors of this rank's files, and by file those that it sends.

        Raises:
            DamagedError: on all ranks, when some rank cannot read its files.
        """
        files: dict[str, dict[str, Array]] = {}
        error = ""
        try:
            files = {file: disk.read(self._path, file, self._here[file]) for file in dict.fromkeys((*wanted, *sent))}
        except disk.DamagedError as raised:
            error = str(raised)
        for rank, text in enumerate(self._ranks.gather(error)):
            if text:
                raise disk.DamagedError(text if self._ranks.size == 1 else f"{text} (rank {rank})")
        return {name: array for file in wanted for name, array in files[file].items()}, {file: files[file] for file in sent}
