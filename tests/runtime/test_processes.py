"""Real processes over shared memory: what only processes can show: deaths, exits, forks, idleness, TCP."""

from __future__ import annotations

import secrets
import signal
import socket

import pytest

from tests.worlds import TORCH, Processes, processes

LOOP = """
import hvdlite as hvd, numpy as np
hvd.init()
step = 0
while True:
    hvd.allreduce(np.ones(1000, np.float32), name="gradient")
    step += 1
    if step == 20:
        print("running", flush=True)
"""


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_collectives(size: int) -> None:
    processes(size, f"""
        import hvdlite as hvd, numpy as np
        hvd.init()
        assert hvd.size() == {size}
        total = sum(range(hvd.size()))
        for count in (0, 1, 1000, 3_000_000):
            assert (hvd.allreduce(np.full(count, hvd.rank()), op=hvd.Sum) == total).all()
        array = np.full((3, 5), hvd.rank(), np.float32)
        assert hvd.allreduce_(array, op=hvd.Max) is array and (array == hvd.size() - 1).all()
        assert hvd.allgather(np.full(hvd.rank(), 1)).sum() == total
        assert hvd.broadcast("abc" == "abd" or np.array(hvd.rank()), 0) == 0
        handle = hvd.allreduce_async([1.5])
        assert hvd.synchronize(handle)[0] == 1.5 and hvd.poll(handle)
        hvd.barrier()
        hvd.shutdown()
        hvd.shutdown()
    """)


def test_ranks_of_a_machine_that_reorders_stores_share_a_fence() -> None:
    processes(3, """
        import os, platform
        platform.machine = lambda: "aarch64"
        import hvdlite as hvd, numpy as np
        left = []
        for _ in range(2):
            hvd.init()
            files = [os.readlink(each.path) for each in os.scandir("/proc/self/fd") if os.path.islink(each.path)]
            assert files.count("anon_inode:[eventfd]") == 4, files  # a doorbell each, and the fence
            for count in (10, 1000, 3_000_000):
                for turn in range(5):
                    assert (hvd.allreduce(np.full(count, hvd.rank() + turn), op=hvd.Sum) == 3 + 3 * turn).all()
            hvd.shutdown()
            left.append(len(os.listdir("/proc/self/fd")))
        assert left[0] == left[1], left
    """)


def test_without_a_launcher_it_is_size_one() -> None:
    (ended,) = processes(1, """
        import os
        for name in list(os.environ):
            if name.startswith(("HVDLITE_", "HOROVOD_")): del os.environ[name]
        import hvdlite as hvd, numpy as np
        hvd.init()
        print(hvd.rank(), hvd.size(), hvd.local_size(), hvd.cross_size(), hvd.allreduce([4]), hvd.is_homogeneous())
    """)
    assert ended.stdout == "0 1 1 1 [4] True\n" and ended.stderr == ""


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_killed_rank_is_named_by_all_others(victim: int) -> None:
    with Processes(3, LOOP) as world:
        world.wait_for(victim, "running")
        world.kill(victim, signal.SIGKILL)
        for ended in world.wait(20):
            if ended.rank == victim:
                assert ended.code == -signal.SIGKILL
            else:
                assert ended.code == 1, ended
                assert f"PeerLostError: rank {victim} was lost" in ended.stderr


@pytest.mark.parametrize("origin", [0, 1])
def test_an_exception_travels_with_its_traceback(origin: int) -> None:
    with Processes(3, f"""
        import hvdlite as hvd, numpy as np
        hvd.init()
        def prepare_batch():
            raise KeyError("no such column")
        hvd.barrier()
        if hvd.rank() == {origin}:
            prepare_batch()
        hvd.allreduce(np.ones(3))
    """) as world:
        for ended in world.wait(20):
            assert ended.code == 1
            assert "in prepare_batch" in ended.stderr and "no such column" in ended.stderr
            if ended.rank != origin:
                assert f"PeerFailedError: rank {origin} failed with KeyError" in ended.stderr


# docs/protocol.md#detection
def test_a_death_is_seen_although_a_forked_worker_holds_every_socket() -> None:
    with Processes(2, """
        import os, sys, time
        import hvdlite as hvd, numpy as np
        hvd.init()
        if hvd.rank() == 1 and os.fork() == 0:
            try:
                hvd.allreduce(np.ones(1))
            except hvd.HorovodInternalError as error:
                print(type(error).__name__, flush=True)
            while True:
                time.sleep(1)
        while True:
            hvd.allreduce(np.ones(1), name="x")
    """) as world:
        world.wait_for(1, "ForkedProcessError")
        world.kill(1, signal.SIGKILL)
        world.ranks[0].wait(20)
        assert "rank 1 was lost" in world._ended(0).stderr


# docs/protocol.md#one-runtime
def test_forked_workers_and_their_own_forks_leave_the_job_alone() -> None:
    processes(2, """
        import os
        import hvdlite as hvd, numpy as np
        hvd.init()
        for turn in range(5):
            child = os.fork()
            if child == 0:
                grandchild = os.fork()
                if grandchild:
                    os.waitpid(grandchild, 0)
                os._exit(0)
            hvd.allreduce(np.ones(100))
            assert os.waitpid(child, 0)[1] == 0
        hvd.allreduce(np.ones(100))
    """)


@pytest.mark.parametrize("plane", ["shm", "gloo"])
def test_forked_workers_that_shut_down_and_end_normally_leave_the_job_alone(plane: str) -> None:
    if plane == "gloo":
        pytest.importorskip("torch")
    processes(2, """
        import gc, os, sys
        import hvdlite as hvd, numpy as np
        from hvdlite import api
        from hvdlite.diagnostics.progress import read
        from hvdlite.training.array_gradients import ArrayReducer
        hvd.init()
        rank, directory = hvd.rank(), os.environ["HVDLITE_JOB_DIRECTORY"]
        reducer = ArrayReducer(api.runtime(), "set", op=hvd.Sum)
        reducer.add((100_000,), "float64")
        def step():
            return reducer.reduce({0: np.full(100_000, 1.0 + rank)})[0]
        for _ in range(5):
            step()
        hvd.record_step(7)
        child = os.fork()
        if child == 0:
            hvd.record_step(1000)
            hvd.shutdown()
            del reducer
            gc.collect()
            sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert read(directory, rank).samples == 7
        for _ in range(5):
            assert (step() == 3).all()
    """, environment={"HVDLITE_CPU_OPERATIONS": plane}, imported=TORCH if plane == "gloo" else (),
              timeout=120)


def test_a_rank_that_dies_before_init_is_named_by_the_others() -> None:
    with Processes(3, """
        import os
        if os.environ["HVDLITE_RANK"] == "1":
            os._exit(7)
        import hvdlite as hvd
        hvd.init()
    """, environment={"HVDLITE_START_TIMEOUT": "2"}) as world:
        ended = world.wait(30)
        assert [rank.code for rank in ended] == [1, 7, 1]
        assert "ranks [1] did not connect" in ended[0].stderr
        assert "ranks [1] did not connect" in ended[2].stderr


def test_ranks_end_in_any_order_without_noise() -> None:
    for ended in processes(3, """
        import time
        import hvdlite as hvd, numpy as np
        hvd.init()
        hvd.allreduce(np.ones(3))
        time.sleep(0.3 * hvd.rank())  # rank 0 is through first, and has to serve the others
        if hvd.rank() > 0:
            try:
                hvd.allreduce(np.ones(3), name="late")
            except hvd.PeerLeftError as error:
                print(error)
    """):
        assert ended.stderr == ""
        assert ended.rank == 0 or ended.stdout.startswith("'late' needs all ranks, but rank")
        assert ended.rank == 0 or (" 0" in ended.stdout and "left the job normally" in ended.stdout)


# docs/protocol.md#waiting
def test_an_idle_job_uses_no_processor_time() -> None:
    for ended in processes(2, """
        import time
        import hvdlite as hvd, numpy as np
        hvd.init()
        hvd.allreduce(np.ones(1))
        before = time.process_time()
        time.sleep(3)
        print(time.process_time() - before)
        hvd.barrier()
    """):
        assert float(ended.stdout) < 0.005, "an idle rank must not poll"


def test_init_and_shutdown_again_leak_nothing() -> None:
    processes(1, """
        import os, threading
        import hvdlite as hvd, numpy as np
        counts = []
        for turn in range(20):
            hvd.init()
            hvd.allreduce(np.ones(1))
            hvd.shutdown()
            counts.append((len(os.listdir("/proc/self/fd")), threading.active_count()))
        assert counts[-1] == counts[1], counts
    """)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _over_tcp() -> dict[str, str]:
    return {"HVDLITE_CONTROL": "tcp", "HVDLITE_COORDINATOR": f"127.0.0.1:{_free_port()}",
            "HVDLITE_SECRET": secrets.token_hex()}


def test_the_control_plane_over_tcp() -> None:
    processes(3, """
        import hvdlite as hvd, numpy as np, time
        hvd.init()
        for turn in range(200):
            assert hvd.allreduce(np.array(hvd.rank()), op=hvd.Sum) == 3
        time.sleep(2.2)  # heartbeats travel
        hvd.barrier()
    """, environment=_over_tcp())


def test_a_death_over_tcp() -> None:
    with Processes(2, LOOP, environment=_over_tcp()) as world:
        world.wait_for(1, "running")
        world.kill(1)
        assert "rank 1 was lost" in world.wait(20)[0].stderr


@pytest.mark.parametrize(("environment", "told"), [
    ({"HVDLITE_FUSION_TRESHOLD": "1"}, "did you mean HVDLITE_FUSION_THRESHOLD"),
    ({"HVDLITE_FUSION_THRESHOLD": "lots"}, "HVDLITE_FUSION_THRESHOLD='lots' is not valid"),
    ({"HVDLITE_RANK": "5"}, "rank 5 is not in 0..0"),
    ({"HVDLITE_RANK": "x"}, "HVDLITE_RANK='x' is not a number"),
])
def test_a_bad_environment_is_one_clear_error(environment: dict[str, str], told: str) -> None:
    with Processes(1, "import hvdlite as hvd; hvd.init()", environment=environment) as world:
        (ended,) = world.wait(20)
        assert ended.code == 1 and told in ended.stderr.splitlines()[-1]


def test_a_job_directory_open_to_others_is_refused(tmp_path) -> None:  # type: ignore[no-untyped-def]
    tmp_path.chmod(0o755)
    with Processes(2, "import hvdlite as hvd; hvd.init()",
                   environment={"HVDLITE_JOB_DIRECTORY": str(tmp_path)}) as world:
        for ended in world.wait(20):
            assert "mode 0700" in ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("count", [6_000, pytest.param(60_000, marks=pytest.mark.long)])
def test_many_small_collectives_leave_nothing_behind(count: int) -> None:
    processes(2, """
        import gc, os, threading, numpy as np, hvdlite as hvd
        hvd.init()
        value = np.ones(3)

        def held():
            gc.collect()
            return (int(open("/proc/self/statm").read().split()[1]) * 4096, len(os.listdir("/proc/self/fd")),
                    threading.active_count())

        for count in range(COUNT):
            match count % 4:
                case 0:
                    hvd.allreduce_(value, op=hvd.Max, name=f"once {count}")
                case 1:
                    hvd.broadcast_(value, 1, name=f"tensor {count % 1000}")
                case 2:
                    hvd.allgather(value, name="same name")
                case 3:
                    handles = [hvd.allreduce_async(value, name=name) for name in "ab"]
                    hvd.synchronize(handles[0]), hvd.synchronize(handles[1])
            if count == COUNT // 3:
                before = held()
        after = held()
        assert after[0] - before[0] < 2.5e6 and after[1] <= before[1] and after[2] == before[2], (before, after)
        hvd.shutdown()
    """.replace("COUNT", str(count)), timeout=170)


def test_numpys_grouped_calls_and_the_story_of_a_tensor() -> None:
    ended = processes(2, """
        import logging, numpy as np, hvdlite as hvd
        hvd.init()
        rank = hvd.rank()
        arrays = [np.full(3, rank + 1.0), np.full((2, 2), rank, np.int64), np.full(4, 10.0 * rank)]
        one, two, three = hvd.grouped_allreduce(arrays, name="g", op=hvd.Sum)
        assert (one == 3).all() and (two == 1).all() and two.dtype == np.int64 and (three == 10).all()
        assert (arrays[0] == rank + 1).all()
        handle = hvd.grouped_allreduce_async_(arrays, op=hvd.Max)
        assert hvd.synchronize(handle)[0] is arrays[0] and hvd.poll(handle) and (arrays[2] == 10).all()
        assert hvd.grouped_allreduce([]) == []
        rows = hvd.grouped_allgather([np.full(rank + 1, rank), np.zeros((1, 2))])
        assert rows[0].tolist() == [0, 1, 1] and rows[1].shape == (2, 2)
        parts = hvd.grouped_reducescatter([np.ones(5), np.ones((2, 3))], op=hvd.Sum)
        assert parts[0].tolist() == [2.0] * (3 - rank) and parts[1].shape == (1, 3)
        angles = hvd.allreduce(np.eye(2)[rank], op=hvd.Adasum)
        assert angles.tolist() == [1, 1], "orthogonal vectors are added"
        try:
            hvd.allreduce(np.ones(rank + 1), name="uneven")
        except hvd.MismatchError as error:
            assert "What happened to 'uneven' on rank" in str(error) and "submitted (allreduce, float64[" in str(error)
        else:
            raise SystemExit("no error")
        story = hvd.story("uneven").splitlines()
        assert "submitted" in story[0] and "failed" in story[-1] and hvd.story("unheard of") == ""
        logging.getLogger("hvdlite").warning("hello")
    """, environment={"HVDLITE_LOG_HIDE_TIME": "1"})
    assert [rank.stderr for rank in ended] == ["[0] hvdlite WARNING: hello\n", "[1] hvdlite WARNING: hello\n"]
