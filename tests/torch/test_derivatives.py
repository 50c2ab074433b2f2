"""Derivatives of collectives over two ranks: autograd's own checks of first and second derivatives, torch.func, vmap.

`together` makes one function of what all ranks do: from all ranks' inputs to all ranks' results. `gradcheck` and
`gradgradcheck` compare its derivatives with finite differences. Rank 0's thread drives; the other ranks' threads carry out
what it asks for.
"""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch.autograd import forward_ad

import hvdlite_torch as hvd
from hvdlite import api
from hvdlite.runtime.runtime import Runtime
from hvdlite_torch.collectives import derivatives
from tests.worlds import threads

SIZE = 2
Function = Callable[..., Sequence[Any]]  # of one rank's tensors
first = functools.partial(torch.autograd.gradcheck, fast_mode=True)
second = functools.partial(torch.autograd.gradgradcheck, fast_mode=True)


class Ranks:
    """All ranks of a world, driven by rank 0."""

    def __init__(self) -> None:
        self._jobs: list[queue.Queue[Any]] = [queue.Queue() for _ in range(SIZE)]
        self._results: list[queue.Queue[Any]] = [queue.Queue() for _ in range(SIZE)]

    def serve(self, rank: int) -> None:
        """Carry out jobs until there is none."""
        while (job := self._jobs[rank].get()) is not None:
            try:
                self._results[rank].put((job(rank), None))
            except Exception as error:
                self._results[rank].put((None, error))

    def run(self, job: Callable[[int], Any]) -> list[Any]:
        """Return what `job(rank)` returns on each rank; raise the first rank's error."""
        for jobs in self._jobs[1:]:
            jobs.put(job)
        self._jobs[0].put(job)
        self._jobs[0].put(None)
        self.serve(0)
        answers = [results.get(timeout=30) for results in self._results]
        for _, error in answers:
            if error is not None:
                raise error
        return [answer for answer, _ in answers]

    def stop(self) -> None:
        """Let the other ranks' threads end."""
        for jobs in self._jobs[1:]:
            jobs.put(None)


def together(ranks: Ranks, function: Function) -> Callable[..., tuple[Any, ...]]:
    """Return the function of all ranks' inputs, as many for each rank, whose results are all ranks' results.

    Its gradient is what autograd computes on the ranks, each from its own upstream gradients, and is such a function itself.
    """

    def gradient(count: int, *arguments: Any) -> Sequence[Any]:
        inputs, upstream = arguments[:count], arguments[count:]
        wanted = [each for each in inputs if each.requires_grad]
        return torch.autograd.grad(function(*inputs), wanted, upstream, create_graph=True, materialize_grads=True)

    class Together(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            ctx.save_for_backward(*inputs)

            def job(rank: int) -> list[Any]:
                with torch.enable_grad():
                    own = [each.detach().requires_grad_() for each in _of(rank, inputs)]
                    return [each.detach() for each in function(*own)]
            return tuple(each for results in ranks.run(job) for each in results)

        @staticmethod
        def backward(ctx: Any, *upstream: Any) -> Any:
            inputs = ctx.saved_tensors
            count = len(inputs) // SIZE
            arguments = [each for rank in range(SIZE) for each in (*_of(rank, inputs), *_of(rank, upstream))]
            return together(ranks, functools.partial(gradient, count))(*arguments)
    return Together.apply


def _of(rank: int, values: Sequence[Any]) -> Sequence[Any]:
    count = len(values) // SIZE
    return values[rank * count:(rank + 1) * count]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[Ranks], None]], None]]:
    """Run a function on rank 0 of a world whose other ranks do what it asks for."""
    current = threading.local()
    monkeypatch.setattr(api.worlds(), "current", lambda: current.runtime)

    def run(drive: Callable[[Ranks], None]) -> None:
        ranks = Ranks()

        def step(runtime: Runtime) -> None:
            current.runtime = runtime
            if runtime.world.rank:
                ranks.serve(runtime.world.rank)
                return
            try:
                drive(ranks)
            finally:
                ranks.stop()
        threads(SIZE, step)
    yield run


def inputs(*shapes: Sequence[int], seed: int = 0) -> list[Any]:
    """Return tensors of these shapes for each rank; the first dimension of rank 1's is one longer where it is -1 here."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn([rank + 2 if length == -1 else length for length in shape], dtype=torch.float64, generator=generator)
            .requires_grad_() for rank in range(SIZE) for shape in shapes]


def curved(call: Callable[..., Any]) -> Function:
    """Return a collective between functions that are not linear, so that second derivatives are not zero."""
    def function(*tensors: Any) -> Sequence[Any]:
        results = call(*(tensor.sin() + tensor * tensor for tensor in tensors))
        return [result * result for result in listed(results)]
    return function


def listed(results: Any) -> Sequence[Any]:
    """Return the results of one call as a list."""
    return [results] if isinstance(results, torch.Tensor) else list(results)


COLLECTIVES: dict[str, tuple[Callable[..., Any], list[Any]]] = {
    "allreduce, Sum": (lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.7), [(2, 2)]),
    "allreduce, Average": (hvd.allreduce, [(3,)]),
    "allreduce, Max": (lambda x: hvd.allreduce(x, op=hvd.Max), [(3,)]),
    "allreduce, Min, scaled": (lambda x: hvd.allreduce(x, op=hvd.Min, prescale_factor=-2.0, postscale_factor=3.0), [(3,)]),
    "allreduce, Product": (lambda x: hvd.allreduce(x, op=hvd.Product, prescale_factor=2.0, postscale_factor=0.3), [(3,)]),
    "grouped_allreduce": (lambda *xs: hvd.grouped_allreduce(xs, op=hvd.Sum), [(2,), (1, 2)]),
    "grouped_allreduce, Max": (lambda *xs: hvd.grouped_allreduce(xs, op=hvd.Max), [(2,), (1, 2)]),
    "allreduce_": (lambda x: hvd.allreduce_(x * 1, op=hvd.Sum), [(2,)]),
    "grouped_allreduce_": (lambda *xs: hvd.grouped_allreduce_([x * 1 for x in xs]), [(2,), (1, 2)]),
    "allgather": (lambda x: hvd.allgather(x, horovod_gradient=False), [(-1, 2)]),
    "grouped_allgather": (lambda *xs: hvd.grouped_allgather(xs, horovod_gradient=False), [(-1, 2), (1,)]),
    "broadcast": (lambda x: hvd.broadcast(x, 1, horovod_gradient=False), [(3,)]),
    "broadcast_": (lambda x: hvd.broadcast_(x * 1, 1), [(3,)]),
    "reducescatter, Sum": (lambda x: hvd.reducescatter(x, op=hvd.Sum, horovod_gradient=False, postscale_factor=0.7),
                           [(3, 2)]),
    "reducescatter, Average": (lambda x: hvd.reducescatter(x, horovod_gradient=False), [(2,)]),
    "grouped_reducescatter": (lambda *xs: hvd.grouped_reducescatter(xs, horovod_gradient=False), [(3, 2), (2,)]),
    "alltoall": (hvd.alltoall, [(2, 2)]),
    "alltoall, splits": (lambda x: hvd.alltoall(x, splits=[1, 2])[0], [(4,)]),  # one row stays
}
ONE_TENSOR = {name: call for name, (call, shapes) in COLLECTIVES.items() if len(shapes) == 1 and not name.endswith("_")}
OF_HOROVOD: dict[str, tuple[Callable[..., Any], list[Any]]] = {
    "allgather": (hvd.allgather, [(-1, 2)]),
    "grouped_allgather": (lambda *xs: hvd.grouped_allgather(xs), [(-1, 2), (1,)]),
    "broadcast": (lambda x: hvd.broadcast(x, 1), [(3,)]),
    "reducescatter": (lambda x: hvd.reducescatter(x, op=hvd.Sum), [(3, 2)]),
    "grouped_reducescatter": (lambda *xs: hvd.grouped_reducescatter(xs), [(3, 2), (2,)]),
}


def test_first_and_second_derivatives_of_every_collective(world: Any) -> None:
    def drive(ranks: Ranks) -> None:
        for name, (call, shapes) in COLLECTIVES.items():
            function, given = together(ranks, curved(call)), inputs(*shapes)
            assert first(function, given), name
            assert second(function, given), name
        for name, (call, shapes) in OF_HOROVOD.items():
            given = inputs(*shapes)
            linear = together(ranks, lambda *xs, call=call: listed(call(*(x.sin() for x in xs))))
            assert second(linear, given), f"{name}: the derivative of Horovod's gradient"
    world(drive)


def test_derivatives_of_synchronised_batch_norm(world: Any) -> None:
    def drive(ranks: Ranks) -> None:
        layers = [hvd.SyncBatchNorm(2, **options).double() for options in ({"affine": False}, {})
                  for _ in range(SIZE)]

        def normalized(first: int, x: Any, *parameters: Any) -> Sequence[Any]:
            layer = layers[first + api.rank()]
            names = dict(zip(("weight", "bias"), parameters, strict=False))
            return [torch.func.functional_call(layer, names, (x,)).sin()]
        for shape in ((-1, 2), (-1, 2, 2), (1, 2, 2, 1)):
            assert first(together(ranks, functools.partial(normalized, 0)), inputs(shape))
            given = inputs(shape, (2,), (2,))
            for check in (first, second):
                assert check(together(ranks, functools.partial(normalized, SIZE)), given)
    world(drive)


def on_all_ranks(monkeypatch: pytest.MonkeyPatch, step: Callable[[], None]) -> None:
    """Run a script on ranks that are threads."""
    current = threading.local()
    monkeypatch.setattr(api.worlds(), "current", lambda: current.runtime)

    def run(runtime: Runtime) -> None:
        current.runtime = runtime
        step()
    threads(SIZE, run)


def test_transforms_of_torch_func(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward mode is in test_ops: its levels are the process's, and ranks are threads here."""
    def step() -> None:
        own = torch.tensor([[1.0, 2.0], [3.0, 5.0]], dtype=torch.float64)[api.rank()]
        both = torch.tensor([4.0, 7.0], dtype=torch.float64)  # the sum
        sums = functools.partial(hvd.allreduce, op=hvd.Sum)
        equal = torch.testing.assert_close
        equal(torch.func.grad(lambda x: sums(x * x).square().sum())(own), SIZE * 4 * own * (own * own + (both - own) ** 2))
        _, backward = torch.func.vjp(hvd.allgather, own)
        equal(backward(torch.arange(4, dtype=torch.float64))[0], torch.arange(4.0, dtype=torch.float64)[2 * api.rank():][:2])
        equal(torch.func.jacrev(lambda x: sums(x * x))(own), SIZE * 2 * own.diag())
        layer = hvd.SyncBatchNorm(2, track_running_stats=False).double()
        got = torch.func.grad(
            lambda weight: (torch.func.functional_call(layer, {"weight": weight}, (own[None],)) ** 3).sum())
        values = torch.tensor([[1.0, 2.0], [3.0, 5.0]], dtype=torch.float64)
        normal = ((values - both / 2) / (values.var(0, correction=0) + layer.eps).sqrt())[api.rank()]
        equal(got(torch.full((2,), 2.0, dtype=torch.float64)), 3 * (2 * normal) ** 2 * normal)
    on_all_ranks(monkeypatch, step)


def test_under_vmap_one_collective_carries_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    def step() -> None:
        rank = api.rank()
        for name, call in ONE_TENSOR.items():
            for dim in range(3):
                rows = 4 if "alltoall" in name else 3 if "reduce" in name else 2 + rank if "gather" in name else 3
                given = torch.randn(rows, 2, dtype=torch.float64).unsqueeze(dim).repeat_interleave(3, dim) + rank
                given.select(dim, 1).add_(1)
                expected = [call(each) for each in given.unbind(dim)]
                got = torch.vmap(call, in_dims=dim)(given)
                torch.testing.assert_close(got, torch.stack(expected), msg=name)
        one, two = torch.vmap(lambda x: tuple(hvd.grouped_allreduce([x, torch.full((2,), rank)], op=hvd.Sum)),
                              out_dims=(0, None))(torch.ones(3, 2))
        assert one.tolist() == [[2, 2]] * 3 and two.tolist() == [1, 1]
        received, counts = torch.vmap(lambda x: hvd.alltoall(x, splits=[1, 1]), out_dims=(0, None))(torch.full((3, 2), rank))
        assert received.tolist() == [[0, 1]] * 3 and counts.tolist() == [1, 1]
        with pytest.raises(hvd.UnsupportedError, match="under vmap this tensor is a scalar"):
            torch.vmap(hvd.allgather)(torch.ones(3))
        with pytest.raises(hvd.UnsupportedError, match="cannot run under vmap"):
            torch.vmap(lambda x: hvd.allreduce(x, op=hvd.Adasum))(torch.ones(3, 2))
        per_sample = torch.vmap(torch.func.grad(lambda x: hvd.allreduce(x * x, op=hvd.Sum).sum()))(torch.ones(3, 2) + rank)
        assert per_sample.tolist() == [[SIZE * 2 * (1 + rank)] * 2] * 3
    on_all_ranks(monkeypatch, step)


def test_collectives_in_place_are_seen_by_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    def step() -> None:
        for call in (lambda x: hvd.allreduce_(x, op=hvd.Sum), lambda x: hvd.grouped_allreduce_([x])[0],
                     lambda x: hvd.broadcast_(x, 1)):
            weight = torch.ones(3, requires_grad=True)
            saved = (weight * 2).exp()  # exp saves its result
            call(saved.detach())
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                saved.sum().backward()
            for each in (torch.ones(2, 3), torch.ones(3, 2).t()):
                before = each._version
                assert call(each) is each and each._version > before
            leaf = torch.nn.Parameter(torch.full((2,), float(api.rank())))
            assert call(leaf) is leaf and leaf.grad_fn is None
            assert leaf.tolist() == [1, 1] or call(leaf).tolist() == [0.5, 0.5]
        with torch.inference_mode():
            assert hvd.allreduce_(torch.ones(2), op=hvd.Sum).tolist() == [2, 2]
        own = torch.ones(2, requires_grad=True)
        computed = own * 3
        handle = hvd.allreduce_async_(computed, op=hvd.Sum)
        assert hvd.synchronize(handle) is computed
        (computed * (1 + api.rank())).sum().backward()
        assert own.grad.tolist() == [9, 9], "3 times the sum of both ranks' upstream gradients"
        with pytest.raises(hvd.UnsupportedError, match="in place with op=Max has no gradient"):
            hvd.allreduce_(own * 1, op=hvd.Max).sum().backward()
        with pytest.raises(hvd.UnsupportedError, match="Adasum has no gradient"):
            hvd.allreduce(own, op=hvd.Adasum).sum().backward()
        _views_and_transforms_in_place()
    on_all_ranks(monkeypatch, step)


def _views_and_transforms_in_place() -> None:
    """Views of leaves are overwritten like leaves; what torch would refuse afterwards is refused before the exchange."""
    rank = api.rank()
    for view in (lambda p: p.view(-1), lambda p: p[0], lambda p: p.unbind()[0], lambda p: p.split(1)[0].view(-1)):
        parameter = torch.nn.Parameter(torch.full((2, 3), float(rank)))
        given = view(parameter)
        assert hvd.broadcast_(given, 1) is given and given.eq(1).all()
        assert hvd.allreduce_(view(parameter), op=hvd.Sum).eq(2).all() and parameter.grad_fn is None
        parameter.square().sum().backward()
        assert torch.equal(parameter.grad, 2 * parameter)
    own = torch.ones(4, requires_grad=True)
    half = (own * (1 + rank)).split(2)[0]
    with pytest.raises(hvd.UnsupportedError, match=r"torch refuses to overwrite this view .* use hvd.allreduce"):
        hvd.allreduce_(half)
    assert half.tolist() == [1 + rank] * 2, "refused before the exchange"
    computed = own * 1
    hvd.allreduce_(computed[:2], op=hvd.Sum)
    (computed * (1 + rank)).sum().backward()
    assert own.grad.tolist() == [3, 3, 1 + rank, 1 + rank]
    with pytest.raises(hvd.UnsupportedError, match=r"in place .* transforms of torch.func; use hvd.broadcast"):
        torch.func.grad(lambda x: hvd.broadcast_(x * 1, 0).sum())(torch.ones(2))


def test_collectives_in_place_refuse_forward_mode() -> None:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones(2), torch.ones(2))
        with pytest.raises(hvd.UnsupportedError, match=r"'x': .* no derivative in forward mode.* use hvd.allreduce"):
            derivatives.apply_in_place(derivatives.AllreduceCall("x", hvd.global_process_set, hvd.Sum), [dual])
