"""Where gradients are waited for: circles of waits, both contracts, interrupted waits, what is read too early."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hvdlite.core.errors import MismatchError  # noqa: E402
from hvdlite.core.types import ReduceOp  # noqa: E402
from hvdlite.runtime.runtime import Runtime  # noqa: E402
from hvdlite.training.gradients.errors import GradientOrderError  # noqa: E402
from hvdlite_torch import comm_hooks  # noqa: E402
from hvdlite_torch.optimizer.distributed_optimizer import wrap_optimizer  # noqa: E402
from tests.torch.models import net, reducer_of, share, train, weights  # noqa: E402
from tests.torch.programs import waiting as programs  # noqa: E402
from tests.worlds import TORCH, processes, threads  # noqa: E402

BOTH = pytest.mark.parametrize("wait_in", ["backward", "step"])
HOOKS = {"with a communication hook": comm_hooks.AllReduce, "with one that reduces once": comm_hooks.PowerSGD}
ALL = pytest.mark.parametrize("wait_in", ["backward", "step", *(f"backward, {hook}" for hook in HOOKS)])


def parameter(length: int = 4) -> Any:
    return torch.nn.Parameter(torch.ones(length))


def wrapped(runtime: Runtime, *parameters: Any, wait_in: str | None = None) -> Any:
    """Return an optimizer of these parameters; `wait_in` is one of `ALL`."""
    wait_in, _, hook = (wait_in or "").partition(", ")
    return wrap_optimizer(torch.optim.SGD(parameters, lr=0.1), runtime=runtime, wait_in=wait_in or None,
                          comm_hook=HOOKS[hook]() if hook else None)


def mean(runtime: Runtime, value: float) -> float:
    array = torch.tensor([float(value)]).numpy()
    runtime.allreduce("mean", array, array, ReduceOp.AVERAGE).wait()
    return float(array[0])


@ALL
@pytest.mark.parametrize("rounds", [1, 3])
def test_ranks_that_differentiate_different_optimizers_parameters(wait_in: str, rounds: int) -> None:
    def step(runtime: Runtime) -> None:
        a, b = parameter(), parameter()
        first, second = wrapped(runtime, a, wait_in=wait_in), wrapped(runtime, b, wait_in=wait_in)
        for _ in range(rounds):
            first.zero_grad()
            second.zero_grad()
            (a if runtime.world.rank == 0 else b).sum().backward()
            first.step()
            second.step()
        expected = torch.full((4,), 1 - rounds * 0.05)
        torch.testing.assert_close(a.data, expected)
        torch.testing.assert_close(b.data, expected)
    threads(2, step)


@ALL
def test_backward_passes_of_two_optimizers_in_different_orders(wait_in: str) -> None:
    def step(runtime: Runtime) -> None:
        a, b = parameter(), parameter()
        first, second = wrapped(runtime, a, wait_in=wait_in), wrapped(runtime, b, wait_in=wait_in)
        for each in (a, b) if runtime.world.rank == 0 else (b, a):
            (each * (runtime.world.rank + 1)).sum().backward()
        total = torch.nn.utils.clip_grad_norm_([a, b], 1.0)
        torch.testing.assert_close(total, torch.tensor(1.5 * 8 ** 0.5))
        first.step()
        second.step()
        torch.testing.assert_close(a.data, b.data)
        torch.testing.assert_close(a.data, torch.full((4,), 1 - 0.1 / 8 ** 0.5))
    threads(2, step)


@ALL
def test_a_collective_between_backward_and_step_where_a_rank_has_nothing_to_differentiate(wait_in: str) -> None:
    def step(runtime: Runtime) -> None:
        a = parameter()
        optimizer = wrapped(runtime, a, wait_in=wait_in)
        if runtime.world.rank == 0:
            a.sum().backward()
        assert mean(runtime, runtime.world.rank) == 0.5
        optimizer.step()
        torch.testing.assert_close(a.data, torch.full((4,), 0.95))
        torch.testing.assert_close(a.grad, torch.full((4,), 0.5))
    threads(2, step)


@ALL
def test_a_rank_that_calls_a_collective_before_its_backward_still_counts(wait_in: str) -> None:
    def step(runtime: Runtime) -> None:
        a = parameter()
        optimizer = wrapped(runtime, a, wait_in=wait_in)
        for circles in (False, False, True, True):
            optimizer.zero_grad()
            if circles and runtime.world.rank == 1:
                mean(runtime, 1.0)
            (a * (runtime.world.rank + 1)).sum().backward()
            if circles and runtime.world.rank == 0:
                mean(runtime, 1.0)
            optimizer.step()
        torch.testing.assert_close(a.data, torch.full((4,), 0.4))
    threads(2, step)


@pytest.mark.parametrize("wait_in", ["backward", "step"])
@pytest.mark.parametrize("circle", programs.CIRCLES)
def test_a_circle_that_cannot_be_deferred_raises_on_all_ranks(circle: str, wait_in: str) -> None:
    processes(2, programs.a_circle_that_cannot_be_deferred_raises_on_all_ranks, circle, imported=TORCH,
              environment={"HVDLITE_WAIT_IN": wait_in})


def test_a_circle_is_only_told_while_another_thread_may_help() -> None:
    """The other thread has never called anything before."""
    for rank in processes(2, programs.a_circle_is_only_told_while_another_thread_may_help, imported=TORCH):
        assert rank.rank or "ranks wait for each other in a circle" in rank.stderr


def test_a_wait_inside_a_wait_of_the_same_thread() -> None:
    """A signal handler calls a collective while its thread has been blocked for long."""
    processes(2, programs.a_wait_inside_a_wait_of_the_same_thread, imported=TORCH)


def test_after_an_interrupted_wait_gradients_are_still_final_when_read() -> None:
    """Two optimizers in one backward pass; the interrupt hits while the first is waited for."""
    processes(2, programs.after_an_interrupted_wait_gradients_are_still_final_when_read, imported=TORCH)


@ALL
def test_a_second_backward_over_other_parameters_after_a_deferral(wait_in: str) -> None:
    def step(runtime: Runtime) -> None:
        a, b = parameter(), parameter()
        optimizer = wrapped(runtime, a, b, wait_in=wait_in)
        for _ in range(3):
            optimizer.zero_grad()
            if runtime.world.rank == 1:
                mean(runtime, 1.0)
            a.sum().backward()
            if runtime.world.rank == 0:
                mean(runtime, 1.0)
            (b * (runtime.world.rank + 1)).sum().backward()
            optimizer.step()
        torch.testing.assert_close(a.data, torch.full((4,), 0.7))
        torch.testing.assert_close(b.data, torch.full((4,), 0.55))
    threads(2, step)


@ALL
def test_a_step_that_all_ranks_skip_does_not_count(wait_in: str) -> None:
    def step(runtime: Runtime) -> None:
        a = parameter()
        optimizer = wrapped(runtime, a, wait_in=wait_in)
        for turn in range(6):
            optimizer.zero_grad()
            if turn != 3 or runtime.world.rank == 0:
                a.sum().backward()
            optimizer.synchronize()
            if turn != 2:
                optimizer.step()
        torch.testing.assert_close(a.data, torch.full((4,), 1 - 0.1 * 4.5))
    threads(2, step)


def test_a_tensor_subclass_and_its_results_while_gradients_are_not_final() -> None:
    class Own(torch.Tensor):
        pass

    def step(runtime: Runtime) -> None:
        own = torch.ones(4).as_subclass(Own).requires_grad_()
        optimizer = wrapped(runtime, own, wait_in="step")
        (own * (runtime.world.rank + 1)).sum().backward()
        assert type(own * 2) is Own and isinstance(own, Own) and type(own) is not Own
        assert torch.equal(own.grad.as_subclass(torch.Tensor), torch.full((4,), 1.5))
        optimizer.step()
    threads(2, step)


def test_the_way_out_of_a_circle_works() -> None:
    def step(runtime: Runtime) -> None:
        a = parameter()
        optimizer = wrapped(runtime, a)
        if runtime.world.rank == 0:
            a.sum().backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_([a], 0.1)
        mean(runtime, 1.0)
        optimizer.step()
        torch.testing.assert_close(a.data, torch.full((4,), 1 - 0.1 * 0.05), rtol=1e-4, atol=1e-4)
    threads(2, step)


@ALL
@pytest.mark.parametrize("change", ["clip", "replace", "none"])
# docs/protocol.md#same-step
def test_gradients_changed_where_other_ranks_could_not_change_them_raise(wait_in: str, change: str) -> None:
    """Rank 1 has no backward, so its step gets the gradients after its script could have clipped them."""
    def step(runtime: Runtime) -> list[Any]:
        model = net()
        optimizer = wrapped(runtime, *model.parameters(), wait_in=wait_in)
        for turn in range(5):
            optimizer.zero_grad()
            last = turn == 4
            if runtime.world.rank == 0 or not last:
                model(torch.ones(4, 6)).square().mean().backward()
            if last and change == "clip":
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            if last and change == "replace" and runtime.world.rank == 0:
                model[0].weight.grad = model[0].weight.grad * 0.5
            if last and change != "none" and runtime.world.rank == 0:
                with pytest.raises(GradientOrderError, match=r"rank 1 had no backward\(\) in this step.*synchronize\(\)"):
                    optimizer.step()
            else:
                optimizer.step()
        return weights(model)
    one, other = threads(2, step)
    if change == "none":
        for mine, theirs in zip(one, other, strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("wait_in", ["backward", *(f"backward, {hook}" for hook in HOOKS)])
def test_a_second_backward_on_some_ranks_only_raises_instead_of_meeting_the_next_step(wait_in: str) -> None:
    def step(runtime: Runtime) -> None:
        a, b = parameter(), parameter()
        optimizer = wrapped(runtime, a, b, wait_in=wait_in)
        with pytest.raises(MismatchError, match=r"(?s)number of optimizer steps.*rank 0: 1; rank 1: 2.*wait_in=\"step\""):
            for turn in range(3):
                optimizer.zero_grad()
                a.sum().backward()
                if turn == 1 and runtime.world.rank == 0:
                    b.sum().backward()
                optimizer.step()
    threads(2, step)


def test_a_second_backward_on_some_ranks_only_is_reduced_in_the_step() -> None:
    def step(runtime: Runtime) -> None:
        a, b = parameter(), parameter()
        optimizer = wrapped(runtime, a, b, wait_in="step")
        for turn in range(6):
            optimizer.zero_grad()
            a.sum().backward()
            if turn % 2 == runtime.world.rank:
                b.sum().backward()
            optimizer.step()
        torch.testing.assert_close(a.data, torch.full((4,), 0.4))
        torch.testing.assert_close(b.data, torch.full((4,), 0.7))
    threads(2, step)


@BOTH
def test_both_contracts_give_the_same_bits(wait_in: str) -> None:
    def step(runtime: Runtime) -> list[Any]:
        torch.manual_seed(0)
        model = net()
        optimizer = wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), runtime=runtime,
                                   wait_in=wait_in)
        generator = torch.Generator().manual_seed(11)
        for turn in range(8):
            x, y = torch.randn(12, 6, generator=generator), torch.randn(12, 3, generator=generator)
            optimizer.zero_grad(set_to_none=turn % 3 > 0)
            torch.nn.functional.mse_loss(model(share(x, runtime)), share(y, runtime)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        return weights(model)
    found = threads(2, step)
    model = net()
    plain = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(11)
    for _ in range(8):
        x, y = torch.randn(12, 6, generator=generator), torch.randn(12, 3, generator=generator)
        plain.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        plain.step()
    for mine, theirs, alone in zip(*found, weights(model), strict=True):
        assert torch.equal(mine, theirs)
        torch.testing.assert_close(mine, alone)


READERS: dict[str, Callable[[Any], Any]] = {
    "grad": lambda model: model[0].weight.grad.clone(),
    "write": lambda model: setattr(model[0].weight, "grad", model[0].weight.grad),
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),  # noqa: S301
    "zero": lambda model: model.zero_grad(),
    "state": lambda model: model.state_dict(),
    "repr": repr,
}


@pytest.mark.parametrize("reader", READERS)
def test_what_looks_at_a_gradient_before_the_step_sees_it_reduced(reader: str) -> None:
    def step(runtime: Runtime) -> None:
        model = net()
        optimizer = wrapped(runtime, *model.parameters(), wait_in="step")
        own = type(model[0].weight)
        for _ in range(4):
            optimizer.zero_grad()
            (model(torch.ones(4, 6)).sum() * (runtime.world.rank + 1)).backward()
            found = READERS[reader](model)
            assert isinstance(model[0].weight, torch.nn.Parameter)
            if reader == "grad":
                alone = net()
                alone.load_state_dict(model.state_dict())
                (alone(torch.ones(4, 6)).sum() * 1.5).backward()
                torch.testing.assert_close(found, alone[0].weight.grad)
            if reader in ("deepcopy", "pickle"):
                assert type(found[0].weight) is own
            optimizer.step()
            assert type(model[0].weight) is own
    threads(2, step)


def test_an_interrupted_wait_can_be_taken_up_again() -> None:
    """A real signal in the middle of the wait of an unlearned round; then `zero_grad`, which ends that round."""
    processes(2, programs.an_interrupted_wait_can_be_taken_up_again, imported=TORCH)


def test_adding_parameters_in_an_open_round_takes_them_into_the_next() -> None:
    def step(runtime: Runtime) -> None:
        model, late = net(), parameter()
        optimizer = wrapped(runtime, *model.parameters(), wait_in="step")
        for turn in range(8):
            optimizer.zero_grad()
            loss = (model(torch.ones(4, 6)).sum() + (late.sum() if turn > 4 else 0)) * (runtime.world.rank + 1)
            loss.backward()
            if turn == 4:
                optimizer.add_param_group({"params": [late]})
            optimizer.step()
        torch.testing.assert_close(late.data, torch.full((4,), 1 - 3 * 0.15))
    threads(2, step)


def test_a_wrong_choice_is_refused() -> None:
    def step(runtime: Runtime) -> None:
        with pytest.raises(ValueError, match='wait_in must be "backward" or "step", not \'never\''):
            wrapped(runtime, parameter(), wait_in="never")
    threads(1, step)


def test_a_knob_gives_the_default() -> None:
    def step(runtime: Runtime) -> None:
        model = net()
        optimizer = wrapped(runtime, *model.parameters())
        torch.nn.functional.mse_loss(model(torch.ones(4, 6)), torch.ones(4, 3)).backward()
        assert reducer_of(optimizer).round is not None
        train(optimizer, model, torch.ones(4, 6), torch.ones(4, 3))
    threads(2, step, wait_in="step")
