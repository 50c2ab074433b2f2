"""The package `horovod` itself."""

import functools
from collections.abc import Sequence
from typing import Any

from hvdlite.launch import run_function

__all__ = ["__version__", "run"]

__version__ = "0.28.1+hvdlite"  # the Horovod release whose surface this is


@functools.wraps(run_function.run)
def run(*args: Any, options: Sequence[str] = (), **kwargs: Any) -> list[Any]:
    """Call a function on every rank, like `hvdlite.run`; its ranks can `import horovod`, as with `--horovod-compat`."""
    return run_function.run(*args, options=["--horovod-compat", *options], **kwargs)
