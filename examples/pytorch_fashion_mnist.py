"""Train a small CNN on Fashion-MNIST, on as many ranks as the launcher starts.

    hvdrun -np 2 python examples/pytorch_fashion_mnist.py
    python examples/pytorch_fashion_mnist.py                 # alone, the same script
    hvdrun -np 2 --sweep batch-size=64,128,256,512 --until accuracy=0.88 python examples/pytorch_fashion_mnist.py \
        --base-batch-size 64 --warmup-epochs 1 --epochs 8    # the batch size that is the soonest there
"""

from __future__ import annotations

import argparse
import os
import time

import fashion_mnist
import torch
from torch.nn import functional
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset

import hvdlite_torch as hvd


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=64, help="per rank")
    parser.add_argument("--lr", type=float, default=0.01, help="for one rank with --base-batch-size; grows in proportion "
                        "to the batch of all ranks")
    parser.add_argument("--base-batch-size", type=int, help="the batch size that --lr is for; None: --batch-size")
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--warmup-epochs", type=float, default=0.5, help="learning rate rises linearly over these")
    parser.add_argument("--data-dir", help="where the four .gz files are")
    parser.add_argument("--workers", type=int, default=0, help="DataLoader processes per rank")
    parser.add_argument("--compression", choices=["none", "fp16", "bf16"], default="none", help="of gradients")
    parser.add_argument("--checkpoint", help="write the model here after every epoch; go on from it when it exists")
    parser.add_argument("--limit", type=int, help="use only so many training images")
    parser.add_argument("--minimum-accuracy", type=float, default=0.0, help="fail below this")
    parser.add_argument("--cpu", action="store_true", help="leave GPUs alone")
    parser.add_argument("--seed", type=int, default=42)
    return parser.parse_args()


class Net(torch.nn.Module):
    """Two convolutions and two dense layers; 421,642 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = torch.nn.Conv2d(1, 32, 3)
        self.conv2 = torch.nn.Conv2d(32, 64, 3)
        self.dense1 = torch.nn.Linear(64 * 5 * 5, 250)
        self.dense2 = torch.nn.Linear(250, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.max_pool2d(functional.relu(self.conv1(x)), 2)
        x = functional.max_pool2d(functional.relu(self.conv2(x)), 2)
        return self.dense2(functional.relu(self.dense1(x.flatten(1))))


def datasets(args: argparse.Namespace) -> tuple[TensorDataset, TensorDataset]:
    """Let the first rank of each host find (or download) the data, then load it everywhere."""
    if hvd.local_rank() == 0:
        fashion_mnist.find(args.data_dir)
    hvd.barrier()
    directory = fashion_mnist.find(args.data_dir, download=False)
    return fashion_mnist.tensors(directory, "train", args.limit), fashion_mnist.tensors(directory, "test")


def batches(dataset: TensorDataset, batch_size: int, workers: int, shuffle: bool) -> tuple[DataLoader, DistributedSampler]:
    """Return this rank's batches. Whole batches are indexed at once: taking 64 single images costs more than the step."""
    sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=shuffle)
    loader = DataLoader(dataset, sampler=BatchSampler(sampler, batch_size, drop_last=False), batch_size=None,
                        num_workers=workers)
    return loader, sampler


def gpu_or_cpu(cpu: bool) -> torch.device:
    """Return this rank's own GPU when there is one for each rank of the host, else the CPU."""
    if cpu or torch.cuda.device_count() < hvd.local_size():
        return torch.device("cpu")
    torch.cuda.set_device(hvd.local_rank())
    return torch.device("cuda", hvd.local_rank())


def evaluate(model: Net, loader: DataLoader, samples: int) -> tuple[float, float]:
    """Return loss and accuracy over all ranks' shares of the test set."""
    model.eval()
    device = next(model.parameters()).device
    sums = torch.zeros(3)  # loss, correct, seen (the sampler pads shares to equal length)
    with torch.no_grad():
        for x, y in loader:
            output = model(x.to(device)).cpu()
            sums += torch.tensor([functional.cross_entropy(output, y, reduction="sum").item(),
                                  (output.argmax(1) == y).sum().item(), len(y)])
    loss, correct, seen = hvd.allreduce(sums, op=hvd.Sum, name="test").tolist()
    return loss / seen, correct / seen


def main() -> None:
    args = arguments()
    hvd.init()
    torch.manual_seed(args.seed)
    train_set, test_set = datasets(args)
    train_loader, train_sampler = batches(train_set, args.batch_size, args.workers, shuffle=True)
    test_loader, _ = batches(test_set, 1000, 0, shuffle=False)

    device = gpu_or_cpu(args.cpu)
    model = Net().to(device)
    # The linear scaling rule, and a warm-up from the rate of one rank (Goyal et al., "Accurate, Large Minibatch SGD", 2017).
    scale = hvd.size() * args.batch_size / (args.base_batch_size or args.batch_size)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * scale, momentum=args.momentum)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(),
                                         compression=getattr(hvd.Compression, args.compression))
    warmup_steps = max(1, round(args.warmup_epochs * len(train_loader)))
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=min(1.0, 1 / scale), total_iters=warmup_steps)

    first_epoch = 0
    if args.checkpoint and hvd.rank() == 0 and os.path.exists(args.checkpoint):
        saved = torch.load(args.checkpoint, map_location=device)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        warmup.load_state_dict(saved["warmup"])
        first_epoch = saved["epoch"]
    first_epoch = hvd.broadcast_object(first_epoch, root_rank=0)
    warmup.load_state_dict(hvd.broadcast_object(warmup.state_dict(), root_rank=0))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    accuracy = None
    for epoch in range(first_epoch + 1, args.epochs + 1):
        train_sampler.set_epoch(epoch)
        model.train()
        started, seen = time.perf_counter(), 0
        for x, y in train_loader:
            optimizer.zero_grad()
            functional.cross_entropy(model(x.to(device)), y.to(device)).backward()
            optimizer.step()
            warmup.step()
            hvd.record_step(len(y))  # for hvdrun --monitor, --scaling and --sweep
            seen += len(y) * hvd.size()
        seconds = time.perf_counter() - started
        loss, accuracy = evaluate(model, test_loader, len(test_set))
        hvd.record_metrics({"accuracy": accuracy, "loss": loss, "lr": warmup.get_last_lr()[0]}, epoch)  # for hvdrun --until
        if hvd.rank() == 0:
            print(f"epoch {epoch}: {seconds:.1f} s, {seen / seconds:.0f} images/s on {hvd.size()} ranks, "
                  f"test loss {loss:.4f}, test accuracy {accuracy:.4f}", flush=True)
            if args.checkpoint:
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                            "warmup": warmup.state_dict(), "epoch": epoch}, f"{args.checkpoint}.new")
                os.replace(f"{args.checkpoint}.new", args.checkpoint)
    if accuracy is None:  # the checkpoint had all epochs already
        loss, accuracy = evaluate(model, test_loader, len(test_set))
        if hvd.rank() == 0:
            print(f"trained {first_epoch} epochs already: test loss {loss:.4f}, test accuracy {accuracy:.4f}", flush=True)
    hvd.shutdown()
    if accuracy < args.minimum_accuracy:
        raise SystemExit(f"test accuracy {accuracy:.4f} is below {args.minimum_accuracy}")


if __name__ == "__main__":
    main()
