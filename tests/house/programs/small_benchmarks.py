"""A program that runs a benchmark on less work than its flags can ask for."""

from __future__ import annotations

import importlib
import sys

SMALLER: dict[str, dict[str, object]] = {
    "collectives": {"SHORT": [4, 1 << 20]},
    "hooks": {"STEPS": 1},
    "ledger": {"STEPS": 1, "CALLS": 100},
    "sharded": {"STEPS": 1, "WARMUP": 1, "WIDTH": 8},
    "planes": {"SHORT": [1 << 16, 1 << 20]},
    "torch_distributed": {"SHORT": [4], "MESSAGES": [4],
                          "TRANSFORMER": {"width": 32, "heads": 2, "layers": 2, "context": 8}},
    "training": {"STEPS": 1},
}
"""Constants of benchmarks."""


def run_small(script: str, *arguments: str) -> None:
    benchmark = importlib.import_module(f"benchmarks.{script}")
    for name, value in SMALLER.get(script, {}).items():
        assert hasattr(benchmark, name)
        setattr(benchmark, name, value)
    if script in ("hooks", "training"):  # the MLP, with its 23 MB of gradients, takes most of their time
        training = importlib.import_module("benchmarks.training")
        training.MODELS.update(dict.fromkeys(("cnn", "mlp"), (training.Cnn, 8)))
    if script in ("gradients", "torch_distributed"):
        shapes = benchmark.resnet50_shapes()[:40]
        benchmark.resnet50_shapes = lambda: shapes  # type: ignore[attr-defined]
    if script == "torch_distributed":
        benchmark.training.STEPS = 1
    sys.argv = [script, *arguments]
    benchmark.main()
