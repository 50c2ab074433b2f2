"""The versions of TensorFlow and Keras that this package supports; importing it with older ones is an error."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable, Mapping

OLDEST = {"keras": (3, 8), "tensorflow": (2, 16), "tensorflow-cpu": (2, 16)}
"""The oldest versions. Keras before 3.8 scales losses differently in a strategy; TensorFlow before 2.16 contains Keras 2."""
OLDEST_JAX = {"jax": (0, 4, 36)}
"""The oldest version as Keras' backend. JAX before it differentiates the callbacks that count samples in a loss."""


def check_installed(version_of: Callable[[str], str] = importlib.metadata.version,
                    wanted: Mapping[str, tuple[int, ...]] = OLDEST) -> None:
    """Raise an error for versions with which training would be wrong; ignore distributions that are not installed.

    Args:
        version_of: returns the version of an installed distribution, or raises `PackageNotFoundError`.
        wanted: the oldest version of each distribution.

    Raises:
        ImportError: for an older version.
    """
    for name, oldest in wanted.items():
        try:
            version = version_of(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if tuple(int(number) for number in re.findall(r"\d+", version)[:len(oldest)]) < oldest:
            raise ImportError(f"hvdlite_tf needs {name} {'.'.join(map(str, oldest))} or newer, and {version} is installed: "
                              f"pip install -U {name}")
