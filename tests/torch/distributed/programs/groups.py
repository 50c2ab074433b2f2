"""Programs of processes that use process groups."""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.optim import ZeroRedundancyOptimizer

import hvdlite_torch
import hvdlite_torch.distributed
from hvdlite import api
from hvdlite.core.errors import HorovodInternalError, LaunchError
from hvdlite_torch.distributed import collectives
from tests.torch.distributed.programs.ranks import RANK, SIZE, begin


def summed(group: Any = None) -> float:
    mine = torch.full((3,), float(RANK))
    dist.all_reduce(mine, group=group)
    return float(mine[0])


def overlapping_groups(folder: str) -> None:
    """Groups of four ranks made in every way that torch has."""
    begin(folder)
    # Names of groups depend on how many a rank has made, so every rank makes one here, and it is the first one.
    ranks = [1, 2, 3] if RANK else [0]
    assert summed(dist.new_group(ranks, use_local_synchronization=True)) == sum(ranks)
    pairs = [dist.new_group([0, 1]), dist.new_group([1, 2, 3], group_desc="three"), dist.new_group([3, 0])]
    members = [[0, 1], [1, 2, 3], [0, 3]]
    for _ in range(3):
        for group, ranks in zip(pairs, members, strict=True):
            if RANK in ranks:
                assert summed(group) == sum(ranks) and dist.get_process_group_ranks(group) == ranks
        assert summed() == 6
    if RANK in (1, 2, 3):
        assert pairs[1].group_desc == "three" and pairs[1].rank() == RANK - 1
    part = dist.group.WORLD.split_group([RANK % 2 + 2, RANK % 2], group_name=f"parity {RANK % 2}")
    assert part.size() == 2 and part.rank() == (RANK < 2), "its ranks have the order of the list"
    mine = torch.ones(1)
    part.allreduce([mine]).wait()
    assert mine.item() == 2 and part.group_name == f"parity {RANK % 2}"
    if torch.__version__ >= (2, 15):  # before, torch wants an accelerator
        split: Any = dist.split_group(split_ranks=[[3, 1], [2, 0]])
        assert dist.get_process_group_ranks(split) == ([3, 1] if RANK % 2 else [2, 0])
        assert summed(split) == 2 + 2 * (RANK % 2)
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    assert summed(mesh["dp"].get_group()) == 2 * (RANK % 2) + 2 and summed(mesh["tp"].get_group()) == [1, 5][RANK // 2]
    if RANK == 0:
        sent: list[Any] = [{"text": "häßlich"}, RANK]
        dist.broadcast_object_list(sent)
    else:
        received: list[Any] = [None, None]
        dist.broadcast_object_list(received)
        assert received == [{"text": "häßlich"}, 0]
    everybodys: list[Any] = [None] * 4
    dist.all_gather_object(everybodys, "x" * RANK)
    assert everybodys == ["", "x", "xx", "xxx"]
    gathered: list[Any] = [None] * 4
    dist.gather_object(RANK, gathered if RANK == 2 else None, dst=2)
    assert RANK != 2 or gathered == [0, 1, 2, 3]
    scattered: list[Any] = [None]
    dist.scatter_object_list(scattered, ["a", "b", "c", "d"] if RANK == 1 else None, src=1)
    assert scattered == ["abcd"[RANK]]
    dist.destroy_process_group()
    begin(folder, size=4)
    assert summed() == 6
    dist.destroy_process_group()


def transfers(folder: str) -> None:
    """Sends and receives in all forms; rank 0 receives."""
    begin(folder)
    if RANK == 0:
        narrow, any_values, first = torch.empty(3, dtype=torch.bfloat16), torch.empty(2), torch.empty(2, 2)
        works = [dist.irecv(narrow, 1, tag=7), dist.irecv(first, 2, tag=1)]
        assert dist.recv(any_values, tag=8) == 2
        assert all(work.wait() for work in works)
        assert narrow.tolist() == [1.0, 2.0, 3.0] and any_values.tolist() == [5.0, 5.0]
        assert first.tolist() == [[1, 2], [3, 4]]
    elif RANK == 1:
        dist.send(torch.tensor([1, 2, 3], dtype=torch.bfloat16), 0, tag=7)
    else:
        dist.send(torch.full((2, 2), 5.0)[:, 0], 0, tag=8)
        dist.isend(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), 0, tag=1).wait()
    left, right = torch.empty(4), torch.full((4,), float(RANK))
    ring = [dist.P2POp(dist.irecv, left, (RANK - 1) % SIZE), dist.P2POp(dist.isend, right, (RANK + 1) % SIZE)]
    for work in dist.batch_isend_irecv(ring):
        work.wait()
    assert left.tolist() == [float((RANK - 1) % SIZE)] * 4
    dist.destroy_process_group()


def beside_gloo(folder: str) -> None:
    """A group of ours under another default backend, and one of Gloo under ours; hvd beside both."""
    begin(folder, "gloo")
    ours = dist.new_group(backend="hvdlite")
    assert dist.get_backend(ours) == "hvdlite" and summed(ours) == summed() == 1
    dist.destroy_process_group()
    begin(folder)
    theirs = dist.new_group(backend="gloo")
    assert dist.get_backend() == "hvdlite" and summed(theirs) == 1
    hvdlite_torch.init()
    assert hvdlite_torch.rank() == RANK
    assert hvdlite_torch.allreduce(torch.ones(1), op=hvdlite_torch.Sum).item() == 2 and summed() == 1
    hvdlite_torch.shutdown()
    assert summed() == 1
    dist.destroy_process_group()


def another_device(folder: str) -> None:
    """Gloo stands in for the backend of a device: torch would give it tensors of a GPU."""
    begin(folder, "cpu:hvdlite,cuda:gloo")
    world: Any = dist.group.WORLD
    assert summed() == 1 and {device.type for device in world._device_types} == {"cpu", "cuda"}
    other = world._get_backend(torch.device("cuda"))
    assert isinstance(other, distributed_c10d.ProcessGroupGloo) and world._get_backend(torch.device("cuda")) is other
    mine = torch.ones(1)
    other.allreduce([mine]).wait()
    assert mine.item() == 2
    dist.destroy_process_group()
    begin(folder, "cpu:hvdlite,xpu:xccl")
    assert summed() == 1
    try:
        cast(Any, dist.group.WORLD)._get_backend(torch.device("xpu"))
    except ValueError as error:
        assert 'backend "xccl" for xpu: this torch' in str(error)
    else:
        raise AssertionError("this torch has XCCL")
    dist.destroy_process_group()


def questions(folder: str) -> None:
    """What scripts and torch ask a group."""
    begin(folder)
    world: Any = dist.group.WORLD
    assert dist.get_backend() == "hvdlite" and world.name() == "hvdlite" and world._get_backend_name() == "hvdlite"
    assert (world.rank(), world.size(), world.group_desc) == (RANK, 2, "default_pg") and world.get_group_store() is not None
    assert dist.distributed_c10d._get_group_tag(world) is not None
    backend = world._get_backend(torch.device("cpu"))
    assert backend.supports_splitting == (backend is not world), "torch's split_group asks a backend of its own kind only"
    assert not backend.supports_coalescing and backend.name() == "hvdlite"
    before = world._get_sequence_number_for_group()
    summed()
    assert world._get_sequence_number_for_group() == before + 1
    world.set_timeout(datetime.timedelta(seconds=50))
    assert backend.options._timeout == datetime.timedelta(seconds=50)
    hvdlite_torch.distributed.monitored_barrier(timeout=datetime.timedelta(seconds=50))
    one = torch.ones(1)
    world.allreduce(one).wait()
    world.allreduce([one], dist.ReduceOp.MAX).wait()
    world.broadcast(one, 0).wait()
    world.reduce(one, 1, dist.ReduceOp.SUM).wait()
    outputs = [torch.empty(1), torch.empty(1)]
    world.allgather(outputs, torch.full((1,), float(RANK))).wait()
    assert outputs == [0, 1]
    world.gather(outputs if RANK == 0 else [], one, 0).wait()
    world.scatter(one, outputs if RANK == 1 else [], 1).wait()
    world.reduce_scatter(one, outputs).wait()
    world.alltoall(outputs, [one.clone(), one.clone()]).wait()
    world.barrier(datetime.timedelta(seconds=50)).wait()
    with dist._coalescing_manager(device=torch.device("cpu")):
        dist.all_reduce(one)
    dist.destroy_process_group()


def one_has_another_size(folder: str) -> str:
    try:
        begin(folder, size=2 + RANK, seconds=20)
    except (LaunchError, RuntimeError) as error:
        return str(error)
    return "no error"


def one_has_another_backend(folder: str) -> str:
    """The rank that is alone finds nobody: the store's timeout ends it."""
    try:
        dist.init_process_group("hvdlite" if RANK else "gloo", init_method=f"file://{folder}/store", rank=RANK, world_size=2,
                                timeout=datetime.timedelta(seconds=3))
        summed()
    except RuntimeError as error:
        also = ", a DistBackendError" if isinstance(error, dist.DistBackendError) else ""
        return f"{type(error).__name__}{also}: {error}"
    return "no error"


def not_a_member(folder: str) -> None:
    begin(folder)
    group = dist.new_group([0])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mine = torch.ones(1)
        dist.all_reduce(mine, group=group)
        if RANK:
            hvdlite_torch.distributed.monitored_barrier(group)
    assert mine.item() == 1 and len([each for each in caught if "group" in str(each.message)]) == 2 * RANK
    dist.destroy_process_group()


def destroyed(folder: str) -> None:
    begin(folder)
    world: Any = dist.group.WORLD
    group = dist.new_group()
    dist.destroy_process_group(group)
    try:
        dist.all_reduce(torch.ones(1), group=group)
    except (ValueError, HorovodInternalError):
        pass
    else:
        raise AssertionError("a destroyed group reduces")
    assert summed() == 1
    dist.destroy_process_group()
    try:
        world.allreduce([torch.ones(1)]).wait()
    except dist.DistBackendError as error:
        assert "destroyed" in str(error)


def destroyed_under_way(folder: str) -> None:
    """What has been begun is done first, also at the end of a process that destroys nothing."""
    begin(folder)
    mine, sent = torch.ones(1 << 20), torch.full((1 << 22,), 3.0)
    group = dist.new_group()
    if RANK == 1:
        time.sleep(0.3)
    work = dist.all_reduce(mine, async_op=True)
    if RANK == 0:
        dist.isend(sent, 1)
        dist.isend(sent, 1, group=group)
        dist.destroy_process_group(group)
    else:
        received = torch.empty(1 << 22)
        dist.recv(received, 0)
        dist.recv(received, 0, group=group)
        assert bool((received == 3).all())
        dist.destroy_process_group()
        assert work.wait() and mine[0].item() == 2


def destroyed_by_an_exception(folder: str) -> None:
    """An operation that the other rank never calls does not keep the group until its timeout."""
    begin(folder, seconds=1000.0)
    is_destroyed = Path(folder, "destroyed")
    if RANK == 0:
        with mock.patch.object(collectives, "FAILING_SECONDS", 0.1), contextlib.suppress(ValueError):
            try:
                dist.all_reduce(torch.ones(1), async_op=True)
                raise ValueError("of the script")
            finally:
                dist.destroy_process_group()
        is_destroyed.touch()
    while not is_destroyed.exists():
        time.sleep(0.01)


def never_destroyed(folder: str) -> None:
    """The script ends with a group, works that are done, and a future nobody waits for."""
    begin(folder)
    group = dist.new_group()
    dist.all_reduce(torch.ones(1), group=group, async_op=True).get_future().then(lambda done: done.value())
    assert summed() == 1


def counts_steps(folder: str) -> None:
    """Without a call of hvdlite's interface, steps, waits for batches and the parts of steps are counted."""
    os.environ["HVDLITE_STEP_PARTS"] = "1"
    begin(folder)
    begun = api.runtime().progress
    assert begun.steps == 0
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    sharded = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    for optimizer in (plain, sharded):  # a step of `sharded` calls another optimizer's
        for batch in torch.utils.data.DataLoader(list(torch.ones(6, 4)), batch_size=2):
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
    wrapped = hvdlite_torch.DistributedOptimizer(torch.optim.SGD(torch.nn.Linear(4, 1).parameters(), lr=0.1))
    wrapped.step()  # counts itself
    assert begun.steps == 7 and begun.input > 0 and all(seconds > 0 for seconds in begun.parts.values()), begun.parts
    dist.destroy_process_group()


def forks(folder: str) -> None:
    """A forked child gets an error at once, and the parent goes on."""
    begin(folder)
    dist.all_reduce(torch.ones(1), async_op=True).wait()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            summed()
        except RuntimeError as error:
            code = 0 if "fork" in str(error) else 2
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert summed() == 1
    dist.destroy_process_group()


def one_dies(folder: str) -> None:
    begin(folder)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    if RANK == 1:
        print("ready", flush=True)
        signal.pause()
    try:
        model(torch.ones(1, 2)).sum().backward()
    except RuntimeError as error:
        print(f"in backward: {error}", flush=True)
    summed()


def recorded(folder: str) -> None:
    """The ranks write traces for a report; then rank 0 fails, for rank 1 does not come: its runtime writes its trace."""
    traces = [Path(folder, f"trace_{rank}") for rank in range(2)]
    os.environ["TORCH_FR_DUMP_TEMP_FILE"] = str(traces[0])[:-1]
    begin(folder, seconds=30.0)
    assert summed() == 1  # every rank's group is complete: it would write nothing before

    def written() -> None:
        while not all(trace.exists() for trace in traces):
            time.sleep(0.01)

    if RANK == 0:
        api.runtime().request_report()
    written()
    assert summed() == 1
    traces[RANK].unlink()
    assert summed() == 1
    if RANK == 0:
        dist.group.WORLD.set_timeout(datetime.timedelta(seconds=0.5))
        dist.broadcast(torch.ones(2), 0)
    written()


def leftovers(folder: str) -> None:
    """Groups that come and go leave no descriptor and no thread."""
    begin(folder)

    def once() -> None:
        group = dist.new_group()
        dist.all_reduce(torch.ones(1), group=group, async_op=True).wait()
        dist.barrier()
        dist.destroy_process_group(group)
        dist.barrier()

    def left() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    once()
    before = left()
    for _ in range(20):
        once()
    assert left()[1] <= before[1] + 1 and left()[0] <= before[0] + 12, (before, left())
    dist.destroy_process_group()


def by_environment() -> None:
    """A script that any launcher starts."""
    dist.init_process_group("hvdlite")
    mine = torch.full((1,), float(dist.get_rank()))
    dist.all_reduce(mine)
    assert mine.item() == sum(range(dist.get_world_size()))
    print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {mine.item():g}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(globals()[sys.argv[1]](*sys.argv[2:]))
