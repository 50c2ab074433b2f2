"""A rank of `benchmarks/elastic.py`: trains parameters of a given size, and tells when each step was complete.

    elastic_rank.py FOLDER MEGABYTES STEPS COMMIT_EVERY {hvdlite,turns,plain,ddp,sampled,loop,saving}

`turns` commits in every other `TURN` of steps only. `sampled` trains with a DataLoader and `DistributedSampler`, `loop` with
`state.loop`, and `saving` with that and a durable checkpoint every minute.
"""

from __future__ import annotations

import os
import struct
import sys
import time
from pathlib import Path
from typing import Any

import torch

TURN = 50
"""Steps."""


class Model(torch.nn.Module):
    """Parameters of 1 MB each; the loss uses all of them."""

    def __init__(self, megabytes: int) -> None:
        super().__init__()
        self.parts = torch.nn.ParameterList(torch.zeros(1 << 18) for _ in range(megabytes))

    def forward(self, factor: float | torch.Tensor) -> torch.Tensor:
        """Return a loss."""
        return torch.stack([(part * factor).sum() for part in self.parts]).sum()


def train_on_samples(hvd: Any, model: Any, optimizer: Any, step: Any, kind: str, steps: int, folder: Path) -> None:
    """Train with data, of which a step of all ranks takes eight samples for each."""
    rows = 8 * hvd.size()
    data = torch.utils.data.TensorDataset(torch.rand(rows * 100, 16))
    if kind == "sampled":
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        sampler: Any = torch.utils.data.DistributedSampler(data, hvd.size(), hvd.rank())
        loader = torch.utils.data.DataLoader(data, batch_size=8, sampler=sampler)
        for epoch in range(-(-steps // 100)):
            sampler.set_epoch(epoch)
            for (x,) in loader:
                step(model, x.mean())
        return
    loader = torch.utils.data.DataLoader(data, batch_size=rows, shuffle=True)
    state = hvd.elastic.TorchState(model, optimizer)
    if kind == "saving":
        state.checkpoint(folder / "checkpoints", every="1 min")

    @hvd.elastic.run
    def train(state: Any) -> None:
        for (x,) in state.loop(loader, epochs=-(-steps // 100)):
            step(model, x.mean())

    train(state)


def main() -> None:
    """Train until the steps are done."""
    folder, megabytes, steps, every, kind = Path(sys.argv[1]), *map(int, sys.argv[2:5]), sys.argv[5]
    torch.set_num_threads(1)
    (folder / f"pid.{os.getpid()}").touch()
    log = (folder / f"steps.{os.getpid()}").open("ab", buffering=0)
    model = Model(megabytes)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)

    def step(run: torch.nn.Module, factor: float | torch.Tensor = 0.5) -> None:
        optimizer.zero_grad()
        run(factor).backward()
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
    if kind in ("sampled", "loop", "saving"):
        train_on_samples(hvd, model, optimizer, step, kind, steps, folder)
        hvd.shutdown()
        return
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
