"""Ranks that look for the job's key after `init()`."""

from __future__ import annotations

import os
import subprocess
import sys

import hvdlite as hvd


def key_in_environment() -> list[str]:
    """Return where the key is, after each of two `init()`."""
    key = os.environ["HVDLITE_SECRET"]
    found = []
    for _ in range(2):
        hvd.init()
        with open("/proc/self/environ", encoding="utf-8") as file:
            places = {"os.environ": str(dict(os.environ)), "/proc": file.read(),
                      "a child": subprocess.run([sys.executable, "-S", "-c", "import os; print(os.environ)"],
                                                capture_output=True, text=True, check=True).stdout}
        found += [place for place, content in places.items() if key in content]
        hvd.shutdown()
    return found
