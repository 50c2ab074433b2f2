"""Run the benchmarks and write tables, plots and raw figures to benchmarks/results/.

    python -m benchmarks.run            everything, on 2 and 4 ranks
    python -m benchmarks.run --short    a few minutes

Ranks are started with MPI's `mpiexec` when mpi4py and one are installed, so that MPI competes; else with hvdrun.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
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


def run_on_two_hosts(script: str, ranks: int, *options: str, record: Path) -> None:
    """Run one script on two simulated hosts: halves of the ranks that have a job directory each, and no MPI."""
    hosts = Hosts((tuple(range(ranks // 2)), tuple(range(ranks // 2, ranks))))
    shared = variables(HVDLITE_SECRET=secrets.token_hex(), HVDLITE_COORDINATOR=f"127.0.0.1:{free_port()}")
    print(f"\n== {script}, {ranks} ranks on two simulated hosts, Gloo between them", flush=True)
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        places = [launch_contract.rank_environment(hosts.world(rank), (one, other)[hosts.world(rank).cross_rank])
                  for rank in range(ranks)]
        command = [sys.executable, str(HERE / f"{script}.py"), *options, "--record", str(record)]
        started = [subprocess.Popen(command, env={**shared, **place}, cwd=HERE.parent) for place in places]
        if any(process.wait() for process in started):
            raise SystemExit(f"{script} failed")


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
    parser.add_argument("--results", type=Path, default=HERE / "results")
    arguments = parser.parse_args()
    arguments.results.mkdir(parents=True, exist_ok=True)
    short = ["--short"] if arguments.short else []
    rounds = ["--rounds", "5" if arguments.short else "11"]
    long_rounds = [*rounds, "--seconds", "0.5" if arguments.short else "1"]
    plan: list[tuple[str, int, list[str]]] = [
        ("gradients", 2, rounds),
        ("training", 2, [*long_rounds, *short]),
        ("collectives", 2, [*rounds, *short]),
        ("training", 1, [*long_rounds, *short]),
        ("idle", 2, ["--idle-seconds", "10" if arguments.short else "60"]),
        ("control_scale", 1, short),
    ]
    if not arguments.short:
        plan += [("collectives", 4, rounds), ("training", 4, long_rounds)]
    for script, ranks, options in plan:
        run(script, ranks, *options, record=arguments.results / f"{script}-{ranks}.json")
    run("planes", 2, *rounds, *short, record=arguments.results / "planes-2.json")
    if not arguments.short:
        run("planes", 4, *rounds, "--job", record=arguments.results / "hierarchical_mpi-4.json",
            environment={"HVDLITE_CPU_OPERATIONS": "hierarchical", "MPIR_CVAR_NUM_CLIQUES": "2"})
        run_on_two_hosts("planes", 4, *rounds, "--job", record=arguments.results / "hierarchical_gloo-4.json")
    report.write(arguments.results)
    print(f"\nwrote {arguments.results}/README.md")


if __name__ == "__main__":
    main()
