"""The command `hvdrun`: from `main` on until the job begins, Ctrl-C ends it without a traceback, also while modules are
imported, and SIGUSR1 and SIGUSR2 do nothing. While Python itself starts, signals do what they do to any Python.
"""

import signal
import sys


def main() -> int:
    """Run the command line; return the exit code."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    for signum in (signal.SIGUSR1, signal.SIGUSR2):  # for ranks, which there are none of yet
        if signal.getsignal(signum) is signal.SIG_DFL:
            signal.signal(signum, lambda number, frame: None)
    from hvdlite_runner.cli import main as run  # imports much
    return run()


if __name__ == "__main__":
    sys.exit(main())
