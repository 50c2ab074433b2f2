"""Checks of a `gpu_check` that end in every way: `python -m tests.house.programs.ending_checks NAME FILE`."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
from pathlib import Path

from benchmarks.gpu_sheet import Sheet


def main() -> None:
    faulthandler.register(signal.SIGUSR2)
    name, sheet = sys.argv[1], Sheet(Path(sys.argv[2]))
    sheet.add("rank", int(os.environ.get("HVDLITE_RANK", 0)))
    if name == "good":
        return
    if name == "under":
        sheet.add("variable", os.environ["CHECKED"])
    elif name == "under what is unsupported":
        print("========= Error: Device not supported")
        sys.exit(1)
    elif name == "part fails":
        with sheet.part("division"):
            sheet.add("impossible", 1 / 0)
        sys.exit(1)
    elif name == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    elif name == "one hangs" and os.environ["HVDLITE_RANK"] == "0":
        sys.exit(3)
    else:
        threading.Event().wait()


if __name__ == "__main__":
    main()
