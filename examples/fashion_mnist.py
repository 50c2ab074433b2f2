"""Fashion-MNIST as arrays: found on this machine, or downloaded once."""

from __future__ import annotations

import gzip
import os
import struct
import tempfile
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch.utils.data import TensorDataset

URL = "https://storage.googleapis.com/tensorflow/tf-keras-datasets/"
DEBIAN = Path("/usr/share/datasets/fashion-mnist")
KERAS_CACHE = Path.home() / ".keras" / "datasets" / "fashion-mnist"
CACHES = (KERAS_CACHE, Path("data/FashionMNIST/raw"), Path.home() / "data" / "FashionMNIST" / "raw")
FILES = {"train": ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"),
         "test": ("t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz")}

Images = NDArray[np.uint8]  # (n, 28, 28), 0..255
Labels = NDArray[np.uint8]  # (n,), 0..9


def find(directory: str | None = None, download: bool = True) -> Path:
    """Return the directory that holds the four files.

    Looks in `directory` when it is given; otherwise in the Debian package's directory, then in the usual caches, and then
    downloads into Keras' cache.

    Raises:
        FileNotFoundError: naming every place that was tried.
    """
    places = [Path(directory)] if directory else [DEBIAN, *CACHES]
    names = [name for pair in FILES.values() for name in pair]
    for place in places:
        if all((place / name).exists() for name in names):
            return place
    problem = "downloading was not asked for"
    if download and not directory:
        try:
            for name in names:
                _download(name)
            return KERAS_CACHE
        except OSError as error:
            problem = f"downloading from {URL} failed: {error}"
    raise FileNotFoundError(
        f"Fashion-MNIST is not in {', '.join(map(str, places))}; {problem}. Install it (Debian: apt-get install "
        f"dataset-fashion-mnist), or put {', '.join(names)} into a directory and pass --data-dir")


def load(directory: Path, part: str) -> tuple[Images, Labels]:
    """Return the images and labels of "train" (60,000) or "test" (10,000).

    Raises:
        ValueError: when a file is not what its name says.
    """
    images, labels = (_read(directory / name) for name in FILES[part])
    if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels):
        raise ValueError(f"{directory}: {part} has images of shape {images.shape} and labels of shape {labels.shape}")
    return images, labels


def tensors(directory: Path, part: str, limit: int | None = None) -> TensorDataset:
    """Return `load`'s images and labels, or the first `limit` of them, for torch.

    Images are float32 of shape (n, 1, 28, 28), with about mean 0 and variance 1; labels are int64.
    """
    import torch
    images, labels = load(directory, part)
    pixels = torch.from_numpy(images[:limit].copy()).unsqueeze(1).float().div_(255).sub_(0.2860).div_(0.3530)
    return torch.utils.data.TensorDataset(pixels, torch.from_numpy(labels[:limit].copy()).long())


def _read(path: Path) -> NDArray[np.uint8]:
    """Read an IDX file (its format: http://yann.lecun.com/exdb/mnist): magic 0x000008dd, dimensions, bytes."""
    with gzip.open(path) as file:
        zero, kind, dimensions = struct.unpack(">HBB", file.read(4))
        if zero != 0 or kind != 8:
            raise ValueError(f"{path} is not an IDX file of bytes")
        shape = struct.unpack(f">{dimensions}I", file.read(4 * dimensions))
        values = np.frombuffer(file.read(), np.uint8)
    if values.size != np.prod(shape):
        raise ValueError(f"{path} says it holds {shape}, but has {values.size} values")
    return values.reshape(shape)


def _download(name: str) -> None:
    """Fetch one file into the cache; it appears there whole or not at all."""
    if (KERAS_CACHE / name).exists():
        return
    KERAS_CACHE.mkdir(parents=True, exist_ok=True)
    with urllib.request.urlopen(URL + name, timeout=60) as answer, \
            tempfile.NamedTemporaryFile(dir=KERAS_CACHE, delete=False) as file:
        file.write(answer.read())
    _read(Path(file.name))
    os.replace(file.name, KERAS_CACHE / name)
