"""Arguments that `DistributedOptimizer` refuses."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hvdlite.core.errors import UnsupportedError  # noqa: E402
from hvdlite.core.process_set import ProcessSet  # noqa: E402
from hvdlite.core.types import ReduceOp  # noqa: E402
from hvdlite.runtime.runtime import Runtime  # noqa: E402
from hvdlite_torch import Compression, comm_hooks  # noqa: E402
from hvdlite_torch.optimizer.distributed_optimizer import wrap_optimizer  # noqa: E402
from tests.torch.models import net  # noqa: E402
from tests.worlds import threads  # noqa: E402


@pytest.mark.parametrize(("arguments", "error", "told"), [
    ({"backward_passes_per_step": 0}, ValueError, "at least 1"),
    ({"backward_passes_per_step": 1.5}, ValueError, "whole number, at least 1, not 1.5"),
    ({"op": "sum"}, ValueError, r"op must be one of hvd.Average, .*, not 'sum'"),
    ({"compression": "fp16"}, ValueError, "hvd.Compression.none, .fp16 or .bf16, not 'fp16'"),
    ({"compression": Compression}, ValueError, "hvd.Compression.none"),
    ({"comm_hook": comm_hooks.AllReduce}, ValueError, r"such as AllReduce\(\)"),
    ({"process_set": [0, 1]}, ValueError, "as hvd.add_process_set returns"),
    ({"named_parameters": net().named_parameters}, ValueError, "pairs"),
    ({"named_parameters": net().named_parameters()}, ValueError, "of the very model"),
    ({"gradient_predivide_factor": 2.0, "op": ReduceOp.SUM}, ValueError, "needs op=Average"),
    ({"named_parameters": [("a", None), ("a", None)]}, ValueError, "more than once: a"),
    ({"named_parameters": ["a"]}, ValueError, "pairs"),
    ({"named_parameters": []}, ValueError, "4 of the optimizer's parameters have no name"),
    ({"groups": 0}, ValueError, "positive number, or a list"),
    ({"groups": "all"}, ValueError, "positive number, or a list"),
    ({"groups": [[1]]}, ValueError, "must hold parameters, not int"),
])
def test_bad_arguments(arguments: dict[str, Any], error: type[Exception], told: str) -> None:
    def step(runtime: Runtime) -> None:
        with pytest.raises(error, match=told):
            _kept = wrap_optimizer(torch.optim.SGD(net().parameters(), lr=0.1), **arguments, runtime=runtime)
    threads(1, step)


def test_only_optimizers_of_torch_are_wrapped() -> None:
    def step(runtime: Runtime) -> None:
        for wrong in (net(), net().parameters(), None):
            with pytest.raises(ValueError, match=f"takes a torch.optim.Optimizer, not {type(wrong).__name__}"):
                wrap_optimizer(wrong, runtime=runtime)
    threads(1, step)


def test_adasum_on_some_ranks_is_refused_as_in_horovod() -> None:
    def step(runtime: Runtime) -> None:
        number = runtime.add_process_set([0, 1]).wait()
        some = ProcessSet([0, 1])
        some.register(number, runtime.world.rank)
        with pytest.raises(NotImplementedError, match="all ranks only"):
            wrap_optimizer(torch.optim.SGD(net().parameters(), lr=0.1), op=ReduceOp.ADASUM, process_set=some,
                           runtime=runtime)
    threads(3, step)


def test_sharded_parameters_are_refused() -> None:
    """torch reduces their gradients over their mesh; so what `DistributedOptimizer` would do is not clear."""
    def step(runtime: Runtime) -> None:
        if not torch.distributed.is_available():
            pytest.skip("this torch has no torch.distributed")
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import DTensor, Shard
        from torch.testing._internal.distributed.fake_pg import FakeStore
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
        try:
            whole = DTensor.from_local(torch.ones(2), DeviceMesh("cpu", [0, 1]), [Shard(0)])
            optimizer = torch.optim.SGD([torch.nn.Parameter(whole)], lr=0.1)
            with pytest.raises(UnsupportedError, match=r"parameter 'noname\.0\.0' is a DTensor"):
                wrap_optimizer(optimizer, runtime=runtime)
        finally:
            torch.distributed.destroy_process_group()
    threads(1, step)
