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
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks import report

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


def run(script: str, ranks: int, *options: str, record: Path) -> dict[str, Any]:
    """Run one script on `ranks` ranks and return what it recorded."""
    with socket.socket() as probe:  # a port for torch.distributed
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "BENCH_PORT": str(port),
                   "PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])}
    command = [*launcher(ranks), sys.executable, str(HERE / f"{script}.py"), *options, "--record", str(record)]
    print(f"\n== {script}, {ranks} rank{'s' * (ranks > 1)}", flush=True)
    subprocess.run(command, check=True, env=environment, cwd=HERE.parent)
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
    report.write(arguments.results)
    print(f"\nwrote {arguments.results}/README.md")


if __name__ == "__main__":
    main()
