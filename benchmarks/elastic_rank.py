"""A rank of `benchmarks/elastic.py`: trains parameters of a given size, and tells when each step was complete.

    elastic_rank.py FOLDER MEGABYTES STEPS COMMIT_EVERY {hvdlite,turns,plain,ddp}

`turns` commits in every other `TURN` of steps only.
"""

from __future__ import annotations

import os
import struct
import sys
import time
from pathlib import Path

import torch

TURN = 50
"""Steps."""


class Model(torch.nn.Module):
    """Parameters of 1 MB each; the loss uses all of them."""

    def __init__(self, megabytes: int) -> None:
        super().__init__()
        self.parts = torch.nn.ParameterList(torch.zeros(1 << 18) for _ in range(megabytes))

    def forward(self, factor: float) -> torch.Tensor:
        """Return a loss."""
        return torch.stack([(part * factor).sum() for part in self.parts]).sum()


def main() -> None:
    """Train until the steps are done."""
    folder, megabytes, steps, every, kind = Path(sys.argv[1]), *map(int, sys.argv[2:5]), sys.argv[5]
    torch.set_num_threads(1)
    (folder / f"pid.{os.getpid()}").touch()
    log = (folder / f"steps.{os.getpid()}").open("ab", buffering=0)
    model = Model(megabytes)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)

    def step(run: torch.nn.Module) -> None:
        optimizer.zero_grad()
        run(0.5).backward()
        optimizer.step()
        log.write(struct.pack("d", time.monotonic()))

    if kind == "ddp":
        attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]  # torchrun's own store keeps the addresses of the last attempt
        torch.distributed.init_process_group("gloo", f"file://{folder.resolve()}/store.{attempt}",
                                             rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        for _ in range(steps):
            step(wrapped)
        return
    import hvdlite_torch as hvd
    hvd.init()
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    if kind == "plain":
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        for _ in range(steps):
            step(model)
        hvd.shutdown()
        return
    state = hvd.elastic.TorchState(model, optimizer, step=0)

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        while state.step < steps:
            step(model)
            state.step += 1
            if every and state.step % every == 0 and (kind != "turns" or state.step // TURN % 2):
                state.commit()

    train(state)
    hvd.shutdown()


if __name__ == "__main__":
    main()
