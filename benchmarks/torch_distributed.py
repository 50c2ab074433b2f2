"""torch.distributed with the backend "hvdlite" and with Gloo: process groups of one job, which do the same work in turn.

    gradients       DDP's part of a step with the 161 gradients of a ResNet-50 (102 MB), all of which exist when it begins;
                    its communication is what it takes longer than with a hook that communicates nothing
    training        steps of an MLP under DDP, and of a transformer with 25 million parameters under FSDP2
    collectives     all_reduce, broadcast, all_gather_into_tensor and reduce_scatter_tensor of float32, and barrier; the size
                    is that of the larger buffer. "blocking" is one call after the other, also with MPI on the same memory;
                    "4 at once" starts four and then waits for each
    ping-pong       a message to a neighbour and back

Steps are medians of rounds; collectives and messages are medians of single calls.

DDP's parameters after some steps are compared with those of Gloo, and those of all ranks with each other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks import training
from benchmarks.gradients import resnet50_shapes
from benchmarks.harness import Bench, median, say
from examples.char_gpt import CharGPT, loss_of

BACKEND = "hvdlite"
SIZES = [4, 64, 1 << 10, 4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]
SHORT = [4, 4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20]
MESSAGES = [4, 64 << 10, 1 << 20, 16 << 20]
TRANSFORMER = {"width": 512, "heads": 8, "layers": 8, "context": 64}
SEQUENCES = 2
"""Sequences of a rank in a step of the transformer."""
BATCH = 64
"""Images of a rank in a step of the MLP."""
AT_ONCE = 4

WHOLE = ("all_reduce", "broadcast", "barrier")
ALL_GATHER, REDUCE_SCATTER = "all_gather_into_tensor", "reduce_scatter_tensor"
all_gather, reduce_scatter = (getattr(dist, new, None) or getattr(dist, old) for new, old in (
    ("all_gather_single", ALL_GATHER), ("reduce_scatter_single", REDUCE_SCATTER)))  # renamed in torch 2.13

Groups = dict[str, Any]  # process groups of all ranks, by contender; MPI's communicator
Work = Callable[[], object]


class Collective:
    """One of the collectives on tensors of its own.

    Args:
        nbytes: of the larger buffer; at least an element for each rank.
    """

    def __init__(self, name: str, nbytes: int, group: Any) -> None:
        size = dist.get_world_size()
        self.name, self.group = name, group
        self.whole = torch.zeros(nbytes // 4 if name in WHOLE else max(1, nbytes // 4 // size) * size)
        self.part = torch.zeros(len(self.whole) // size)

    def __call__(self, async_op: bool = False) -> Any:
        if self.name == "all_reduce":
            return dist.all_reduce(self.whole, group=self.group, async_op=async_op)
        if self.name == "broadcast":
            return dist.broadcast(self.whole, 0, group=self.group, async_op=async_op)
        if self.name == "barrier":
            return dist.barrier(self.group, async_op=async_op)
        if self.name == ALL_GATHER:
            return all_gather(self.whole, self.part, group=self.group, async_op=async_op)
        return reduce_scatter(self.part, self.whole, group=self.group, async_op=async_op)


class MpiCollective(Collective):
    """The same by MPI, on NumPy's views of the tensors."""

    def __init__(self, name: str, nbytes: int, communicator: Any) -> None:
        super().__init__(name, nbytes, communicator)
        from mpi4py import MPI
        whole, part = self.whole.numpy(), self.part.numpy()
        self.run = {"all_reduce": lambda: communicator.Allreduce(MPI.IN_PLACE, whole),
                    "broadcast": lambda: communicator.Bcast(whole, 0), "barrier": communicator.Barrier,
                    ALL_GATHER: lambda: communicator.Allgather(part, whole),
                    REDUCE_SCATTER: lambda: communicator.Reduce_scatter_block(whole, part)}[name]

    def __call__(self, async_op: bool = False) -> Any:
        self.run()


def at_once(calls: list[Collective]) -> None:
    """Start all of them, and then wait for each."""
    for work in [call(async_op=True) for call in calls]:
        work.wait()


def collectives(groups: Groups, sizes: list[int], mpi: Any) -> Iterator[tuple[dict[str, Any], dict[str, Work]]]:
    """Yield what is measured, and who competes."""
    for name in ("all_reduce", "broadcast", ALL_GATHER, REDUCE_SCATTER, "barrier"):
        for nbytes in sizes if name != "barrier" else [4]:
            several = {who: [Collective(name, nbytes, group) for _ in range(AT_ONCE)] for who, group in groups.items()}
            blocking: dict[str, Work] = {who: calls[0] for who, calls in several.items()}
            if mpi is not None:
                blocking["mpi"] = MpiCollective(name, nbytes, mpi)
            yield {"part": f"{name}, blocking", "bytes": nbytes}, blocking
            if name in (ALL_GATHER, REDUCE_SCATTER, "all_reduce"):
                yield ({"part": f"{name}, {AT_ONCE} at once", "bytes": nbytes},
                       {who: functools.partial(at_once, calls) for who, calls in several.items()})


def ping_pong(groups: Groups, sizes: list[int]) -> Iterator[tuple[dict[str, Any], dict[str, Work]]]:
    """Yield messages between neighbours, all pairs at the same time."""
    rank = dist.get_rank()
    for nbytes in sizes:
        def there_and_back(group: Any, message: torch.Tensor) -> None:
            for sender in (0, 1):
                if rank % 2 == sender:
                    dist.send(message, rank ^ 1, group)
                else:
                    dist.recv(message, rank ^ 1, group)
        yield ({"part": "ping-pong", "bytes": nbytes},
               {who: functools.partial(there_and_back, group, torch.zeros(nbytes, dtype=torch.uint8))
                for who, group in groups.items()})


class Given(torch.autograd.Function):
    """A loss whose gradients are there already: what is left of a step is DDP's part of it."""

    @staticmethod
    def forward(ctx: Any, gradients: list[torch.Tensor], *parameters: torch.Tensor) -> torch.Tensor:
        ctx.gradients = gradients
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        return None, *(gradient.detach() for gradient in ctx.gradients)  # new tensors, which autograd need not copy


class GivenGradients(torch.nn.Module):
    """A model of these parameters, and nothing to compute."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.zeros(shape) for shape in shapes)
        self.gradients = [torch.ones(shape) for shape in shapes]

    def forward(self) -> torch.Tensor:
        return Given.apply(self.gradients, *self.weights)


def no_communication(state, bucket):  # without annotations: DDP compares them with types, and here they are strings
    """Return this rank's gradients: a communication hook of DDP."""
    done = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def gradients(groups: Groups) -> dict[str, Work]:
    """Return DDP's steps over the gradients of a ResNet-50."""
    def step(group: Any, hook: Any = None) -> Work:
        model = DistributedDataParallel(GivenGradients(resnet50_shapes()), process_group=group, gradient_as_bucket_view=True)
        if hook is not None:
            model.register_comm_hook(None, hook)

        def run() -> None:
            model.zero_grad()
            model().backward()
        return run
    steps = {who: step(group) for who, group in groups.items()}
    return {**steps, "no communication": step(groups["gloo"], no_communication)}


def communication_of(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row of what is left when DDP's own copying is taken off."""
    seconds = row["seconds"]
    found = {who: seconds[who] - seconds["no communication"] for who in ("hvdlite", "gloo")}
    say(f"  communication of these: x{found['hvdlite'] / found['gloo']:.2f}")
    return {"part": "the same, communication only", "seconds": found}


def mlp_under_ddp(group: Any) -> tuple[torch.nn.Module, Work]:
    """Return an MLP, and a function that trains it on images that differ from rank to rank; without a group, alone."""
    torch.manual_seed(0)
    model = training.mlp()
    if group is not None:
        model = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    images = torch.rand(16 * BATCH, 1, 28, 28, generator=generator)
    labels = torch.randint(10, (len(images),), generator=generator)
    return model, training.trainer(model, torch.optim.SGD(model.parameters(), lr=0.01), images, labels, BATCH)


def transformer_under_fsdp(group: Any) -> Work:
    """Return a function that trains a sharded transformer for one step."""
    torch.manual_seed(0)
    model = CharGPT(128, **TRANSFORMER)
    mesh = DeviceMesh.from_group(group, "cpu")
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    tokens = torch.randint(128, (SEQUENCES, TRANSFORMER["context"]))

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model, tokens, tokens).backward()
        optimizer.step()
    return step


def compare_parameters(groups: Groups) -> dict[str, Any]:
    """Train the MLP with each backend; return how far the parameters are apart.

    Raises:
        SystemExit: when they differ from Gloo's by more than 1e-6, or between ranks at all.
    """
    found = {}
    for who, group in groups.items():
        model, train = mlp_under_ddp(group)
        train()
        found[who] = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    apart = max(float((found[who] - found["gloo"]).abs().max()) for who in groups)
    of_all = [torch.empty_like(found[BACKEND]) for _ in range(dist.get_world_size())]
    dist.all_gather(of_all, found[BACKEND])
    alike = all(torch.equal(each, of_all[0]) for each in of_all)
    if apart > 1e-6 or not alike:
        raise SystemExit(f"parameters after {training.STEPS} steps: {apart:g} from Gloo's, on all ranks alike: {alike}")
    return {"part": "parameters", "steps": training.STEPS, "from_gloo": apart}


def measured(bench: Bench, row: dict[str, Any], contenders: dict[str, Work], calls: int = 1) -> dict[str, Any]:
    """Return a row with the seconds of each contender: the median of its calls, or of its steps by rounds.

    Not the average of a round for calls: a few of Gloo's small ones take milliseconds, which would multiply its figures.
    """
    rounds = bench.interleave(contenders, warmup=2)
    seconds = {who: median(values) / calls for who, values in (bench.calls if "bytes" in row else rounds).items()}
    what = f"{row['bytes']:>9} B" if "bytes" in row else ""
    say(f"{row['part']:34} {what:>12}" + "".join(f"  {who} {value * 1e6:10.1f} us" for who, value in seconds.items())
        + "".join(f"   x{who} {seconds['hvdlite'] / seconds[who]:.2f}" for who in seconds if who != "hvdlite"))
    return {**row, "seconds": seconds}


def steps(bench: Bench, groups: Groups) -> list[dict[str, Any]]:
    """Return the rows of training."""
    rows = [measured(bench, {"part": "DDP, gradients of a ResNet-50"}, gradients(groups))]
    rows.append(communication_of(rows[-1]))
    trainers = {who: mlp_under_ddp(group)[1] for who, group in {**groups, "alone": None}.items()}
    rows.append(measured(bench, {"part": "DDP, step of an MLP"}, trainers, training.STEPS))
    rows.append(measured(bench, {"part": "FSDP2, step of a transformer"},
                         {who: transformer_under_fsdp(group) for who, group in groups.items()}))
    return rows


def main() -> None:
    bench = Bench.start(__doc__, blocking="only blocking collectives")
    groups: Groups = {"hvdlite": dist.new_group(backend=BACKEND), "gloo": dist.new_group(backend="gloo")}
    only_blocking = bench.arguments.blocking
    rows = [compare_parameters(groups)]
    say(f"parameters after {training.STEPS} steps: {rows[0]['from_gloo']:g} from Gloo's, on all ranks alike")
    rows += [] if only_blocking else steps(bench, groups)
    for row, contenders in collectives(groups, SHORT if bench.arguments.short else SIZES, bench.mpi):
        if "blocking" in row["part"] or not only_blocking:
            rows.append(measured(bench, row, contenders))
    for row, contenders in ping_pong(groups, [] if only_blocking else MESSAGES):
        rows.append(measured(bench, row, contenders))
    bench.finish(rows)


if __name__ == "__main__":
    main()
