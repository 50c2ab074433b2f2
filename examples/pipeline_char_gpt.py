"""A small GPT whose layers are divided between the ranks: parts of a batch go through them one behind the other (pipeline).

    hvdrun -np 2 python examples/pipeline_char_gpt.py
    torchrun --nproc-per-node 2 examples/pipeline_char_gpt.py --schedule GPipe
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist
from char_gpt import CharGPT, Text
from torch import nn
from torch.distributed import pipelining
from torch.nn import functional

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--backend", default="hvdlite")
parser.add_argument("--schedule", choices=["1F1B", "GPipe"], default="1F1B")
parser.add_argument("--parts", type=int, default=4, help="into which a batch is divided")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--lr", type=float, default=0.002)


class Stage(nn.Module):
    """Some blocks of the model; the first rank's begin with the embeddings, and the last one's end with the head."""

    def __init__(self, whole: CharGPT, rank: int, size: int) -> None:
        super().__init__()
        count = len(whole.blocks)
        self.blocks = nn.Sequential(*whole.blocks[rank * count // size:(rank + 1) * count // size])
        if rank == 0:
            self.characters, self.positions = whole.characters, whole.positions
        if rank == size - 1:
            self.norm, self.head = whole.norm, whole.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if hasattr(self, "characters"):
            x = self.characters(x) + self.positions(torch.arange(x.shape[1]))
        x = self.blocks(x)
        return self.head(self.norm(x)) if hasattr(self, "head") else x


def loss_of(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy, in nats a character."""
    return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def main(args: argparse.Namespace) -> None:
    dist.init_process_group(args.backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(42)  # all ranks make the same model, and keep their part
    text = Text()
    own = Stage(CharGPT(text.characters), rank, size)
    stage = pipelining.PipelineStage(own, rank, size, torch.device("cpu"))
    schedule = getattr(pipelining, f"Schedule{args.schedule}")(stage, n_microbatches=args.parts, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(own.parameters(), lr=args.lr)

    started = time.perf_counter()
    for step in range(1, args.steps + 1):
        inputs, targets = text.batch(step, 0, args.batch_size)  # the same on all ranks: the ends use it
        losses: list[torch.Tensor] = []
        optimizer.zero_grad()
        if rank == size - 1:
            schedule.step(*[inputs] * (size == 1), target=targets, losses=losses)
        else:
            schedule.step(*[inputs] * (rank == 0))
        optimizer.step()
        if step % 50 == 0 or step == args.steps:
            loss = torch.stack(losses).mean().detach() if losses else torch.empty(())
            dist.broadcast(loss, size - 1)  # which alone has it
            if rank == 0:
                print(f"step {step}: {(time.perf_counter() - started) / step * 1000:.0f} ms a step on {size} ranks, "
                      f"training loss {loss.item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(parser.parse_args())
