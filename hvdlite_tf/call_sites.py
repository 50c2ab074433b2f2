"""Names for collectives inside `tf.function` that have none: the lines of the script that call them.

A name must be equal on all ranks (docs/protocol.md#names). Ranks trace a function at different times and unequally often
(another batch size, a summary or a checkpoint on one rank only), so a name contains nothing that counts traces, graphs
or tensors of the process. Lines of the script are equal on all ranks. If a trace passes a line several times, the name has a
number, counted within the graph of that trace; a loop or a branch of TensorFlow is a graph of its own. The iterations of a
loop share a name: TensorFlow runs them one after the other, as it does all collectives of a function.
"""

from __future__ import annotations

import itertools
import os
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf

from hvdlite import api
from hvdlite.core.texts import encodable

_PACKAGES = tuple(os.path.dirname(os.path.abspath(path)) + os.sep for path in (
    __file__, api.__file__, keras.__file__, tf.__file__))
"""Frames of these packages are not the script's."""
_TRACING = os.sep + "polymorphic_function" + os.sep
"""Part of the path of TensorFlow's files that begin a trace; outer frames differ from trace to trace."""
_DEPTH = 3
"""The number of calls of the script that a name contains."""

_passed: weakref.WeakKeyDictionary[Any, Counter[tuple[str, int]]] = weakref.WeakKeyDictionary()
"""The number of times that each graph has passed a name, by process set."""


def graph_name(kind: str, process_set: int) -> str:
    """Return the name of the collective that is being traced: the lines of the script that call it, innermost first."""
    frames = [(frame[0], frame[1], frame[2]) for frame in reversed(tf.no_op().traceback)]
    name = f"{kind}.{'.from.'.join(itertools.islice(_places(frames), _DEPTH)) or 'graph'}"
    passed = _passed.setdefault(tf.compat.v1.get_default_graph(), Counter())
    count = passed[name, process_set]
    passed[name, process_set] += 1
    return encodable(f"{name}#{count}" if count else name)  # a file's name is any bytes


def _places(frames: Iterable[tuple[str, int, str]]) -> Iterator[str]:
    """Yield the script's lines within the trace, one for each function, of a traceback whose innermost frame comes first."""
    frames = list(frames)
    is_traced = any(_TRACING in file for file, _, _ in frames)
    last = None
    for file, line, function in frames:
        if _TRACING in file:
            return
        if file.startswith(_PACKAGES) or (file, function) == last:  # the latter: a loop or a branch in that function
            continue
        last = file, function
        yield f"{os.path.basename(file)}:{line}.{function}"
        if not is_traced:
            return  # a graph of the script's own: its callers may differ between ranks
