"""One of torch's test files on a backend, for `torch_suite`: its tests on several processes, with tensors in host memory.

The files are in `test/distributed` of torch's source, for example in Debian's package `pytorch` (torch 2.6). They name
Gloo or no backend; here their groups are made of the given one. Files for GPUs are read with "cpu" in place of "cuda". What
cannot run so, or has changed in torch since, fails with Gloo, too.
"""

from __future__ import annotations

import os
import re
import sys
import types
import unittest
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.testing._internal import common_cuda, common_distributed, common_fsdp

from hvdlite_torch.distributed import process_group  # noqa: F401 - here, so that the forked ranks need not import it

RANKS = int(os.environ["WORLD_SIZE"])

CHANGES = (
    (r"f?(['\"])cuda(:[^'\"]*)?\1", '"cpu"'),
    (r"(['\"])(cpu:gloo,cuda:)?nccl\1", '"gloo"'),
    (r"\.cuda\([^()]*\)", ".cpu()"),
    (r"torch\.cuda\.device_count\(\)", str(RANKS)),
    (r"\bdevice_ids=\[[^]]*\]", "device_ids=None"),
    (r"\bMultiProcContinousTest\b", "MultiProcContinuousTest"),
    (r"\bPipeliningShapeError\b", "PipeliningMetadataError"),
    (r"\bloss_fn=loss_fn\b", "loss_fn=loss_fn, scale_grads=False"),
)
"""Texts of the files, and what stands for them: for GPUs, and for what torch has changed since 2.6."""


def tests(path: Path, backend: str, only: str) -> unittest.TestSuite:
    """Return the tests of a file that run on several processes and whose names match."""
    _allow_host_memory()
    if backend != "gloo":
        _make_groups_of(backend)
    classes = (common_distributed.MultiProcessTestCase, common_distributed.MultiProcContinuousTest)
    found = unittest.TestLoader().loadTestsFromModule(_module(path))
    return unittest.TestSuite(test for test in _cases(found) if isinstance(test, classes) and re.search(only, test.id()))


def _allow_host_memory() -> None:
    """Let tests run without GPUs, and fork their ranks: a test then takes a second and not ten."""
    torch.set_num_threads(1)
    torch.multiprocessing.set_start_method("fork", force=True)
    torch.cpu.device_count = torch.accelerator.device_count = lambda: RANKS
    common_cuda.TEST_MULTIGPU = True
    fork = torch.multiprocessing.get_context("fork").Process
    common_distributed.MultiProcessTestCase._spawn_processes = lambda self: self._start_processes(fork)
    common_distributed.skip_if_no_gpu = lambda test: test
    for name in ("skip_if_lt_x_gpu", "requires_nccl", "requires_accelerator_dist_backend"):
        setattr(common_distributed, name, _unconditional)
    common_fsdp.test_compiled_fsdp = _unconditional  # torch 2.6 had it
    set_up = common_distributed.MultiProcContinuousTest.setUp

    def set_up_afresh(test: Any) -> None:
        """Start other processes where a test has failed; torch would skip the rest of the class."""
        if type(test).poison_pill:
            for process in test.processes:
                process.terminate()
            type(test).poison_pill = type(test)._processes_spawned = False
        set_up(test)

    common_distributed.MultiProcContinuousTest.setUp = set_up_afresh


def _unconditional(*_arguments: Any, **_keywords: Any) -> Callable[[Any], Any]:
    return lambda test: test


def _make_groups_of(backend: str) -> None:
    """Let groups of Gloo, or of torch's choice, be of this backend."""
    make = distributed_c10d._new_process_group_helper

    def replaced(size: int, rank: int, ranks: list[int], named: str, *arguments: Any, **keywords: Any) -> Any:
        named = backend if named == dist.Backend.UNDEFINED else dist.Backend(str(named).replace("gloo", backend))
        return make(size, rank, ranks, named, *arguments, **keywords)

    distributed_c10d._new_process_group_helper = replaced


def _module(path: Path) -> types.ModuleType:
    source = path.read_text(encoding="utf-8")
    for text, other in CHANGES:
        source = re.sub(text, other, source)
    sys.path.insert(0, str(path.parent))
    module = types.ModuleType(path.stem)
    sys.modules[path.stem] = module
    module.__dict__["__file__"] = str(path)
    exec(compile(source, path, "exec", dont_inherit=True), module.__dict__)  # noqa: S102 - torch's own file
    return module


def _cases(suite: unittest.TestSuite) -> Iterator[unittest.TestCase]:
    for test in suite:
        if isinstance(test, unittest.TestSuite):
            yield from _cases(test)
        else:
            yield test
