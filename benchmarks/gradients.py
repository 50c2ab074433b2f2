"""The 161 gradients of a ResNet-50 (102 MB of float32), averaged: through the optimizer's buckets, and grouped.

    buckets, views     gradients lie in their buckets already (zero_grad(set_to_none=False)); the peer is Gloo on flat
                       25 MB buckets of which gradients are views, as DDP with gradient_as_bucket_view
    buckets, copied    gradients are private tensors, copied into buckets first; the peer copies too
    grouped, private   grouped_allreduce_ of private tensors; the peer copies into flat buckets and back
    each, private      allreduce_async_ of each private tensor; the peer copies nothing, or copies in and out
    flat               the same bytes as one private tensor
    mlp, copied        the gradients of training.py's MLP (23 MB) as in "buckets, copied"; "bare" is the least that memory
                       allows: the same copies, ideal barriers, and each rank averages its part of all ranks' memory
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist

import hvdlite_torch as hvd
from benchmarks import training
from benchmarks.harness import Bench, median, say, shared_memory

BUCKET = 25 << 20
PIECE = 1 << 15
"""Elements."""


def resnet50_shapes() -> list[tuple[int, ...]]:
    """Return the parameter shapes of a ResNet-50 (He et al. 2015, table 1), input side first."""
    shapes: list[tuple[int, ...]] = [(64, 3, 7, 7), (64,), (64,)]
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            for shape in ((width, inputs, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)):
                shapes += [shape, (shape[0],), (shape[0],)]
            if block == 0:
                shapes += [(4 * width, inputs, 1, 1), (4 * width,), (4 * width,)]
            inputs = 4 * width
    return [*shapes, (1000, 2048), (1000,)]


class Ours:
    """A real `DistributedOptimizer`, whose hooks are called as autograd would."""

    def __init__(self, shapes: Iterable[tuple[int, ...]]) -> None:
        self.parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
        self.optimizer = hvd.DistributedOptimizer(torch.optim.SGD(self.parameters, lr=0.1))
        self.private = [torch.zeros(parameter.shape) for parameter in self.parameters]

    def step(self, copied: bool) -> None:
        reducer = self.optimizer._hooks.reducer
        for parameter, gradient in zip(reversed(self.parameters), reversed(self.private), strict=True):
            if copied or parameter.grad is None:
                parameter.grad = gradient
            reducer.accumulated(parameter)
        reducer.end_pass()
        reducer.wait()
        self.optimizer._hooks.before_step.stepped()


class GlooBuckets:
    """Flat buckets over Gloo, as DDP's."""

    def __init__(self, shapes: Iterable[tuple[int, ...]]) -> None:
        self.private = [torch.zeros(shape) for shape in shapes]
        self.buckets: list[tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]] = []
        members: list[torch.Tensor] = []
        for gradient in reversed(self.private):
            members.append(gradient)
            limit = BUCKET if self.buckets else 1 << 20
            if sum(member.nbytes for member in members) >= limit:
                self._close(members)
                members = []
        if members:
            self._close(members)

    def _close(self, members: list[torch.Tensor]) -> None:
        flat = torch.zeros(sum(member.numel() for member in members))
        views = [part.view(member.shape) for part, member in
                 zip(flat.split([member.numel() for member in members]), members, strict=True)]
        self.buckets.append((flat, members, views))

    def step(self, copy_in: bool, copy_out: bool) -> None:
        works = []
        for flat, members, views in self.buckets:
            if copy_in:
                for member, view in zip(members, views, strict=True):
                    view.copy_(member)
            flat.div_(hvd.size())
            works.append(dist.all_reduce(flat, async_op=True))
        for work, (_, members, views) in zip(works, self.buckets, strict=True):
            work.wait()
            if copy_out:
                for member, view in zip(members, views, strict=True):
                    member.copy_(view)


class Bare:
    """Copies, and averages of parts, in memory that the ranks of one host share."""

    def __init__(self, bench: Bench, private: Sequence[torch.Tensor]) -> None:
        self._private, self._meet = private, bench.ideal_barrier.meet
        count, rank, size = sum(map(torch.numel, private)), hvd.rank(), hvd.size()
        memory, path = shared_memory("bare", 4 * count * size)
        self._meet()
        if rank == 0:
            path.unlink()
        buckets = torch.frombuffer(memory, dtype=torch.float32).view(size, count)
        self._places = [place.view(tensor.shape) for place, tensor in
                        zip(buckets[rank].split([tensor.numel() for tensor in private]), private, strict=True)]
        # Pieces stay in a core's cache between their sum and its copies.
        self._pieces = list(zip(*(bucket.chunk(size)[rank].split(PIECE) for bucket in buckets), strict=True))

    def step(self) -> None:
        for place, gradient in zip(self._places, self._private, strict=True):
            place.copy_(gradient)
        self._meet()
        for first, *others in self._pieces:
            for other in others:
                first.add_(other)
            first.div_(hvd.size())
            for other in others:
                other.copy_(first)
        self._meet()


def each(tensors: Iterable[torch.Tensor]) -> None:
    """Average each tensor by a call of its own, as a script without an optimizer does."""
    for handle in [hvd.allreduce_async_(tensor, name=f"each.{index}") for index, tensor in enumerate(tensors)]:
        hvd.synchronize(handle)


def cases(bench: Bench) -> dict[str, dict[str, Callable[[], object]]]:
    """Return what competes in each case."""
    shapes = resnet50_shapes()
    ours, peer = Ours(shapes), GlooBuckets(shapes)
    private, flat, other = [torch.zeros(shape) for shape in shapes], *(torch.zeros(25_557_032) for _ in range(2))
    found: dict[str, dict[str, Callable[[], object]]] = {
        "buckets, views": {"hvdlite": lambda: ours.step(False), "gloo": lambda: peer.step(False, False)},
        "buckets, copied": {"hvdlite": lambda: ours.step(True), "gloo": lambda: peer.step(True, False)},
        "grouped, private": {"hvdlite": lambda: hvd.grouped_allreduce_(private, name="g"),
                             "gloo": lambda: peer.step(True, True)},
        "each, private": {"hvdlite": lambda: each(private), "gloo": lambda: peer.step(False, False),
                          "gloo, copied": lambda: peer.step(True, True)},
        "flat": {"hvdlite": lambda: hvd.allreduce_(flat, name="flat"), "gloo": lambda: dist.all_reduce(other)},
    }
    if hvd.size() > 1:
        mlp = Ours([tuple(parameter.shape) for parameter in training.mlp().parameters()])
        found["mlp, copied"] = {"hvdlite": lambda: mlp.step(True), "bare": Bare(bench, mlp.private).step}
    if bench.mpi is not None:
        from mpi4py import MPI
        array = torch.zeros(25_557_032).numpy()
        for contenders in found.values():
            contenders["mpi, flat"] = lambda: bench.mpi.Allreduce(MPI.IN_PLACE, array)
    if bench.horovod is not None:
        gradients = [torch.zeros(shape) for shape in shapes]
        for contenders in found.values():
            contenders["horovod, grouped"] = lambda: bench.horovod.grouped_allreduce_(gradients, name="g")
    return found


def main() -> None:
    bench = Bench.start(__doc__)
    rows = []
    for case, contenders in cases(bench).items():
        seconds = {name: median(values) for name, values in bench.interleave(contenders, warmup=4).items()}
        rows.append({"case": case, "seconds": seconds})
        say(f"{case:18}" + "  ".join(f"{name} {value * 1e3:7.2f} ms" for name, value in seconds.items())
            + "".join(f"   x{name} {seconds['hvdlite'] / seconds[name]:.2f}" for name in seconds if name != "hvdlite"))
    bench.finish(rows)


if __name__ == "__main__":
    main()
