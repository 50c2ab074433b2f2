"""Classify images on all ranks: each one its part, which need not be of the same size; the results come in order.

    hvdrun -np 2 python examples/pytorch_fashion_mnist.py --checkpoint model.pt
    hvdrun -np 3 python examples/pytorch_inference.py --checkpoint model.pt --output classes.npy
"""

from __future__ import annotations

import argparse
import time

import fashion_mnist
import numpy as np
import torch
from pytorch_fashion_mnist import Net, gpu_or_cpu

import hvdlite_torch as hvd


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", required=True, help="of pytorch_fashion_mnist.py; rank 0 alone reads it")
    parser.add_argument("--output", help="write each image's class and its probability to this file (.npy)")
    parser.add_argument("--batch-size", type=int, default=500, help="per rank (default: 500)")
    parser.add_argument("--limit", type=int, help="use only so many test images")
    parser.add_argument("--data-dir", help="where the four .gz files are")
    parser.add_argument("--cpu", action="store_true", help="leave GPUs alone")
    return parser.parse_args()


@torch.inference_mode()
def classify(model: Net, images: torch.Tensor, batch_size: int) -> torch.Tensor:
    """Return the class and its probability for each image, float32 of shape (n, 2)."""
    device = next(model.parameters()).device
    found = [torch.empty(0, 2)]  # a rank may have no image
    for batch in images.split(batch_size):
        probability, number = torch.softmax(model(batch.to(device)), 1).max(1)
        found.append(torch.stack([number.float(), probability], 1).cpu())
    return torch.cat(found)


def main() -> None:
    args = arguments()
    hvd.init()
    device = gpu_or_cpu(args.cpu)
    model = Net().to(device).eval()
    if hvd.rank() == 0:
        model.load_state_dict(torch.load(args.checkpoint, map_location=device)["model"])
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    if hvd.local_rank() == 0:
        fashion_mnist.find(args.data_dir)  # or download it, once on each host
    hvd.barrier()
    images, labels = fashion_mnist.tensors(fashion_mnist.find(args.data_dir, download=False), "test", args.limit).tensors

    started = time.perf_counter()
    mine = images.tensor_split(hvd.size())[hvd.rank()]  # consecutive images: parts in rank order are the whole again
    results = hvd.allgather(classify(model, mine, args.batch_size), name="results")
    seconds = time.perf_counter() - started
    if hvd.rank() == 0:
        accuracy = (results[:, 0] == labels).float().mean()
        print(f"{len(results)} images on {hvd.size()} ranks in {seconds:.2f} s, accuracy {accuracy:.4f}")
        if args.output:
            np.save(args.output, results.numpy())
    hvd.shutdown()


if __name__ == "__main__":
    main()
