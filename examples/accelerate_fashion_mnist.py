"""Fashion-MNIST with Hugging Face Accelerate, whose collectives are those of the named backend.

    hvdrun -np 2 python examples/accelerate_fashion_mnist.py
    torchrun --nproc-per-node 2 examples/accelerate_fashion_mnist.py
"""

from __future__ import annotations

import argparse
import time

import fashion_mnist
import torch
import torch.distributed as dist
from accelerate import Accelerator
from ddp_fashion_mnist import mlp
from torch.nn import functional
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--backend", default="hvdlite")
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--batch-size", type=int, default=64, help="per rank")
parser.add_argument("--lr", type=float, default=0.001)
parser.add_argument("--data-dir", help="where the four .gz files are")
parser.add_argument("--limit", type=int, help="use only so many training images")


def main(args: argparse.Namespace) -> None:
    # On the CPU, Accelerate by itself accepts no backend but Gloo and MPI. A group that exists is taken.
    dist.init_process_group(args.backend)
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(42)
    with accelerator.local_main_process_first():
        directory = fashion_mnist.find(args.data_dir, download=accelerator.is_local_main_process)
    training, tests = fashion_mnist.tensors(directory, "train", args.limit), fashion_mnist.tensors(directory, "test")
    model = mlp()
    model, optimizer, loader, test_loader = accelerator.prepare(
        model, torch.optim.Adam(model.parameters(), lr=args.lr),
        DataLoader(training, args.batch_size, shuffle=True), DataLoader(tests, 1000))

    for epoch in range(1, args.epochs + 1):
        started = time.perf_counter()
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            accelerator.backward(functional.cross_entropy(model(x), y))
            optimizer.step()
        seconds = time.perf_counter() - started
        model.eval()
        correct = 0
        for x, y in test_loader:
            with torch.no_grad():
                predicted, wanted = accelerator.gather_for_metrics((model(x).argmax(1), y))
            correct += int((predicted == wanted).sum())
        accelerator.print(f"epoch {epoch}: {seconds:.1f} s, {len(training) / seconds:.0f} images/s on "
                          f"{accelerator.num_processes} ranks, test accuracy {correct / len(tests):.4f}", flush=True)
    accelerator.end_training()  # destroys the group


if __name__ == "__main__":
    main(parser.parse_args())
