"""Traces in the format of torch's Flight Recorder, read by torch's own analyzer."""

from __future__ import annotations

import datetime
import errno
import gc
import os
import pickle
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from hvdlite.core.errors import MismatchError, OperationTimeoutError
from hvdlite_torch.distributed.fr_trace import GroupRecord, dump, write
from tests.torch.distributed.programs import groups as programs
from tests.torch.distributed.threads import run
from tests.worlds import HANGS_SECONDS, TORCH, Processes

analyzer = pytest.importorskip("torch.distributed.flight_recorder.fr_trace", reason="torch 2.13 and later have it")


def analyzed(folder: Path, dumps: Sequence[Any] = ()) -> Any:
    """Return the analyzer's table of collectives, from a dump of each rank or from the files in a folder."""
    for rank, found in enumerate(dumps):
        (folder / f"trace_{rank}").write_bytes(pickle.dumps(found))
    args = analyzer.JobConfig().parse_args([str(folder), "--prefix", "trace_"])
    try:
        details, version = analyzer.read_dir(args)
        return analyzer.build_db(details, args, version).collectives
    finally:
        gc.enable()  # which the analyzer has switched off


def test_calls_of_all_kinds_match(tmp_path: Path) -> None:
    def step(group: Any) -> Any:
        rank, size, mine = group.rank(), group.size(), torch.ones(6)
        parts = [torch.empty(6) for _ in range(size)]
        uneven = [torch.empty(each) for each in range(1, size + 1)]
        group.allreduce([mine])
        group.allreduce_coalesced([mine, torch.ones(2, 2)])
        group.allreduce([torch.ones(3, 2).to_sparse()])
        group.broadcast(mine, 1)
        group.reduce(mine, 0)
        group.allgather([parts], [mine])
        group.allgather([uneven], [uneven[rank]])
        group.gather(parts if rank == 1 else [], mine, 1)
        group.scatter(mine, parts if rank == 0 else [], 0)
        group.reduce_scatter([mine], [parts])
        group.reduce_scatter([uneven[rank]], [uneven])
        group.alltoall(parts, [part.clone() for part in parts])
        group.all_to_all_single(torch.empty(6), torch.ones(6), [], [])
        group.all_to_all_single(torch.empty(6), torch.ones(6), [2] * size if rank else [], [])
        group.monitored_barrier()
        group.barrier().wait()
        return dump([group.record()])

    dumps = run(3, step)
    found = analyzed(tmp_path, dumps)
    assert [each.collective_name.removeprefix("gloo:") for each in found] == [
        "all_reduce", "allreduce_coalesced", "all_gather", "all_gather", "all_gather", "broadcast", "reduce", "all_gather",
        "all_gather_v", "gather", "scatter", "reduce_scatter", "reduce_scatter_v", "all_to_all", "all_to_all", "all_to_all",
        "barrier", "barrier"]
    assert all(each.pass_check and each.collective_state == "completed" for each in found), found


def test_a_mismatch_is_found(tmp_path: Path) -> None:
    def step(group: Any) -> Any:
        group.allreduce([torch.ones(2)])
        with pytest.raises(MismatchError):
            group.allreduce([torch.ones(3 if group.rank() == 1 else 2)]).wait()
        return dump([group.record()])

    first, second = analyzed(tmp_path, run(3, step))
    assert first.pass_check and not second.pass_check
    assert (second.collective_seq_id, second.collective_state) == (2, "started")
    (rank, culprit), = second.mismatch_collectives.items()
    assert rank == 1 and culprit.input_sizes == [[3]] and "SIZE_OR_SYNTAX_MISMATCH" in str(culprit.type_of_mismatch)


def test_a_rank_that_is_missing_is_found_and_so_is_what_waits_behind(tmp_path: Path) -> None:
    done = threading.Barrier(2)

    def step(group: Any) -> Any:
        group.allreduce([torch.ones(2)]).wait()
        if group.rank() == 1:
            done.wait()
            return dump([group.record()])
        group.set_timeout(datetime.timedelta(seconds=0.5))
        troubled: list[Any] = []
        group._group.watch(lambda: troubled.append(dump([group.record()])))
        work = group.allreduce([torch.ones(3)])
        group.broadcast(torch.ones(4), 0)
        with pytest.raises(OperationTimeoutError):
            work.wait()
        done.wait()
        return troubled[0]

    dumps = run(2, step)
    assert [entry["state"] for entry in dumps[0]["entries"]] == ["completed", "started", "scheduled"]
    completed, *others = analyzed(tmp_path, dumps)
    assert completed.pass_check and [each.missing_ranks for each in others] == [{1}, {1}]
    assert [each.collective_name for each in others] == ["gloo:all_reduce", "gloo:broadcast"]


def test_a_trace_that_cannot_be_written_leaves_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def no_memory() -> Sequence[GroupRecord]:
        raise MemoryError("for the calls")

    folder = tmp_path / "in the way"
    (folder / "too").mkdir(parents=True)
    write(str(tmp_path / "trace"), no_memory)
    write(str(folder), list)
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]
    assert [record.getMessage().rpartition(": ")[2] for record in caplog.records] == [
        "MemoryError('for the calls')", os.strerror(errno.EISDIR)]


def test_the_ranks_write_files_when_a_job_fails(tmp_path: Path) -> None:
    """And when rank 0 gathers a report. Also the rank that is missing, which waits for nothing, writes."""
    with Processes(2, programs.recorded, str(tmp_path), imported=TORCH) as world:
        first, _ = world.wait(HANGS_SECONDS)
    assert "OperationTimeoutError" in first.stderr
    *_, last = analyzed(tmp_path)
    assert last.collective_name == "gloo:broadcast" and last.missing_ranks == {1}
