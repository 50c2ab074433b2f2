"""Elastic training with PyTorch: `hvd.elastic.run`, its state, and a sampler that goes on where it was (docs/elastic.md)."""

from hvdlite.core.errors import HorovodInternalError, HostsUpdatedInterrupt
from hvdlite.training.elastic import run
from hvdlite.training.elastic.state import ObjectState, State
from hvdlite_torch.elastic.elastic_sampler import ElasticSampler
from hvdlite_torch.elastic.handlers import (
    ModelStateHandler,
    OptimizerStateHandler,
    SamplerStateHandler,
    StateDictHandler,
    StateHandler,
    get_handler_registry,
    set_handler_registry,
)
from hvdlite_torch.elastic.torch_state import TorchState

__all__ = [
    "ElasticSampler", "HorovodInternalError", "HostsUpdatedInterrupt", "ModelStateHandler", "ObjectState",
    "OptimizerStateHandler", "SamplerStateHandler", "State", "StateDictHandler", "StateHandler", "TorchState",
    "get_handler_registry", "run", "set_handler_registry",
]
