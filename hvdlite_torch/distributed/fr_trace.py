"""The last calls of this rank's process groups in the format of torch's Flight Recorder, for its analyzer, `torchfrtrace`.

Only torch's own backends can fill torch's recorder, and its analyzer accepts only their names: calls are called "gloo:..."
here. They are numbered as the ranks compare them, so a mismatch, or a call that a rank has not made, has one number on all
ranks. Sends and receives are left out: the analyzer takes every call for one of all ranks of its group.
"""

from __future__ import annotations

import logging
import os
import pickle
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

import hvdlite
from hvdlite.groups.execution import PastCall

_log = logging.getLogger("hvdlite")

VERSION: Final = "2.10"
"""Of the format: that of torch 2.13."""
_TEXT: Final = re.compile(r"(\w+).*?(?:(\w+)(?:\[([^[\]]*)\]|; splits (.*)))?\)?", re.DOTALL)
"""What `operations.py` calls an operation: its name, dtype, and numbers of elements."""
_STATES: Final = ("completed", "started", "scheduled")


class GroupRecord(NamedTuple):
    """A process group, as one of its ranks remembers it.

    Attributes:
        name: under which torch has registered it.
        description: the script's; "" for none.
        ranks: those of the default group that are in it.
        timeout: of its operations, in seconds.
        calls: the last ones, oldest first.
    """

    name: str
    description: str
    ranks: Sequence[int]
    timeout: float
    calls: Sequence[PastCall]


def dump(groups: Sequence[GroupRecord]) -> dict[str, Any]:
    """Return the dump of one rank: dictionaries, lists, tuples, strings and numbers."""
    now = time.time_ns()
    calls = sorted(((-call.age, index, call) for index, group in enumerate(groups) for call in group.calls),
                   key=lambda each: each[:2])  # the sort is stable: what has not begun stays in its order
    forgotten = sum(group.calls[0].number - 1 for group in groups if group.calls)
    return {
        "version": VERSION, "comm_lib_version": f"hvdlite {hvdlite.__version__}",
        "pg_config": {group.name: {"name": group.name, "desc": _description(group), "ranks": str(list(group.ranks))}
                      for group in groups},
        "pg_status": {str(index): _status(group.calls) for index, group in enumerate(groups)},
        "entries": [{"record_id": record, "pg_id": index, **_entry(groups[index], call, now)}
                    for record, (_, index, call) in enumerate(calls, forgotten)]}


def write(path: str, records: Callable[[], Sequence[GroupRecord]]) -> None:
    """Write a dump to a file, which is complete at any time; any failure is logged, for calls must end nevertheless."""
    try:
        _write(path, dump(records()))
    except Exception as error:
        reason = error.strerror if isinstance(error, OSError) else repr(error)
        _log.error("the flight recorder's trace cannot be written to %s: %s", path, reason)


def _write(path: str, dumped: dict[str, Any]) -> None:
    with tempfile.NamedTemporaryFile(dir=Path(path).absolute().parent, delete=False) as file:
        try:
            pickle.dump(dumped, file)
            file.flush()
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def _description(group: GroupRecord) -> str:
    return group.description or "undefined"


def _status(calls: Sequence[PastCall]) -> dict[str, int]:
    """Return the numbers of the last calls that have come so far, -1 for none."""
    return {f"last_{word}_collective": max((call.number for call in calls if call.state in _STATES[:count]), default=-1)
            for count, word in enumerate(("completed", "started", "enqueued"), 1)}


def _entry(group: GroupRecord, call: PastCall, now: int) -> dict[str, Any]:
    name, dtype, inputs, outputs = _operands(call.text, len(group.ranks))
    return {
        "process_group": (group.name, _description(group)), "profiling_name": f"gloo:{name}", "state": call.state,
        "collective_seq_id": call.number, "p2p_seq_id": 0, "op_id": call.number, "is_p2p": False,
        "input_sizes": [[size] for size in inputs], "input_dtypes": [dtype] * len(inputs),
        "output_sizes": [[size] for size in outputs], "output_dtypes": [dtype] * len(outputs),
        "time_created_ns": now - int(call.age * 1e9), "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None, "retired": call.state == "completed",
        "timeout_ms": int(group.timeout * 1000), "frames": []}


def _operands(text: str, size: int) -> tuple[str, str, Sequence[int], Sequence[int]]:
    """Return the analyzer's name of an operation, the dtype, and the elements of this rank's inputs and outputs.

    If the tensors of the ranks differ in size, the elements are those of all ranks: these have to be equal on all.
    """
    matched = _TEXT.fullmatch(text)
    assert matched is not None, text
    name, dtype, elements, splits = matched.groups("")
    if not dtype:
        return "barrier", "", (), ()
    counts = [int(number) for number in re.findall(r"\d+", elements or splits)]
    if "tensors" in elements:
        name, counts = "allreduce_coalesced", counts[1:]
    if text.startswith("all_reduce of a sparse"):
        name = "all_gather"
    if len(counts) > 1:
        return f"{name}_v", _dtype(dtype), counts, counts
    each = counts[0] if counts else 0  # an alltoall whose splits the script has given: they are not kept
    whole = each * size
    inputs, outputs = {"all_gather": (each, whole), "gather": (each, whole), "scatter": (whole, each),
                       "reduce_scatter": (whole, each), "all_to_all": (whole, whole)}.get(name, (each, each))
    return name, _dtype(dtype), (inputs,), (outputs,)


def _dtype(name: str) -> str:
    """Return the recorder's name of a dtype: "Float" for float32."""
    return torch.empty(0, dtype=getattr(torch, name)).type().removeprefix("torch.").removesuffix("Tensor")
