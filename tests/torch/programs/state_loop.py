"""Members of an elastic job that train with `state.loop`, and tell which samples each finished step has had."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler, get_worker_info

import hvdlite_torch as hvd
from hvdlite.training.mirrored.shares import Shares, shares_of_world
from hvdlite_torch.elastic import TorchState, body_loader, run
from tests.training.random_shares import draw_shares

SAMPLES, EPOCHS = 22, 3


class Samples(Dataset[Any]):
    """Samples that tell who has loaded them."""

    def __init__(self) -> None:
        self.x = torch.randn(SAMPLES, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return self.x[index], index, os.getpid() if get_worker_info() else 0


class Dying(RandomSampler):
    """Ends the process when it has given some orders."""

    left: int

    def __iter__(self) -> Iterator[int]:
        if not self.left:
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= 1
        return super().__iter__()


def train(folder: str, batch: int | str, gates: tuple[int, ...] = (), workers: int = 0, late: bool = False,
          epochs: int = EPOCHS, dies: int = -1, shares: Any = None) -> dict[str, Any]:
    """Train so many epochs, or until the file "end" exists in a folder.

    Args:
        folder: also with files "gate.N", one for each number in `gates`: in body N, counted over all epochs, ranks wait
            for it before they compute gradients.
        batch: the global batch.
        late: whether they wait after that, before the step.
        dies: the member that dies when the second epoch's order is drawn.
        shares: of `state.loop`; "drawn" for others in each body.
    """
    hvd.init()
    torch.manual_seed(hvd.rank())  # ranks would draw different orders
    model = torch.nn.Linear(3, 1).double()
    with torch.no_grad():
        model.weight.fill_(0.3)
        model.bias.zero_()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    data = Samples()
    sampler = Dying(data, generator=torch.Generator().manual_seed(8))
    sampler.left = 1 if os.environ.get("HVDLITE_MEMBER") == str(dies) else 1000
    loader: DataLoader[Any] = DataLoader(data, 4, sampler=sampler, num_workers=workers, persistent_workers=workers > 0)
    state: Any = TorchState(model, optimizer, ledger=[], losses=[], sizes=[], scaled=[])
    seen: list[int] = []
    own_rows: list[int] = []
    if shares == "drawn":
        shares = "auto"
        setattr(body_loader, "shares_of_world", shares_drawn)  # noqa: B010 - of the module that calls it
    state.on_scale(lambda rows: setattr(state, "scaled", [*state.scaled, rows]))

    def wait(body: int) -> None:
        print(f"body {body} in {hvd.size()}", flush=True)
        time.sleep(0.01 if epochs > EPOCHS else 0)  # each boundary copies the ledger, which grows
        while body in gates and not (Path(folder) / f"gate.{body}").exists():
            time.sleep(0.01)

    @run
    def loop(state: Any) -> None:
        print(f"world of {hvd.size()} at {len(state.ledger)}", flush=True)
        for x, index, loaders in state.loop(loader, epochs, batch, shares):
            seen.extend(set(loaders.tolist()))
            body = len(state.ledger)
            if not late:
                wait(body)
            optimizer.zero_grad()
            each = (model(x) - x.sum(1, keepdim=True)).square()
            each.mean().backward()
            rows, losses = hvd.allgather(index), hvd.allgather(each.detach())
            ends = hvd.allreduce(torch.tensor((Path(folder) / "end").exists()), op=hvd.Max)
            if late:
                wait(body)
            optimizer.step()
            state.ledger.append((state.epoch, *dict.fromkeys(rows.tolist())))
            state.losses.append(losses.mean().item())
            state.sizes.append(hvd.size())
            own_rows.append(len(x))
            if ends:
                break

    loop(state)
    hvd.check_replicas(model.state_dict())
    hvd.shutdown()
    return {"ledger": state.ledger, "losses": state.losses, "sizes": state.sizes, "scaled": state.scaled,
            "loaders": sorted(set(seen)), "rows": own_rows}


def shares_drawn(*arguments: Any) -> Shares:
    """Return a world's shares, which are others in each body."""
    shares = shares_of_world(*arguments)
    if shares.is_auto:  # there are other ranks
        draw_shares(shares, 5)
    return shares


def replay(ledger: list[tuple[int, ...]]) -> list[float]:
    """Return the losses of a plain training in one process with these samples."""
    weight, bias = torch.full((3,), 0.3, dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    weight.requires_grad_()
    bias.requires_grad_()
    optimizer = torch.optim.SGD([weight, bias], lr=0.05, momentum=0.9)
    x, losses = Samples().x, []
    for _, *rows in ledger:
        optimizer.zero_grad()
        loss = (x[rows] @ weight + bias - x[rows].sum(1)).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    return losses
