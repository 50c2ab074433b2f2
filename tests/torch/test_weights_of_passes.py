"""Weights of passes that reach no parameter, or between which ranks join; and of gradients that are set or added late."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from hvdlite.core.errors import MismatchError  # noqa: E402
from hvdlite.runtime.runtime import Runtime  # noqa: E402
from hvdlite_torch.optimizer.distributed_optimizer import wrap_optimizer  # noqa: E402
from tests.elastic_jobs import ElasticJob  # noqa: E402
from tests.torch.programs import elastic_weights  # noqa: E402
from tests.worlds import TORCH, threads  # noqa: E402


@pytest.mark.parametrize("wait_in", ["backward", "step"])
@pytest.mark.parametrize("other", [True, False], ids=["a pass of another optimizer", "no pass"])
def test_a_rank_whose_pass_reaches_no_parameter_counts(other: bool, wait_in: str) -> None:
    """Its gradients are zeros; the weight does not last until the next step."""
    def step(runtime: Runtime) -> list[float]:
        rank, found = runtime.world.rank, []
        shared, expert = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
        optimizers = [wrap_optimizer(torch.optim.SGD([each], lr=0.0), runtime=runtime, wait_in=wait_in)
                      for each in (shared, expert)]
        for turn in range(4):
            for optimizer in optimizers:
                optimizer.zero_grad()
                optimizer.set_weight((3, 5)[rank] + turn)
            if other or not rank:
                (shared.sum() + (2 * expert.sum() if not rank else 0)).backward()
            for optimizer in optimizers:
                optimizer.step()
            found += [float(each.grad[0]) for each in (shared, expert)]
        for optimizer in optimizers:
            optimizer.zero_grad()
            if not rank:
                optimizer.set_weight(1)
        with pytest.raises(MismatchError, match="rank 1 made a backward pass without one"):
            (shared.sum() + expert.sum()).backward()
            for optimizer in optimizers:
                optimizer.step()
        return found
    shares = [(3 + turn) / (8 + 2 * turn) for turn in range(4)]
    for found in threads(2, step):
        assert found == pytest.approx([value for share in shares for value in (1 if other else share, 2 * share)])


@pytest.mark.parametrize("reached", [(), (0,), (1,)], ids=str)
@pytest.mark.parametrize("passes", [1, 2], ids=["no_sync", "backward_passes_per_step"])
def test_passes_that_reach_no_parameter_of_a_step_with_several(passes: int, reached: tuple[int, ...]) -> None:
    def step(runtime: Runtime) -> list[float]:
        rank, found = runtime.world.rank, []
        parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
        optimizers = [wrap_optimizer(torch.optim.SGD([each], lr=0.0), runtime=runtime,
                                     backward_passes_per_step=passes) for each in parameters]
        for _ in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad()
            for number in range(2):
                with contextlib.ExitStack() as stack:
                    for optimizer in optimizers:
                        if passes == 1 and not number:
                            stack.enter_context(optimizer.no_sync())
                        optimizer.set_weight(100)
                        optimizer.set_weight(3 + rank + 5 * number)
                    (parameters[0] + (parameters[1] if not rank or number in reached else 0)).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
            found += [float(each.grad[0]) for each in parameters]
        return found
    expert = 2 * (3 + 8 + sum((4, 9)[number] for number in reached)) / (3 + 8 + 4 + 9)
    for found in threads(2, step):
        assert found == pytest.approx([2, expert] * 3)


@pytest.mark.parametrize("kind", ["backward_passes_per_step", "no_sync", "gradients that the script sets", "reduced"])
def test_join_between_the_passes_of_a_step(kind: str) -> None:
    """What has accumulated is multiplied for the unit that is found anew."""
    def step(runtime: Runtime) -> list[float]:
        rank, found, (parameter, other) = runtime.world.rank, [], (torch.nn.Parameter(torch.ones(1)) for _ in range(2))
        optimizer = wrap_optimizer(torch.optim.SGD([parameter, other], lr=0.0), runtime=runtime,
                                   backward_passes_per_step=1 if kind in ("no_sync", "reduced") else 2)

        def turn(number: int) -> None:
            optimizer.set_weight(count(rank, number))
            if kind.startswith("gradients") and number % 2 == 0:
                parameter.grad = torch.full((1,), gradient(rank, number))
                other.sum().backward()
            else:
                ((parameter + other).sum() * gradient(rank, number)).backward()
        for number in range(6):
            if kind == "no_sync" and number % 2 == 0:
                with optimizer.no_sync():
                    turn(number)
            else:
                turn(number)
            if number % 2 == 0 and number:
                runtime.join().wait()
            if number % 2 or kind == "reduced":
                optimizer.step()
                assert parameter.grad is not None
                found.append(float(parameter.grad[0]))
                optimizer.zero_grad()
        return found

    def gradient(rank: int, number: int) -> float:
        return 1.0 + rank + number

    def count(rank: int, number: int) -> int:
        return 3 + rank + 10 * number

    def wanted(numbers: list[int]) -> float:
        pairs = [(count(rank, number), gradient(rank, number)) for rank in range(2) for number in numbers]
        return len(numbers) * sum(one * other for one, other in pairs) / sum(one for one, _ in pairs)
    steps = [[number] for number in range(6)] if kind == "reduced" else [[0, 1], [2, 3], [4, 5]]
    for found in threads(2, step):
        assert found == pytest.approx(list(map(wanted, steps)), rel=1e-5)


def test_one_tensor_as_the_gradient_of_two_parameters() -> None:
    def step(runtime: Runtime) -> list[float]:
        parameters, found = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)], []
        optimizer = wrap_optimizer(torch.optim.SGD(parameters, lr=0.0), runtime=runtime)
        for _ in range(3):
            optimizer.zero_grad()
            optimizer.set_weight((1, 3)[runtime.world.rank])
            gradient = torch.full((2,), 1.0 + runtime.world.rank)
            for parameter in parameters:
                parameter.grad = gradient
            optimizer.step()
            found += [float(parameter.grad[1]) for parameter in parameters]
        return found
    assert threads(2, step) == [[1.75] * 6] * 2


def test_a_gradient_that_is_set_of_a_parameter_that_has_thawed() -> None:
    def step(runtime: Runtime) -> list[float]:
        rank, frozen = runtime.world.rank, torch.nn.Parameter(torch.ones(2), requires_grad=False)
        other = torch.nn.Parameter(torch.ones(2))
        optimizer = wrap_optimizer(torch.optim.SGD([frozen, other], lr=0.0), runtime=runtime)
        frozen.requires_grad_(True)
        optimizer.set_weight((1, 3)[rank])
        frozen.grad, other.grad = (torch.full((2,), float(rank)) for _ in range(2))
        optimizer.step()
        return [float(each.grad[0]) for each in (frozen, other)]
    for found in threads(2, step):
        assert found == pytest.approx([0.75, 0.75])


def test_parameters_that_are_added_between_the_weight_and_the_pass() -> None:
    def step(runtime: Runtime) -> list[float]:
        parameters, found = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)], []
        optimizer = wrap_optimizer(torch.optim.SGD(parameters[:1], lr=0.0), runtime=runtime)
        for turn in range(4):
            optimizer.zero_grad()
            optimizer.set_weight((1, 3)[runtime.world.rank])
            if turn == 1:
                optimizer.add_param_group({"params": parameters[1:]})
            (sum(parameters[:1 if turn == 0 else 2]).sum() * (1.0 + runtime.world.rank)).backward()
            optimizer.step()
            found += [float(parameter.grad[1]) for parameter in parameters if parameter.grad is not None]
        return found
    assert threads(2, step) == [[1.75] * 7] * 2


@pytest.mark.parametrize(("compression", "way", "tolerance"), [("none", "passes", 1e-9), ("fp16", "no_sync", 1e-2)])
def test_worlds_of_an_elastic_job(tmp_path: Path, compression: str, way: str, tolerance: float) -> None:
    """A rank comes, and one is killed; batches are divided at random, and some ranks have nothing."""
    with ElasticJob(elastic_weights.train, str(tmp_path), compression, way, slots={"a": 2}, min_np=1, imported=TORCH) as job:
        job.until_printed(1, "step 4 in 2")
        job.see({"a": 3})
        job.until_printed(2, "in 3")
        job.until(lambda: job.output(2).count(" in 3") > 5)
        job.kill(0)
        job.until(lambda: job.output(1).rpartition(" in ")[2].startswith("2"))
        (tmp_path / "end").touch()
        results = list(job.finish().values())
    assert len(results) >= 2 and all(result == results[0] for result in results)
    for own, wanted in zip(results[0]["parameters"], elastic_weights.replay(results[0]["steps"]), strict=True):
        torch.testing.assert_close(torch.tensor(own, dtype=torch.float64), wanted, rtol=tolerance, atol=tolerance)
