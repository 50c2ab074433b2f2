"""Fashion-MNIST with DistributedDataParallel: an ordinary script for torch.distributed; only the backend's name is new.

    hvdrun -np 2 python examples/ddp_fashion_mnist.py
    torchrun --nproc-per-node 2 examples/ddp_fashion_mnist.py --zero
"""

from __future__ import annotations

import argparse
import time

import fashion_mnist
import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--backend", default="hvdlite")
parser.add_argument("--zero", action="store_true", help="split the optimizer's state: ZeroRedundancyOptimizer")
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--batch-size", type=int, default=64, help="per rank")
parser.add_argument("--lr", type=float, default=0.001)
parser.add_argument("--data-dir", help="where the four .gz files are")
parser.add_argument("--limit", type=int, help="use only so many training images")
parser.add_argument("--checkpoint", help="write the model and the optimizer to this file at the end")


def mlp() -> torch.nn.Module:
    """Return a network with 669,706 parameters."""
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 512), torch.nn.ReLU(),
                               torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))


def accuracy_of(model: torch.nn.Module, tests: torch.utils.data.TensorDataset) -> float:
    """Return the accuracy over the whole test set, of which each rank looks at its share."""
    x, y = (tensor[dist.get_rank()::dist.get_world_size()] for tensor in tests.tensors)
    with torch.no_grad():
        correct = (model(x).argmax(1) == y).sum()
    dist.all_reduce(correct)
    return correct.item() / len(tests)


def main(args: argparse.Namespace) -> None:
    dist.init_process_group(args.backend)
    torch.manual_seed(42)
    if dist.get_node_local_rank(0) == 0:
        fashion_mnist.find(args.data_dir)  # downloads it, if need be
    dist.barrier()
    directory = fashion_mnist.find(args.data_dir, download=False)
    training, tests = fashion_mnist.tensors(directory, "train", args.limit), fashion_mnist.tensors(directory, "test")
    sampler = DistributedSampler(training)
    # Whole batches are indexed at once: taking 64 single images costs more than the step.
    loader = DataLoader(training, sampler=BatchSampler(sampler, args.batch_size, drop_last=False), batch_size=None)

    model = DistributedDataParallel(mlp())
    if args.zero:
        optimizer: torch.optim.Optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=args.lr)
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    for epoch in range(1, args.epochs + 1):
        sampler.set_epoch(epoch)
        started = time.perf_counter()
        for x, y in loader:
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        seconds = time.perf_counter() - started
        accuracy = accuracy_of(model.module, tests)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {seconds:.1f} s, {len(training) / seconds:.0f} images/s on "
                  f"{dist.get_world_size()} ranks, test accuracy {accuracy:.4f}", flush=True)
    if args.checkpoint:
        if isinstance(optimizer, ZeroRedundancyOptimizer):
            optimizer.consolidate_state_dict(to=0)
        if dist.get_rank() == 0:
            torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, args.checkpoint)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(parser.parse_args())
