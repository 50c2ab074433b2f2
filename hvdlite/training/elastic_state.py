"""The name of `hvdlite.training.elastic.state` until now: tests/groups, which is being changed elsewhere, still has it."""

from hvdlite.training.elastic.state import ObjectState

__all__ = ["ObjectState"]
