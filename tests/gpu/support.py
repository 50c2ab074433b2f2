"""Ranks as processes on the GPUs that there are: one each, or all on one."""

from __future__ import annotations

import textwrap

from tests.worlds import RAISES, Ended, processes

HEAD = RAISES + """
import os, sys
RANK = os.environ["HVDLITE_RANK"]
import torch
if torch.cuda.device_count() < int(os.environ["HVDLITE_SIZE"]):
    # Several ranks on one GPU: NCCL takes each for a host of its own, and speaks TCP over the loopback interface.
    os.environ.update(NCCL_HOSTID=f"r{RANK}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1", NCCL_ALGO="Ring",
                      NCCL_PROTO="Simple", NCCL_MAX_CTAS="2", HVDLITE_SHARED_GPU="1")
os.environ.setdefault("NCCL_DEBUG", "WARN")
import hvdlite_torch as hvd
hvd.init()
rank, size = hvd.rank(), hvd.size()
torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
gpu = torch.device("cuda", torch.cuda.current_device())
torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False

def net(seed=3, wide=64):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8, track_running_stats=False),
                                torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(8 * 36, wide), torch.nn.Tanh(),
                                torch.nn.Linear(wide, 5))
    return model.to(gpu)

def batches(steps, size, each=8):
    generator = torch.Generator().manual_seed(5)
    for _ in range(steps):
        yield (torch.randn(each * size, 3, 8, 8, generator=generator).to(gpu),
               torch.randint(0, 5, (each * size,), generator=generator).to(gpu))

def step(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss

def same_everywhere(model):
    hvd.check_replicas(model.state_dict())

def share_even_alone():
    '''Let a job of one rank go all the way, as if there were others.'''
    from hvdlite.training.gradient_reducer import GradientReducer
    real = GradientReducer.__init__
    def init(self, *arguments, **options):
        real(self, *arguments, **options)
        self.is_shared = True
    GradientReducer.__init__ = init
"""


def run(size: int, body: str, timeout: float = 85.0, environment: dict[str, str] | None = None) -> list[Ended]:
    """Run a step on `size` ranks; one that fails fails the test, with its output."""
    return processes(size, HEAD + textwrap.dedent(body), timeout=timeout,
                     environment={"HVDLITE_START_TIMEOUT": "80", **(environment or {})})
