"""RayExecutor on a real Ray: a cluster of two nodes, both on this machine."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray")

from ray.cluster_utils import Cluster  # noqa: E402

from hvdlite.core.errors import LaunchError, NotInitializedError  # noqa: E402
from hvdlite.ray import RayExecutor  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    before = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith(("HVDLITE_", "HOROVOD_"))}
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 3, "include_dashboard": False})
    nodes.add_node(num_cpus=2)
    ray.init(address=nodes.address, logging_level="error", log_to_driver=False)
    yield
    ray.shutdown()
    nodes.shutdown()
    os.environ.update(before)


def total(value: int) -> tuple[int, int, int, str]:
    import numpy as np

    import hvdlite as hvd
    hvd.init()
    return (hvd.rank(), hvd.local_rank(), int(hvd.allreduce(np.array(value), op=hvd.Sum)),
            os.environ["HVDLITE_JOB_DIRECTORY"])


def test_ranks_run_functions_again_and_again_and_leave_nothing() -> None:
    executor = RayExecutor(RayExecutor.create_settings(timeout_s=60), num_workers=3)
    executor.start(extra_env_vars={"GREETING": "hello"})
    for value in (2, 5):
        results = executor.run(total, args=[value])
        assert [result[:3] for result in results] == [(rank, rank, 3 * value) for rank in range(3)]
    assert executor.run(os.getenv, kwargs={"key": "GREETING"}) == ["hello"] * 3
    assert ray.get(executor.run_remote(total, [1]))[2][0] == 2
    assert Path(results[0][3]).exists()
    executor.shutdown()
    executor.shutdown()
    assert not Path(results[0][3]).exists()
    with pytest.raises(NotInitializedError, match="start"):
        executor.run(total, [1])


def coordinates() -> tuple[int, ...]:
    import numpy as np

    import hvdlite as hvd
    hvd.init()
    total = hvd.allreduce(np.ones(100_000), op=hvd.Sum)
    return hvd.rank(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size(), int(total[0])


def test_ranks_on_two_nodes() -> None:
    pytest.importorskip("torch")  # for Gloo
    executor = RayExecutor(num_hosts=2, num_workers_per_host=2)
    executor.start()
    assert executor.run(coordinates) == [(0, 0, 2, 0, 2, 4), (1, 1, 2, 0, 2, 4), (2, 0, 2, 1, 2, 4), (3, 1, 2, 1, 2, 4)]
    executor.shutdown()


def test_an_executable_lives_on_each_rank() -> None:
    class Trainer:
        def __init__(self, begin: int) -> None:
            self.steps = begin

        def train(self) -> int:
            self.steps += 1
            return self.steps

    executor = RayExecutor(num_hosts=1, num_workers_per_host=2)
    executor.start(executable_cls=Trainer, executable_kwargs={"begin": 10})
    assert executor.execute(lambda trainer: trainer.train()) == [11, 11]
    assert executor.execute_single(lambda trainer: trainer.train()) == 12
    assert executor.execute(lambda trainer: trainer.train()) == [13, 12]
    executor.shutdown()


def wait_for(rank: int, what: str) -> Any:
    import numpy as np

    import hvdlite as hvd
    hvd.init()
    if hvd.rank() == rank:
        if what == "raise":
            raise KeyError("bad batch")
        os.kill(os.getpid(), signal.SIGKILL)
    return hvd.allreduce(np.ones(1), name="x")


def test_a_rank_that_raises_or_dies_ends_the_call() -> None:
    executor = RayExecutor(num_workers=2)
    executor.start()
    with pytest.raises(KeyError, match="bad batch"):
        executor.run(wait_for, [1, "raise"])
    executor.shutdown()
    executor = RayExecutor(num_workers=2)
    executor.start()
    begun = time.monotonic()
    with pytest.raises(ray.exceptions.RayActorError):
        executor.run(wait_for, [1, "die"])
    executor.shutdown()
    assert time.monotonic() - begun < 60


def test_what_cannot_be() -> None:
    executor = RayExecutor(RayExecutor.create_settings(placement_group_timeout_s=1), num_workers=99)
    with pytest.raises(LaunchError, match="no room for 99 ranks"):
        executor.start()
    for arguments in ({}, {"num_workers": 1, "num_hosts": 1}, {"num_workers": 0}, {"num_workers": 1, "gpus_per_worker": 1},
                      {"num_workers": 1, "min_workers": 1}):
        with pytest.raises(ValueError):
            RayExecutor(**arguments)  # type: ignore[arg-type]
