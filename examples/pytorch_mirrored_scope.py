"""Fashion-MNIST without a wrapped optimizer, a broadcast or a sampler: what a scope makes is distributed.

    hvdrun -np 2 python examples/pytorch_mirrored_scope.py
    python examples/pytorch_mirrored_scope.py                 # alone, the same script
"""

import argparse
import time

import torch
from pytorch_fashion_mnist import Net, datasets
from torch.nn import functional
from torch.utils.data import DataLoader

import hvdlite_torch as hvd

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--batch-size", type=int, default=128, help="of all ranks together")
parser.add_argument("--lr", type=float, default=0.02)
parser.add_argument("--data-dir", help="where the four .gz files are")
parser.add_argument("--limit", type=int, help="use only so many training images")


def main(args: argparse.Namespace) -> float:
    torch.manual_seed(42)
    strategy = hvd.MirroredStrategy()
    train_set, test_set = datasets(args)
    with strategy.scope():
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    train_loader = strategy.distribute(DataLoader(train_set, args.batch_size, shuffle=True))
    test_loader = strategy.distribute(DataLoader(test_set, 1000))

    accuracy = 0.0
    for epoch in range(1, args.epochs + 1):
        model.train()
        started = time.perf_counter()
        for x, y in train_loader:
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        seconds = time.perf_counter() - started
        model.eval()
        sums = torch.zeros(2)  # loss, correct
        for x, y in test_loader:
            with torch.no_grad():
                output = model(x)
            sums += strategy.reduce("SUM", torch.stack([functional.cross_entropy(output, y, reduction="sum"),
                                                        (output.argmax(1) == y).sum()]))
        loss, accuracy = (sums / len(test_set)).tolist()
        if hvd.rank() == 0:
            print(f"epoch {epoch}: {seconds:.1f} s, {len(train_set) / seconds:.0f} images/s on {hvd.size()} ranks, "
                  f"test loss {loss:.4f}, test accuracy {accuracy:.4f}", flush=True)
    return accuracy


if __name__ == "__main__":
    main(parser.parse_args())
