"""Time from Enter to the end of a job of two ranks that take one step, in parts: `python -m benchmarks.starts`.

hvdrun and `hvdlite_torch`, torchrun and DDP, and two processes with DDP that no launcher starts, in turns. Parts end when
the last rank has done them; medians in seconds:

    python     from Enter to the script's first line
    torch      import torch
    init       import hvdlite_torch and hvd.init(), or init_process_group("gloo")
    optimizer  a model and its optimizer, with what torch imports for it
    step       the first step
    shutdown   hvd.shutdown(), or destroy_process_group()
    end        until the command returns; most of it is the end of Python with torch
"""

from __future__ import annotations

import time

PARTS = [time.time()]  # before anything else is imported

import argparse  # noqa: E402
import itertools  # noqa: E402
import os  # noqa: E402
import statistics  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402

NAMES = ("python", "torch", "init", "optimizer", "step", "shutdown", "end", "together")


def rank(kind: str) -> None:
    """Take one step, and print when each part was done."""
    def done() -> None:
        PARTS.append(time.time())

    import torch
    done()
    if kind == "hvdlite":
        import hvdlite_torch as hvd
        hvd.init()
    else:
        torch.distributed.init_process_group("gloo")
    done()
    model = torch.nn.Linear(10, 10)
    wrapped = model if kind == "hvdlite" else torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if kind == "hvdlite":
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = hvd.DistributedOptimizer(optimizer)
    done()
    wrapped(torch.ones(4, 10)).sum().backward()
    optimizer.step()
    done()
    if kind == "hvdlite":
        hvd.shutdown()
    else:
        torch.distributed.destroy_process_group()
    done()
    sys.stdout.write(f"parts {' '.join(map(str, PARTS))}\n")  # at once: ranks share a pipe
    sys.stdout.flush()


def job(contender: str, port: int) -> list[float]:
    """Run one job; return the seconds of its parts."""
    script = ["-m", "benchmarks.starts", "--rank", "hvdlite" if contender == "hvdrun" else "gloo"]
    launchers = {"hvdrun": ["-m", "hvdlite_runner", "-np", "2", sys.executable],
                 "torchrun": ["-m", "torch.distributed.run", "--nproc-per-node", "2", f"--master-port={port}"]}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                   "WORLD_SIZE": "2"}
    entered = time.time()
    commands = [({}, launchers[contender])] if contender in launchers else [({"RANK": str(each)}, []) for each in range(2)]
    jobs = [subprocess.Popen([sys.executable, *launcher, *script], env={**environment, **own}, stdout=subprocess.PIPE,
                             text=True) for own, launcher in commands]
    lines = [line for each in jobs for line in each.communicate(timeout=600)[0].splitlines() if "parts" in line]
    ended = time.time()
    if len(lines) != 2:
        raise SystemExit(f"{contender}: {len(lines)} of 2 ranks came to the end")
    ranks = [[float(each) for each in line.split("parts")[1].split()] for line in lines]
    times = [entered, *map(max, zip(*ranks, strict=True)), ended]
    return [*(after - before for before, after in itertools.pairwise(times)), ended - entered]


def main() -> None:
    """Run the jobs in turns."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rank", choices=["hvdlite", "gloo"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        return rank(options.rank)
    from benchmarks.run import free_port

    found: dict[str, list[list[float]]] = {"hvdrun": [], "torchrun": [], "no launcher": []}
    for _ in range(options.rounds):
        for contender, jobs in found.items():
            jobs.append(job(contender, free_port()))
    print(f"{'':12}" + "".join(f"{name:>10}" for name in NAMES))
    for contender, jobs in found.items():
        print(f"{contender:12}" + "".join(f"{statistics.median(each):10.2f}" for each in zip(*jobs, strict=True)))


if __name__ == "__main__":
    main()
