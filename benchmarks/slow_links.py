"""Speed of workers that train by themselves (`outer=`) over a slow link, beside synchronous training.

    python benchmarks/slow_links.py --hosts 2 --rate 100mbit   25 million parameters, on network namespaces (root)

With torchft in Python's path its DiLoCo is a peer, for one rank a host. It has no int8 without Triton.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import hvdlite_torch as hvd

WIDTH = 2048
"""Of the model for speed: 25 million parameters."""
COUNTER = Path("/sys/class/net/bench0/statistics/tx_bytes")
"""Bytes that a host has sent to the others."""


def wide() -> Any:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(784, WIDTH), *(torch.nn.Linear(WIDTH, WIDTH) for _ in range(6)), torch.nn.Linear(WIDTH, 10)]
    return torch.nn.Sequential(*[each for layer in layers for each in (layer, torch.nn.ReLU())][:-1])


def speeds(steps: int, every: int) -> list[dict[str, Any]]:
    """Return steps per second and bytes per step of this host, alone, synchronously, and as a worker."""
    settings = {"alone": (hvd.LocalSGD(10**9), steps), "synchronous": (None, 3), "outer": (hvd.DiLoCo(every), steps)}
    rows = []
    for name, (outer, count) in settings.items():
        model = wide()
        optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3), model.named_parameters(),
                                                  outer=outer)
        rows.append({"case": name, **speed(model, optimizer, count)})
    if importlib.util.find_spec("torchft") and hvd.local_size() == 1:
        model = wide()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        with torchft_diloco(model, optimizer, every):
            rows.append({"case": "torchft", **speed(model, optimizer, steps)})
    return rows


def speed(model: Any, optimizer: Any, count: int) -> dict[str, float]:
    def step() -> None:
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
    found = {"steps_per_second": count / seconds, "bytes_per_step": (_sent() - sent) / count}
    hvd.allreduce(torch.zeros(1))
    return found


@contextlib.contextmanager
def torchft_diloco(model: torch.nn.Sequential, optimizer: torch.optim.Optimizer, every: int) -> Iterator[None]:
    """Train as a replica group of one rank, with 4 fragments and the longest delay, and float32 on the wire."""
    from torch.distributed import TCPStore
    from torchft import Manager, ProcessGroupGloo
    from torchft.coordination import LighthouseServer
    from torchft.local_sgd import DiLoCo

    host, first = f"10.78.0.{hvd.cross_rank() + 1}", "10.78.0.1"
    server = LighthouseServer(bind=f"{first}:29510", min_replicas=hvd.size()) if hvd.rank() == 0 else None
    hvd.allreduce(torch.zeros(1))
    store = TCPStore(host, 29511, is_master=True, wait_for_workers=False)
    manager = Manager(pg=ProcessGroupGloo(), load_state_dict=None, state_dict=None, min_replica_size=hvd.size(),
                      use_async_quorum=False, rank=0, world_size=1, store_addr=host, store_port=29511, hostname=host,
                      lighthouse_addr=f"http://{first}:29510", replica_id=f"host{hvd.rank()}", init_sync=False)
    sizes = itertools.pairwise(round(part * len(model) / 4) for part in range(5))
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    with DiLoCo(manager, [model[begin:end] for begin, end in sizes], optimizer, outer, sync_every=every,
                fragment_sync_delay=every // 4 - 1, pin_memory=False):
        yield
    manager.shutdown(wait=False)
    del store
    if server is not None:
        server.shutdown()


def _sent() -> int:
    return int(COUNTER.read_text(encoding="ascii")) if COUNTER.exists() else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=48)
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
    rows = speeds(arguments.steps, arguments.every)
    if hvd.rank() == 0:
        print(json.dumps(rows, indent=1))
        if arguments.record:
            arguments.record.write_text(json.dumps({"rows": rows}), encoding="utf-8")


if __name__ == "__main__":
    main()
