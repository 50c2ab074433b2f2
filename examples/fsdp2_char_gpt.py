"""A small GPT whose parameters, gradients and optimizer state are split over the ranks: FSDP2, with checkpoints.

    hvdrun -np 2 python examples/fsdp2_char_gpt.py --checkpoint build/gpt
    torchrun --nproc-per-node 2 examples/fsdp2_char_gpt.py --checkpoint build/gpt --steps 400

The second command goes on where the first one has ended, also on another number of ranks.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from char_gpt import CharGPT, Text, loss_of
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--backend", default="hvdlite")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--batch-size", type=int, default=16, help="per rank")
parser.add_argument("--lr", type=float, default=0.002)
parser.add_argument("--checkpoint", type=Path, help="go on from the newest one in this directory; write one at the end")


class Training:
    """All that a checkpoint contains. Every rank writes and reads its own part of it.

    Attributes:
        step: steps that have been taken.
    """

    def __init__(self, model: CharGPT, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer, self.step = model, optimizer, 0

    def state_dict(self) -> dict[str, object]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def load_state_dict(self, state: dict[str, object]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.step = state["step"]


def main(args: argparse.Namespace) -> None:
    dist.init_process_group(args.backend)
    torch.manual_seed(42)
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    text = Text()
    model = CharGPT(text.characters)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)  # the unit that is gathered before it computes, and let go afterwards
    fully_shard(model, mesh=mesh)
    training = Training(model, torch.optim.AdamW(model.parameters(), lr=args.lr))
    written = sorted(args.checkpoint.glob("*/.metadata")) if args.checkpoint else []  # the last file of a checkpoint
    if written:
        dcp.load({"training": training}, checkpoint_id=written[-1].parent)
        if rank == 0:
            print(f"goes on after step {training.step}", flush=True)

    started, first = time.perf_counter(), training.step
    while training.step < args.steps:
        training.optimizer.zero_grad()
        loss_of(model, *text.batch(training.step, rank, args.batch_size)).backward()
        training.optimizer.step()
        training.step += 1
        if training.step % 50 == 0 or training.step == args.steps:
            with torch.no_grad():
                loss = loss_of(model, *text.validation())
            if rank == 0:
                seconds = (time.perf_counter() - started) / (training.step - first)
                print(f"step {training.step}: {seconds * 1000:.0f} ms a step on {size} ranks, "
                      f"validation loss {loss.item():.3f}", flush=True)
    if args.checkpoint:
        dcp.save({"training": training}, checkpoint_id=args.checkpoint / f"{training.step:08}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(parser.parse_args())
