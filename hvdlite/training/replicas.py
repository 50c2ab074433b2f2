"""The comparison of replicas: bit by bit through short digests, or once, of a few values, as a warning."""

from __future__ import annotations

import contextlib
import logging
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Final

import numpy as np

from hvdlite.api import finish_before_leaving
from hvdlite.core.array import Array
from hvdlite.core.errors import HvdliteError, ReplicaMismatchError
from hvdlite.core.process_set import GLOBAL_PROCESS_SET_ID
from hvdlite.negotiation.stalls import NO_STALL
from hvdlite.runtime.runtime import Runtime
from hvdlite.training import objects

_log = logging.getLogger("hvdlite")

_PLAIN: Final = frozenset((bool, int, float, complex, str, bytes, type(None)))
"""Types whose values have the same `repr` on all ranks."""

_DRIFT: Final = ("Something changed it on some ranks only: a gradient that is not reduced, a random number without a common "
                 "seed, or a broadcast that was left out")

VALUES: Final = 4
"""The values of each tensor that `FirstComparison` looks at."""
_TOLERANCE: Final = 1e-3
"""How far they may differ, relative to the largest one of the tensor."""
_TOLERANCES: Final = (("bfloat16", 2.0 ** -5), ("float16", 2.0 ** -8), ("float8_e4m3", 0.5), ("float8", 1.0))
"""The same for dtypes whose names begin so, if it is more: four units in the last place."""
_LAST_SECONDS: Final = 0.5


class FirstComparison:
    """Compares a few values of tensors over the ranks of a process set, once; warns where replicas differ.

    Ranks without a common start train different models, and nothing fails. All ranks make this before the second step: some
    scripts broadcast after the first one. Nobody waits for the answer. A tolerance is for hosts that round otherwise.

    Args:
        named: the name and the dtype of each tensor, in any order.
        values: float32, of shape (tensors, `VALUES`).
        name: of the collective.
        line: of a script, which gives ranks the same start.
    """

    _open: ClassVar[list[FirstComparison]] = []
    """Those without an answer."""

    def __init__(self, runtime: Runtime, named: Sequence[tuple[str, str]], values: Array, name: str, process_set: int,
                 line: str) -> None:
        order = sorted(range(len(named)), key=named.__getitem__)  # some scripts make groups from a set of names
        self._names, self._line, self._rank = [named[index][0] for index in order], line, runtime.world.rank
        self._tolerances = np.array([_tolerance(named[index][1]) for index in order])
        check = zlib.crc32("\n".join(self._names).encode())
        self._head = np.array([check >> 16, check & 0xFFFF, 0, self._rank], np.float32)  # joined ranks send nothing
        self._handle = runtime.allgather(name + NO_STALL, np.concatenate([self._head[None], values[order]]),
                                         process_set=process_set)
        self._open.append(self)
        finish_before_leaving(_report_open)

    def report(self, seconds: float = 0.0) -> bool:
        """Warn, on the first rank, if replicas differ; return whether there is an answer.

        Args:
            seconds: how long to wait for it.
        """
        if not seconds and not self._handle.done():
            return False
        gathered = None
        with contextlib.suppress(HvdliteError):
            try:
                gathered = self._handle.wait(seconds)
            except TimeoutError:
                return False
        with contextlib.suppress(ValueError):  # another thread has removed it, which leaves the job
            self._open.remove(self)
        if gathered is None or len(gathered) % (len(self._names) + 1):  # another number of tensors has its own error
            return True
        found = gathered.reshape(-1, len(self._names) + 1, VALUES)
        if not np.array_equal(found[:, 0, :3], np.broadcast_to(self._head[:3], (len(found), 3))):  # other names
            return True
        ranks, values = found[:, 0, 3].astype(int), found[:, 1:]
        limit = self._tolerances[:, None] * np.abs(values[0]).max(axis=-1, keepdims=True)
        with np.errstate(invalid="ignore"):
            is_near = np.abs(values - values[0]) <= limit
        differ = ~(is_near | (values == values[0]) | (np.isnan(values) & np.isnan(values[0])))
        wrong = np.flatnonzero(differ.any(axis=(0, 2)))
        if wrong.size and ranks[0] == self._rank:
            first = int(wrong[0])
            column = int(np.flatnonzero(differ[:, first].any(axis=0))[0])
            others = f" and {wrong.size - 1} of the other {len(self._names) - 1} tensors" if wrong.size > 1 else ""
            who = _groups(list(ranks), [f"{value:.4g}" for value in values[:, first, column]])
            _log.warning("ranks train different models: after the first step they differ in '%s'%s (a value of %s). Give "
                         "all ranks the same start, before the first step: %s", self._names[first], others, who, self._line)
        return True


def _tolerance(dtype: str) -> float:
    return next((each for begin, each in _TOLERANCES if dtype.startswith(begin)), _TOLERANCE)


def _report_open() -> None:
    for each in list(FirstComparison._open):
        each.report(_LAST_SECONDS)


def check_replicas(runtime: Runtime, named: Sequence[tuple[str, Array | int]], name: str,
                   process_set: int = GLOBAL_PROCESS_SET_ID, advice: str = _DRIFT) -> None:
    """Compare tensors over the ranks of a process set; all of them call this.

    Costs a pass over the tensors and one small collective. The digest is CRC-32: a difference is overlooked once in 2^32.

    Args:
        named: C-contiguous, or their digests; the same names in the same order on all ranks. What follows a space in a name
            is for people, and may differ.
        name: of the collectives.
        advice: the end of the error's text.

    Raises:
        ReplicaMismatchError: on all ranks, naming the first tensor that differs, how many do, and who has what.
    """
    ranks = runtime.members(process_set)
    names = [each.partition(" ")[0] for each, _ in named]
    own = np.array([len(named), zlib.crc32("\n".join(names).encode()),
                    *(each if isinstance(each, int) else digest(each) for _, each in named)], np.int64)
    gathered = runtime.allgather(name, own, process_set=process_set).wait()
    assert gathered is not None
    found = []
    while gathered.size:  # each rank's: how many, a digest of their names, digests
        found.append(gathered[:2 + int(gathered[0])])
        gathered = gathered[found[-1].size:]
    if any(tuple(each[:2]) != tuple(own[:2]) for each in found):
        everywhere = objects.allgather_object(runtime, names, f"{name}.names", process_set)
        raise ReplicaMismatchError(f"ranks check different tensors: {_difference(ranks, everywhere)}; give the same names "
                                   "in the same order everywhere")
    digests = np.stack(found)[:, 2:]
    wrong = np.flatnonzero((digests != digests[0]).any(axis=0))
    runtime.progress.replicas_checked(are_equal=not wrong.size)
    if wrong.size:
        first = int(wrong[0])
        others = f" and {wrong.size - 1} of the other {len(named) - 1} tensors" if wrong.size > 1 else ""
        who = _groups(ranks, [f"digest {int(each):08x}" for each in digests[:, first]])
        raise ReplicaMismatchError(f"replicas differ in '{named[first][0]}'{others}: {who}. {advice}")


def named_parts(name: str, value: Any,
                array_of: Callable[[str, Any], Array | int | None]) -> Iterator[tuple[str, Array | int]]:
    """Yield the tensors and plain data in a structure of dicts, lists, tuples and sets, each as an array with a name.

    Other objects are left out, because equal ones may have different bytes.

    Args:
        array_of: returns a tensor of a framework as a C-contiguous array, or its digest; None for anything else.
    """
    yield from _parts(name, value, array_of, ())


def digest(array: Array) -> int:
    """Return a C-contiguous array's digest: the CRC-32 of its dtype, its shape and its bytes."""
    head = zlib.crc32(f"{array.dtype}{array.shape}".encode())
    return zlib.crc32(array.reshape(-1).view(np.uint8).data, head)


def _parts(name: str, value: Any, array_of: Callable[[str, Any], Array | int | None],
           inside: tuple[int, ...]) -> Iterator[tuple[str, Array | int]]:
    array = array_of(name, value)
    if array is None and isinstance(value, (np.ndarray, np.generic)):
        has_padding = value.dtype.fields is not None or value.dtype.char in "gG"  # whose bytes mean nothing
        array = None if has_padding or value.dtype.hasobject else np.asarray(value, order="C")
    if array is not None:
        yield name, array
    elif type(value) in _PLAIN:
        yield name, _described(value)
    elif isinstance(value, (list, tuple, set, frozenset)) and _PLAIN.issuperset(map(type, value)):
        yield name, _described(sorted(map(repr, value)) if isinstance(value, (set, frozenset)) else list(value))
    elif isinstance(value, (dict, list, tuple)) and id(value) not in inside:  # a structure may contain itself
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        for position, (key, each) in enumerate(entries):
            part = key if type(key) in _PLAIN else position
            yield from _parts(f"{name}.{part}", each, array_of, (*inside, id(value)))


def _described(value: object) -> Array:
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python writes
        text = "a long integer"
    return np.frombuffer(text.encode(), np.uint8)


def _difference(ranks: Sequence[int], names: Sequence[Sequence[str]]) -> str:
    """Return a text with a tensor that some ranks lack, or else that the order differs."""
    for each in dict.fromkeys(name for own in names for name in own):
        if not all(each in own for own in names):
            return f"'{each}' of {_groups(ranks, ['there' if each in own else 'missing' for own in names])}"
    return f"the same {len(names[0])} in another order"


def _groups(ranks: Sequence[int], values: Sequence[str]) -> str:
    """Return a text with the ranks of each value."""
    who: dict[str, list[int]] = {}
    for rank, value in zip(ranks, values, strict=True):
        who.setdefault(value, []).append(rank)
    return "; ".join(f"rank{'s' * (len(own) > 1)} {', '.join(map(str, own))}: {value}" for value, own in who.items())
