"""Layers whose variables each rank keeps for itself."""

from __future__ import annotations

from typing import Any


def local_variables(layers: Any) -> list[Any]:
    """Return the trainable variables of a layer, or of a list of layers; none for None.

    Raises:
        ValueError: for an object that is not a layer, and for a layer without variables.
    """
    given = [] if layers is None else layers if isinstance(layers, (list, tuple)) else [layers]
    for layer in given:
        if not hasattr(layer, "trainable_variables"):
            raise ValueError(f"local_layers holds Keras layers, not {type(layer).__name__}")
        if not getattr(layer, "built", True):
            raise ValueError(f"layer '{layer.name}' of local_layers has no variables yet: build the model first")
    return [variable for layer in given for variable in layer.trainable_variables]
