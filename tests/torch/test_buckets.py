"""The optimizer on learned buckets: same bits as without, views that nobody else touches, every way to leave the pattern."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hvdlite.core.errors import MismatchError  # noqa: E402
from hvdlite.memory import futex  # noqa: E402
from hvdlite.planes.base import FusionBuffer, Plane  # noqa: E402
from hvdlite.runtime.runtime import Runtime  # noqa: E402
from hvdlite_torch import Compression  # noqa: E402
from hvdlite_torch.arrays import cuda  # noqa: E402
from hvdlite_torch.optimizer.distributed_optimizer import wrap_optimizer  # noqa: E402
from tests.torch.models import by_bucket, net, reducer_of, settle, train, weights, wrapped  # noqa: E402
from tests.torch.programs import buckets as programs  # noqa: E402
from tests.worlds import HANGS_SECONDS, TORCH, processes, threads  # noqa: E402


def test_gradients_become_views_of_one_buffer_and_stay_the_users() -> None:
    def step(runtime: Runtime) -> None:
        model = net()
        optimizer = wrapped(runtime, model)
        settle(runtime, model, optimizer)
        before = [parameter.grad.data_ptr() for parameter in model.parameters()]
        assert max(before) - min(before) < 4096 and all(address % 64 == 0 for address in before)
        for parameter in model.parameters():  # else torch.save would write the bucket
            assert parameter.grad.untyped_storage().nbytes() == parameter.grad.nbytes
        for to_none in (True, False, True):
            optimizer.zero_grad(set_to_none=to_none)
            torch.nn.functional.mse_loss(model(torch.ones(4, 6)), torch.ones(4, 3)).backward()
            assert [parameter.grad.data_ptr() for parameter in model.parameters()] == before
            optimizer.step()
        assert by_bucket(optimizer)
    threads(2, step)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("kind", programs.KINDS)
def test_the_same_bits_as_without_buckets(kind: str, size: int) -> None:
    with_buckets = threads(size, programs.story, kind, bucket_edge=100)
    without = threads(size, programs.story, kind, bucket_size=0)
    for rank in range(size):
        for ours, theirs, first in zip(with_buckets[rank], without[rank], with_buckets[0], strict=True):
            for mine, other, same in zip(ours, theirs, first, strict=True):
                assert torch.equal(mine, same), "ranks differ"
                if kind == "fp16" and cuda.is_on_gpu(mine):  # there a bucket's gradients are averaged before they are cast
                    torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-4)
                else:
                    assert torch.equal(mine, other), "buckets change the result"


@pytest.mark.slow
@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.long), 3])
def test_the_same_bits_in_shared_memory(size: int) -> None:
    outputs = []
    for bucket_size, edge in (("0", "100"), ("25M", "100"), ("25M", "4M")):  # the last one with mailboxes
        ended = processes(size, programs.the_same_bits_in_shared_memory, timeout=120, imported=TORCH,
                          environment={"HVDLITE_BUCKET_SIZE": bucket_size, "HVDLITE_BUCKET_EDGE": edge})
        outputs += [rank.result for rank in ended]
    assert all(output == outputs[0] for output in outputs) and list(outputs[0]) == programs.KINDS


# docs/protocol.md#mailboxes
@pytest.mark.skipif(not futex.AVAILABLE, reason="needs futexes")
@pytest.mark.parametrize("size", [2, 3])
def test_the_only_bucket_goes_through_a_mailbox(size: int) -> None:
    ended = processes(size, programs.the_only_bucket_goes_through_a_mailbox, imported=TORCH)
    assert len({rank.result for rank in ended}) == 1


def test_nobody_touches_a_gradient_between_backward_and_step() -> None:
    """docs/protocol.md#slots: one rank clips, scales and zeroes while the others sleep before `step()`."""
    processes(3, programs.nobody_touches_a_gradient_between_backward_and_step, imported=TORCH)


def changes_dtype(model: Any, optimizer: Any, rank: int) -> None:
    model.double()


def grows(model: Any, optimizer: Any, rank: int) -> None:
    model.extra = torch.nn.Linear(3, 3)
    torch.nn.init.ones_(model.extra.weight)
    torch.nn.init.zeros_(model.extra.bias)
    optimizer.add_param_group({"params": list(model.extra.parameters())})


@pytest.mark.parametrize("change", [changes_dtype, grows])
def test_a_set_that_changes_everywhere_is_learned_again(change: Callable[..., None]) -> None:
    def step(runtime: Runtime) -> Any:
        model = net()
        optimizer = wrapped(runtime, model)
        settle(runtime, model, optimizer)
        change(model, optimizer, runtime.world.rank)
        dtype = model[0].weight.dtype
        flags = []
        for _ in range(5):
            train(optimizer, model, torch.full((4, 6), runtime.world.rank, dtype=dtype), torch.ones(4, 3, dtype=dtype))
            flags.append(by_bucket(optimizer))
        assert not all(flags) and flags[-1], flags
        return weights(model)
    first, second = threads(2, step)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(first, second, strict=True))


@pytest.mark.parametrize("compression", [Compression.none, Compression.fp16])
@pytest.mark.parametrize("change", ["double", "bfloat16"])
def test_the_dtype_changes_everywhere_while_a_rank_has_no_gradient(change: str, compression: Any) -> None:
    def step(runtime: Runtime) -> None:
        rank = runtime.world.rank
        first, second = (torch.nn.Parameter(torch.ones(5)) for _ in range(2))
        model = torch.nn.ParameterList([first, second])
        optimizer = wrapped(runtime, model, groups=2, compression=compression)
        flags = []
        for turn in range(10):
            if turn == 5:
                getattr(model, change)()
            optimizer.zero_grad()
            lacks = turn in (5, 8) and rank == 1
            sum(((parameter * (rank + 1.0)).sum() for parameter in ([first] if lacks else [first, second])),
                torch.zeros(())).backward()
            for parameter, wanted in ((first, 1.5), (second, 0.5 if turn in (5, 8) else 1.5)):
                assert parameter.grad is not None and parameter.grad.dtype is parameter.dtype
                assert (parameter.grad == wanted).all(), (turn, parameter.grad)
            optimizer.step()
            flags.append(by_bucket(optimizer))
        assert flags[2:5] == [True] * 3 and flags[8:] == [True] * 2, flags
    threads(2, step)


def test_a_member_that_was_sparse_once_leaves_the_others_in_their_buckets() -> None:
    """It goes by itself, also when it is dense or a rank has no gradient for it."""
    def step(runtime: Runtime) -> int:
        torch.manual_seed(runtime.world.rank)
        embedding, model = torch.nn.Embedding(20, 6, sparse=True), net()
        optimizer = wrap_optimizer(torch.optim.SGD([*embedding.parameters(), *model.parameters()], lr=0.05),
                                   runtime=runtime)
        flags = []
        for turn in range(100):
            optimizer.zero_grad()
            lacks = turn % 4 == 0 and (runtime.world.rank == 1 or turn % 8 == 0)
            x = torch.ones(4, 6) if lacks else embedding(torch.randint(0, 20, (4,)))
            model(x).sum().backward()
            if lacks and runtime.world.rank == 0:
                assert embedding.weight.grad is None
            optimizer.step()
            flags.append(by_bucket(optimizer))
        return flags.count(True)
    assert min(threads(2, step)) >= 97


def test_a_change_on_one_rank_is_an_error_everywhere_and_the_job_goes_on() -> None:
    def step(runtime: Runtime) -> Any:
        model = net()
        optimizer = wrapped(runtime, model)
        settle(runtime, model, optimizer)
        if runtime.world.rank == 1:
            model.double()
        kind = model[0].weight.dtype
        with pytest.raises(MismatchError, match=r"dtype of 'gradient\..*rank 0: float32; rank 1: float64"):
            train(optimizer, model, torch.ones(4, 6, dtype=kind), torch.ones(4, 3, dtype=kind))
        model.float()
        optimizer.zero_grad()
        for _ in range(6):
            train(optimizer, model, torch.ones(4, 6), torch.ones(4, 3))
        assert by_bucket(optimizer)
    threads(2, step)


def test_a_parameter_that_one_rank_does_not_have_is_named() -> None:
    named = threading.Event()

    def step(runtime: Runtime) -> Any:
        model = net()
        optimizer = wrapped(runtime, model)
        settle(runtime, model, optimizer)
        if runtime.world.rank == 0:
            grows(model, optimizer, 0)
            with pytest.raises(MismatchError, match=r"rank 0: reduces 'gradient.*rank 1: does not have it"):
                train(optimizer, model, torch.ones(4, 6), torch.ones(4, 3))
            named.set()
        else:
            train(optimizer, model, torch.ones(4, 6), torch.ones(4, 3))
            assert named.wait(HANGS_SECONDS)  # else rank 0 may hear first that this rank has left the job
    threads(2, step)


def test_a_broken_bucket_keeps_what_it_held() -> None:
    """One member changes after others of its bucket were filled: they are reduced by themselves, with the right values."""
    def step(runtime: Runtime) -> None:
        parameters = [torch.nn.Parameter(torch.zeros(10)) for _ in range(3)]
        optimizer = wrap_optimizer(torch.optim.SGD(parameters, lr=0.0), runtime=runtime)
        for turn in range(6):
            optimizer.zero_grad()
            for index, parameter in enumerate(parameters):
                if turn == 3 and index == 1:
                    parameter.data = parameter.data.double()
                parameter.grad = torch.full((10,), float(index + 1 + turn + 2 * runtime.world.rank), dtype=parameter.dtype)
                reducer_of(optimizer).accumulated(parameter)
            reducer_of(optimizer).make_round()
            assert [parameter.grad.unique().tolist() for parameter in parameters] == [[turn + 2], [turn + 3], [turn + 4]]
            optimizer.step()
    threads(2, step)


def test_hooks_from_two_threads() -> None:
    def step(runtime: Runtime) -> None:
        parameters = [torch.nn.Parameter(torch.zeros(64 if index % 2 else 8000)) for index in range(200)]
        optimizer = wrap_optimizer(torch.optim.SGD(parameters, lr=0.0), runtime=runtime)
        for turn in range(20):
            optimizer.zero_grad()
            for index, parameter in enumerate(parameters):
                parameter.grad = torch.full_like(parameter, float(index + turn + 2 * runtime.world.rank))
            hooks = [threading.Thread(target=lambda part: [reducer_of(optimizer).accumulated(each) for each in part],
                                      args=(parameters[half::2],)) for half in range(2)]
            for hook in hooks:
                hook.start()
            for hook in hooks:
                hook.join()
            reducer_of(optimizer).make_round()
            for index, parameter in enumerate(parameters):
                assert (parameter.grad == index + turn + 1).all()
            optimizer.step()
        assert by_bucket(optimizer)
    threads(2, step, bucket_edge=10_000, bucket_size=100_000)


# docs/protocol.md#views
def test_channels_last_gradients_are_views_with_the_parameters_strides() -> None:
    start, x = torch.nn.Conv2d(3, 4, 3).state_dict(), torch.randn(2, 3, 5, 5)

    def step(runtime: Runtime) -> None:
        model = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        reference = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        model.load_state_dict(start)
        reference.load_state_dict(start)
        optimizer = wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), runtime=runtime)
        for _ in range(4):
            optimizer.zero_grad()
            model(x).square().sum().backward()
        reference(x).square().sum().backward()
        assert by_bucket(optimizer) and model.weight.grad.stride() == model.weight.stride()
        torch.testing.assert_close(model.weight.grad, reference.weight.grad)
    threads(2, step)


def test_memory_formats_that_differ_between_ranks_work_all_the_same() -> None:
    start = torch.nn.Conv2d(3, 4, 3).state_dict()

    def step(runtime: Runtime) -> Any:
        model = torch.nn.Conv2d(3, 4, 3)
        model.load_state_dict(start)
        if runtime.world.rank == 1:
            model.to(memory_format=torch.channels_last)
        optimizer = wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), runtime=runtime)
        for turn in range(5):
            optimizer.zero_grad()
            model(torch.full((1, 3, 5, 5), float(turn + runtime.world.rank))).square().sum().backward()
            optimizer.step()
        return model.weight.detach().contiguous()
    first, second = threads(2, step)
    assert torch.equal(first, second)


def test_views_can_be_turned_off() -> None:
    def step(runtime: Runtime) -> None:
        model = net()
        optimizer = wrapped(runtime, model)
        settle(runtime, model, optimizer)
        kept = model[0].weight.grad
        values = kept.clone()
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(torch.zeros(4, 6)), torch.ones(4, 3)).backward()
        assert torch.equal(kept, values) and model[0].weight.grad is not kept
    threads(2, step, gradient_as_bucket_view=False)


def test_gradients_outlive_shutdown() -> None:
    processes(2, programs.gradients_outlive_shutdown, imported=TORCH)


def test_no_memory_on_one_rank_means_no_buckets_on_all(caplog: pytest.LogCaptureFixture) -> None:
    class Poor:
        """A plane without room for fusion buffers."""

        def __init__(self, plane: Plane) -> None:
            self.plane = plane

        def __getattr__(self, name: str) -> Any:
            return getattr(self.plane, name)

        def fusion_buffer(self, nbytes: int, ranks: tuple[int, ...]) -> FusionBuffer:
            raise MemoryError(f"no memory for {nbytes} bytes")

    def step(runtime: Runtime) -> Any:
        model = net()
        optimizer = wrapped(runtime, model)
        for _ in range(6):
            train(optimizer, model, torch.full((4, 6), float(runtime.world.rank)), torch.ones(4, 3))
            assert not by_bucket(optimizer)
        return weights(model)

    first, second = threads(2, step, wrap=lambda rank, plane: Poor(plane) if rank == 1 else plane)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(first, second, strict=True))
    assert "goes on without learned buckets" in caplog.text


def test_optimizers_that_come_and_go_leave_no_memory_behind() -> None:
    processes(2, programs.optimizers_that_come_and_go_leave_no_memory_behind, imported=TORCH,
              environment={"HVDLITE_BUCKET_LAYOUTS": "3"})
    gc.collect()
