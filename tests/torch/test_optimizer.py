"""`DistributedOptimizer` on ranks as threads, against single-process training on the same global batch."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hvdlite.core.errors import MismatchError  # noqa: E402
from hvdlite.core.types import ReduceOp  # noqa: E402
from hvdlite.runtime.runtime import Runtime  # noqa: E402
from hvdlite_torch import Compression  # noqa: E402
from hvdlite_torch.optimizer.distributed_optimizer import wrap_optimizer  # noqa: E402
from tests.torch.models import OPTIMIZERS, batches, net, share, train, weights  # noqa: E402
from tests.worlds import threads  # noqa: E402


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_n_ranks_equal_one_rank_with_the_whole_batch(kind: str, clip: bool, size: int) -> None:
    alone = net()
    optimizer = OPTIMIZERS[kind](alone.parameters())
    for x, y in batches(20, size):
        train(optimizer, alone, x, y, clip)

    def step(runtime: Runtime) -> list[list[Any]]:
        model = net()
        optimizer = wrap_optimizer(OPTIMIZERS[kind](model.parameters()), model.named_parameters(), runtime=runtime)
        history = []
        for x, y in batches(20, size):
            train(optimizer, model, share(x, runtime), share(y, runtime), clip)
            history.append(weights(model))
        return history

    histories = threads(size, step)
    for ours in zip(*histories, strict=True):
        for tensors in zip(*ours, strict=True):
            assert all(torch.equal(tensors[0], tensor) for tensor in tensors), "ranks differ"
    for ours, theirs in zip(histories[0][-1], weights(alone), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_the_optimizer_stays_the_users() -> None:
    def step(runtime: Runtime) -> None:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        train(optimizer, model, torch.ones(2, 6), torch.ones(2, 3))
        state = optimizer.state_dict()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        wrapped = wrap_optimizer(optimizer, runtime=runtime)
        assert wrapped is optimizer and isinstance(wrapped, torch.optim.SGD) and type(wrapped).__name__ == "SGD"
        assert wrapped.defaults["momentum"] == 0.5
        assert str(wrapped.state_dict()["state"]) == str(state["state"])
        train(wrapped, model, torch.ones(2, 6), torch.ones(2, 3))
        scheduler.step()
        assert wrapped.param_groups[0]["lr"] == pytest.approx(0.01)
        wrapped.load_state_dict(state)
        for to_none in (True, False):
            wrapped.zero_grad(set_to_none=to_none)
            train(wrapped, model, torch.ones(2, 6), torch.ones(2, 3))
        with pytest.raises(ValueError, match="already"):
            wrap_optimizer(wrapped, runtime=runtime)
    threads(2, step)


def three_heads() -> Any:
    return torch.nn.ModuleList([torch.nn.Linear(2, 2) for _ in range(3)])


def test_parameters_without_a_gradient_hang_nobody() -> None:
    torch.manual_seed(0)
    start = three_heads().state_dict()

    def step(runtime: Runtime) -> list[Any]:
        model = three_heads()
        model.load_state_dict(start)
        optimizer = wrap_optimizer(torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9, weight_decay=0.1),
                                   model.named_parameters(), runtime=runtime)
        for _ in range(3):  # rank 0 uses head 0, rank 1 head 1, nobody head 2
            optimizer.zero_grad()
            model[runtime.world.rank](torch.ones(1, 2)).sum().backward()
            assert model[0].weight.grad is not None and model[1].weight.grad is not None
            torch.testing.assert_close(model[1 - runtime.world.rank].bias.grad, torch.full((2,), 0.5))
            assert model[2].weight.grad is None
            optimizer.step()
        assert torch.equal(model[2].weight, start["2.weight"]), "nobody's gradient, so weight decay must not move it"
        return weights(model)

    first, second = threads(2, step)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(first, second, strict=True))


def test_a_rank_that_steps_without_a_backward_takes_part() -> None:
    def step(runtime: Runtime) -> Any:
        model = net()
        optimizer = wrap_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), runtime=runtime)
        for turn in range(4):
            optimizer.zero_grad()
            if (turn + runtime.world.rank) % 2:
                model(torch.ones(1, 6)).sum().backward()
            optimizer.step()
        return weights(model)[0]
    first, second = threads(2, step)
    assert torch.equal(first, second)


@pytest.mark.parametrize("how", ["passes", "no_sync"])
def test_accumulation_equals_one_large_batch(how: str) -> None:
    def step(runtime: Runtime) -> None:
        model, reference = net(), net()
        passes = 2 if how == "passes" else 1
        optimizer = wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), backward_passes_per_step=passes,
                                   runtime=runtime)
        plain = torch.optim.SGD(reference.parameters(), lr=0.1)
        pairs = list(batches(6, 2))
        for (x1, y1), (x2, y2) in zip(pairs[::2], pairs[1::2], strict=True):
            optimizer.zero_grad()
            if how == "no_sync":
                with optimizer.no_sync():
                    torch.nn.functional.mse_loss(model(share(x1, runtime)), share(y1, runtime)).backward()
            else:
                torch.nn.functional.mse_loss(model(share(x1, runtime)), share(y1, runtime)).backward()
            torch.nn.functional.mse_loss(model(share(x2, runtime)), share(y2, runtime)).backward()
            optimizer.step()
            plain.zero_grad()
            (torch.nn.functional.mse_loss(reference(x1), y1) + torch.nn.functional.mse_loss(reference(x2), y2)).backward()
            plain.step()
        for ours, theirs in zip(weights(model), weights(reference), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    threads(2, step)


def test_a_second_backward_onto_reduced_gradients_is_refused_where_they_are_summed() -> None:
    def step(runtime: Runtime) -> None:
        model = net()
        optimizer = wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), op=ReduceOp.SUM, runtime=runtime)
        model(torch.ones(1, 6)).sum().backward()
        with pytest.raises(AssertionError, match="no_sync"):
            model(torch.ones(1, 6)).sum().backward()
        optimizer.zero_grad()
        train(optimizer, model, torch.ones(1, 6), torch.ones(1, 3))
        model.zero_grad()  # the module's, not the optimizer's: the gradients are new all the same
        train(optimizer, model, torch.ones(1, 6), torch.ones(1, 3))
    threads(2, step)


def test_a_second_backward_onto_averaged_gradients_adds_up() -> None:
    def step(runtime: Runtime) -> None:
        model = net()
        optimizer = wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.0), runtime=runtime)
        for turn in range(6):
            optimizer.zero_grad()
            for _ in range(2):
                (model(torch.ones(1, 6)).sum() * (1 + runtime.world.rank + turn)).backward()
            torch.testing.assert_close(model[2].bias.grad, torch.full((3,), 3.0 + 2 * turn))
            optimizer.step()
    threads(2, step)


def test_two_losses_over_disjoint_parameters() -> None:
    def step(runtime: Runtime) -> None:
        model = three_heads()
        optimizer = wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), runtime=runtime)
        for _ in range(2):
            optimizer.zero_grad()
            model[0](torch.ones(1, 2)).sum().backward()
            model[1](torch.ones(1, 2)).sum().backward()
            torch.testing.assert_close(model[0].bias.grad, torch.ones(2))
            torch.testing.assert_close(model[1].bias.grad, torch.ones(2))
            optimizer.step()
    threads(2, step)


def test_two_optimizers_as_in_a_gan() -> None:
    torch.manual_seed(0)
    start = [torch.nn.Linear(4, 4).state_dict(), torch.nn.Linear(4, 1).state_dict()]

    def step(runtime: Runtime) -> list[Any]:
        generator, critic = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
        generator.load_state_dict(start[0])
        critic.load_state_dict(start[1])
        first = wrap_optimizer(torch.optim.Adam(generator.parameters()), generator.named_parameters(),
                               runtime=runtime)
        second = wrap_optimizer(torch.optim.Adam(critic.parameters()), critic.named_parameters(), runtime=runtime)
        for turn in range(5):
            noise = torch.full((2, 4), float(turn + runtime.world.rank))
            first.zero_grad()
            critic(generator(noise)).sum().backward()  # fires the critic's hooks as well
            first.step()
            second.zero_grad()
            (critic(noise) - critic(generator(noise).detach())).sum().backward()
            second.step()
        return weights(generator) + weights(critic)

    one, two = threads(2, step)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(one, two, strict=True))


def test_reentrant_checkpoints() -> None:
    from torch.utils.checkpoint import checkpoint

    def step(runtime: Runtime) -> None:
        model, reference = (torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)) for _ in range(2))
        reference.load_state_dict({name: torch.full_like(value, 0.1) for name, value in model.state_dict().items()})
        model.load_state_dict(reference.state_dict())
        optimizer = wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), runtime=runtime)
        for _ in range(3):
            x = torch.full((2, 3), float(runtime.world.rank + 1))
            optimizer.zero_grad()
            checkpoint(model[1], model[0](x), use_reentrant=True).sum().backward()
            reference.zero_grad()
            for rank in range(2):
                (reference(torch.full((2, 3), float(rank + 1))).sum() / 2).backward()
            for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(ours.grad, theirs.grad)  # final when backward() returns
            optimizer.step()
            with torch.no_grad():
                reference.load_state_dict(model.state_dict())
    threads(2, step)


# docs/protocol.md#final-gradients
def test_infinity_on_one_rank_is_seen_by_all() -> None:
    def step(runtime: Runtime) -> None:
        model = net()
        _kept = wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), runtime=runtime)
        (model(torch.ones(1, 6)).sum() * (float("inf") if runtime.world.rank == 1 else 1.0)).backward()
        assert not torch.isfinite(model[2].bias.grad).any()
    threads(2, step)


@pytest.mark.parametrize(("compression", "tolerance"), [(Compression.fp16, 1e-3), (Compression.bf16, 1e-2)])
def test_compressed_gradients_are_close_and_equal_on_all_ranks(compression: Any, tolerance: float) -> None:
    def step(runtime: Runtime) -> Any:
        model = net()
        _kept = wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), compression=compression, runtime=runtime)
        x, _ = next(batches(1, 2))
        model(share(x, runtime)).square().mean().backward()
        reference = net()
        reference(x).square().mean().backward()
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            assert ours.grad.dtype is torch.float32
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=tolerance * 10, atol=tolerance)
        return model[0].weight.grad
    first, second = threads(2, step)
    assert torch.equal(first, second)


def test_predivide_and_sum() -> None:
    def step(runtime: Runtime) -> None:
        for arguments, factor in (({"gradient_predivide_factor": 4.0}, 1.0), ({"op": ReduceOp.SUM}, 2.0)):
            model = net()
            _kept = wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), **arguments, runtime=runtime)
            model(torch.ones(1, 6)).sum().backward()
            torch.testing.assert_close(model[2].bias.grad, torch.full((3,), factor))
    threads(2, step)


def test_channels_last_and_bfloat16_parameters() -> None:
    def step(runtime: Runtime) -> None:
        for change in (lambda m: m.to(memory_format=torch.channels_last), lambda m: m.to(torch.bfloat16)):
            torch.manual_seed(1)
            model, reference = change(torch.nn.Conv2d(3, 4, 3)), change(torch.nn.Conv2d(3, 4, 3))
            _kept = wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), runtime=runtime)
            x = torch.ones(1, 3, 5, 5, dtype=model.weight.dtype)
            model(x).sum().backward()
            reference(x).sum().backward()
            torch.testing.assert_close(model.weight.grad, reference.weight.grad)
    threads(2, step)


class Words(torch.nn.Module):
    """Two sparse embeddings, one of which only some batches use, and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(11, 3, sparse=True)
        self.rare = torch.nn.Embedding(7, 3, sparse=True)
        self.last = torch.nn.Linear(3, 2)
        with torch.no_grad():
            for index, parameter in enumerate(self.parameters()):
                parameter.copy_(torch.linspace(-1, 1, parameter.numel()).reshape(parameter.shape) * (index + 1))

    def forward(self, words: Any, rare: bool) -> Any:
        found = self.table(words).sum(1)
        return self.last(found + self.rare(words % 7).sum(1) if rare else found)


@pytest.mark.parametrize("compression", [Compression.none, Compression.bf16])
@pytest.mark.parametrize("as_dense", [False, True])
def test_sparse_gradients_equal_one_rank_with_the_whole_batch(as_dense: bool, compression: Any) -> None:
    size, steps = 3, 8
    batches = torch.Generator().manual_seed(2)
    words = [torch.randint(0, 11, (size, 4, 5), generator=batches) for _ in range(steps)]
    rare = [[(step, rank) in ((2, 1), (5, 0), (5, 2)) for rank in range(size)] for step in range(steps)]

    def run(model: Any, optimizer: Any, step: int, ranks: list[int]) -> None:
        optimizer.zero_grad()
        sum((model(words[step][rank], rare[step][rank]).square().mean() for rank in ranks), torch.zeros(())).backward()
        if len(ranks) == size:
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad /= size
        optimizer.step()

    def make(model: Any) -> Any:
        return torch.optim.SGD(model.parameters(), lr=0.01)

    alone = Words()
    optimizer = make(alone)
    for step in range(steps):
        run(alone, optimizer, step, list(range(size)))

    def body(runtime: Runtime) -> list[Any]:
        model = Words()
        wrapped = wrap_optimizer(make(model), model.named_parameters(), compression, sparse_as_dense=as_dense,
                                 runtime=runtime)
        for step in range(steps):
            run(model, wrapped, step, [runtime.world.rank])
            assert as_dense or model.table.weight.grad.is_sparse
        runtime.barrier("all have finished").wait()
        return weights(model)
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if compression is Compression.none else {"rtol": 0.05, "atol": 0.05}
    for found in threads(size, body):
        for mine, theirs in zip(found, weights(alone), strict=True):
            torch.testing.assert_close(mine, theirs, **tolerance)


def test_a_parameter_group_added_later_and_closures() -> None:
    def step(runtime: Runtime) -> Any:
        model, extra = net(), torch.nn.Linear(3, 1)
        torch.nn.init.ones_(extra.weight)
        optimizer = wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), runtime=runtime)
        optimizer.add_param_group({"params": extra.parameters()})

        def closure() -> Any:
            optimizer.zero_grad()
            loss = extra(model(torch.full((1, 6), float(runtime.world.rank)))).sum()
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)
        return extra.weight.detach()
    first, second = threads(2, step)
    assert torch.equal(first, second)


def test_after_a_mismatch_the_optimizer_goes_on() -> None:
    def step(runtime: Runtime) -> None:
        model = torch.nn.Linear(2 + runtime.world.rank, 1)
        optimizer = wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), runtime=runtime)
        for _ in range(2):
            optimizer.zero_grad()
            with pytest.raises(MismatchError, match="gradient"):
                model(torch.ones(1, 2 + runtime.world.rank)).sum().backward()
        torch.testing.assert_close(model.bias.grad, torch.ones(1))
    threads(2, step)


@pytest.mark.parametrize("groups", [1, 3, "explicit"])
def test_groups_are_buckets_of_their_own(groups: Any) -> None:
    def step(runtime: Runtime) -> list[set[str]]:
        model = net()
        names = dict(model.named_parameters())
        given = [[names["0.weight"], names["2.bias"]]] if groups == "explicit" else groups
        optimizer = wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), groups=given,
                                   runtime=runtime)
        for x, y in batches(4, 2):
            train(optimizer, model, share(x, runtime), share(y, runtime))
        learned = runtime.gradients.layout("torch.optimizer.0", 1 << 20)
        runtime.barrier("all have it").wait()
        assert learned is not None
        return [{member.name.removeprefix("gradient.torch.optimizer.0.") for member in bucket.members}
                for bucket in learned.layout.buckets]
    found = threads(2, step)
    assert found[0] == found[1]
    if groups == 1:
        assert found[0] == [{"0.weight", "0.bias", "2.weight", "2.bias"}]
    elif groups == 3:
        assert sorted(map(sorted, found[0])) == [["0.bias", "0.weight"], ["2.bias"], ["2.weight"]]
    else:
        assert {"0.weight", "2.bias"} in found[0]


def test_steps_of_a_single_rank_count() -> None:
    """For comparisons with several."""
    def step(runtime: Any) -> int:
        model = torch.nn.Linear(2, 1)
        optimizer = wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), runtime=runtime)
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        return runtime.progress.steps

    assert threads(1, step) == [3]
