"""Several backward passes before a step."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hvdlite.core.errors import MismatchError  # noqa: E402
from hvdlite.core.types import ReduceOp  # noqa: E402
from hvdlite.runtime.runtime import Runtime  # noqa: E402
from hvdlite.training.gradients.errors import GradientOrderError  # noqa: E402
from hvdlite_torch import Compression, comm_hooks  # noqa: E402
from hvdlite_torch.optimizer.distributed_optimizer import wrap_optimizer  # noqa: E402
from tests.torch.models import by_bucket as by_bucket_of  # noqa: E402
from tests.torch.models import net, reducer_of  # noqa: E402
from tests.torch.one_process import Case, compare  # noqa: E402
from tests.worlds import threads  # noqa: E402

TURNS = 5
"""Two by single gradients, the others in learned buckets."""


def train(case: Case, *passes: Callable[[int], Any]) -> None:
    """Train with several backward passes per step: each is a function that returns its loss in a turn."""
    optimizer = case.optimizer()
    for turn in range(TURNS):
        optimizer.zero_grad()
        for loss in passes:
            loss(turn).backward()
        optimizer.step()


def two_passes(case: Case) -> None:
    train(case, case.loss, lambda turn: case.loss(turn + 50))


def three_passes_that_are_clipped_and_zeroed(case: Case) -> None:
    optimizer = case.optimizer()
    for turn in range(TURNS):
        for part in range(3):
            case.loss(turn + 50 * part).backward()
            torch.nn.utils.clip_grad_norm_(case.model.parameters(), 0.1)
        optimizer.step()
        case.model.zero_grad(set_to_none=turn % 2 > 0)


def a_second_pass_over_other_layers_on_each_rank(case: Case) -> None:
    train(case, case.loss, lambda turn: case.loss(turn + 50, parts=True))


def local_passes_between(case: Case) -> None:
    optimizer = case.optimizer()
    for turn in range(TURNS):
        optimizer.zero_grad()
        case.loss(turn).backward()
        if case.rank is None:
            case.loss(turn + 50).backward()
        else:
            with optimizer.no_sync():
                case.loss(turn + 50).backward()
        if turn % 2:
            case.loss(turn + 80).backward()
        optimizer.step()


def a_skipped_step_and_zeros_by_the_module(case: Case) -> None:
    optimizer = case.optimizer()
    for turn in range(TURNS + 2):
        case.model.zero_grad(set_to_none=False)
        case.loss(turn).backward()
        if turn != 3:
            optimizer.step()


def a_skipped_step_zeros_and_a_rank_without_a_batch(case: Case) -> None:
    """The rank has a reduced gradient of the skipped step, which the module has set to zero."""
    optimizer = case.optimizer()
    for turn in range(TURNS + 2):
        case.model.zero_grad(set_to_none=False)
        if turn != 3 or case.rank != 1:
            case.loss(turn, without=1 if turn == 3 else None).backward()
        if turn != 2:
            optimizer.step()


def a_first_step_that_is_skipped(case: Case) -> None:
    """Rank 0 alone uses the first layers afterwards."""
    optimizer = case.optimizer()
    for turn in range(TURNS):
        case.model.zero_grad()
        case.loss(turn, parts=turn > 0).backward()
        if turn:
            optimizer.step()


def passes_over_layers_of_which_one_rank_alone_uses_some_again(case: Case) -> None:
    train(case, lambda turn: case.loss(turn, case.model[:2]), lambda turn: case.loss(turn + 50, parts=True))


def passes_over_different_layers_and_a_rank_that_looks_in_between(case: Case) -> None:
    def second(turn: int) -> Any:
        if case.rank == 0 and turn % 2:
            assert case.model[0].weight.grad is not None
        return case.loss(turn + 50, lambda x: case.model[2](case.model[:2](x).detach()))
    train(case, lambda turn: case.loss(turn, case.model[:2]), second)


def dcgan(case: Case) -> None:
    """The order of torch's tutorial."""
    critic, generator = case.model, torch.nn.Linear(6, 6)
    torch.nn.init.eye_(generator.weight)
    torch.nn.init.zeros_(generator.bias)
    of_critic, of_generator = case.optimizer(), case.optimizer(torch.optim.SGD(generator.parameters(), lr=0.2))
    for turn in range(TURNS):
        critic.zero_grad()
        case.loss(turn).backward()
        case.loss(turn + 50, lambda x: critic(generator(x).detach()) - 1).backward()
        of_critic.step()
        generator.zero_grad()
        case.loss(turn + 50, lambda x: critic(generator(x))).backward()
        of_generator.step()


SCRIPTS = [two_passes, three_passes_that_are_clipped_and_zeroed, a_second_pass_over_other_layers_on_each_rank,
           local_passes_between, a_skipped_step_and_zeros_by_the_module, a_skipped_step_zeros_and_a_rank_without_a_batch,
           a_first_step_that_is_skipped, passes_over_layers_of_which_one_rank_alone_uses_some_again,
           passes_over_different_layers_and_a_rank_that_looks_in_between, dcgan]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {}, "step": {"wait_in": "step"}, "predivide": {"gradient_predivide_factor": 4.0},
    "two passes per step": {"backward_passes_per_step": 2},
    "two passes per step, step": {"backward_passes_per_step": 2, "wait_in": "step"},
}


@pytest.mark.parametrize("options", OPTIONS)
def test_passes_before_a_step_add_up(options: str) -> None:
    scripts = [script for script in SCRIPTS if "clip" not in script.__name__ or "two" not in options]  # of local gradients
    if "step" in options:  # known faults
        scripts = [script for script in scripts if "one_rank" not in script.__name__ and "looks" not in script.__name__]
    compare(scripts, lambda rank: OPTIONS[options])


def test_passes_before_a_step_add_up_where_ranks_wait_in_different_places() -> None:
    compare([two_passes, a_second_pass_over_other_layers_on_each_rank, dcgan],
            lambda rank: {"wait_in": ["backward", "step"][rank]})


def test_passes_before_a_step_add_up_with_communication_hooks_and_compression() -> None:
    compare(SCRIPTS, lambda rank: {"comm_hook": comm_hooks.AllReduce()})
    compare([two_passes, dcgan], lambda rank: {"compression": Compression.fp16}, tolerance=2e-3)


def test_a_second_pass_after_a_wait_that_was_deferred() -> None:
    """Rank 0's first wait is deferred; its second pass comes while that round is under way, as does a third."""
    def step(runtime: Runtime) -> list[float]:
        a, b = (torch.nn.Parameter(torch.zeros(3)) for _ in range(2))
        optimizer = wrap_optimizer(torch.optim.SGD([a, b], lr=1.0), runtime=runtime)
        for turn in range(4):
            optimizer.zero_grad()
            if turn in (0, 3) and runtime.world.rank == 1:
                runtime.barrier(f"early {turn}").wait()
            (a * (runtime.world.rank + 1)).sum().backward()
            if turn in (0, 3) and runtime.world.rank == 0:
                runtime.barrier(f"early {turn}").wait()
            (a * 10 + b * runtime.world.rank).sum().backward()
            if runtime.world.rank == 0:
                (a * 100).sum().backward()
            else:
                (b * 100).sum().backward()
            optimizer.step()
        return [float(each.detach()[0]) for each in (a, b)]
    assert threads(2, step) == [[-4 * (1.5 + 10 + 50), -4 * 50.5]] * 2


@pytest.mark.parametrize("options", [
    {"op": ReduceOp.SUM}, {"op": ReduceOp.MAX}, {"comm_hook": comm_hooks.PowerSGD}, {"op": ReduceOp.SUM, "wait_in": "step"}])
# docs/protocol.md#reduced-again
def test_where_reducing_again_is_not_exact_a_second_pass_is_an_error(options: dict[str, Any]) -> None:
    def step(runtime: Runtime) -> None:
        own = {**options, "comm_hook": options["comm_hook"]()} if "comm_hook" in options else options
        model = net()
        optimizer = wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), runtime=runtime, **own)
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.ones(1, 6)).sum().backward()
            with pytest.raises(GradientOrderError, match=rf"on rank {runtime.world.rank}.*no_sync.*op=Average"):
                model(torch.ones(1, 6)).sum().backward()
    threads(2, step)


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVERAGE])
def test_a_gradient_that_comes_after_the_round_in_which_other_ranks_had_it(op: ReduceOp) -> None:
    """Ranks 0 and 2 compute b in a second pass, while the wait of their first one is deferred; rank 1 in its first."""
    def step(runtime: Runtime) -> Any:
        rank = runtime.world.rank
        a, b, c = (torch.nn.Parameter(torch.zeros(1)) for _ in range(3))
        optimizer = wrap_optimizer(torch.optim.SGD([a, b, c], lr=1.0), runtime=runtime, op=op)
        if rank == 1:
            runtime.barrier("early").wait()
            (a + b * 10).sum().backward()
            (c * 5).sum().backward()
            optimizer.synchronize()
        else:
            a.sum().backward()
            runtime.barrier("early").wait()
            refused = pytest.raises(GradientOrderError, match=f"on rank {rank} only after")
            with refused if op is ReduceOp.SUM else nullcontext():
                (b * (1 if rank == 0 else 100)).sum().backward()
                optimizer.synchronize()
            optimizer.synchronize()
        return [each.grad.item() for each in (a, b, c)]
    expected = [3, 10, 5] if op is ReduceOp.SUM else [1, 37, 5 / 3]
    assert threads(3, step) == [pytest.approx(expected)] * 3


@pytest.mark.parametrize("wait_in", ["backward", "step"])
def test_different_numbers_of_passes_over_the_same_parameters_are_an_error_on_all_ranks(wait_in: str) -> None:
    def step(runtime: Runtime) -> None:
        model = net()
        optimizer = wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), runtime=runtime, wait_in=wait_in)
        with pytest.raises(MismatchError, match="number of optimizer steps"):
            for turn in range(5):
                optimizer.zero_grad()
                for _ in range(1 + (turn == 3 and runtime.world.rank == 0)):
                    model(torch.ones(1, 6)).sum().backward()
                optimizer.step()
    threads(2, step)


def after_a_pass(runtime: Runtime, *, by_bucket: bool, **options: Any) -> tuple[Any, Any]:
    """Return a model and its optimizer after a backward pass, which is the first one unless buckets are to be learned."""
    model = net()
    optimizer = wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), runtime=runtime, **options)
    for _ in range(4 if by_bucket else 0):
        optimizer.zero_grad()
        model(torch.ones(1, 6)).sum().backward()
        optimizer.step()
    optimizer.zero_grad()
    model(torch.ones(1, 6)).sum().backward()
    return model, optimizer


@pytest.mark.parametrize("by_bucket", [False, True])
def test_a_gradient_that_one_rank_alone_clears_between_two_passes_is_an_error(by_bucket: bool) -> None:
    """The average would be too small: rank 1's part of the first pass is missing."""
    def step(runtime: Runtime) -> None:
        model, optimizer = after_a_pass(runtime, by_bucket=by_bucket)
        first, *_, last = model.parameters()
        assert by_bucket_of(optimizer) == by_bucket
        if runtime.world.rank == 0:
            told = "another rank" if by_bucket else "rank 1"
            with pytest.raises(GradientOrderError, match=rf"{told} took part without the reduced gradient"):
                model(torch.ones(1, 6)).sum().backward()
        else:
            first.grad = None
            last.sum().backward()
    threads(2, step)


def test_a_second_pass_is_an_error_while_ranks_have_joined() -> None:
    """Their reduced gradients would be missing."""
    def step(runtime: Runtime) -> None:
        model = net()
        optimizer = wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), runtime=runtime)
        with optimizer.join():
            for turn in range(3 + 3 * (runtime.world.rank == 0)):
                optimizer.zero_grad()
                model(torch.ones(1, 6)).sum().backward()
                if turn == 5:
                    with pytest.raises(GradientOrderError, match=r"rank 1 took part without the reduced gradient \(joined"):
                        model(torch.ones(1, 6)).sum().backward()
                optimizer.step()
    threads(2, step)


@pytest.mark.parametrize("options", [{}, {"comm_hook": comm_hooks.AllReduce}], ids=["runtime", "hook"])
@pytest.mark.parametrize("by_bucket", [False, True])
@pytest.mark.parametrize("begun", [False, True])
def test_a_second_pass_is_an_error_when_a_rank_joins_first(begun: bool, by_bucket: bool, options: dict[str, Any]) -> None:
    """Before the pass, or in the middle of it."""
    has_begun = threading.Event()

    def step(runtime: Runtime) -> None:
        own = {name: make() for name, make in options.items()}
        model, optimizer = after_a_pass(runtime, by_bucket=by_bucket, **own)
        assert by_bucket_of(optimizer) == (by_bucket and not options)
        if runtime.world.rank == 0:
            model[0].bias.register_post_accumulate_grad_hook(lambda parameter: has_begun.set())
            with pytest.raises(GradientOrderError, match=r"rank 1 took part without the reduced gradient \(joined"):
                model(torch.ones(1, 6)).sum().backward()
        elif begun:
            assert has_begun.wait(60)
        runtime.join().wait()
    threads(2, step)


def test_a_thread_that_reads_gradients_while_the_optimizer_steps() -> None:
    """It waits for the round that it has found under way; the step begins no other one."""
    def step(runtime: Runtime) -> list[torch.Tensor]:
        model = net()
        optimizer = wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), runtime=runtime, wait_in="step")
        for turn in range(12):
            optimizer.zero_grad()
            (model(torch.ones(1, 6)).sum() * (turn + runtime.world.rank)).backward()
            reads = threading.Event()

            def read(reads: threading.Event = reads) -> None:
                reads.set()
                assert all(parameter.grad is not None for parameter in model.parameters())
            reader = threading.Thread(target=read)
            if runtime.world.rank == 0:
                reader.start()
                reads.wait()
            optimizer.step()
            if runtime.world.rank == 0:
                reader.join()
        return [parameter.detach() for parameter in model.parameters()]
    one, other = threads(2, step)
    assert all(map(torch.equal, one, other))


def test_a_guard_ends_only_its_own_round() -> None:
    """Somebody who has found a round under way may come to wait for it when the next one is open."""
    def step(runtime: Runtime) -> list[float]:
        first, second = (torch.nn.Parameter(torch.zeros(3)) for _ in range(2))
        optimizer = wrap_optimizer(torch.optim.SGD([first, second], lr=1.0), runtime=runtime, wait_in="step")
        reducer, found = reducer_of(optimizer), []

        def wait_late(_: Any) -> None:
            for current in found:
                reducer.finish(current)
        for parameter in (first, second):
            parameter.register_post_accumulate_grad_hook(wait_late)
        for _ in range(6):
            optimizer.zero_grad()
            (first * 2 + second * (runtime.world.rank + 1)).sum().backward()
            found = [reducer.round] if runtime.world.rank == 0 else []
            optimizer.step()
        return [first[0].item(), second[0].item()]
    assert threads(2, step) == [[-12.0, -9.0]] * 2


def test_a_gradient_that_is_accumulated_into_while_it_is_reduced_adds_up() -> None:
    """Which only somebody can do who hands gradients over himself. Nobody writes to what is being reduced."""
    def step(runtime: Runtime) -> None:
        layer = torch.nn.Linear(3, 3)
        optimizer = wrap_optimizer(torch.optim.SGD(layer.parameters(), lr=0.1), runtime=runtime)
        layer.weight.grad = torch.ones(3, 3)
        reducer = reducer_of(optimizer)
        reducer.accumulated(layer.weight)
        assert layer.weight.grad is None
        layer.weight.grad = torch.full((3, 3), 2.0 * runtime.world.rank)
        reducer.accumulated(layer.weight)
        optimizer.synchronize()
        assert (layer.weight.grad == 2).all()
        optimizer.step()
    threads(2, step)
