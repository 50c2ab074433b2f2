"""A rank of `benchmarks/elastic.py`: trains parameters of a given size, and tells when each step was complete.

    elastic_rank.py FOLDER MEGABYTES STEPS COMMIT_EVERY {hvdlite,turns,plain,ddp,loop,loops,saving,join}

`turns` commits in every other `TURN` of steps only. `loop` trains with `state.loop`; `join` does so too, and of its
parameters all but 100 MB are frozen: they are sent to who joins. `loops` uses `state.loop` in every other epoch, and in
those between a DataLoader and `DistributedSampler`; it tells when each epoch was complete, with its commit. `saving` is
`loops` with a durable checkpoint every minute, which is written whenever it is due.
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
    """Parameters of 1 MB each; the loss uses all of them, but for those that are frozen."""

    def __init__(self, megabytes: int, frozen: int = 0) -> None:
        super().__init__()
        self.parts = torch.nn.ParameterList(torch.zeros(1 << 18) for _ in range(megabytes))
        self.frozen = torch.nn.ParameterList(torch.nn.Parameter(torch.ones(1 << 18), requires_grad=False)
                                             for _ in range(frozen))

    def forward(self, factor: float | torch.Tensor) -> torch.Tensor:
        """Return a loss."""
        return torch.stack([(part * factor).sum() for part in self.parts]).sum()


def train_on_samples(hvd: Any, model: Any, optimizer: Any, step: Any, tell: Any, kind: str, steps: int,
                     folder: Path) -> None:
    """Train with data, of which a step of all ranks takes `rows`."""
    rows = 16 if kind == "join" else 8 * hvd.size()
    data = torch.utils.data.TensorDataset(torch.rand(rows * 100, 16))
    loader = torch.utils.data.DataLoader(data, batch_size=rows, shuffle=True)
    sampler: Any = torch.utils.data.DistributedSampler(data, hvd.size(), hvd.rank())
    sampled = torch.utils.data.DataLoader(data, batch_size=8, sampler=sampler)
    state = hvd.elastic.TorchState(model, optimizer)
    if kind == "saving":
        state.checkpoint(folder / "checkpoints", every="1 min")

    @hvd.elastic.run
    def train(state: Any) -> None:
        if kind in ("loop", "join"):
            for (x,) in state.loop(loader, epochs=steps // 100):
                step(model, x.mean())
            return
        for epoch in range(steps // 200):
            sampler.set_epoch(epoch)
            for (x,) in sampled:
                step(model, x.mean())
            tell()
            for (x,) in state.loop(loader, epochs=epoch + 1):
                step(model, x.mean())
            tell()

    train(state)


def main() -> None:
    """Train until the steps are done."""
    folder, megabytes, steps, every, kind = Path(sys.argv[1]), *map(int, sys.argv[2:5]), sys.argv[5]
    torch.set_num_threads(1)
    (folder / f"pid.{os.getpid()}").touch()
    log = (folder / f"steps.{os.getpid()}").open("ab", buffering=0)
    trained = min(megabytes, 100) if kind == "join" else megabytes
    model = Model(trained, megabytes - trained)
    optimizer = torch.optim.SGD(model.parts.parameters(), 0.01, momentum=0.9)

    def tell() -> None:
        log.write(struct.pack("d", time.monotonic()))

    def step(run: torch.nn.Module, factor: float | torch.Tensor = 0.5) -> None:
        optimizer.zero_grad()
        run(factor).backward()
        optimizer.step()
        if kind not in ("loops", "saving"):
            tell()

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
    optimizer = hvd.DistributedOptimizer(optimizer, model.parts.named_parameters())
    if kind in ("loop", "join", "loops", "saving"):
        train_on_samples(hvd, model, optimizer, step, tell, kind, steps, folder)
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
