"""A script that trains with Lightning on two ranks, and computes metrics over them."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from typing import Any, cast
from unittest import mock

import lightning.pytorch as pl
import torch
import torchmetrics
from lightning.pytorch.demos.boring_classes import BoringModel

import hvdlite_torch as hvd
from hvdlite import api
from hvdlite.core.errors import UnsupportedError
from hvdlite_torch.lightning import HvdliteStrategy
from tests.raising import raises


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers: Any = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
        self.error = torchmetrics.MeanSquaredError()
        self.seen = torchmetrics.CatMetric()  # states of lists, of different lengths
        self.totals: list[Any] = []

    def training_step(self, batch: Any, index: int) -> Any:
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.layers(x), y)
        self.log("loss", loss, sync_dist=True, on_epoch=True, on_step=False)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        x, y = batch
        self.log("val", torch.nn.functional.mse_loss(self.layers(x), y), sync_dist=True)
        self.error(self.layers(x), y)
        self.log("error", self.error)
        self.seen.update(x[:, 0])

    def on_validation_epoch_end(self) -> None:
        self.totals.append(self.seen.compute())
        self.seen.reset()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


GENERATOR = torch.Generator().manual_seed(1)
DATA = torch.utils.data.TensorDataset(torch.randn(64, 6, generator=GENERATOR), torch.randn(64, 2, generator=GENERATOR))
COMMON: dict[str, Any] = {
    "max_epochs": 2, "accelerator": "cpu", "devices": 1, "logger": False, "enable_progress_bar": False,
    "enable_model_summary": False, "gradient_clip_val": 0.5}


def shares(rank: int) -> Any:
    return torch.utils.data.DistributedSampler(DATA, 2, rank, shuffle=False)


def loader(batch: int, sampler: Any = None) -> Any:
    return torch.utils.data.DataLoader(DATA, batch_size=batch, sampler=sampler)


class Normal(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers.insert(1, torch.nn.BatchNorm1d(8))
        self.before: list[Any] = []

    def training_step(self, batch: Any, index: int) -> Any:
        self.before.append(self.layers[1].running_mean.clone())
        return super().training_step(batch, index)


def fits(folder: str) -> None:
    model = Net()
    if os.environ.get("HVDLITE_RANK") == "1":
        torch.nn.init.zeros_(model.layers[0].weight)  # the broadcast mends it
    checkpoint = pl.callbacks.ModelCheckpoint(dirpath=folder, filename="last")
    trainer = pl.Trainer(strategy=HvdliteStrategy(), callbacks=[checkpoint], use_distributed_sampler=False, **COMMON)
    trainer.fit(model, loader(8, shares(hvd.rank())), loader(8))
    assert trainer.world_size == 2 and trainer.global_rank == hvd.rank()
    assert type(trainer.optimizers[0]).__name__ == "Adam" and trainer.global_step == 8
    hvd.check_replicas(model.state_dict())
    gathered = trainer.strategy.all_gather(torch.tensor([float(hvd.rank())]))
    assert gathered.tolist() == [[0.0], [1.0]]
    mine = torch.tensor([1.0 + hvd.rank()], requires_grad=True)
    (trainer.strategy.all_gather(mine, sync_grads=True).sum() * (1.0 + hvd.rank())).backward()
    assert mine.grad.item() == 3.0  # the sum of both ranks' upstream gradients, as under DDP
    both = pl.Trainer(strategy=HvdliteStrategy(), enable_checkpointing=False, use_distributed_sampler=False, **COMMON)
    both.validate(model, loader(7, [*shares(hvd.rank())][:20 + 12 * hvd.rank()]), verbose=False)
    assert model.totals[-1].shape == (52,)
    part = torch.stack([DATA[index][0] for rank in range(2) for index in [*shares(rank)][:20 + 12 * rank]])
    target = torch.stack([DATA[index][1] for rank in range(2) for index in [*shares(rank)][:20 + 12 * rank]])
    assert torch.equal(model.totals[-1], part[:, 0])
    torch.testing.assert_close(both.callback_metrics["error"], torch.nn.functional.mse_loss(model.layers(part), target))
    assert trainer.strategy.broadcast({"rank": hvd.rank()}, 1) == {"rank": 1}
    assert trainer.strategy.reduce(torch.tensor(hvd.rank()), reduce_op="sum").item() == 1

    # Workers that train by themselves: what is saved is what all ranks have at the end.
    local, saves = Normal(), pl.callbacks.ModelCheckpoint(dirpath=folder, filename="outer")
    outer = pl.Trainer(strategy=HvdliteStrategy(outer=hvd.DiLoCo(3, workers="rank")), callbacks=[saves], **COMMON)
    outer.fit(local, loader(8))
    hvd.check_replicas(local.state_dict())
    saved = torch.load(os.path.join(folder, "outer.ckpt"), weights_only=False)
    assert all(torch.equal(saved["state_dict"][name], each) for name, each in local.state_dict().items())
    assert saved["optimizer_states"][0]["outer"]["step"] == outer.global_step == 8

    normal = Normal()
    normal.layers[1].running_mean += hvd.rank()
    pl.Trainer(strategy=HvdliteStrategy(broadcast_buffers=True), enable_checkpointing=False, **COMMON).fit(normal, loader(8))
    hvd.check_replicas([(str(index), mean) for index, mean in enumerate(normal.before)])
    assert len(normal.before) == 8 and normal.before[0].sum() == 0

    accumulating = pl.Trainer(strategy=HvdliteStrategy(), accumulate_grad_batches=2, enable_checkpointing=False, **COMMON)
    other = Net()
    accumulating.fit(other, loader(4))  # Lightning shares this one out
    hvd.check_replicas(other.state_dict())
    assert accumulating.global_step == 8

    # One process, with batches made of what the two ranks had together.
    alone = Net()
    one, two = ([list(shares(rank))[begin:begin + 8] for begin in range(0, 32, 8)] for rank in range(2))
    batches = [[*first, *second] for first, second in zip(one, two, strict=True)]
    single = torch.utils.data.DataLoader(DATA, batch_sampler=batches)
    pl.Trainer(enable_checkpointing=False, use_distributed_sampler=False, **COMMON).fit(alone, single)
    for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    assert sorted(os.listdir(folder)) == ["last.ckpt", "outer.ckpt"] or hvd.rank() == 1


def metrics_of_all_ranks() -> None:
    rank = hvd.rank()
    torch.manual_seed(1)
    predicted, target = torch.rand(40, 3), torch.randint(3, (40,))
    mine = slice(0, 25) if rank == 0 else slice(25, 40)

    def metrics() -> Any:
        return torch.nn.ModuleDict({
            "accuracy": torchmetrics.classification.MulticlassAccuracy(3),
            "both": torchmetrics.MetricCollection([torchmetrics.classification.MulticlassF1Score(3),
                                                   torchmetrics.classification.MulticlassAUROC(3)]),  # sums, and lists
        })
    own = torchmetrics.MeanMetric(dist_sync_fn=hvd.gather_all_tensors, distributed_available_fn=hvd.is_initialized)
    part, whole = metrics(), metrics()
    hvd.synchronize_metrics(part)
    for _ in range(2):
        for name in part:
            part[name].update(predicted[mine], target[mine])
            whole[name].update(predicted, target)
            torch.testing.assert_close(part[name].compute(), whole[name].compute())
    own.update(float(rank))
    assert own.compute() == 0.5
    empty = torchmetrics.CatMetric()
    hvd.synchronize_metrics(empty)
    if rank == 1:
        empty.update(torch.arange(3.0))
    assert empty.compute().tolist() == [0, 1, 2]
    leaf = torch.ones(2 + rank, 2, requires_grad=True)
    gathered = hvd.gather_all_tensors(leaf)
    assert [tuple(each.shape) for each in gathered] == [(2, 2), (3, 2)] and gathered[rank] is leaf
    assert [each.dtype for each in hvd.gather_all_tensors(torch.ones(1).to((torch.bool, torch.bfloat16)[rank]))] == [
        torch.bool, torch.bfloat16]
    assert [tuple(each.shape) for each in hvd.gather_all_tensors(torch.ones(0, 2 + rank))] == [(0, 2), (0, 3)]


def a_signal_to_one_rank_stops_all() -> None:
    """Run last: the stop remains requested."""
    class Warned(pl.Callback):
        """Gets a scheduler's warning on one rank."""

        seen = 0

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
            self.seen += 1
            if hvd.rank() == 1 and self.seen == 3:
                signal.raise_signal(signal.SIGTERM)

    warned = Warned()
    trainer = pl.Trainer(accelerator="cpu", devices=1, max_epochs=9, strategy=HvdliteStrategy(stop_on_request=True),
                         logger=False, callbacks=[warned], enable_progress_bar=False, enable_model_summary=False,
                         enable_checkpointing=False)
    model, rows = BoringModel(), cast(Any, torch.randn(40, 32))
    trainer.fit(model, train_dataloaders=torch.utils.data.DataLoader(rows, 2))
    assert hvd.allgather_object(warned.seen) == [warned.seen] * 2 and 3 <= warned.seen < 20, warned.seen


def elastic_jobs_are_refused() -> None:
    with mock.patch.object(hvd, "init"), mock.patch.object(api, "is_elastic", lambda: True):
        raises(UnsupportedError, "HvdliteStrategy does not work in an elastic job", HvdliteStrategy)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    fits(sys.argv[1])
    metrics_of_all_ranks()
    elastic_jobs_are_refused()
    a_signal_to_one_rank_stops_all()
