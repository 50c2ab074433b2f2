"""Workers that train by themselves (`outer=`), beside synchronous training: losses, or speed over a slow link.

    hvdrun -np 2 python benchmarks/slow_links.py --losses      Fashion-MNIST, each rank a worker, equal samples
    python benchmarks/slow_links.py --hosts 2 --rate 100mbit   25 million parameters, on network namespaces (root)
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import hvdlite_torch as hvd
from examples import fashion_mnist

WIDTH = 2048
"""Of the model for speed: 25 million parameters."""
COUNTER = Path("/sys/class/net/bench0/statistics/tx_bytes")
"""Bytes that a host has sent to the others."""
SEEDS = (1, 2, 3)


def wide() -> Any:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(784, WIDTH), *(torch.nn.Linear(WIDTH, WIDTH) for _ in range(6)), torch.nn.Linear(WIDTH, 10)]
    return torch.nn.Sequential(*[each for layer in layers for each in (layer, torch.nn.ReLU())][:-1])


def small(seed: int) -> Any:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 16, 3, stride=2), torch.nn.ReLU(), torch.nn.Conv2d(16, 32, 3, stride=2), torch.nn.ReLU(),
        torch.nn.Flatten(), torch.nn.Linear(1152, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))


def speeds(steps: int, every: int) -> list[dict[str, Any]]:
    """Return steps per second and bytes per step of this host, alone, synchronously, and as a worker."""
    settings = {"alone": (hvd.LocalSGD(10**9), steps), "synchronous": (None, 3), "outer": (hvd.DiLoCo(every), steps)}
    rows = []
    for name, (outer, count) in settings.items():
        model = wide()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3), model.named_parameters(),
                                             outer=outer)

        def step(model: Any = model, optimizer: Any = optimizer) -> None:
            optimizer.zero_grad()
            model(torch.randn(64, 784)).square().mean().backward()
            optimizer.step()

        for _ in range(2):
            step()
        hvd.allreduce(torch.zeros(1))
        sent, begun = _sent(), time.perf_counter()
        for _ in range(count):
            step()
        seconds = time.perf_counter() - begun
        rows.append({"case": name, "steps_per_second": count / seconds, "bytes_per_step": (_sent() - sent) / count})
        hvd.allreduce(torch.zeros(1))
    return rows


def _sent() -> int:
    return int(COUNTER.read_text(encoding="ascii")) if COUNTER.exists() else 0


def losses(epochs: int) -> list[dict[str, Any]]:
    """Return the test losses of each way to train, by seed; of the global weights, after as many samples."""
    ways: dict[str, Any] = {"synchronous": None, "LocalSGD(10)": hvd.LocalSGD(10, workers="rank")}
    for every in (10, 50, 100, 500):
        for wire in ("int8", None) if every < 100 else ("int8",):
            ways[f"DiLoCo({every}, wire={wire})"] = hvd.DiLoCo(every, workers="rank", wire=wire)
    data = fashion_mnist.find(download=False)
    (images, labels), (test, truth) = (fashion_mnist.tensors(data, part).tensors for part in ("train", "test"))
    rows = []
    for name, outer in ways.items():
        found = []
        for seed in SEEDS:
            model = small(seed)
            optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
                                                      model.named_parameters(), outer=outer)
            order = torch.Generator().manual_seed(seed)
            for _ in range(epochs):
                for indices in torch.randperm(len(images), generator=order).split(32 * hvd.size()):
                    own = indices.chunk(hvd.size())[hvd.rank()] if len(indices) == 32 * hvd.size() else None
                    if own is None:
                        continue
                    optimizer.zero_grad()
                    torch.nn.functional.cross_entropy(model(images[own]), labels[own]).backward()
                    optimizer.step()
            if outer is not None:
                optimizer.synchronize_outer(model)
            with torch.no_grad():
                found.append(float(torch.nn.functional.cross_entropy(model(test), truth)))
        rows.append({"case": name, "losses": found, "median": statistics.median(found)})
        if hvd.rank() == 0:
            print(f"{name:>24}: {', '.join(f'{each:.4f}' for each in found)}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--losses", action="store_true")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--hosts", type=int, default=0, help="start ranks on so many network namespaces")
    parser.add_argument("--ranks", type=int, default=1, help="of each of them")
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--record", type=Path)
    arguments = parser.parse_args()
    if arguments.hosts:
        from benchmarks.run import run_on_hosts
        run_on_hosts(arguments.hosts, "slow_links", arguments.hosts * arguments.ranks, "--steps", str(arguments.steps),
                     "--every", str(arguments.every), record=arguments.record or Path("/tmp/slow_links.json"),
                     rate=arguments.rate)
        return
    os.environ.pop("PMI_SIZE", None)  # of mpiexec, which starts the ranks of namespaces
    hvd.init()
    torch.set_num_threads(1)
    rows = losses(arguments.epochs) if arguments.losses else speeds(arguments.steps, arguments.every)
    if hvd.rank() == 0:
        print(json.dumps(rows, indent=1))
        if arguments.record:
            arguments.record.write_text(json.dumps({"rows": rows}), encoding="utf-8")


if __name__ == "__main__":
    main()
