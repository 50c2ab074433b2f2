"""Durable checkpoints: `hvd.save` and `hvd.load` (docs/checkpoints.md)."""

import hvdlite.api  # noqa: F401 - first: `from hvdlite import api` would load the frontend, which imports this
from hvdlite.training.checkpoints.loading import load
from hvdlite.training.checkpoints.saving import Saving, save

__all__ = ["Saving", "load", "save"]
