"""`DistributedOptimizer(op=Adasum)` on ranks as threads, against Adasum of what plain optimizers did (NumPy, float64)."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hvdlite.core.errors import MismatchError  # noqa: E402
from hvdlite.core.types import ReduceOp  # noqa: E402
from hvdlite.runtime.runtime import Runtime  # noqa: E402
from hvdlite_torch import Compression, comm_hooks  # noqa: E402
from hvdlite_torch.optimizer.distributed_optimizer import wrap_optimizer  # noqa: E402
from tests.torch.models import net, weights  # noqa: E402
from tests.worlds import threads  # noqa: E402


def adaptive(deltas: list[Any]) -> Any:
    """Return Adasum of any number of vectors: neighbours first, one without a partner goes up a level as it is."""
    while len(deltas) > 1:
        pairs = [_of_two(one, other) for one, other in zip(deltas[::2], deltas[1::2])]  # noqa: B905 (an odd one)
        deltas = pairs + deltas[2 * len(pairs):]
    return deltas[0]


def _of_two(one: Any, other: Any) -> Any:
    product = np.vdot(one, other).real
    parts = [each * (1 - product / (2 * np.vdot(each, each).real)) if each.any() else each for each in (one, other)]
    return parts[0] + parts[1]


def wide(tensor: Any) -> Any:
    return tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64).numpy().copy()


def inputs(rank: int, number: int, rows: int = 4) -> Any:
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(100 * number + rank))


def seeded(model: Any) -> Any:
    """Return a model with values that do not depend on threads."""
    generator = torch.Generator().manual_seed(7)
    for parameter in model.parameters():
        parameter.data.normal_(generator=generator)
    return model


@dataclasses.dataclass
class Replica:
    """A model and its optimizer; `more` is what a case needs besides."""

    rank: int
    model: Any
    optimizer: Any
    more: Any = None

    def backward(self, number: int, factor: float = 1.0) -> Any:
        loss = self.model(inputs(self.rank, number)).square().mean() * factor
        loss.backward()
        return loss


class Case:
    """How a model is trained; on every rank, and in one process for every rank in turn."""

    steps = 4

    def model(self) -> Any:
        return net()

    def optimizer(self, model: Any) -> Any:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)

    def before_wrapping(self, replica: Replica) -> None:
        """What a script does with the plain optimizer."""

    def train(self, replica: Replica, number: int) -> None:
        replica.optimizer.zero_grad()
        replica.backward(number)
        replica.optimizer.step()


class SchedulerMadeFirst(Case):
    def before_wrapping(self, replica: Replica) -> None:
        replica.more = torch.optim.lr_scheduler.StepLR(replica.optimizer, 2, 0.5)

    def train(self, replica: Replica, number: int) -> None:
        super().train(replica, number)
        replica.more.step()


class Loaded(Case):
    def train(self, replica: Replica, number: int) -> None:
        replica.optimizer.load_state_dict(replica.optimizer.state_dict())
        super().train(replica, number)


class Closure(Case):
    def optimizer(self, model: Any) -> Any:
        return torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def train(self, replica: Replica, number: int) -> None:
        def closure() -> Any:
            replica.optimizer.zero_grad()
            return replica.backward(number)
        assert replica.optimizer.step(closure) is not None


class Accumulated(Case):
    def train(self, replica: Replica, number: int) -> None:
        replica.optimizer.zero_grad(set_to_none=False)
        replica.backward(2 * number)
        replica.backward(2 * number + 1)
        replica.optimizer.step()


class Nested(Case):
    def optimizer(self, model: Any) -> Any:
        class Outer(torch.optim.Adam):
            def step(self, closure: Any = None) -> Any:
                return super().step(closure)
        torch.optim.Adam(model.parameters())  # from now on, the base class's step runs hooks as well
        return Outer(model.parameters(), lr=0.01)


class WithoutBackward(Case):
    def train(self, replica: Replica, number: int) -> None:
        replica.optimizer.zero_grad()
        if (replica.rank + number) % 2:
            replica.backward(number)
        replica.optimizer.step()


class FrozenAndAdded(Case):
    def optimizer(self, model: Any) -> Any:
        model[0].bias.requires_grad_(False)
        return torch.optim.Adam(model[0].parameters(), lr=0.01)

    def train(self, replica: Replica, number: int) -> None:
        if number == 2:
            replica.model[0].bias.requires_grad_(True)
            replica.optimizer.add_param_group({"params": list(replica.model[2].parameters()), "lr": 0.1})
        super().train(replica, number)


class Sparse(Case):
    def model(self) -> Any:
        return seeded(torch.nn.Embedding(9, 3, sparse=True))

    def optimizer(self, model: Any) -> Any:
        return torch.optim.SparseAdam(model.parameters(), lr=0.1)

    def train(self, replica: Replica, number: int) -> None:
        replica.optimizer.zero_grad()
        replica.model(torch.tensor([replica.rank, 4, 4, 2 + number])).square().sum().backward()
        replica.optimizer.step()


class ChannelsLastAndComplex(Case):
    def model(self) -> Any:
        model = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last).double()
        model.phase = torch.nn.Parameter(torch.empty(5, dtype=torch.complex64))
        return seeded(model)

    def train(self, replica: Replica, number: int) -> None:
        replica.optimizer.zero_grad()
        x = inputs(replica.rank, number, 9).double()
        (replica.model(x.reshape(1, 3, 3, 6)).square().mean() + (replica.model.phase * x[0, :5]).abs().sum()).backward()
        replica.optimizer.step()


class Scaled(Case):
    """GradScaler, with an infinity on rank 1 in steps 1 and 3, and clipping in the first steps."""

    steps = 6

    def before_wrapping(self, replica: Replica) -> None:
        replica.more = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def train(self, replica: Replica, number: int) -> None:
        replica.optimizer.zero_grad()
        loss = replica.model(inputs(replica.rank, number)).square().mean()
        replica.more.scale(loss * (float("inf") if replica.rank == 1 and number in (1, 3) else 1)).backward()
        if number < 3:
            replica.more.unscale_(replica.optimizer)
            torch.nn.utils.clip_grad_norm_(replica.model.parameters(), 0.1)
        replica.more.step(replica.optimizer)
        replica.more.update()
        assert replica.more.get_scale() == 1024.0 / (2 ** sum(number >= bad for bad in (1, 3)) if replica.rank == 1 else 1)


class ScaledAdam(Scaled):
    """Its single-tensor kernel refuses what GradScaler hands to optimizers that unscale."""

    def optimizer(self, model: Any) -> Any:
        return torch.optim.Adam(model.parameters(), lr=0.01, foreach=False)


class ScaledFused(Scaled):
    def optimizer(self, model: Any) -> Any:
        return torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)


CASES: list[type[Case]] = [Case, SchedulerMadeFirst, Loaded, Closure, Accumulated, Nested, WithoutBackward, FrozenAndAdded,
                           Sparse, ChannelsLastAndComplex, Scaled, ScaledAdam, ScaledFused]


def alone(case: Case, size: int) -> list[Any]:
    """Train in one process: all ranks' plain optimizers in turn, then Adasum of what they did."""
    replicas = []
    for rank in range(size):
        model = case.model()
        replicas.append(Replica(rank, model, case.optimizer(model)))
        case.before_wrapping(replicas[-1])
    for number in range(case.steps):
        before = [wide(tensor) for tensor in replicas[0].model.parameters()]
        for replica in replicas:
            case.train(replica, number)
        for start, *tensors in zip(before, *(replica.model.parameters() for replica in replicas), strict=True):
            together = torch.from_numpy(start + adaptive([wide(tensor) - start for tensor in tensors]))
            for tensor in tensors:
                tensor.data.copy_(together)
    return weights(replicas[0].model)


def together(case: Case, runtime: Runtime, **arguments: Any) -> list[Any]:
    model = case.model()
    replica = Replica(runtime.world.rank, model, case.optimizer(model))
    case.before_wrapping(replica)
    assert wrap_optimizer(replica.optimizer, op=ReduceOp.ADASUM, runtime=runtime, **arguments) is replica.optimizer
    for number in range(case.steps):
        case.train(replica, number)
    return weights(model)


@pytest.mark.parametrize("size", [2, 3])
def test_what_plain_optimizers_did_is_combined(size: int) -> None:
    def step(runtime: Runtime) -> list[list[Any]]:
        return [together(case(), runtime, backward_passes_per_step=2 if case is Accumulated else 1) for case in CASES]
    found = threads(size, step, replica_check_steps=1)
    for number, case in enumerate(CASES):
        for mine, theirs in zip(found[0][number], alone(case(), size), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6, msg=f"{case.__name__}: {mine} {theirs}")


class Tiny(Case):
    """Steps that float16 cannot hold, and steps that it can hold only after division."""

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def model(self) -> Any:
        model = net()
        for parameter in model.parameters():
            parameter.data.mul_(self.rate)
        return model

    def optimizer(self, model: Any) -> Any:
        return torch.optim.Adam(model.parameters(), lr=self.rate)

    def train(self, replica: Replica, number: int) -> None:
        replica.optimizer.zero_grad()
        for parameter in replica.model.parameters():
            generator = torch.Generator().manual_seed(10 * number + replica.rank)
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        replica.optimizer.step()


@pytest.mark.parametrize("compression", ["fp16", "bf16"])
def test_steps_of_any_size_survive_compression(compression: str) -> None:
    rates = [1e-12, 2e-8, 1.0, 1e7]

    def step(runtime: Runtime) -> list[list[Any]]:
        return [together(Tiny(rate), runtime, compression=getattr(Compression, compression)) for rate in rates]
    found = threads(3, step, replica_check_steps=1)
    for rate, mine in zip(rates, found[0], strict=True):
        for ours, theirs in zip(mine, alone(Tiny(rate), 3), strict=True):
            tolerance = 0.01 if compression == "fp16" else 0.06
            torch.testing.assert_close(ours / rate, theirs / rate, rtol=tolerance, atol=tolerance)


def test_hooks_run_once_and_see_the_combined_parameters() -> None:
    def step(runtime: Runtime) -> Any:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        seen: list[Any] = []
        optimizer.register_step_post_hook(lambda *_: seen.append(weights(model)))
        wrap_optimizer(optimizer, op=ReduceOp.ADASUM, runtime=runtime)
        optimizer.register_step_post_hook(lambda *_: seen.append(weights(model)))
        if runtime.world.rank:
            optimizer.load_state_dict(optimizer.state_dict())
        for number in range(2):
            Case().train(Replica(runtime.world.rank, model, optimizer), number)
        assert len(seen) == 4
        return seen
    one, other = threads(2, step)
    for mine, theirs in zip(one, other, strict=True):
        assert all(map(torch.equal, mine, theirs))


def test_gradients_of_a_skipped_step_stay() -> None:
    """As without Adasum; also where the step raises after they were hidden."""
    def step(runtime: Runtime) -> None:
        model = net()
        optimizer = wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), op=ReduceOp.ADASUM, runtime=runtime)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(model(inputs(0, 0)).sum() * (float("inf") if runtime.world.rank else 1)).backward()
        scaler.step(optimizer)
        bad = [parameter.grad.isfinite().all().item() for parameter in model.parameters()]
        assert bad == [runtime.world.rank == 0] * 4
        assert not hasattr(optimizer, "found_inf") and not hasattr(optimizer, "grad_scale")
        model.half()
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.ones(()))
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        with pytest.raises(ValueError, match="unscale FP16"):
            scaler.step(optimizer)
    threads(2, step)


def test_a_reduction_that_fails_leaves_the_parameters() -> None:
    def step(runtime: Runtime) -> None:
        model = net()
        optimizer = wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), op=ReduceOp.ADASUM, runtime=runtime)
        replica = Replica(runtime.world.rank, model, optimizer)
        Case().train(replica, 0)
        model[0].bias.requires_grad_(runtime.world.rank == 0)
        before = weights(model)
        with pytest.raises(MismatchError, match="adasum"):
            Case().train(replica, 1)
        assert all(map(torch.equal, before, weights(model)))
        model[0].bias.requires_grad_(True)
        model.double()  # other memory is needed from now on
        Case().train(Replica(runtime.world.rank, Widened(model), optimizer), 2)
    threads(2, step)


class Widened:
    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self, x: Any) -> Any:
        return self._model(x.double())


def test_ranks_that_join_early_take_what_the_last_one_has() -> None:
    def step(runtime: Runtime) -> Any:
        model = seeded(torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4)))
        optimizer = wrap_optimizer(torch.optim.Adam(model.parameters(), lr=0.1), op=ReduceOp.ADASUM, runtime=runtime)
        with optimizer.join(model) as joined:
            for number in range(3 + runtime.world.rank):
                Case().train(Replica(runtime.world.rank, model, optimizer), number)
        assert joined.last_rank == runtime.world.size - 1
        state = [optimizer.state[parameter]["exp_avg"] for parameter in model.parameters()]
        return [*weights(model), *(buffer.clone() for buffer in model.buffers()), *state]
    first, *others = threads(3, step)
    assert all(map(torch.equal, first, other) for other in others)


def test_what_has_no_meaning_here() -> None:
    def step(runtime: Runtime) -> None:
        plain: Any = torch.optim.SGD(net().parameters(), lr=0.1)
        optimizer = wrap_optimizer(plain, op=ReduceOp.ADASUM, runtime=runtime)
        with pytest.raises(AssertionError, match="skip_synchronize"), optimizer.skip_synchronize():
            pass
        with optimizer.no_sync():
            optimizer.synchronize()
        with pytest.raises(ValueError, match="whole number"):
            optimizer.set_backward_passes_per_step(0)
        optimizer.set_backward_passes_per_step(2)
        with pytest.raises(ValueError, match="comm_hook decides"):
            wrap_optimizer(torch.optim.SGD(net().parameters(), lr=0.1), op=ReduceOp.ADASUM, runtime=runtime,
                           comm_hook=comm_hooks.PowerSGD())
    threads(2, step)
