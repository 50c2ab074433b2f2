"""hvdlite.spark.run on a real Spark in local mode: barrier stages, each task a process."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Iterator

import pytest

pyspark = pytest.importorskip("pyspark")

import hvdlite.spark  # noqa: E402
from hvdlite.core.errors import LaunchError, PeerLostError  # noqa: E402
from tests.launch.failing import check_first_exception  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.skipif(
    shutil.which("java") is None, reason="needs a Java runtime (make test as root installs it)")]


def total(value: int, name: str = "") -> tuple[int, int, int, str]:
    import numpy as np

    import hvdlite as hvd
    hvd.init()
    return hvd.rank(), hvd.local_rank(), int(hvd.allreduce(np.array(value), op=hvd.Sum)), os.environ["GREETING"] + name


def test_without_a_context() -> None:
    with pytest.raises(LaunchError, match="make a SparkSession first"):
        hvdlite.spark.run(total, (1,))


@pytest.fixture(scope="module")
def spark() -> Iterator[None]:
    interrupted = signal.getsignal(signal.SIGINT)  # Spark's own handler would stay, without its Spark
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # else Spark takes the python3 that it finds first
    builder = pyspark.sql.SparkSession.builder.master("local[3]").config("spark.ui.enabled", "false")
    session = builder.config("spark.driver.bindAddress", "127.0.0.1").config("spark.driver.host", "127.0.0.1").getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    yield
    session.stop()
    signal.signal(signal.SIGINT, interrupted)


def test_results_in_rank_order_and_processes_that_can_be_used_again(spark: None) -> None:
    for size in (3, 2):
        results = hvdlite.spark.run(total, (2,), {"name": "!"}, num_proc=size, env={"GREETING": "hello"})
        assert results == [(rank, rank, 2 * size, "hello!") for rank in range(size)]
    assert len(hvdlite.spark.run(total, (1,), env={"GREETING": ""})) == 3, "as many as there is room for"


def test_the_first_exception_is_raised_once_with_its_traceback(spark: None) -> None:
    check_first_exception(hvdlite.spark.run)


def test_a_dead_rank_and_too_many_ranks(spark: None) -> None:
    with pytest.raises(LaunchError, match="not started 9 tasks at a time within 2 s; it has room for 3"):
        hvdlite.spark.run(total, (1,), num_proc=9, start_timeout=2)

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(PeerLostError, match="barrier stage of 2 ranks failed"):
        hvdlite.spark.run(die, num_proc=2)
