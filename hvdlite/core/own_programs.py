"""Command lines for Python programs of our own, which import nothing from the working directory: others may write to it.

`python -m` and `python -c` search it first. Python's own option against that, `-P`, needs Python 3.11, and `-I` also ignores
PYTHONPATH, by which hvdlite itself may be found.
"""

from __future__ import annotations

import sys
from typing import Final

NOT_HERE: Final = "import sys; sys.path[:] = [path for path in sys.path if path]; "
"""The beginning of a program for `python -c`: it removes the working directory ("") from the search path.

The entries of PYTHONPATH stay: Python has made them absolute.
"""


def module_command(module: str, python: str = sys.executable) -> list[str]:
    """Return the beginning of a command line that does what `python -m module` does, without the working directory."""
    return [python, "-c", NOT_HERE + f"import runpy; runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"]
