"""Run the benchmarks and write tables, plots and raw figures to benchmarks/results/.

    python -m benchmarks.run            everything, on 2 and 4 ranks
    python -m benchmarks.run --short    a few minutes
    python -m benchmarks.run --hogs 2   collectives alone, quiet and beside that many CPU hogs

Ranks are started with MPI's `mpiexec` when mpi4py and one are installed, so that MPI competes; else with hvdrun.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks import report
from hvdlite.core import launch_contract
from hvdlite.core.world import Hosts

HERE = Path(__file__).resolve().parent


def launcher(ranks: int) -> list[str]:
    """Return the command that starts `ranks` ranks of what follows it."""
    if ranks == 1:
        return []
    mpiexec = Path(sys.executable).parent / "mpiexec"
    found = str(mpiexec) if mpiexec.exists() else shutil.which("mpiexec")
    if found and importlib.util.find_spec("mpi4py"):
        return [found, "-n", str(ranks)]
    return [sys.executable, "-m", "hvdlite_runner.cli", "-np", str(ranks)]


def free_port() -> int:
    """Return a port of this host at which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def variables(**more: str) -> dict[str, str]:
    """Return the environment of a run."""
    return {**os.environ, **more, "OMP_NUM_THREADS": "1", "BENCH_PORT": str(free_port()),
            "PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])}


def run_on_hosts(count: int, script: str, ranks: int, *options: str, record: Path, rate: str = "1gbit",
                 environment: Mapping[str, str] | None = None) -> None:
    """Run one script on hosts of equally many ranks: network namespaces with wires of that rate, or any. Needs root.

    Where MPI's launcher and mpi4py are installed, MPICH competes over TCP, and knows which ranks share a host.
    """
    each = ranks // count
    hosts = Hosts(tuple(tuple(range(first, first + each)) for first in range(0, ranks, each)))
    print(f"\n== {script}, {ranks} ranks on {count} hosts, {rate or 'no limit'} between them", flush=True)
    shared = variables(HVDLITE_SECRET=secrets.token_hex(), HVDLITE_COORDINATOR=f"10.78.0.1:{free_port()}",
                       BENCH_HOST="10.78.0.1", GLOO_SOCKET_IFNAME="bench0", MPIR_CVAR_NUM_CLIQUES=str(count),
                       MPIR_CVAR_CLIQUES_BY_BLOCK="1", MPIR_CVAR_CH4_NETMOD="ofi", FI_PROVIDER="tcp", FI_TCP_IFACE="bench0",
                       **(environment or {}))
    command = [sys.executable, str(HERE / f"{script}.py"), *options, "--record", str(record)]
    mpiexec = launcher(ranks)[0]
    with contextlib.ExitStack() as stack:
        places = [stack.enter_context(tempfile.TemporaryDirectory()) for _ in range(count)]
        namespaces = stack.enter_context(hosts_with_wires(count, rate))
        started = []
        for rank in range(ranks):
            world = hosts.world(rank)
            place = launch_contract.rank_environment(world, places[world.cross_rank])
            inside = ["ip", "netns", "exec", namespaces[world.cross_rank], *command]
            started.append(["env", *(f"{name}={value}" for name, value in place.items()), *inside])
        if Path(mpiexec).name == "mpiexec":
            several = itertools.chain.from_iterable([":", "-n", "1", *each] for each in started)
            started = [[mpiexec, *itertools.islice(several, 1, None)]]
        processes = [subprocess.Popen(each, env=shared, cwd=HERE.parent) for each in started]
        if any([process.wait() for process in processes]):
            raise SystemExit(f"{script} failed")


@contextlib.contextmanager
def hosts_with_wires(count: int, rate: str) -> Iterator[list[str]]:
    """Make network namespaces, 10.78.0.1, .2, ..., on one switch, and remove them afterwards."""
    switch = f"bench{os.getpid()}"
    names = [f"{switch}{letter}" for letter in "abcdefgh"[:count]]

    def ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True)

    try:
        ip("netns", "add", switch)
        ip("-n", switch, "link", "add", "switch", "type", "bridge")
        ip("-n", switch, "link", "set", "switch", "up")
        for number, name in enumerate(names, 1):
            ip("netns", "add", name)
            ip("link", "add", "bench0", "netns", name, "type", "veth", "peer", "name", f"port{number}", "netns", switch)
            ip("-n", switch, "link", "set", f"port{number}", "master", "switch", "up")
            ip("-n", name, "addr", "add", f"10.78.0.{number}/24", "dev", "bench0")
            ip("-n", name, "link", "set", "bench0", "up")
            ip("-n", name, "link", "set", "lo", "up")
            for inside, device in ((name, "bench0"), (switch, f"port{number}")) if rate else ():
                subprocess.run(["tc", "-n", inside, "qdisc", "add", "dev", device, "root", "tbf", "rate", rate, "burst",
                                "256kb", "latency", "50ms"], check=True)
        yield names
    finally:
        for name in [*names, switch]:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def run(script: str, ranks: int, *options: str, record: Path,
        environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Run one script on `ranks` ranks and return what it recorded."""
    command = [*launcher(ranks), sys.executable, str(HERE / f"{script}.py"), *options, "--record", str(record)]
    print(f"\n== {script}, {ranks} rank{'s' * (ranks > 1)}", flush=True)
    subprocess.run(command, check=True, env=variables(**(environment or {})), cwd=HERE.parent)
    return json.loads(record.read_text(encoding="utf-8"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="2 ranks, fewer points, fewer rounds")
    parser.add_argument("--hogs", type=int, default=0, help="only collectives: quiet, and beside so many CPU hogs")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    arguments = parser.parse_args()
    arguments.results.mkdir(parents=True, exist_ok=True)
    short = ["--short"] if arguments.short else []
    rounds = ["--rounds", "5" if arguments.short else "11"]
    if arguments.hogs:
        for ranks in (2, 4):
            for hogs in (0, arguments.hogs):
                run("collectives", ranks, *rounds, *short, "--hogs", str(hogs),
                    record=arguments.results / f"busy-{ranks}-{hogs}.json")
        return
    long_rounds = [*rounds, "--seconds", "0.5" if arguments.short else "1"]
    plan: list[tuple[str, int, list[str]]] = [
        ("gradients", 2, rounds),
        ("small_gradients", 2, [*rounds, *short]),
        ("training", 2, [*long_rounds, *short]),
        ("hooks", 2, [*long_rounds, *short]),
        ("ledger", 2, [*long_rounds, *short]),
        ("sharded", 2, rounds),
        ("torch_distributed", 2, [*rounds, *short]),
        ("collectives", 2, [*rounds, *short]),
        ("latency", 2, [*rounds, *short]),
        ("latency", 4, [*rounds, "--short"]),
        ("batch_norm", 2, [*rounds, *short]),
        ("training", 1, [*long_rounds, *short]),
        ("idle", 2, ["--idle-seconds", "10" if arguments.short else "60"]),
        ("control_scale", 1, short),
    ]
    if not arguments.short:
        plan += [("collectives", 4, rounds), ("training", 4, long_rounds), ("torch_distributed", 4, rounds)]
    for script, ranks, options in plan:
        run(script, ranks, *options, record=arguments.results / f"{script}-{ranks}.json")
    if importlib.util.find_spec("keras") and importlib.util.find_spec("tensorflow"):
        for backend in filter(importlib.util.find_spec, ("tensorflow", "torch", "jax")):
            run("keras_fit", 2, *long_rounds, record=arguments.results / f"keras_{backend}-2.json",
                environment={"KERAS_BACKEND": backend, "TF_NUM_INTRAOP_THREADS": "1"})
        if importlib.util.find_spec("jax"):
            run("jax_gradients", 2, *rounds, record=arguments.results / "jax_gradients-2.json")
    run("planes", 2, *rounds, *short, record=arguments.results / "planes-2.json")
    if not arguments.short:
        for plane in ("mpi", "hierarchical"):
            run("planes", 4, *rounds, "--job", record=arguments.results / f"two_hosts_mpi_{plane}-4.json",
                environment={"HVDLITE_CPU_OPERATIONS": plane, "MPIR_CVAR_NUM_CLIQUES": "2"})
        if os.geteuid() == 0 and shutil.which("tc"):
            for plane in ("gloo", "hierarchical"):
                run_on_hosts(2, "planes", 4, *rounds, "--job", record=arguments.results / f"two_hosts_gloo_{plane}-4.json",
                                 environment={"HVDLITE_CPU_OPERATIONS": plane})
    report.write(arguments.results)
    print(f"\nwrote {arguments.results}/README.md")


if __name__ == "__main__":
    main()
