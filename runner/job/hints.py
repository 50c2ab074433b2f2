"""The errors by which ranks end: their texts, and what to do where these do not say so."""

from __future__ import annotations

import re
import sys
from typing import Final

from hvdlite.core.launch_contract import FailureRecord

MOST_LINES: Final = 20
"""The lines of an exception's message that are repeated at the end, after its first one."""
_HINTS: Final = (
    (r"No module named 'horovod'", "hvdrun --horovod-compat gives scripts a package horovod that is hvdlite; or see "
                                   "hvdrun --horovod-check train.py"),
    (r"No module named 'horovod\.", "this package horovod has no such module; hvdrun --horovod-check train.py tells what "
                                    "hvdlite has of Horovod"),
    (r"No module named '(?:hvdlite|hvdlite_torch|hvdlite_tf)'", "hvdlite is installed for {python}, and the ranks run "
        "another Python: start that one, hvdrun -np 2 {python} train.py, or activate its environment"),
    (r"No module named 'hvdlite", "there is no such module; import hvdlite_torch (PyTorch), hvdlite_tf (TensorFlow), "
                                  "hvdlite_tf.keras (Keras 3) or hvdlite (NumPy)"),
    (r"No module named '(torch|tensorflow|keras|jax)'", "install it for the Python of the ranks: pip install {0}"),
)


def hints(message: str) -> list[str]:
    """Return a line for the user about an exception's message, the first that fits, if there is one."""
    found = ((re.search(pattern, message), hint) for pattern, hint in _HINTS)
    return [hint.format(*match.groups(), python=sys.executable) for match, hint in found if match][:1]


def rest_of_message(message: str) -> list[str]:
    """Return the lines of an exception's message after the first one, at most `MOST_LINES`."""
    more = message.splitlines()[1:]
    left_out = len(more) - MOST_LINES
    return more[:MOST_LINES] + ([f"({left_out} more lines in its traceback above)"] if left_out > 0 else [])


def printed_record(key: int, traceback: str) -> FailureRecord | None:
    """Return the record of a process that has printed a traceback, and has written none.

    None if there is none, or if more follows it: the process may have handled the exception, and ended for another reason.
    """
    lines = traceback.rpartition("Traceback (most recent call last):\n")[2].splitlines()
    error, *more = [line for line in lines if line and line[0] not in " \t"] or lines[-1:] or [""]
    kind, _, message = error.partition(": ")
    if more or not kind.replace(".", "").isidentifier():
        return None
    return FailureRecord(key, key, 0.0, kind.rpartition(".")[2], message, traceback, shown=True)
