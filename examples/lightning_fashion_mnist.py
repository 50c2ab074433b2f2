"""Fashion-MNIST with Lightning's DDPStrategy, whose collectives are those of the named backend.

    hvdrun -np 2 python examples/lightning_fashion_mnist.py --devices 2
    torchrun --nproc-per-node 2 examples/lightning_fashion_mnist.py --devices 2
    python examples/lightning_fashion_mnist.py --devices 2                      # Lightning starts the other rank
"""

from __future__ import annotations

import argparse
from typing import Any

import fashion_mnist
import lightning.pytorch as pl
import torch
from ddp_fashion_mnist import mlp
from lightning.pytorch.strategies import DDPStrategy
from torch.nn import functional
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--backend", default="hvdlite")
parser.add_argument("--devices", type=int, default=1, help="ranks on each host")
parser.add_argument("--hosts", type=int, default=1)
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--batch-size", type=int, default=64, help="per rank")
parser.add_argument("--lr", type=float, default=0.001)
parser.add_argument("--data-dir", help="where the four .gz files are")
parser.add_argument("--limit", type=int, help="use only so many training images")


class Classifier(pl.LightningModule):
    """The network, how it is trained, and its accuracy over the test set."""

    def __init__(self, lr: float) -> None:
        super().__init__()
        self.lr, self.layers = lr, mlp()

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        x, y = batch
        return functional.cross_entropy(self.layers(x), y)

    def validation_step(self, batch: Any, index: int) -> None:
        x, y = batch
        self.log("accuracy", (self.layers(x).argmax(1) == y).float().mean(), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.print(f"epoch {self.current_epoch + 1}: test accuracy {self.trainer.callback_metrics['accuracy']:.4f} on "
                       f"{self.trainer.world_size} ranks", flush=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


class FashionMnist(pl.LightningDataModule):
    """The images. Lightning gives each rank its share of them."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.args = args

    def prepare_data(self) -> None:  # on the first rank of each host, before the others go on
        fashion_mnist.find(self.args.data_dir)

    def setup(self, stage: str) -> None:
        directory = fashion_mnist.find(self.args.data_dir, download=False)
        self.training = fashion_mnist.tensors(directory, "train", self.args.limit)
        self.tests = fashion_mnist.tensors(directory, "test")

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.training, self.args.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.tests, 1000)


def main(args: argparse.Namespace) -> None:
    pl.seed_everything(42, verbose=False)
    trainer = pl.Trainer(accelerator="cpu", devices=args.devices, num_nodes=args.hosts, max_epochs=args.epochs,
                         strategy=DDPStrategy(process_group_backend=args.backend), enable_progress_bar=False,
                         enable_model_summary=False, enable_checkpointing=False, logger=False)
    trainer.fit(Classifier(args.lr), FashionMnist(args))


if __name__ == "__main__":
    main(parser.parse_args())
