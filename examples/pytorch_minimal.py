"""The least that a training on several ranks needs, with no helper: Fashion-MNIST, with PyTorch.

    hvdrun -np 2 python examples/pytorch_minimal.py [FOLDER OF THE FOUR .gz FILES]
"""

import gzip
import sys
import urllib.request
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import hvdlite_torch as hvd

FOLDERS = [*map(Path, sys.argv[1:]), Path("/usr/share/datasets/fashion-mnist"), Path("data")]
FOLDER = next((folder for folder in FOLDERS if folder.exists()), FOLDERS[-1])


def read(name: str, header: int) -> torch.Tensor:
    """Return the bytes of a file after its header; the first rank of each host downloads a file that is missing."""
    if hvd.local_rank() == 0 and not (FOLDER / name).exists():
        FOLDER.mkdir(exist_ok=True)
        urllib.request.urlretrieve(f"https://storage.googleapis.com/tensorflow/tf-keras-datasets/{name}", FOLDER / name)
    hvd.barrier()
    return torch.from_numpy(np.frombuffer(gzip.open(FOLDER / name).read(), np.uint8, offset=header).copy())


hvd.init()
torch.manual_seed(42)
images, labels = read("train-images-idx3-ubyte.gz", 16), read("train-labels-idx1-ubyte.gz", 8)
test_images, test_labels = read("t10k-images-idx3-ubyte.gz", 16), read("t10k-labels-idx1-ubyte.gz", 8)
images, test_images = images.reshape(-1, 784) / 255, test_images.reshape(-1, 784) / 255
dataset = TensorDataset(images, labels.long())
sampler = DistributedSampler(dataset, hvd.size(), hvd.rank())  # each rank has its own part
loader = DataLoader(dataset, batch_size=64, sampler=sampler)

model = torch.nn.Sequential(torch.nn.Linear(784, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02 * hvd.size(), momentum=0.9)  # a larger batch, a higher rate
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1 / hvd.size(), total_iters=len(loader))

for epoch in range(3):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()  # gradients are averages when this returns
        optimizer.step()
        warmup.step()
if hvd.rank() == 0:
    accuracy = (model(test_images).argmax(1) == test_labels).float().mean().item()
    print(f"test accuracy {accuracy:.4f} on {hvd.size()} ranks")
