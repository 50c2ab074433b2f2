"""The package `horovod` itself."""

from hvdlite.launch.run_function import run

__all__ = ["__version__", "run"]

__version__ = "0.28.1+hvdlite"  # the Horovod release whose surface this is
