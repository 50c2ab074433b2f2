"""A program that runs an example for torch.distributed as hvdrun would start it."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from hvdlite.core import launch_contract

EXAMPLES = Path(__file__).resolve().parent.parent.parent.parent / "examples"
VARIABLES = {"RANK": launch_contract.RANK, "WORLD_SIZE": launch_contract.SIZE, "LOCAL_RANK": launch_contract.LOCAL_RANK,
             "LOCAL_WORLD_SIZE": launch_contract.LOCAL_SIZE}
"""Torch's names of variables that a rank has."""


def run_example(script: str, port: int, *arguments: str) -> None:
    os.environ.update({name: os.environ[ours] for name, ours in VARIABLES.items()},
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    sys.path.insert(0, str(EXAMPLES))
    sys.argv = [str(EXAMPLES / script), *arguments]
    runpy.run_path(sys.argv[0], run_name="__main__")
