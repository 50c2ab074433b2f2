"""The least that a training on several ranks needs, with no helper: Fashion-MNIST, with Keras on TensorFlow, torch or JAX.

    hvdrun -np 2 python examples/keras_minimal.py [FOLDER OF THE FOUR .gz FILES]
"""

import gzip
import sys
import urllib.request
from pathlib import Path

import keras
import numpy as np

import hvdlite_tf.keras as hvd

FOLDERS = [*map(Path, sys.argv[1:]), Path("/usr/share/datasets/fashion-mnist"), Path("data")]
FOLDER = next((folder for folder in FOLDERS if folder.exists()), FOLDERS[-1])


def read(name: str, header: int) -> np.ndarray:
    """Return the bytes of a file after its header; the first rank of each host downloads a file that is missing."""
    if hvd.local_rank() == 0 and not (FOLDER / name).exists():
        FOLDER.mkdir(exist_ok=True)
        urllib.request.urlretrieve(f"https://storage.googleapis.com/tensorflow/tf-keras-datasets/{name}", FOLDER / name)
    hvd.barrier()
    return np.frombuffer(gzip.open(FOLDER / name).read(), np.uint8, offset=header)


hvd.init()
keras.utils.set_random_seed(42 + hvd.rank())  # ranks shuffle and drop in different ways
images, labels = read("train-images-idx3-ubyte.gz", 16), read("train-labels-idx1-ubyte.gz", 8)
test_images, test_labels = read("t10k-images-idx3-ubyte.gz", 16), read("t10k-labels-idx1-ubyte.gz", 8)
images, test_images = (each.reshape(-1, 784).astype("float32") / 255 for each in (images, test_images))
own = slice(hvd.rank(), len(images) // hvd.size() * hvd.size(), hvd.size())  # equally many on each rank

model = keras.Sequential([keras.Input((784,)), keras.layers.Dense(128, activation="relu"), keras.layers.Dense(10)])
rate = 0.02 * hvd.size()  # a larger batch, a higher rate
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(rate, momentum=0.9)),
              keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
model.fit(images[own], labels[own], batch_size=64, epochs=3, verbose=0, callbacks=[
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),  # all ranks begin with rank 0's weights
    hvd.callbacks.LearningRateWarmupCallback(rate, warmup_epochs=1)])
loss, accuracy = model.evaluate(test_images, test_labels, verbose=0)
if hvd.rank() == 0:
    print(f"test accuracy {accuracy:.4f} on {hvd.size()} ranks")
