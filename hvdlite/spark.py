"""`hvdlite.spark.run`: a function on every rank of a job whose processes are the tasks of a Spark barrier stage."""

from hvdlite.launch.spark import run

__all__ = ["run"]
