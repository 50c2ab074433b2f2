"""What tests of several rooms need."""

from __future__ import annotations

import gzip
import struct
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import fashion_mnist


def write_idx(path: Path, values: np.ndarray) -> None:
    header = struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape)
    path.write_bytes(gzip.compress(header + values.astype(np.uint8).tobytes()))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with groups and with what is slow, so that no test process works on it alone at the end.

    Tests run in several processes, each test in any of them (pytest-xdist, `--dist loadgroup`). Those that share what takes
    long to make, and lies in a fixture of their module or in tests/warm.py, are an `xdist_group`: one process runs them,
    one after the other. Nothing else may be shared: ports are free ones, directories temporary.
    """
    items.sort(key=lambda item: not (item.get_closest_marker("xdist_group") or item.get_closest_marker("slow")))


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Ten classes that differ in which row is bright: easy to learn."""
    generator = np.random.default_rng(0)
    for part, count in (("train", 640), ("test", 200)):
        labels = generator.integers(0, 10, count)
        images = generator.integers(0, 60, (count, 28, 28))
        images[np.arange(count), 2 * labels] = 255
        for name, values in zip(fashion_mnist.FILES[part], (images, labels), strict=True):
            write_idx(tmp_path / name, values)
    return tmp_path
