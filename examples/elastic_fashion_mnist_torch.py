"""Train a small CNN on Fashion-MNIST while ranks are lost and others join.

    hvdrun -np 2 --min-np 1 --max-np 4 --host-discovery-script ./hosts.sh python examples/elastic_fashion_mnist_torch.py
    python examples/elastic_fashion_mnist_torch.py           # alone, the same script
"""

from __future__ import annotations

import argparse
import os
import time

import fashion_mnist
import torch
from pytorch_fashion_mnist import Net
from torch.nn import functional
from torch.utils.data import BatchSampler, DataLoader, TensorDataset

import hvdlite_torch as hvd


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=64, help="per rank")
    parser.add_argument("--lr", type=float, default=0.01, help="for one rank; multiplied by the number of ranks")
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--batches-per-commit", type=int, default=10)
    parser.add_argument("--data-dir", help="where the four .gz files are")
    parser.add_argument("--limit", type=int, help="use only so many training images")
    parser.add_argument("--minimum-accuracy", type=float, default=0.0, help="fail below this")
    parser.add_argument("--seed", type=int, default=42)
    return parser.parse_args()


def dataset(args: argparse.Namespace, part: str, limit: int | None, device: torch.device) -> TensorDataset:
    found = fashion_mnist.tensors(fashion_mnist.find(args.data_dir), part, limit)
    return TensorDataset(*(tensor.to(device) for tensor in found.tensors))


def own_device() -> torch.device:
    """Return this rank's GPU, if there are enough. The slot stays, whatever becomes of the rank."""
    return torch.device("cuda", hvd.slot()) if hvd.slot() < torch.cuda.device_count() else torch.device("cpu")


def accuracy_of(model: Net, test_set: TensorDataset) -> float:
    """Return the accuracy over the whole test set, of which each rank looks at its share."""
    model.eval()
    x, y = (tensor[hvd.rank()::hvd.size()] for tensor in test_set.tensors)
    with torch.no_grad():
        correct = sum(int((model(x[begin:begin + 1000]).argmax(1) == y[begin:begin + 1000]).sum())
                      for begin in range(0, len(x), 1000))
    return hvd.allreduce(torch.tensor(float(correct)), op=hvd.Sum, name="correct").item() / len(test_set)


def main() -> None:
    args = arguments()
    hvd.init()  # no collectives from here to train(): ranks that join later would be alone with them
    torch.manual_seed(args.seed)
    device = own_device()
    train_set, test_set = dataset(args, "train", args.limit, device), dataset(args, "test", None, device)
    sampler = hvd.elastic.ElasticSampler(train_set, seed=args.seed)
    # Whole batches are indexed at once: taking 64 single images costs more than the step.
    loader = DataLoader(train_set, sampler=BatchSampler(sampler, args.batch_size, drop_last=False), batch_size=None)
    model = Net().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=args.momentum)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    def scale_learning_rate() -> None:
        for group in optimizer.param_groups:
            group["lr"] = args.lr * hvd.size()

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> float:
        processes = hvd.allgather_object(os.getpid())
        if hvd.rank() == 0:
            print(f"{hvd.size()} ranks, processes {processes}: epoch {state.epoch + 1} goes on after "
                  f"{sampler.processed_num} images", flush=True)
        while state.epoch < args.epochs:
            model.train()
            started, before = time.perf_counter(), sampler.processed_num
            for batch, (x, y) in enumerate(loader, 1):
                optimizer.zero_grad()
                functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                sampler.record_batch(batch, len(y))
                hvd.record_step(len(y))  # for hvdrun --monitor
                if batch % args.batches_per_commit == 0:
                    state.commit()
                else:
                    state.check_host_updates()
            rate = (sampler.processed_num - before) / (time.perf_counter() - started)
            state.accuracy = accuracy_of(model, test_set)
            state.epoch += 1
            sampler.set_epoch(state.epoch)
            if hvd.rank() == 0:
                print(f"epoch {state.epoch}: {rate:.0f} images/s on {hvd.size()} ranks, test accuracy "
                      f"{state.accuracy:.4f}", flush=True)
            state.commit()
        return state.accuracy

    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, accuracy=0.0)
    state.register_reset_callbacks([scale_learning_rate])
    accuracy = train(state)
    hvd.shutdown()
    if accuracy < args.minimum_accuracy:
        raise SystemExit(f"test accuracy {accuracy:.4f} is below {args.minimum_accuracy}")


if __name__ == "__main__":
    main()
