"""Elastic training with NumPy and CuPy arrays: `hvd.elastic.run` and its states; see docs/elastic.md."""

from hvdlite.core.errors import HorovodInternalError, HostsUpdatedInterrupt
from hvdlite.training.elastic import run
from hvdlite.training.elastic.state import ObjectState, State

__all__ = ["HorovodInternalError", "HostsUpdatedInterrupt", "ObjectState", "State", "run"]
