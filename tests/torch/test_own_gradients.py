"""Gradients that a script sets itself, and what it does with parameters and optimizers beside the usual loop."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hvdlite.core.errors import MismatchError, UnsupportedError  # noqa: E402
from hvdlite.core.types import ReduceOp  # noqa: E402
from hvdlite.runtime.runtime import Runtime  # noqa: E402
from hvdlite.training.gradients.errors import GradientOrderError  # noqa: E402
from hvdlite_torch import comm_hooks  # noqa: E402
from hvdlite_torch.optimizer.distributed_optimizer import wrap_optimizer  # noqa: E402
from tests.torch.models import net, reducer_of  # noqa: E402
from tests.torch.one_process import Case, compare  # noqa: E402
from tests.worlds import threads  # noqa: E402

TURNS = 5


def gradients(case: Case, turn: int) -> list[Any]:
    return list(torch.autograd.grad(case.loss(turn), list(case.model.parameters())))


def set_by_autograd_grad(case: Case) -> None:
    optimizer = case.optimizer()
    for turn in range(TURNS):
        if turn % 2:
            optimizer.zero_grad()
        for parameter, gradient in zip(case.model.parameters(), gradients(case, turn), strict=True):
            parameter.grad = gradient
        optimizer.synchronize() if case.rank is not None and turn > 2 else None
        torch.nn.utils.clip_grad_norm_(case.model.parameters(), 0.1) if turn > 2 else None
        optimizer.step()


def set_by_torch_func(case: Case) -> None:
    optimizer = case.optimizer()
    for turn in range(TURNS):
        found = torch.func.grad(lambda values, turn=turn: case.loss(
            turn, lambda x: torch.func.functional_call(case.model, values, (x,))))(dict(case.model.named_parameters()))
        for name, parameter in case.model.named_parameters():
            parameter.grad = found[name].detach()
        optimizer.step()


def float32_copies(case: Case) -> None:
    """As in apex and fairseq; the copies' gradients are made once, and written in place from then on."""
    working = net().double()
    optimizer = case.optimizer()
    for turn in range(TURNS):
        for parameter in working.parameters():
            parameter.grad = None
        case.loss(turn, lambda x: working(x.double())).backward()
        for parameter, copy in zip(working.parameters(), case.model.parameters(), strict=True):
            if copy.grad is None:
                copy.grad = torch.empty_like(copy)
            copy.grad.copy_(parameter.grad)
        optimizer.step()
        for parameter, copy in zip(working.parameters(), case.model.parameters(), strict=True):
            parameter.data.copy_(copy.data)


def replaced_after_a_backward_pass(case: Case) -> None:
    """By what was made of reduced gradients, of local ones, and of both; some are changed in place."""
    optimizer = case.optimizer()
    for turn in range(TURNS):
        optimizer.zero_grad()
        case.loss(turn).backward()
        for index, (parameter, local) in enumerate(zip(case.model.parameters(), gradients(case, turn + 50), strict=True)):
            if index == 0:
                parameter.grad = parameter.grad * 0.5 + local
            elif index == 1:
                parameter.grad = local
            else:
                parameter.grad.mul_(0.5)
        if turn == 3 and case.rank is not None:
            optimizer.synchronize()
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()


def clipped_sample_by_sample(case: Case) -> None:
    """As private training does: each sample's gradient is clipped, and their mean is set."""
    optimizer = case.optimizer()
    for turn in range(TURNS):
        means: list[Any] = [0.0 for _ in case.model.parameters()]
        ranks = range(2) if case.rank is None else [case.rank]
        for rank in ranks:
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * turn + rank))
            for sample in x:
                found = torch.autograd.grad(case.model(sample).square().sum(), list(case.model.parameters()))
                norm = torch.stack([each.norm() for each in found]).norm()
                for index, each in enumerate(found):
                    means[index] = means[index] + each * (0.5 / norm).clamp(max=1.0) / (4 * len(ranks))
        for parameter, mean in zip(case.model.parameters(), means, strict=True):
            parameter.grad = mean
        optimizer.step()


def several_optimizers(case: Case) -> None:
    optimizers = [case.optimizer(torch.optim.SGD(case.model[index].parameters(), lr=0.2)) for index in (0, 2)]
    for turn in range(TURNS):
        for parameter, gradient in zip(case.model.parameters(), gradients(case, turn), strict=True):
            parameter.grad = gradient
        for optimizer in optimizers:
            optimizer.step()


SCRIPTS = [set_by_autograd_grad, set_by_torch_func, float32_copies, replaced_after_a_backward_pass, clipped_sample_by_sample,
           several_optimizers]


@pytest.mark.parametrize("options", [{}, {"wait_in": "step"}, {"comm_hook": comm_hooks.AllReduce}], ids=str)
def test_gradients_of_the_scripts_own_are_reduced(options: dict[str, Any]) -> None:
    compare(SCRIPTS, lambda rank: {key: value() if callable(value) else value for key, value in options.items()})


def test_sparse_gradients_of_the_scripts_own_are_reduced() -> None:
    def step(runtime: Runtime) -> Any:
        table = torch.nn.Embedding.from_pretrained(torch.zeros(4, 2), freeze=False, sparse=True)
        optimizer = wrap_optimizer(torch.optim.SGD(table.parameters(), lr=1.0), runtime=runtime)
        for turn in range(5):
            optimizer.zero_grad()
            row = (turn + runtime.world.rank) % 4
            table.weight.grad = torch.sparse_coo_tensor([[row]], torch.ones(1, 2), (4, 2), check_invariants=True)
            optimizer.step()
        return table.weight.detach()
    one, other = threads(2, step)
    assert torch.equal(one, other) and one[:, 0].tolist() == [-1.5, -1.5, -1.0, -1.0]


def test_what_is_changed_in_place_after_the_reduction_is_not_reduced_again() -> None:
    """With Sum, which would show it."""
    def step(runtime: Runtime) -> list[float]:
        parameter = torch.nn.Parameter(torch.zeros(3))
        optimizer = wrap_optimizer(torch.optim.SGD([parameter], lr=1.0), runtime=runtime, op=ReduceOp.SUM)
        for _ in range(5):
            optimizer.zero_grad()
            (parameter * (runtime.world.rank + 1)).sum().backward()
            parameter.grad /= 2
            rounds = reducer_of(optimizer).set.round_id
            optimizer.step()
            assert reducer_of(optimizer).set.round_id == rounds
        return parameter.detach().tolist()
    assert threads(2, step) == [[-7.5] * 3] * 2


def moved_between_groups(case: Case) -> None:
    """One parameter, and later all of them, come into new groups."""
    optimizer = case.optimizer()
    for turn in range(9):
        if turn == 3:
            optimizer.add_param_group({"params": [optimizer.param_groups[0]["params"].pop(0)], "lr": 0.05})
        elif turn == 6:
            optimizer.param_groups.clear()
            for number, layer in enumerate((case.model[0], case.model[2])):
                optimizer.add_param_group({"params": layer.parameters(), "lr": 0.1 + 0.1 * number})
        optimizer.zero_grad()
        case.loss(turn).backward()
        optimizer.step()


def test_parameters_move_between_groups() -> None:
    compare([moved_between_groups])


@pytest.mark.parametrize("to_none", [True, False])
def test_unused_parameters_cost_no_round(to_none: bool) -> None:
    def step(runtime: Runtime) -> None:
        model = torch.nn.ModuleList([net(), net()])
        optimizer = wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), runtime=runtime)
        for turn in range(6):
            optimizer.zero_grad(set_to_none=to_none)
            model[turn > 2](torch.ones(1, 6)).sum().backward()
            optimizer.step()
            assert reducer_of(optimizer).set.round_id == turn + 1
    threads(2, step)


def test_replaced_gradients_are_an_error_where_reducing_them_again_is_not_exact() -> None:
    def step(runtime: Runtime) -> None:
        model = net()
        optimizer = wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), runtime=runtime, op=ReduceOp.SUM)
        model(torch.ones(1, 6)).sum().backward()
        model[2].bias.grad = model[2].bias.grad / 2
        with pytest.raises(GradientOrderError, match=rf"another gradient on rank {runtime.world.rank}.*op=Sum.*in place"):
            optimizer.step()
        optimizer.zero_grad()
        model[2].bias.grad = torch.ones(3)
        optimizer.step()
        assert torch.equal(model[2].bias.grad, torch.full((3,), 2.0))
    threads(2, step)


def test_a_gradient_that_is_replaced_on_one_rank_only_is_an_error_on_all() -> None:
    def step(runtime: Runtime) -> None:
        model = net()
        optimizer = wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), runtime=runtime)
        with pytest.raises(MismatchError, match=r"number of optimizer steps(?s:.*)replaced"):
            for turn in range(5):
                optimizer.zero_grad()
                model(torch.ones(1, 6)).sum().backward()
                if turn == 3 and runtime.world.rank == 0:
                    model[0].weight.grad = model[0].weight.grad * 0.5
                optimizer.step()
    threads(2, step)


@pytest.mark.parametrize("by_hand", [True, False])
def test_a_rank_without_a_backward_after_a_skipped_step_and_gradients_cleared_by_hand(by_hand: bool) -> None:
    def step(runtime: Runtime) -> Any:
        model = net()
        optimizer = wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), runtime=runtime)
        for turn in range(6):
            if by_hand:
                model.zero_grad()
            else:
                optimizer.zero_grad()
            if turn != 4 or runtime.world.rank == 0:
                model(torch.full((1, 6), 1.0 + runtime.world.rank)).sum().backward()
            if turn != 3:
                optimizer.step()
        return model[0].weight.detach()
    one, other = threads(2, step)
    assert torch.equal(one, other)


def test_an_optimizer_whose_zero_grad_takes_no_argument() -> None:
    class Fused(torch.optim.SGD):
        def zero_grad(self) -> None:  # type: ignore[override]
            for parameter in self.param_groups[0]["params"]:
                parameter.grad = None

    def script(case: Case) -> None:
        optimizer = case.optimizer(Fused(case.model.parameters(), lr=0.1))
        for turn in range(TURNS):
            optimizer.zero_grad()
            case.loss(turn).backward()
            optimizer.step()
    compare([script])


def test_lazy_parameters_and_a_model_that_changes_its_dtype() -> None:
    """The lazy layer gets its shape after the optimizer was wrapped; the second one is not used before the third step."""
    def script(case: Case) -> None:
        lazy = torch.nn.ModuleList([torch.nn.LazyLinear(3), torch.nn.LazyLinear(3)])
        optimizer = case.optimizer(torch.optim.SGD([*case.model.parameters(), *lazy.parameters()], lr=0.1))

        def forward(turn: int, x: Any) -> Any:
            hidden = case.model(x.to(case.model[0].weight.dtype))
            for layer in lazy[:2 if turn > 2 else 1]:
                if torch.nn.parameter.is_lazy(layer.weight):
                    layer.initialize_parameters(hidden)
                    with torch.no_grad():
                        layer.weight.fill_(0.1).add_(torch.eye(3))
                        layer.bias.zero_()
                    layer(hidden)  # lets it become an ordinary one
                hidden = layer(hidden)
            return hidden
        for turn in range(12):
            optimizer.zero_grad()
            case.loss(turn, lambda x, turn=turn: forward(turn, x)).backward()
            optimizer.step()
            if turn in (5, 8):
                dtype = torch.float64 if turn == 5 else torch.bfloat16
                case.model.to(dtype), lazy.to(dtype)
    compare([script], tolerance=3e-2)


def test_hooks_end_with_their_optimizer() -> None:
    def step(runtime: Runtime) -> None:
        model = net()
        for _ in range(3):
            optimizer = wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), runtime=runtime)
        model(torch.ones(1, 6)).sum().backward()
        assert len(model[0].weight._post_accumulate_grad_hooks) == 1
        del optimizer
        assert not model[0].weight._post_accumulate_grad_hooks
    threads(2, step)


def test_compiled_autograd_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A real one takes half a minute to compile."""
    monkeypatch.setitem(sys.modules, "torch._dynamo.compiled_autograd", SimpleNamespace(in_compiled_autograd_region=True))

    def step(runtime: Runtime) -> None:
        model = net()
        _kept = wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), runtime=runtime)
        with pytest.raises(UnsupportedError, match="compiled autograd"):
            model(torch.ones(1, 6)).sum().backward()
    threads(2, step)
