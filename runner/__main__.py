"""The command `hvdrun`: until the job begins, Ctrl-C ends it without a traceback, also while modules are imported."""

import signal
import sys


def main() -> int:
    """Run the command line; return the exit code."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from hvdlite_runner.cli import main as run  # imports much
    return run()


if __name__ == "__main__":
    sys.exit(main())
