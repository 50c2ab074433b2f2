"""The ranks that save or load a checkpoint together; one, outside of a job."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from hvdlite import api
from hvdlite.core.errors import CheckpointError
from hvdlite.runtime.runtime import Runtime
from hvdlite.training import objects

T = TypeVar("T")


class Ranks:
    """All ranks of a world, which make the same calls. Another thread may use it: its collectives have names of their own.

    Args:
        runtime: of the world; None for one rank.
        what: for the names of collectives.
    """

    def __init__(self, runtime: Runtime | None, what: str) -> None:
        self._runtime = runtime
        self.rank, self.size = (0, 1) if runtime is None else (runtime.world.rank, runtime.world.size)
        self._name = "" if runtime is None else runtime.names.unnamed("checkpoint", what)
        self._calls = 0

    @classmethod
    def present(cls, what: str) -> Ranks:
        """Return the ranks of this process's world; it is alone before `init()`, and before it joins an elastic job.

        Raises:
            HorovodInternalError: when the job has failed.
        """
        if not api.is_initialized() or api.is_provisional():
            return cls(None, what)
        runtime = api.runtime()
        if runtime.failure is not None:
            raise runtime.failure.with_traceback(None)
        return cls(runtime, what)

    def gather(self, value: Any) -> list[Any]:
        """Return the value of every rank, in rank order.

        Raises:
            HorovodInternalError: when a rank is lost.
        """
        if self._runtime is None:
            return [value]
        return objects.allgather_object(self._runtime, value, self._next_name())

    def broadcast(self, value: Any, root_rank: int) -> Any:
        """Return one rank's value on all.

        Raises:
            HorovodInternalError: when a rank is lost.
        """
        if self._runtime is None:
            return value
        return objects.broadcast_object(self._runtime, value, root_rank, self._next_name())

    def agreed(self, call: Callable[[], T], what: str) -> T:
        """Return what a function returns, when it has returned on all ranks.

        Args:
            what: begins the text of the error.

        Raises:
            CheckpointError: on all ranks, when it has raised an error of any kind on one.
        """
        error, result = None, None
        try:
            result = call()
        except Exception as raised:  # safetensors has errors of its own, and objects of the script theirs
            error = raised
        texts = self.gather("" if error is None else f"{type(error).__name__}: {error}")
        failed = [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text]
        if failed:
            raise CheckpointError(f"{what}: {'; '.join(failed)}") from error
        return cast(T, result)

    def _next_name(self) -> str:
        self._calls += 1
        return f"{self._name}.{self._calls}"
