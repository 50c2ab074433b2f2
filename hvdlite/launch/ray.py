"""`RayExecutor`: ranks as actors of a Ray cluster, with the interface of `horovod.ray`.

    executor = RayExecutor(num_workers=4, use_gpu=True)
    executor.start()
    losses = executor.run(train, args=[config])     # train() calls hvd.init()
    executor.shutdown()

Ray starts the processes and transports functions and results; the ranks rendezvous as under every other launcher.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hvdlite.core.errors import LaunchError, NotInitializedError
from hvdlite.core.sockets import HeldPort
from hvdlite.launch import workers

try:
    import ray
    from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ModuleNotFoundError as error:
    raise ImportError("hvdlite.ray needs Ray: pip install 'hvdlite[ray]'") from error


@dataclasses.dataclass(frozen=True)
class Settings:
    """Timeouts in seconds; created by `RayExecutor.create_settings`."""

    timeout_s: float = 60.0
    placement_group_timeout_s: float = 100.0


class _Worker:
    """One rank's actor."""

    def __init__(self) -> None:
        self.executable: Any = None
        self._directory: workers.TemporaryJobDirectory | None = None
        self._held_port: HeldPort | None = None  # at which this one listens if it becomes rank 0

    def node_info(self) -> tuple[str, str, int, list[str]]:
        """Return node, address, a free port, and the GPUs that Ray gave this actor."""
        context = ray.get_runtime_context()
        self._held_port = HeldPort()
        return context.get_node_id(), ray.util.get_node_ip_address(), self._held_port.port, [
            str(gpu) for gpu in context.get_accelerator_ids().get("GPU", [])]

    def create_job_directory(self) -> str:
        self._directory = workers.TemporaryJobDirectory()
        return self._directory.path

    def set_environment(self, variables: Mapping[str, str]) -> None:
        os.environ.update(variables)

    def create_executable(self, cls: Callable[..., Any] | None, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if cls is not None:
            self.executable = workers.call(cls, args, kwargs)

    def call(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], on_executable: bool) -> Any:
        return workers.call(func, [self.executable, *args] if on_executable else args, kwargs)

    def shut_down(self) -> None:
        try:
            workers.shut_down()
        finally:
            if self._directory is not None:
                self._directory.remove()


class RayExecutor:
    """Ranks on a Ray cluster.

    Args:
        settings: from `create_settings`.
        num_workers: number of ranks, placed by Ray; or
        num_hosts, num_workers_per_host: the number of nodes, and of ranks on each node.
        cpus_per_worker, use_gpu, gpus_per_worker: resources of each rank; `use_gpu` reserves one GPU by default.
        use_current_placement_group: whether to use the caller's placement group, if it has one.
    """

    @classmethod
    def create_settings(cls, timeout_s: float = 60.0, ssh_identity_file: str | None = None, ssh_str: str | None = None,
                        placement_group_timeout_s: float = 100.0, nics: object = None) -> Settings:
        """Return settings; ssh and network interfaces are ignored: Ray starts the ranks, and routes determine addresses."""
        return Settings(timeout_s, placement_group_timeout_s)

    def __init__(self, settings: Settings | None = None, num_workers: int | None = None, num_hosts: int | None = None,
                 num_workers_per_host: int = 1, cpus_per_worker: int = 1, use_gpu: bool = False,
                 gpus_per_worker: int | None = None, use_current_placement_group: bool = True, **elastic: Any) -> None:
        refused = [name for name, value in elastic.items() if value is not None]
        if refused:
            raise ValueError(f"RayExecutor has no use for {', '.join(refused)}: jobs of this version do not grow or shrink")
        if (num_workers is None) == (num_hosts is None):
            raise ValueError("give either num_workers or num_hosts")
        if gpus_per_worker is not None and not use_gpu:
            raise ValueError("gpus_per_worker needs use_gpu=True")
        self.num_workers = num_workers if num_workers is not None else (num_hosts or 0) * num_workers_per_host
        if self.num_workers < 1:
            raise ValueError(f"the number of workers must be at least 1, not {self.num_workers}")
        self._settings = settings or Settings()
        gpus = (gpus_per_worker or 1) if use_gpu else 0
        self._resources = {"CPU": float(cpus_per_worker), **({"GPU": float(gpus)} if gpus else {})}
        self._per_bundle = 1 if num_workers is not None else num_workers_per_host
        self._spread = num_workers is None
        self._use_current = use_current_placement_group
        self._group: PlacementGroup | None = None
        self._own_group = False
        self._workers: list[Any] = []  # in rank order

    def start(self, executable_cls: Callable[..., Any] | None = None, executable_args: Sequence[Any] | None = None,
              executable_kwargs: Mapping[str, Any] | None = None, extra_env_vars: Mapping[str, str] | None = None) -> None:
        """Start the ranks; each creates an `executable_cls(...)` for `execute`, if a class is given.

        Raises:
            LaunchError: when the cluster has no room within `placement_group_timeout_s`.
        """
        self._reserve_placement_group()
        actor = ray.remote(num_cpus=self._resources["CPU"], num_gpus=self._resources.get("GPU", 0))(_Worker)
        found = [actor.options(scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, bundle)).remote()
                 for bundle in range(self.num_workers // self._per_bundle) for _ in range(self._per_bundle)]
        self._workers = found
        nodes = self._get([worker.node_info.remote() for worker in found])
        assigned = workers.assign_ranks([node for node, _, _, _ in nodes])
        self._workers = [found[index] for index, _ in assigned]
        leaders = [rank for rank, (_, world) in enumerate(assigned) if world.local_rank == 0]
        directories = dict(zip((nodes[assigned[rank][0]][0] for rank in leaders), self._get(
            [self._workers[rank].create_job_directory.remote() for rank in leaders]), strict=True))
        _, address, port, _ = nodes[assigned[0][0]]
        secret, environments = secrets.token_hex(), []
        for index, world in assigned:
            node = nodes[index][0]
            gpus = [gpu for other, _ in assigned if nodes[other][0] == node for gpu in nodes[other][3]]
            visible = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}  # hvd.local_rank() chooses among them
            environments.append({**(extra_env_vars or {}), **visible,
                                 **workers.rank_variables(world, directories[node], f"{address}:{port}", secret)})
        self._get([worker.set_environment.remote(variables)
                   for worker, variables in zip(self._workers, environments, strict=True)])
        self._finish([worker.create_executable.remote(executable_cls, executable_args or [], executable_kwargs or {})
                      for worker in self._workers])

    def run(self, fn: Callable[..., Any], args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None) -> Any:
        """Call `fn(*args, **kwargs)` on every rank; return the results in rank order.

        Raises:
            Exception: the exception of the rank that failed first.
        """
        return self._finish(self.run_remote(fn, args, kwargs))

    def run_remote(self, fn: Callable[..., Any], args: Sequence[Any] | None = None,
                   kwargs: Mapping[str, Any] | None = None) -> list[Any]:
        """Like `run`, but return Ray's references to the results without waiting."""
        return [worker.call.remote(fn, args or [], kwargs or {}, False) for worker in self._running()]

    def execute(self, fn: Callable[[Any], Any], callbacks: None = None) -> list[Any]:
        """Call `fn(executable)` on every rank with the object created by `start`; return the results in rank order."""
        return self._finish([worker.call.remote(fn, [], {}, True) for worker in self._running()])

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """Like `execute`, on rank 0 only."""
        return ray.get(self._running()[0].call.remote(fn, [], {}, True))

    def shutdown(self) -> None:
        """End the ranks and release their resources; may be called again."""
        if self._workers:
            ray.wait([worker.shut_down.remote() for worker in self._workers], num_returns=len(self._workers),
                     timeout=self._settings.timeout_s)
        for worker in self._workers:
            ray.kill(worker)
        self._workers = []
        if self._group is not None and self._own_group:
            remove_placement_group(self._group)
        self._group = None

    def _running(self) -> list[Any]:
        if not self._workers:
            raise NotInitializedError("the ranks have not been started; call start() first")
        return self._workers

    def _reserve_placement_group(self) -> None:
        current = ray.util.get_current_placement_group() if self._use_current else None
        if current is not None:
            self._group = current
            return
        bundles = [{name: self._per_bundle * count for name, count in self._resources.items()}
                   for _ in range(self.num_workers // self._per_bundle)]
        self._group, self._own_group = placement_group(bundles, "STRICT_SPREAD" if self._spread else "PACK"), True
        ready, _ = ray.wait([self._group.ready()], timeout=self._settings.placement_group_timeout_s)
        if not ready:
            remove_placement_group(self._group)
            self._group = None
            raise LaunchError(f"the Ray cluster has no room for {self.num_workers} ranks with {self._resources} each within "
                              f"{self._settings.placement_group_timeout_s:.0f} s; it has {ray.cluster_resources()}")

    def _get(self, references: Sequence[Any]) -> list[Any]:
        try:
            return list(ray.get(list(references), timeout=self._settings.timeout_s))
        except ray.exceptions.GetTimeoutError:
            self.shutdown()
            raise LaunchError(f"not all ranks started within {self._settings.timeout_s:.0f} s (timeout_s)") from None

    def _finish(self, references: Sequence[Any]) -> list[Any]:
        """Return all results, or raise the error of the rank that failed first."""
        errors: dict[int, BaseException] = {}
        results: list[Any] = []
        for rank, reference in enumerate(references):
            try:
                results.append(ray.get(reference))
            except ray.exceptions.RayError as error:
                errors[rank] = error
        if errors:
            raise workers.root_error(errors)
        return results
