"""Measure images/s of training ResNet-50 on synthetic images: the data cost nothing, so it is the rest that is measured.

    hvdrun -np 2 python examples/pytorch_synthetic_benchmark.py
    hvdrun --scaling 1,2,4 examples/pytorch_synthetic_benchmark.py --batch-size 8
    hvdrun --sweep batch-size=4,8,16 -np 2 examples/pytorch_synthetic_benchmark.py

Options have the names of Horovod's script. The models are torchvision's, if it is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import time

import resnet
import torch
from torch.nn import functional

import hvdlite_torch as hvd

OURS = {"resnet50": resnet.resnet50, "resnet14": resnet.resnet14}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet50", help="resnet50, resnet14, or the name of a model of torchvision")
    parser.add_argument("--batch-size", type=int, default=32, help="per rank (default: 32)")
    parser.add_argument("--image-size", type=int, default=224, help="height and width (default: 224)")
    parser.add_argument("--num-warmup-batches", type=int, default=10, help="not measured (default: 10)")
    parser.add_argument("--num-batches-per-iter", type=int, default=10, help="batches of a round (default: 10)")
    parser.add_argument("--num-iters", type=int, default=10, help="rounds (default: 10)")
    parser.add_argument("--compression", choices=["none", "fp16", "bf16"], default="none", help="of gradients")
    parser.add_argument("--fp16-allreduce", dest="compression", action="store_const", const="fp16",
                        help="the same as --compression fp16")
    parser.add_argument("--use-adasum", action="store_true", help="combine the ranks' steps by Adasum")
    parser.add_argument("--no-cuda", action="store_true", help="leave GPUs alone")
    args = parser.parse_args()
    if args.num_iters < 1 or args.num_batches_per_iter < 1 or args.batch_size < 1:
        parser.error("--num-iters, --num-batches-per-iter and --batch-size must be at least 1")
    return args


def built(name: str) -> torch.nn.Module:
    """Return torchvision's model of this name, or ours.

    Raises:
        SystemExit: there is no such model.
    """
    if name not in OURS and importlib.util.find_spec("torchvision") is None:
        raise SystemExit(f"--model {name}: without torchvision there are only {' and '.join(OURS)}; pip install torchvision")
    if importlib.util.find_spec("torchvision") is not None:
        from torchvision import models
        if name in models.list_models():
            return models.get_model(name)
    if name not in OURS:
        raise SystemExit(f"--model {name}: torchvision has no such model")
    return OURS[name]()


def interval(values: list[float]) -> str:
    """Return the mean, and the distance from it within which 95 % of normally distributed values lie."""
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.1f} +-{1.96 * spread:.1f}"


def main() -> None:
    args = arguments()
    hvd.init()
    cuda = not args.no_cuda and torch.cuda.device_count() >= hvd.local_size()
    device = torch.device("cuda", hvd.local_rank()) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = True

    torch.manual_seed(42 + hvd.rank())
    model = built(args.model).to(device)
    # With Average the learning rate grows with the batch of all ranks; Adasum finds the length of its step itself.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * (1 if args.use_adasum else hvd.size()))
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(),
                                         compression=getattr(hvd.Compression, args.compression),
                                         op=hvd.Adasum if args.use_adasum else hvd.Average)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    images = torch.randn(args.batch_size, 3, args.image_size, args.image_size, device=device)
    labels = torch.randint(1000, (args.batch_size,), device=device)

    def train(batches: int) -> float:
        """Train, and return this rank's images/s."""
        started = time.perf_counter()
        for _ in range(batches):
            optimizer.zero_grad()
            functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            hvd.record_step(args.batch_size)  # for hvdrun --monitor, --scaling and --sweep
        if cuda:
            torch.cuda.synchronize()
        return batches * args.batch_size / (time.perf_counter() - started)

    if hvd.rank() == 0:
        print(f"{args.model}, batch size {args.batch_size} per rank, {hvd.size()} ranks, on {device.type}", flush=True)
    train(args.num_warmup_batches)
    rounds: list[list[float]] = []  # one list per round, with each rank's images/s
    for number in range(1, args.num_iters + 1):
        rounds.append(hvd.allgather_object(train(args.num_batches_per_iter)))
        if hvd.rank() == 0:
            print(f"round {number}: {sum(rounds[-1]):.1f} images/s", flush=True)
    if hvd.rank() == 0:
        for rank, rates in enumerate(zip(*rounds, strict=True)):
            print(f"rank {rank}: {interval(list(rates))} images/s")
        print(f"in all: {interval([sum(rates) for rates in rounds])} images/s")
    hvd.shutdown()


if __name__ == "__main__":
    main()
