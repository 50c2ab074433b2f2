"""What tests of several rooms need."""

from __future__ import annotations

import gzip
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import fashion_mnist


def write_idx(path: Path, values: np.ndarray) -> None:
    header = struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape)
    path.write_bytes(gzip.compress(header + values.astype(np.uint8).tobytes()))


TOGETHER = ("tests/runner/test_hosts.py", "tests/runner/test_schedulers.py", "tests/launch/test_ray.py",
            "tests/launch/test_spark.py", "tests/planes/test_mpi.py", "tests/planes/test_nccl_kernels.py",
            "tests/tf/test_keras.py", "tests/tf/test_mirrored.py")
"""Files whose tests one process runs, one after the other: they share what takes long to make (a network, a Slurm, compiled
kernels, the imports of tests/warm.py) or leave no processor to each other (ranks that spin in MPI).

All other tests run in any process beside any other one (pytest-xdist), and so share nothing: ports are free ones, names
are those of the whole path of a directory. A file with a fixture for the whole module belongs in this list.
"""

WITH_TENSORFLOW = ("tests/house/test_house.py", "tests/house/test_site.py", "tests/tf/test_gpu.py")
"""Files whose tests import TensorFlow into the process that runs them: one process runs all of them."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Deal tests out one by one, but for files that stay together.

    `--dist loadgroup` is meant for this, but pytest-xdist 3.8 loses its groups under pytest 9.2, without a word.
    """
    if config.getvalue("dist") != "load":  # what `-n` means by itself
        return None
    from xdist.scheduler import LoadScopeScheduling

    class OneByOne(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "with TensorFlow" if file in WITH_TENSORFLOW else file if file in TOGETHER else nodeid
    return OneByOne(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what is slow, so that no process works on it alone at the end.

    Tests whose ranks begin with the same frameworks follow each other: an importer (tests/warm.py) takes seconds to start.
    """
    def order(item: pytest.Item) -> tuple[bool, str]:
        parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        return item.get_closest_marker("slow") is None, str(parameters.get("backend", ""))
    items.sort(key=order)


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
