"""`hvdlite.spark.run`: call a function on every rank of a job whose processes are the tasks of a Spark barrier stage.

Spark starts all processes or none, and transports the function and the results; the ranks rendezvous as under every other
launcher. An exception of the function is returned as a result, so that Spark does not retry the stage.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import cloudpickle

from hvdlite.core.errors import LaunchError, PeerLostError
from hvdlite.core.sockets import HeldPort
from hvdlite.launch import workers
from hvdlite.launch.run_function import RankTraceback, pickled_failure, pickled_result

try:
    import pyspark
    from pyspark import BarrierTaskContext, SparkContext
except ModuleNotFoundError as error:
    raise ImportError("hvdlite.spark needs PySpark: pip install 'hvdlite[spark]' (and a Java runtime)") from error

_POLL_SECONDS = 0.5


def run(fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None,
        num_proc: int | None = None, start_timeout: float | None = None, env: Mapping[str, str] | None = None,
        verbose: int = 1, **horovods: Any) -> list[Any]:
    """Call `fn(*args, **kwargs)` on every rank; return the results in rank order.

    Args:
        num_proc: number of ranks; default: the number of tasks that Spark runs concurrently (`spark.default.parallelism`).
        start_timeout: seconds within which Spark must start all ranks; default 600.
        env: environment variables of the ranks.
        horovods: Horovod's other arguments (stdout, nics, use_gloo, ...); they have no effect.

    Raises:
        LaunchError: without a Spark context, or when Spark does not start the ranks in time.
        PeerLostError: when a rank's process died.
        Exception: the exception of the rank that failed first, with its traceback as the cause.
    """
    context = SparkContext._active_spark_context
    if context is None:
        raise LaunchError("there is no Spark context; make a SparkSession first")
    if horovods.get("use_mpi"):
        raise ValueError("Spark starts the ranks, not mpirun: leave use_mpi out")
    size, timeout = num_proc or context.defaultParallelism, 600.0 if start_timeout is None else start_timeout
    task = _task(cloudpickle.dumps((fn, tuple(args), dict(kwargs or {}))), dict(env or {}), secrets.token_hex())
    group = f"hvdlite-{secrets.token_hex(4)}"
    answers: list[tuple[int, bytes]] = []
    failures: list[BaseException] = []

    def job() -> None:
        try:
            context.setJobGroup(group, f"hvdlite: {getattr(fn, '__name__', fn)} on {size} ranks")
            answers.extend(context.parallelize(range(size), size).barrier().mapPartitions(task).collect())
        except Exception as error:  # of any kind: Spark's, Java's
            failures.append(error)

    thread = pyspark.InheritableThread(target=job, name="hvdlite-spark", daemon=True)
    thread.start()
    _watch(context, group, thread, size, timeout)
    if failures:
        raise PeerLostError(f"the barrier stage of {size} ranks failed: {failures[0]}") from failures[0]
    return _results(answers)


def _watch(context: SparkContext, group: str, job: threading.Thread, size: int, timeout: float) -> None:
    """Wait for the job; cancel it when its tasks do not start in time or the caller is interrupted."""
    tracker, begun, started = context.statusTracker(), time.monotonic(), False
    try:
        while job.is_alive():
            job.join(_POLL_SECONDS)
            if not started and job.is_alive():
                stages = [tracker.getStageInfo(stage) for number in tracker.getJobIdsForGroup(group)
                          for stage in getattr(tracker.getJobInfo(number), "stageIds", ())]
                started = any(stage is not None and stage.numActiveTasks + stage.numCompletedTasks > 0 for stage in stages)
                if not started and time.monotonic() - begun > timeout:
                    raise LaunchError(f"Spark has not started {size} tasks at a time within {timeout:.0f} s; it has room "
                                      f"for {context.defaultParallelism} (spark.default.parallelism); num_proc must fit")
    except BaseException:
        context.cancelJobGroup(group)
        raise


def _task(call: bytes, env: Mapping[str, str], secret: str) -> Callable[[Iterable[int]], Iterator[tuple[int, bytes]]]:
    """Return the function that a barrier task runs: find its rank, and call the function as that rank."""

    def task(_: Iterable[int]) -> Iterator[tuple[int, bytes]]:
        context = BarrierTaskContext.get()
        nodes = [info.address.rpartition(":")[0] or info.address for info in context.getTaskInfos()]
        worker_index = context.partitionId()
        assigned = workers.assign_ranks(nodes)
        world = next(world for worker, world in assigned if worker == worker_index)
        directory = workers.TemporaryJobDirectory() if world.local_rank == 0 else None
        held = HeldPort()
        own_endpoint = json.dumps([directory.path if directory else "", held.port])
        endpoints = [json.loads(text) for text in context.allGather(own_endpoint)]
        leader = next(worker for worker, its_world in assigned
                      if its_world.local_rank == 0 and nodes[worker] == nodes[worker_index])
        first = assigned[0][0]
        coordinator = f"{nodes[first]}:{endpoints[first][1]}"
        variables = {**env, **workers.rank_variables(world, endpoints[leader][0], coordinator, secret)}
        try:
            with workers.as_rank(variables):
                yield world.rank, _called(call)
        finally:
            held.close()
            if directory is not None:
                directory.remove()

    return task


def _called(call: bytes) -> bytes:
    """Call the pickled function; return its pickled result or failure."""
    try:
        fn, args, kwargs = cloudpickle.loads(call)  # from the driver, by Spark's own closure
        return pickled_result(workers.call(fn, args, kwargs))
    except Exception as error:
        return pickled_failure(error)


def _results(answers: Sequence[tuple[int, bytes]]) -> list[Any]:
    outcomes = {rank: cloudpickle.loads(outcome) for rank, outcome in sorted(answers)}
    errors = {rank: value for rank, (failed, value) in outcomes.items() if failed}
    if errors:
        first = workers.root_error({rank: error for rank, (error, _) in errors.items()})
        rank = next(rank for rank, (error, _) in errors.items() if error is first)
        raise first from RankTraceback(f"on rank {rank}:\n{errors[rank][1]}")
    return [value for _, value in outcomes.values()]
