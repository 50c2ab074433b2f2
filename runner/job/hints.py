"""What to do about an error by which ranks end, where its own text does not say so."""

from __future__ import annotations

import re
import sys
from typing import Final

_HINTS: Final = (
    (r"No module named 'horovod\b", "hvdrun --horovod-compat gives scripts a package horovod that is hvdlite; or see "
                                    "hvdrun --horovod-check train.py"),
    (r"No module named 'hvdlite", "hvdlite is installed for {python}, and the ranks run another Python: start that "
                                  "one, hvdrun -np 2 {python} train.py, or activate its environment"),
    (r"No module named '(torch|tensorflow|keras|jax)'", "install it for the Python of the ranks: pip install {0}"),
)


def hints(message: str) -> list[str]:
    """Return a line for the user about an exception's message, if there is one."""
    found = ((re.search(pattern, message), hint) for pattern, hint in _HINTS)
    return [hint.format(*match.groups(), python=sys.executable) for match, hint in found if match]
