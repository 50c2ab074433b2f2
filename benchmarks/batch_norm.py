"""A layer of batch normalization, forward and backward: `hvd.SyncBatchNorm` beside torch's own `BatchNorm2d`.

torch's `SyncBatchNorm` refuses tensors on the CPU, so its `BatchNorm2d` is the peer, which tells other ranks nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

import hvdlite_torch as hvd
from benchmarks.harness import Bench, median, say

ROWS, LAST = torch.contiguous_format, torch.channels_last
CASES = [((16, 64, 56, 56), torch.float32, ROWS), ((16, 64, 56, 56), torch.float32, LAST),
         ((16, 64, 56, 56), torch.bfloat16, ROWS), ((16, 64, 56, 56), torch.bfloat16, LAST),
         ((16, 256, 14, 14), torch.float32, ROWS), ((16, 512, 1, 1), torch.float32, ROWS)]
SHORT = CASES[:1]


def work(layer: torch.nn.Module, x: torch.Tensor, upstream: torch.Tensor) -> Callable[[], object]:
    """Return one forward and backward pass."""
    return lambda: layer(x).backward(upstream)


def main() -> None:
    bench = Bench.start(__doc__)
    rows = []
    for shape, dtype, memory_format in SHORT if bench.arguments.short else CASES:
        x = torch.randn(shape).to(dtype).contiguous(memory_format=memory_format).requires_grad_()
        upstream = torch.randn_like(x)
        contenders = {"hvdlite": work(hvd.SyncBatchNorm(shape[1]), x, upstream),
                      "torch, alone": work(torch.nn.BatchNorm2d(shape[1]), x, upstream)}
        seconds = {name: median(values) for name, values in bench.interleave(contenders).items()}
        how = ", ".join(str(each).removeprefix("torch.") for each in (dtype, memory_format))
        case = f"{'x'.join(map(str, shape))}, {how}"
        rows.append({"case": case, "seconds": seconds})
        say(f"{case:44}" + "  ".join(f"{name} {value * 1e3:7.2f} ms" for name, value in seconds.items()))
    bench.finish(rows)


if __name__ == "__main__":
    main()
