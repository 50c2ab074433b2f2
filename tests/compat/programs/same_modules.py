"""Horovod's names are our modules, not copies of them."""
# ruff: noqa: I001  the first import makes the others possible

import importlib

import hvdlite.horovod_compat

import horovod.torch
import hvdlite_torch
from horovod import torch as frontend
from horovod.torch import functions, mpi_ops, sync_batch_norm

assert horovod.torch is hvdlite_torch and hvdlite_torch.__spec__.name == "hvdlite_torch"
assert frontend is functions is mpi_ops is hvdlite_torch and sync_batch_norm is hvdlite_torch.sync_batch_norm
assert importlib.import_module("horovod.common.process_sets").ProcessSet is hvdlite.ProcessSet
try:
    importlib.import_module("horovod.mxnet")
except ImportError as error:
    assert "horovod.mxnet" in str(error)
else:
    raise AssertionError("there is no frontend for MXNet")
