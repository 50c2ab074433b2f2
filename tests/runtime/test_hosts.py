"""Jobs on several hosts: to the ranks, hosts are what has a job directory of its own."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.worlds import TORCH, Processes, processes

pytest.importorskip("torch")

COLLECTIVES = """
    import hvdlite as hvd, numpy as np
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    for name, count in (("small", 3), ("large", 300_000)):
        values = np.arange(count, dtype=np.float32) + rank
        assert np.allclose(hvd.allreduce(values, name=name), np.arange(count) + (size - 1) / 2), name
        assert hvd.broadcast(values, 1, name=f"{name}.b")[0] == 1
        rows = hvd.allgather(np.full((rank + count, 2), rank, np.int32), name=f"{name}.g")
        assert rows.shape == (sum(count + each for each in range(size)), 2) and rows[-1, 0] == size - 1
        parts = hvd.alltoall(np.repeat(np.arange(size), count), name=f"{name}.a")
        assert (parts == rank).all() and parts.size == size * count
        own = hvd.reducescatter(np.ones((size * count, 2)), op=hvd.Sum, name=f"{name}.r")
        assert own.shape == (count, 2) and (own == size).all()
    ends = hvd.add_process_set([0, size - 1]) if size > 2 else hvd.global_process_set
    if ends.included():
        assert hvd.allreduce(np.full(100_000, rank), op=hvd.Sum, process_set=ends)[0] == size - 1
    assert hvd.remove_process_set(ends) == (size > 2)
    if rank == 0:
        hvd.send(np.arange(70_000), size - 1)
    elif rank == size - 1:
        assert hvd.recv(np.zeros(70_000, int), 0)[-1] == 69_999
    print(hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size(), hvd.is_homogeneous())
    hvd.shutdown()
"""


@pytest.mark.parametrize(("hosts", "told"), [
    ((2, 2), ["0 2 0 2 True", "1 2 0 2 True", "0 2 1 2 True", "1 2 1 2 True"]),
    ((1, 3), ["0 1 0 2 False", "0 3 1 2 False", "1 3 0 1 False", "2 3 0 1 False"]),
])
def test_everything_works_between_hosts(hosts: tuple[int, ...], told: list[str]) -> None:
    ended = processes(sum(hosts), COLLECTIVES, hosts=hosts, imported=TORCH)
    assert [rank.stdout.strip() for rank in ended] == told


def test_hosts_whose_machines_reorder_stores_have_a_fence_each() -> None:
    processes(3, "\n    import platform; platform.machine = lambda: 'aarch64'" + COLLECTIVES, hosts=(2, 1), imported=TORCH)


ENDLESS = """
    import hvdlite as hvd, numpy as np
    hvd.init()
    values = np.ones(400_000, np.float32)
    for step in range(10**9):
        hvd.allreduce(values, name="x")
        if step == 3:
            print("moving")
"""


@pytest.mark.parametrize(("hosts", "victim"), [((2, 2), 3), ((2, 2), 2), ((1, 3), 0), ((1, 1), 0)])
def test_a_death_on_another_host_is_named_by_all(hosts: tuple[int, ...], victim: int) -> None:
    with Processes(sum(hosts), ENDLESS, hosts=hosts, imported=TORCH) as world:
        for rank in range(sum(hosts)):
            world.wait_for(rank, "moving")
        killed = time.monotonic()
        world.kill(victim)
        ended = world.wait(20)
        took = time.monotonic() - killed
    for rank in ended:
        assert rank.code == (-9 if rank.rank == victim else 1), rank
    assert all(f"rank {victim} " in rank.stderr.splitlines()[-1] for rank in ended if rank.rank != victim)
    assert took < 15, "no time limit is tested, but that no timeout was waited for"


@pytest.mark.parametrize("victim", [2, 3])
def test_an_exception_on_another_host_is_everybodys_cause(victim: int) -> None:
    """Rank 2 leads rank 3."""
    with Processes(4, f"""
        import hvdlite as hvd, numpy as np
        hvd.init()
        for step in range(10**9):
            hvd.allreduce(np.ones(40_000), name="x")
            if step == 5 and hvd.rank() == {victim}:
                raise KeyError("no such column")
    """, hosts=(2, 2), imported=TORCH) as world:
        ended = world.wait(30)
    for rank in ended:
        assert rank.code == 1 and "no such column" in rank.stderr, rank
        assert rank.rank == victim or f"rank {victim} failed with KeyError" in rank.stderr, rank


@pytest.mark.parametrize("victim", [2, 0])
def test_a_rank_that_stops_answering_is_named_by_all(victim: int) -> None:
    """Rank 2, which speaks for rank 3, or rank 0, to whom it speaks."""
    with Processes(4, ENDLESS, hosts=(2, 2), imported=TORCH, environment={
            "HVDLITE_HEARTBEAT_TIMEOUT": "3", "HVDLITE_SILENCE_CHECK_SECONDS": "1"}) as world:
        for rank in range(4):
            world.wait_for(rank, "moving")
        world.kill(victim, signal.SIGSTOP)
        for rank in range(4):
            if rank != victim:
                world.ranks[rank].wait(40)
        world.kill(victim)
        ended = world.wait(20)
    assert all(f"rank {victim} " in rank.stderr.splitlines()[-1] for rank in ended if rank.rank != victim), ended


def test_a_leader_that_leaves_first_still_speaks_for_its_host() -> None:
    processes(4, """
        import hvdlite as hvd, numpy as np
        hvd.init()
        others = hvd.add_process_set([0, 1, 3])
        hvd.barrier()
        if hvd.rank() != 2:
            for step in range(20):
                assert hvd.allreduce(np.full(100, step), op=hvd.Sum, process_set=others)[0] == 3 * step
        hvd.shutdown()
    """, hosts=(2, 2), imported=TORCH)


def test_the_stall_report_names_the_one_whom_a_host_waits_for() -> None:
    """Rank 2 has reported the bucket to its leader, itself, which holds it back for rank 3."""
    with Processes(4, """
        import time, torch, hvdlite_torch as hvd
        hvd.init()
        model = torch.nn.Linear(30, 40)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        for step in range(6):
            if step == 5 and hvd.rank() == 3:
                time.sleep(600)
            optimizer.zero_grad()
            model(torch.randn(8, 30)).square().mean().backward()
            optimizer.step()
    """, hosts=(2, 2), environment={"HVDLITE_STALL_CHECK_TIME_SECONDS": "1"}, imported=TORCH) as world:
        world.wait_for(0, "waited", stream="stderr")
        world.wait_for(0, "time.sleep(600)", stream="stderr")
        for rank in range(4):
            world.kill(rank)
        told = world.wait(20)[0].stderr
    assert "submitted by ranks [0, 1, 2], not yet by ranks [3]" in told


@pytest.mark.parametrize("victim", [0, 1])
def test_a_death_under_gloo_on_one_host(victim: int) -> None:
    with Processes(3, ENDLESS, environment={"HVDLITE_CPU_OPERATIONS": "gloo"}, imported=TORCH) as world:
        for rank in range(3):
            world.wait_for(rank, "moving")
        world.kill(victim)
        ended = world.wait(20)
    for rank in ended:
        assert rank.code == (-9 if rank.rank == victim else 1), rank
        assert rank.rank == victim or f"rank {victim} " in rank.stderr.splitlines()[-1]


BESIDE_THE_SCRIPTS_OWN = """
    import numpy as np, torch, torch.distributed as dist
    import hvdlite as hvd
    hvd.init()
    assert not dist.is_initialized()
    assert hvd.allreduce(np.full(100_000, hvd.rank()), op=hvd.Sum)[0] == 1
    dist.init_process_group("gloo", init_method="file://MEETING", rank=hvd.rank(), world_size=2)
    mine = torch.ones(1000)
    for step in range(20):
        dist.all_reduce(mine)
        assert hvd.allreduce(np.full(100_000, step), op=hvd.Sum, name="x")[0] == 2 * step
    assert mine[0] == 2.0 ** 20
    hvd.shutdown()
    dist.all_reduce(mine)
    dist.destroy_process_group()
"""


def test_gloo_leaves_the_scripts_own_process_group_alone(tmp_path: Path) -> None:
    processes(2, BESIDE_THE_SCRIPTS_OWN.replace("MEETING", str(tmp_path / "meet")),
              environment={"HVDLITE_CPU_OPERATIONS": "gloo"}, imported=TORCH)


@pytest.mark.parametrize("control", ["auto", "tcp"])
def test_training_between_hosts_gives_the_same_parameters(control: str) -> None:
    """Learned buckets, broadcast and the eager lane, on uneven hosts with and without leaders, with 16-bit gradients."""
    ended = processes(3, """
        import torch, hvdlite_torch as hvd
        hvd.init()
        torch.manual_seed(hvd.rank())
        model = torch.nn.Sequential(torch.nn.Linear(300, 400), torch.nn.ReLU(), torch.nn.Linear(400, 10))
        hvd.broadcast_parameters(model.state_dict(), root_rank=1)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(),
                                             compression=hvd.Compression.bf16)
        for step in range(6):
            optimizer.zero_grad()
            model(torch.randn(8, 300)).square().mean().backward()
            optimizer.step()
        total = sum(float(parameter.double().sum()) for parameter in model.parameters())
        assert len(set(hvd.allgather_object(total))) == 1
        print(repr(total))
        hvd.shutdown()
    """, hosts=(1, 2), environment={"HVDLITE_CONTROL": control}, imported=TORCH)
    assert len({rank.stdout for rank in ended}) == 1


def test_0_seconds_are_never() -> None:
    """Rank 1 comes when rank 0 waits in init(), leaves when it waits in shutdown(), and is silent in between."""
    never = ("START_TIMEOUT", "SHUTDOWN_TIMEOUT", "HEARTBEAT_TIMEOUT", "GLOO_TIMEOUT", "STALL_CHECK_TIME_SECONDS",
             "STALL_SHUTDOWN_TIME_SECONDS", "SILENCE_CHECK_SECONDS")
    ended = processes(2, """
        import sys, hvdlite as hvd, numpy as np
        hvd.init()
        for _ in range(3):
            assert hvd.allreduce(np.full(100_000, 2.0 + hvd.rank()))[0] == 2.5
        hvd.shutdown()
    """, hosts=(1, 1), imported=TORCH, environment={f"HVDLITE_{name}": "0" for name in never})
    assert not any(rank.stderr for rank in ended), ended
