"""Elastic training, for any framework: the loop of `elastic.run`, and the states that outlive a world."""

from hvdlite.training.elastic.loop import run

__all__ = ["run"]
