"""What stands for the package `horovod` itself."""

__version__ = "0.28.1+hvdlite"  # the Horovod release whose surface this is
