"""A program that runs a script for Horovod in this process."""

from __future__ import annotations

import runpy
import sys


def run_for_horovod(script: str, *arguments: str) -> None:
    """Run a script as `hvdrun --horovod-compat` does."""
    import hvdlite.horovod_compat  # noqa: F401 from now on, horovod is hvdlite
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")
