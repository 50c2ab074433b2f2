"""`counting.py` with a failpoint: one member fails when it passes a function of the product for the first time.

FAILPOINT=MEMBER|MODULE:NAME|WHEN|ARGUMENT|KIND, in the environment of all members:

- WHEN: `before` the function, `after` it has returned, or when it has `raised`.
- ARGUMENT: the type of one of the function's arguments; empty for any call.
- KIND: `kill`, `stop` and `notice` (signals; SIGTERM is a notice), `raise` (an exception), `exit` (os._exit(0)).

Before the file `armed` is in the folder, nothing fails. The file `fired` tells that the member has passed the point.
"""

from __future__ import annotations

import functools
import importlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

from tests.elastic.programs import counting


class Failpoint:
    """A place in the product at which this process fails, once.

    Args:
        folder: where the files `armed` and `fired` are.
        text: the environment's description, without the member.
    """

    def __init__(self, folder: Path, text: str) -> None:
        self._folder = folder
        self._target, self._when, self._argument, self._kind = text.split("|")

    def install(self) -> None:
        """Put itself around the function."""
        module, _, path = self._target.partition(":")
        owner: Any = importlib.import_module(module)
        *outer, name = path.split(".")
        for each in outer:
            owner = getattr(owner, each)
        function = getattr(owner, name)

        @functools.wraps(function)
        def passed(*args: Any, **kwargs: Any) -> Any:
            counts = not self._argument or self._argument in {type(each).__name__ for each in args}
            if counts and self._when == "before":
                self._fail()
            try:
                result = function(*args, **kwargs)
            except BaseException:
                if counts and self._when == "raised":
                    self._fail()
                raise
            if counts and self._when == "after":
                self._fail()
            return result

        setattr(owner, name, passed)

    def _fail(self) -> None:
        if not (self._folder / "armed").exists():
            return
        try:
            (self._folder / "fired").touch(exist_ok=False)
        except FileExistsError:
            return
        if self._kind == "raise":
            raise RuntimeError("a failpoint")
        if self._kind == "exit":
            os._exit(0)
        os.kill(os.getpid(), {"stop": signal.SIGSTOP, "kill": signal.SIGKILL, "notice": signal.SIGTERM}[self._kind])


if __name__ == "__main__":
    told = Path(sys.argv[1])
    failing, _, description = os.environ["FAILPOINT"].partition("|")
    if failing == os.environ["HVDLITE_MEMBER"]:
        Failpoint(told, description).install()
    counting.main(told, int(sys.argv[2]))
