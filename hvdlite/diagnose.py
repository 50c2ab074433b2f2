"""The versions, planes and operations that are available here: `python -m hvdlite.diagnose`, or `hvdrun --check-build`.

`--markdown knobs` and `--markdown operations` print the tables of the documentation.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from hvdlite._version import __version__
from hvdlite.bootstrap.environments import read_launch_info
from hvdlite.core.config import Config, environment_name
from hvdlite.core.errors import LaunchError
from hvdlite.planes.nccl import library
from hvdlite.planes.nccl.bandwidth import measure
from hvdlite.planes.selection import PLANES, operations

FRAMEWORKS = {"PyTorch": ("torch", "hvdlite_torch"), "TensorFlow": ("tensorflow", "hvdlite_tf"),
              "Keras": ("keras", "hvdlite_tf.keras")}
LIBRARIES = (("MPI", "mpi4py"), ("NCCL", "cupy-cuda12x"), ("NCCL", "cupy-cuda13x"), ("NCCL", "nvidia-nccl-cu12"),
             ("NCCL", "nvidia-nccl-cu13"), ("CUDA", "nvidia-cuda-runtime-cu12"), ("CUDA", "nvidia-cuda-runtime"))


def build(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return versions, planes, operations and launch environment; only strings, lists and dictionaries."""
    versions = {name: _version(package) for name, (package, _) in FRAMEWORKS.items()}
    versions |= {f"{name} ({package})": _version(package) for name, package in LIBRARIES}
    return {"hvdlite": __version__, "python": platform.python_version(), "platform": platform.platform(),
            "installed": {name: version for name, version in versions.items() if version},
            "planes": {plane.name: {"device": plane.device, "where": plane.where, "missing": plane.unavailable_reason()}
                       for plane in PLANES},
            "operations": dict(operations()), "environment": _environment(environ)}


def _environment(environ: Mapping[str, str]) -> str:
    """Say whose variables `init()` would go by here."""
    try:
        info = read_launch_info(environ, os.getppid())
    except LaunchError as error:
        return str(error)
    where = f"rank {info.world.rank} of {info.world.size}"
    return "none: a script runs alone, as size 1" if info.environment == "none" else f"{info.environment}, {where}"


def _version(package: str) -> str:
    for name in (package, f"{package}-cpu"):  # TensorFlow's smaller build has a name of its own
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return ""


def text(facts: dict[str, Any], *, with_operations: bool) -> str:
    """Return what `build` found, for people."""
    lines = [f"hvdlite {facts['hvdlite']}, Python {facts['python']}, {facts['platform']}", "", "Installed:"]
    lines += [f"    [{'X' if name in facts['installed'] else ' '}] {name} {facts['installed'].get(name, '')}".rstrip()
              for name in FRAMEWORKS]
    lines += ["", f"Launch environment: {facts['environment']}"]
    lines += ["", "Data planes:"]
    for name, plane in facts["planes"].items():
        state = "X" if not plane["missing"] else " "
        lines.append(f"    [{state}] {name} ({plane['device']}): {plane['missing'] or plane['where']}")
    if not with_operations:
        return "\n".join([*lines, "", "Operations by plane and dtype: --verbose"])
    lines += ["", "Operations, and the dtypes that work:"]
    width = max(map(len, facts["operations"]))
    for name, cells in facts["operations"].items():
        lines.append(f"    {name:<{width}}  " + "; ".join(f"{plane}: {cell}" for plane, cell in cells.items()))
    return "\n".join(lines)


def operations_table() -> str:
    """Return the table of operations, in Markdown."""
    names = [plane.name for plane in PLANES]
    head = ["| operation | " + " | ".join(f"{plane.name} ({plane.device})" for plane in PLANES) + " |",
            "|---|" + "---|" * len(names)]
    return "\n".join(head + [f"| {name} | " + " | ".join(cells[plane] for plane in names) + " |"
                             for name, cells in operations()])


def knobs_table() -> str:
    """Return the table of knobs, in Markdown."""
    rows = ["| variable | Horovod's names | default | meaning |", "|---|---|---|---|"]
    for field in dataclasses.fields(Config):
        aliases = ", ".join(f"`HOROVOD_{alias}`" for alias in field.metadata["horovod"])
        rows.append(f"| `{environment_name(field.name)}` | {aliases} | {_shown(field.default)} | {field.metadata['help']} |")
    return "\n".join(rows)


def _shown(default: object) -> str:
    """Return a default as one would write it."""
    if isinstance(default, bool):
        return str(int(default))
    if isinstance(default, int) and default >= 1024:
        whole = default % 1024 == 0
        return f"{default >> 20}M" if default % (1 << 20) == 0 else f"{default >> 10}K" if whole else str(default)
    return f"{default:g}" if isinstance(default, float) else str(default)


TABLES = {"knobs": knobs_table, "operations": operations_table}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser("python -m hvdlite.diagnose", description="Say what is installed here and what works.")
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument("--verbose", action="store_true", help="also which dtypes each operation takes on each plane")
    parser.add_argument("--markdown", choices=TABLES, help="print a table of the documentation")
    parser.add_argument("--bandwidth", action="store_true", help="measure copies between GPUs, and print JSON")
    options = parser.parse_args(arguments)
    if options.markdown:
        print(TABLES[options.markdown]())
    elif options.bandwidth:
        print(json.dumps(measure(library.load(os.environ).cuda.runtime)))
    else:
        facts = build(os.environ)
        print(json.dumps(facts, indent=1) if options.json else text(facts, with_operations=options.verbose))
    return 0


if __name__ == "__main__":
    sys.exit(main())
