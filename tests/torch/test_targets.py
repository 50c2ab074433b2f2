"""Gradients in memory that the script uses itself: results come back into it, and `.grad` stays the script's tensor."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hvdlite.runtime.runtime import Runtime  # noqa: E402
from hvdlite_torch import Compression  # noqa: E402
from hvdlite_torch.optimizer.distributed_optimizer import wrap_optimizer  # noqa: E402
from tests.torch.models import by_bucket, net, reducer_of, settle, wrapped  # noqa: E402
from tests.torch.one_process import Case, compare  # noqa: E402
from tests.worlds import threads  # noqa: E402

TURNS = 6
"""Two by single gradients, the others in learned buckets."""


def flat_buffer(parameters: list[Any]) -> Any:
    """Make views of one tensor the gradients of all parameters."""
    buffer = torch.zeros(sum(parameter.numel() for parameter in parameters))
    for parameter, part in zip(parameters, buffer.split([parameter.numel() for parameter in parameters]), strict=True):
        parameter.grad = part.view_as(parameter)
    return buffer


def a_flat_buffer_that_is_cleared_and_clipped(case: Case) -> None:
    parameters = list(case.model.parameters())
    buffer, optimizer = flat_buffer(parameters), case.optimizer()
    for turn in range(TURNS):
        buffer.zero_()
        case.loss(turn, parts=turn == 4).backward()  # one rank computes only some of the gradients
        if case.rank is not None:
            optimizer.synchronize()
        buffer.mul_(0.1 / max(buffer.norm().item(), 0.1))
        optimizer.step()
        assert all(each.grad.untyped_storage().data_ptr() == buffer.data_ptr() for each in parameters)


def a_list_of_gradients_that_is_made_once(case: Case) -> None:
    optimizer, gradients = case.optimizer(), list[Any]()
    for turn in range(TURNS):
        if gradients:
            torch._foreach_zero_(gradients)
        case.loss(turn).backward()
        gradients = gradients or [parameter.grad for parameter in case.model.parameters()]
        optimizer.step()


def a_list_of_gradients_and_two_losses(case: Case) -> None:
    """In the pass of one loss the gradients of the other are absent, while they lie in their places."""
    optimizer, kept = case.optimizer(), dict[int, Any]()
    halves = [list(layer.parameters()) for layer in case.model if list(layer.parameters())]
    for turn in range(TURNS):
        for parameter in case.model.parameters():
            if parameter.grad is not None:
                kept.setdefault(id(parameter), parameter.grad)
        if kept:
            torch._foreach_zero_(list(kept.values()))
        for _ in range(2):
            for half in halves:
                factor = (turn + 1) * (0.5 if case.rank is None else case.rank)  # of two ranks, on average
                (0.01 * factor * sum(parameter.sum() for parameter in half)).backward()
        optimizer.step()


def gradients_with_a_graph(case: Case) -> None:
    """Each rank has its own second derivatives, as under DDP."""
    optimizer, parameters = case.optimizer(), list(case.model.parameters())
    for turn in range(TURNS):
        optimizer.zero_grad()
        case.loss(turn).backward(create_graph=True)
        torch.autograd.grad([each.grad for each in parameters], parameters, [torch.ones_like(each) for each in parameters])
        for parameter in parameters:
            parameter.grad = parameter.grad.detach()
        optimizer.step()


SCRIPTS = [a_flat_buffer_that_is_cleared_and_clipped, a_list_of_gradients_that_is_made_once,
           a_list_of_gradients_and_two_losses]


@pytest.mark.parametrize("options", [{}, {"wait_in": "step"}], ids=["backward", "step"])
def test_gradients_in_the_scripts_own_memory(options: dict[str, Any]) -> None:
    compare([*SCRIPTS, gradients_with_a_graph], lambda rank: options)


def test_gradients_in_the_scripts_own_memory_without_views_and_compressed() -> None:
    compare(SCRIPTS, gradient_as_bucket_view=False)
    compare(SCRIPTS, lambda rank: {"compression": Compression.fp16}, tolerance=2e-3)


def test_a_large_gradient_in_the_scripts_own_memory() -> None:
    """It is copied as soon as it is computed, and not with others."""
    def step(runtime: Runtime) -> None:
        parameters = [torch.nn.Parameter(torch.zeros(100, 100)) for _ in range(3)]
        kept = parameters[0].grad = torch.zeros(100, 100)
        optimizer = wrap_optimizer(torch.optim.SGD(parameters, lr=0.0), runtime=runtime)
        for turn in range(1, TURNS):
            kept.zero_()
            parameters[1].grad = None
            sum((parameter * (turn + 2 * runtime.world.rank)).sum() for parameter in parameters[:2]).backward()
            assert parameters[0].grad is kept and (kept == turn + 1).all()
            assert (parameters[1].grad == turn + 1).all() and parameters[2].grad is None
            optimizer.step()
        assert by_bucket(optimizer)
    threads(2, step)


@pytest.mark.parametrize("size", [4, 100], ids=["small", "large"])
def test_a_gradient_that_nobody_else_uses_becomes_a_view_although_it_was_written_to(size: int) -> None:
    """By accumulation, in either place where gradients are handed over: alone, and with the others of a bucket."""
    def step(runtime: Runtime) -> None:
        parameters = [torch.nn.Parameter(torch.zeros(size, size)) for _ in range(3)]
        optimizer = wrap_optimizer(torch.optim.SGD(parameters, lr=0.0), runtime=runtime)
        for turn in range(TURNS):
            optimizer.zero_grad()
            for passes in range(2):
                with optimizer.no_sync():
                    sum(parameter.sum() for parameter in parameters[passes:]).backward()
            sum(parameter.sum() for parameter in parameters).backward()
            if turn > 2:
                places = [place for bucket in reducer_of(optimizer).layout.plans for place in bucket.places.places]
                assert {id(place.view) for place in places} == {id(parameter.grad) for parameter in parameters}
            optimizer.step()
    threads(2, step)


def test_of_small_gradients_that_autograd_has_copied_only_those_that_the_script_has_stay_its_own() -> None:
    """Autograd writes to the copies that it makes of a sum's gradients; users of all small ones are counted together."""
    def step(runtime: Runtime) -> None:
        parameters, kept = [torch.nn.Parameter(torch.zeros(4)) for _ in range(3)], list[Any]()
        optimizer = wrap_optimizer(torch.optim.SGD(parameters, lr=0.0), runtime=runtime)
        parameters[1].register_post_accumulate_grad_hook(lambda parameter: kept.append(parameter.grad))
        for turn in range(TURNS):
            optimizer.zero_grad()
            sum(parameter.sum() for parameter in parameters).backward()
            assert parameters[1].grad is kept[-1] and all((parameter.grad == 1).all() for parameter in parameters)
            if turn > 2:
                places = [place for bucket in reducer_of(optimizer).layout.plans for place in bucket.places.places]
                views = {id(place.view) for place in places}
                assert [id(parameter.grad) in views for parameter in parameters] == [True, False, True]
            optimizer.step()
    threads(2, step)


def test_results_come_back_in_memory_of_the_scripts_where_a_rank_has_no_gradient() -> None:
    def step(runtime: Runtime) -> None:
        model = net()
        optimizer = wrapped(runtime, model)
        settle(runtime, model, optimizer)
        parameters = list(model.parameters())
        buffer = flat_buffer(parameters)
        for turn in range(4):
            buffer.zero_()
            if turn % 2 == runtime.world.rank:
                sum(parameter.sum() for parameter in parameters).backward()
            optimizer.step()
            assert by_bucket(optimizer) and (buffer == 0.5).all()
    threads(2, step)


def test_passes_add_up_after_gradients_were_kept() -> None:
    """With `wait_in="step"`, in a round in which a bucket breaks because somebody has kept gradients."""
    def step(runtime: Runtime) -> float:
        layers = torch.nn.ModuleList(torch.nn.Linear(5, 8) for _ in range(3))
        head = torch.nn.Linear(8, 2)
        for parameter in [*layers.parameters(), *head.parameters()]:
            torch.nn.init.constant_(parameter, 0.1)
        optimizer = wrap_optimizer(torch.optim.SGD([*layers.parameters(), *head.parameters()], lr=0.01),
                                   runtime=runtime, wait_in="step")
        kept = []
        for turn, passes in enumerate([[(0,), (1, 2)], [(1, 2), (0, 2)], *[[(0, 1), (1, 2)]] * 3]):
            optimizer.zero_grad()
            for used in passes:
                head(sum(layers[number](torch.full((3, 5), 1.0 + runtime.world.rank)) for number in used)).sum().backward()
            if turn == 1:
                kept = [(each.grad, each.grad.clone()) for each in head.parameters()]
            optimizer.step()
        assert all(torch.equal(gradient, values) for gradient, values in kept)
        return head.weight.sum().item()
    one, other = threads(2, step)
    assert one == other
