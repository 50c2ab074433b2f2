"""A small GPT in two dimensions: layers split inside pairs of ranks (tensor parallel), parameters between pairs (FSDP2).

    hvdrun -np 4 python examples/tensor_parallel_char_gpt.py
    torchrun --nproc-per-node 2 examples/tensor_parallel_char_gpt.py              # one pair: tensor parallel alone
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist
from char_gpt import CharGPT, Text, loss_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--backend", default="hvdlite")
parser.add_argument("--tensor-parallel", type=int, default=2, help="ranks that share a layer")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--batch-size", type=int, default=16, help="per pair of ranks")
parser.add_argument("--lr", type=float, default=0.002)

SPLIT = {"attention.query": ColwiseParallel(), "attention.key": ColwiseParallel(), "attention.value": ColwiseParallel(),
         "attention.output": RowwiseParallel(), "wide": ColwiseParallel(), "narrow": RowwiseParallel()}
"""How a block's layers are split. Each rank has some of the heads, and the results of the output projections are summed."""


def main(args: argparse.Namespace) -> None:
    dist.init_process_group(args.backend)
    torch.manual_seed(42)
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size // args.tensor_parallel, args.tensor_parallel), mesh_dim_names=("data", "tensor"))
    text = Text()
    model = CharGPT(text.characters)
    for block in model.blocks:
        parallelize_module(block, mesh["tensor"], SPLIT)
        fully_shard(block, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)

    started = time.perf_counter()
    for step in range(1, args.steps + 1):
        optimizer.zero_grad()
        loss_of(model, *text.batch(step, mesh.get_local_rank("data"), args.batch_size)).backward()  # the same in a pair
        optimizer.step()
        if step % 50 == 0 or step == args.steps:
            with torch.no_grad():
                loss = loss_of(model, *text.validation())
            if dist.get_rank() == 0:
                print(f"step {step}: {(time.perf_counter() - started) / step * 1000:.0f} ms a step on {size} ranks, "
                      f"validation loss {loss.item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(parser.parse_args())
