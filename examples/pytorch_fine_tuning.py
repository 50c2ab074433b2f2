"""Fine-tune a trained network for another question: first its new head, then all layers. A stopped run goes on.

    hvdrun -np 2 python examples/pytorch_fashion_mnist.py --checkpoint base.pt
    hvdrun -np 2 python examples/pytorch_fine_tuning.py --base base.pt --checkpoint tuned.pt
    hvdrun -np 2 python examples/pytorch_fine_tuning.py --base base.pt --checkpoint tuned.pt --epochs 6   # goes on

The new question: is it worn on the upper body, on the legs, on the feet, or is it a bag?
"""

from __future__ import annotations

import argparse
import os

import torch
from pytorch_fashion_mnist import Net, batches, datasets, evaluate, gpu_or_cpu
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import hvdlite_torch as hvd

ANSWERS = torch.tensor([0, 1, 0, 0, 0, 2, 0, 2, 3, 2])
"""The answer for each of Fashion-MNIST's ten classes."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", help="checkpoint of pytorch_fashion_mnist.py; without it, begin with random layers")
    parser.add_argument("--checkpoint", help="write the model here after every epoch; go on from it when it exists")
    parser.add_argument("--epochs", type=int, default=4, help="(default: 4)")
    parser.add_argument("--frozen-epochs", type=int, default=2, help="epochs in which the head alone trains (default: 2)")
    parser.add_argument("--batch-size", type=int, default=32, help="per rank (default: 32)")
    parser.add_argument("--lr", type=float, default=0.01, help="for one rank; multiplied by the ranks (default: 0.01)")
    parser.add_argument("--limit", type=int, default=2000, help="use only so many training images (default: 2000)")
    parser.add_argument("--data-dir", help="where the four .gz files are")
    parser.add_argument("--cpu", action="store_true", help="leave GPUs alone")
    parser.add_argument("--seed", type=int, default=42)
    return parser.parse_args()


def build(base: str | None) -> nn.Sequential:
    """Return the trained convolutions, frozen, and a new head with batch normalization over the batches of all ranks."""
    net = Net()
    if base:
        net.load_state_dict(torch.load(base, map_location="cpu")["model"])
    model = nn.Sequential()
    model.add_module("backbone", nn.Sequential(net.conv1, nn.ReLU(), nn.MaxPool2d(2), net.conv2, nn.ReLU(), nn.MaxPool2d(2)))
    model.add_module("head", nn.Sequential(nn.Flatten(), nn.Linear(64 * 5 * 5, 64), nn.BatchNorm1d(64), nn.ReLU(),
                                           nn.Linear(64, 4)))
    model.backbone.requires_grad_(False)
    return hvd.SyncBatchNorm.convert_sync_batchnorm(model)


def thaw(model: nn.Sequential, optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Let the convolutions train from now on, carefully."""
    model.backbone.requires_grad_(True)
    optimizer.add_param_group({"params": list(model.backbone.parameters()), "lr": lr})


def main() -> None:
    args = arguments()
    hvd.init()
    torch.manual_seed(args.seed)
    train_set, test_set = (TensorDataset(images, ANSWERS[labels]) for images, labels in
                           (dataset.tensors for dataset in datasets(args)))
    train_loader, train_sampler = batches(train_set, args.batch_size, 0, shuffle=True)
    test_loader, _ = batches(test_set, 1000, 0, shuffle=False)

    device = gpu_or_cpu(args.cpu)
    model = build(args.base if hvd.rank() == 0 else None).to(device)
    lr = args.lr * hvd.size()
    optimizer = torch.optim.SGD(model.head.parameters(), lr=lr, momentum=0.9)
    # The names are those of all layers: also of the ones that join later.
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    saved = None
    if args.checkpoint and hvd.rank() == 0 and os.path.exists(args.checkpoint):
        saved = torch.load(args.checkpoint, map_location=device)
    first_epoch = hvd.broadcast_object(saved["epoch"] if saved else 0, root_rank=0)
    if first_epoch > args.frozen_epochs:  # before the state is loaded: it has the second group
        thaw(model, optimizer, lr / 10)
    if saved:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    for epoch in range(first_epoch + 1, args.epochs + 1):
        if epoch == args.frozen_epochs + 1:
            thaw(model, optimizer, lr / 10)
        train_sampler.set_epoch(epoch)
        model.train()
        for x, y in train_loader:
            optimizer.zero_grad()
            functional.cross_entropy(model(x.to(device)), y.to(device)).backward()
            optimizer.step()
            hvd.record_step(len(y))  # for hvdrun --monitor, --scaling and --sweep
        loss, accuracy = evaluate(model, test_loader, len(test_set))
        if hvd.rank() == 0:
            layers = "the head" if epoch <= args.frozen_epochs else "all layers"
            print(f"epoch {epoch}, {layers}: test loss {loss:.4f}, test accuracy {accuracy:.4f}", flush=True)
            if args.checkpoint:
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch},
                           f"{args.checkpoint}.new")
                os.replace(f"{args.checkpoint}.new", args.checkpoint)
    hvd.shutdown()


if __name__ == "__main__":
    main()
